"""The choice of a backend: the same decision on all ranks, from what each rank can do."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ringway.backends import registry, select
from ringway.backends.select import Choice, Obstacle, RankFacts, decide, obstacle
from ringway.errors import BackendUnavailable, ConfigError, RendezvousError, UsageError
from ringway.launch.ask_mpi import mpi_failure
from ringway.launch.gpus import gpu_of_rank
from ringway.launch.info import LaunchInfo
from ringway.launch.locality import meeting_point, shares_host
from ringway.testing import RankContext, RankPool

NO_GPU = {"nccl": Obstacle("no CUDA device is visible")}
NO_SHM = {"shm": Obstacle("no memfd")}
NO_MPI = {"mpi": Obstacle("mpi4py is not installed", "Install it")}


def _decide(
    *standings: tuple[bool, Mapping[str, Obstacle]], explicit: str | None = None, source: str = "torchrun"
) -> Choice:
    info = LaunchInfo(rank=0, size=len(standings), source=source)
    reported = {rank: RankFacts(here, NO_GPU | dict(lacking)) for rank, (here, lacking) in enumerate(standings)}
    return decide(explicit, "argument", info, reported)


def test_one_host_gets_shared_memory() -> None:
    assert _decide((True, {}), (True, {})) == Choice("shm", "all 2 ranks proved to be on one host")
    assert _decide((True, {})) == Choice("shm", "a world of one")


def test_one_rank_without_shared_memory_decides_for_all() -> None:
    choice = _decide((True, {}), (True, NO_SHM))
    assert choice.backend == "gloo"
    assert "no memfd" in choice.reason


def test_mpi4py_without_an_mpi_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py's wheels load MPI when their module is imported, and raise a RuntimeError if there is none."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc:\n    initialize = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loads = "from mpi4py import rc\nassert not rc.initialize, 'the question must not start MPI'\n"
    for module, expected in (
        ("raise RuntimeError('cannot load MPI library\\nlibmpi.so.12: cannot open shared object file')", True),
        (loads, False),
    ):
        (package / "MPI.py").write_text(module)
        mpi_failure.cache_clear()
        found = obstacle("mpi")
        assert (found is not None) == expected
        if found is not None:
            assert found.reason == "mpi4py cannot load MPI: cannot load MPI library"
            assert "pip install mpich" in str(found.remedy)
    mpi_failure.cache_clear()
    assert "mpi4py.MPI" not in sys.modules


def test_several_hosts_get_gloo() -> None:
    choice = _decide((True, {}), (False, {}))
    assert choice == Choice("gloo", "1 of 2 ranks are on other hosts than rank 0")


def _decide_on(
    *hosts: str, source: str = "torchrun", lacking: Mapping[str, Obstacle] | None = None, proven: str | None = None
) -> Choice:
    """One rank for each host name. `proven` is the host that rank 0's socket reached, if that is not its own."""
    near = hosts[0] if proven is None else proven
    reported = {
        rank: RankFacts(rank == 0 or host == near, {**NO_GPU, **(lacking or {})}, host=host)
        for rank, host in enumerate(hosts)
    }
    return decide(None, "", LaunchInfo(rank=0, size=len(hosts), source=source), reported)


def test_hosts_with_several_ranks_each_get_hierarchical() -> None:
    choice = _decide_on("a", "a", "b", "b")
    assert choice.backend == "hierarchical"
    assert choice.reason == "2 hosts with 2 ranks each: shared memory inside, gloo between them"
    assert _decide_on("a", "b", "a", "b").backend == "hierarchical"


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabbc", "abc"])
def test_hosts_with_unequal_numbers_of_ranks_get_gloo(hosts: str) -> None:
    assert _decide_on(*hosts).backend == "gloo"


