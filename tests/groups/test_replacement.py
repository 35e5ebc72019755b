"""RINGWAY_REPLACE=gloo:shm: programs that name gloo get shared memory, and find everything else as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn

import ringway as dist
from ringway.errors import ConfigError
from ringway.groups import replacement
from ringway.groups.bridge import Bridge
from ringway.testing import RankContext, RankPool

GLOO = {"RINGWAY_REPLACE": "gloo:shm"}


def _start(context: RankContext, backend: str | None, number: int) -> None:
    dist.destroy_process_group()
    store = c10d.PrefixStore(f"start {number}", context.store)
    c10d.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size)


def _training(context: RankContext) -> list[float]:
    """A program of torch's, without a word about ringway."""
    rank, size = c10d.get_rank(), c10d.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    objects: list[Any] = [None] * size
    c10d.all_gather_object(objects, rank)
    assert objects == list(range(size))
    c10d.monitored_barrier()
    mesh = c10d.init_device_mesh("cpu", (size,))
    assert c10d.get_backend(mesh.get_group()) == c10d.get_backend()
    return losses


def _replaced(context: RankContext) -> None:
    _start(context, "gloo", 0)
    assert not isinstance(c10d.group.WORLD, Bridge)
    expected = _training(context)
    replacement.install()
    for number, backend in enumerate(("gloo", "cpu:gloo", None), 1):
        _start(context, backend, number)
        assert repr(c10d.group.WORLD) == f"<ringway group 0: shm, rank {context.rank} of 2>"
        assert c10d.get_backend() == (backend or "undefined")
        assert _training(context) == expected, "to the bit"
    for asked in (None, "gloo"):
        for ranks in ([0, 1], [0]):
            group = c10d.new_group(ranks, backend=asked)
            assert (group == c10d.GroupMember.NON_GROUP_MEMBER) == (context.rank not in ranks)
            if context.rank in ranks:
                assert ": shm, rank" in repr(group)
                assert c10d.get_backend(group) == (asked or "undefined")
    # What means gloo itself stays.
    own = dist.new_group(backend="gloo")
    assert (": gloo, rank" in repr(own), dist.get_backend(own)) == (True, "gloo")
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(interface="lo")]
    assert not isinstance(c10d.new_group(backend="gloo", pg_options=options), Bridge)
    dist.destroy_process_group()
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    assert c10d.get_backend() == dist.get_backend() == "gloo"
    assert isinstance(c10d.group.WORLD, Bridge)
    dist.destroy_process_group()


def test_a_program_that_names_gloo_runs_on_shm(pool: RankPool) -> None:
    pool.replace()
    first, second = pool.try_run(_replaced, world_size=2, environment=dict(GLOO))
    pool.replace()  # they replace gloo from now on
    assert first.ok, first
    assert second.ok, second
    said = "ringway: RINGWAY_REPLACE=gloo:shm: gloo is replaced by shm (all 2 ranks proved to be on one host)"
    assert first.output.count(said) == 3  # one line a job, from rank 0
    assert said not in second.output


def _asked(backend: str, hosts: str, monkeypatch: pytest.MonkeyPatch, lacks: str | None = None) -> str | None:
    """What one rank makes instead, if there is a rank on each of the hosts."""
    said = [json.dumps({"host": host, "uid": 0, "lacks": lacks}).encode() for host in hosts]
    monkeypatch.setattr(replacement, "exchange", lambda *_: said)
    arguments = {"group_rank": 1, "group_size": len(hosts), "global_ranks_in_group": [], "group_name": "0"}
    return replacement._spelling({**arguments, "backend": backend, "store": c10d.HashStore(), "timeout": None})


def test_what_is_made_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _asked("gloo", "aa", monkeypatch) == "shm"
    assert _asked("gloo", "aabb", monkeypatch) == "hierarchical"
    assert _asked("gloo", "aab", monkeypatch) is None
    assert _asked("gloo", "aa", monkeypatch, lacks="no memfd") is None
    assert _asked("shm", "aa", monkeypatch) is None
    assert _asked("cuda:gloo", "aa", monkeypatch) is None
    assert _asked("cpu:gloo,cuda:nccl", "aa", monkeypatch) is None  # torch says that there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    assert _asked("cpu:gloo,cuda:nccl", "aa", monkeypatch) == "cpu:shm,cuda:nccl"
    assert _asked("cpu:gloo,cuda:nccl", "aabb", monkeypatch) == "cpu:hierarchical,cuda:nccl"
    assert _asked("gloo", "aa", monkeypatch) == "cpu:shm,cuda:gloo"
    assert _asked("undefined", "aa", monkeypatch) == "shm"  # every group of ringway's has nccl for CUDA
    assert _asked("nccl", "aa", monkeypatch) is None


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = c10d.distributed_c10d._new_process_group_helper
    for value in ("", " "):
        monkeypatch.setenv("RINGWAY_REPLACE", value)
        replacement.install()
        assert c10d.distributed_c10d._new_process_group_helper is before
    monkeypatch.setenv("RINGWAY_REPLACE", "gloo:mpi")
    with pytest.raises(ConfigError, match="the only replacement is gloo:shm"):
        replacement.install()