def test_only_a_proven_location_counts() -> None:
    """Ranks that claim to be on rank 0's host but could not connect to it there, for example as another user."""
    assert _decide_on("a", "a", "b", "b", proven="nowhere").backend == "gloo"
    assert _decide_on("a", "a", "b", "b", lacking=NO_SHM).backend == "gloo"


def test_mpi_across_hosts_is_not_replaced_by_hierarchical() -> None:
    assert _decide_on("a", "a", "b", "b", source="Open MPI").backend == "mpi"
    assert _decide_on("a", "a", "b", "b", source="Open MPI", lacking=NO_MPI).backend == "hierarchical"


@pytest.mark.parametrize(
    ("second", "reported"),
    [
        ({"policy": "other"}, "rank 1 loaded another policy than rank 0"),
        ({}, "rank 1 loaded none, and rank 0 a policy"),
        ({"policy_error": "cannot read the policy p.json"}, "rank 1: cannot read the policy p.json"),
    ],
)
def test_ranks_with_different_policies_get_an_error(second: dict[str, str], reported: str) -> None:
    info = LaunchInfo(rank=0, size=2, source="torchrun")
    with pytest.raises(ConfigError, match=reported):
        decide(None, "", info, {0: RankFacts(True, policy="one"), 1: RankFacts(True, **second)})


def test_several_hosts_under_mpi_get_mpi_if_all_ranks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.Registration("mpi", "mpi4py", ("cpu",), lambda info: pytest.fail("nothing is made"))
    monkeypatch.setattr(registry, "own", lambda name: known if name == "mpi" else None)
    assert _decide((True, {}), (False, {}), source="Open MPI").backend == "mpi"
    assert _decide((True, {}), (False, NO_MPI), source="Open MPI").backend == "gloo"
    assert _decide((True, {}), (False, {}), source="torchrun").backend == "gloo"


def test_cuda_goes_to_nccl() -> None:
    info = LaunchInfo(rank=0, size=1, source="torchrun")
    assert decide(None, "", info, {0: RankFacts(True, {})}).backend == "cpu:shm,cuda:nccl"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("a", "b"), "cpu:shm,cuda:nccl"),
        (("a", "a"), "cpu:shm,cuda:shm"),
        (("a", "b", "c", "b"), "cpu:shm,cuda:shm"),
        (("a", None), "cpu:shm,cuda:nccl"),
        (("a",), "cpu:shm,cuda:nccl"),
    ],
)
def test_ranks_that_share_a_gpu_get_shm(gpus: tuple[str | None, ...], expected: str) -> None:
    info = LaunchInfo(rank=0, size=len(gpus), source="torchrun")
    facts = {rank: RankFacts(True, {}, gpu=gpu) for rank, gpu in enumerate(gpus)}
    choice = decide(None, "", info, facts)
    assert choice.backend == expected
    sharing = [str(rank) for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    assert ("share a GPU" in choice.reason) == bool(sharing)
    assert not sharing or f"ranks {', '.join(sharing)} share a GPU" in choice.reason


def test_ranks_that_share_a_gpu_on_several_hosts_get_nccl() -> None:
    info = LaunchInfo(rank=0, size=4, source="torchrun")
    facts = {rank: RankFacts(rank < 2, {}, host="ab"[rank // 2], gpu="ab"[rank // 2]) for rank in range(4)}
    assert decide(None, "", info, facts).backend == "cpu:hierarchical,cuda:nccl"


class _Driver:
    """Stands in for libcuda: the UUID of device n ends with n + 1."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = number
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: ctypes.c_int) -> int:  # noqa: N802
        uuid.raw = bytes(15) + bytes([device.value + 1])
        return 0


@pytest.mark.parametrize(
    ("visible", "current", "local_ranks", "expected"),
    [
        (1, None, (0, 1), (1, 1)),
        (4, None, (0, 1, 3), (1, 2, 4)),
        (2, None, (0, 1, 2, 3), (1, 2, 1, 2)),
        (4, 0, (0, 1), (1, 2)),  # used, but not set
        (4, 3, (0, 1), (4, 4)),
    ],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    current: int | None,
    local_ranks: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(ctypes, "CDLL", _Driver)
    found = [gpu_of_rank(rank) for rank in local_ranks]
    assert found == [f"{number:032x}" for number in expected]


@pytest.mark.parametrize(("local_rank", "expected"), [(None, 5), (2, 2)])
def test_a_rank_without_a_local_rank_is_counted_by_its_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int | None, expected: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(select, "gpu_of_rank", asked.append)
    monkeypatch.setattr(select, "_tell_each_other", lambda mine, *_: {0: mine})
    info = LaunchInfo(rank=5, size=6, source="test", local_rank=local_rank)
    select.select(None, "", info, HashStore(), 5.0)
    assert asked == [expected]


def test_no_gpu_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of_rank(0) is None


def test_explicit_choice_wins() -> None:
    assert _decide((True, {}), (True, {}), explicit="gloo") == Choice("gloo", "chosen by argument")


def test_explicit_choice_fails_by_name_with_what_to_install() -> None:
    with pytest.raises(BackendUnavailable, match=r"not installed \(rank 1\)\. Install it") as caught:
        _decide((True, {}), (True, {"gloo": Obstacle("not installed", "Install it")}), explicit="gloo")
    assert (caught.value.backend, caught.value.remedy) == ("gloo", "Install it")


def test_shm_across_hosts_is_refused_with_the_ranks_that_are_elsewhere() -> None:
    with pytest.raises(BackendUnavailable, match="ranks 1, 2 are not on rank 0's"):
        _decide((True, {}), (False, {}), (False, {}), explicit="shm")


def test_unknown_backend_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'gloo'"):
        _decide((True, {}), explicit="glop")


def test_ranks_with_different_settings_are_named() -> None:
    reported = {0: RankFacts(True, {}, "gloo"), 1: RankFacts(True, {}, "gloo"), 2: RankFacts(True, {})}
    info = LaunchInfo(rank=0, size=3, source="torchrun")
    with pytest.raises(UsageError, match="rank 0 is configured to use backend 'gloo', rank 2 no backend"):
        decide("gloo", "argument", info, reported)


def test_obstacles_on_this_machine() -> None:
    assert obstacle("gloo") is None
    found = obstacle("ucc")
    assert found is not None
    assert found.reason
    assert obstacle("a third party's") is None


def test_locality_is_proven_by_a_socket() -> None:
    with meeting_point() as name:
        assert shares_host(name)
    assert not shares_host(name)  # the socket is closed by now


def test_strangers_in_the_queue_do_not_hide_a_rank() -> None:
    with meeting_point() as name:
        crowd = []
        for _ in range(6000):  # more than the queue holds
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            crowd[-1].setblocking(False)
            with suppress(BlockingIOError):
                crowd[-1].connect("\0" + name)
            if len(crowd) > 300:
                crowd.pop(0).close()  # a connection stays in the queue after its caller has gone
        assert shares_host(name)
    for connection in crowd:
        connection.close()


def _select(context: RankContext, silent: int | None) -> tuple[str, str] | str:
    info = LaunchInfo(rank=context.rank, size=context.world_size, source="torchrun")
    if context.rank == silent:
        return "silent"
    try:
        choice = select.select(None, "", info, context.store, 2.0 if silent is not None else 60.0)
    except RendezvousError as error:
        return str(error)
    return choice.backend, choice.reason


def test_ranks_decide_alike(pool: RankPool) -> None:
    found = pool.run(_select, None, world_size=3, timeout=60)
    assert len(set(found)) == 1
    assert "all 3 ranks proved to be on one host" in found[0][1]


def test_a_rank_that_stops_responding_is_named(pool: RankPool) -> None:
    found = pool.run(_select, 1, world_size=2, timeout=60)
    assert found == ["rank 1 arrived but did not say what it can do", "silent"]
