"""shm as a torch backend: torch's calls go through shared memory, its profiler sees them, its timeout is obeyed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn

import ringway as dist
import ringway_autoload
from ringway.config_file import read_file
from ringway.testing import RankContext, RankPool

LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


# The gloo inside


def _inner() -> Any:
    """The torch group inside the world's group, for calls that torch makes in C++ and that bypass ringway."""
    return c10d.group.WORLD._get_backend(torch.device("cpu"))


def _own_sockets() -> list[tuple[str, str]]:
    """Address and state of each TCP socket of this process."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    own = {found[1] for link in links if (found := re.match(r"socket:\[(\d+)\]", link))}
    rows = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows += [line.split() for line in lines.readlines()[1:]]
    return [(row[1].split(":")[0], row[3]) for row in rows if row[9] in own]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _collectives() -> None:
    size, rank = c10d.get_world_size(), c10d.get_rank()
    one, all_ranks = torch.ones(4), torch.ones(4 * size)
    parts = [torch.ones(4) for _ in range(size)]
    for async_op in (False, True):
        works = [
            c10d.all_reduce(one, async_op=async_op),
            c10d.broadcast(one, 0, async_op=async_op),
            c10d.reduce(one, 0, async_op=async_op),
            c10d.all_gather(parts, one, async_op=async_op),
            c10d.all_gather_into_tensor(all_ranks, one, async_op=async_op),
            c10d.gather(one, parts if rank == 0 else None, 0, async_op=async_op),
            c10d.scatter(one, parts if rank == 0 else None, 0, async_op=async_op),
            c10d.reduce_scatter(one, parts, async_op=async_op),
            c10d.reduce_scatter_tensor(one, all_ranks, async_op=async_op),
            c10d.all_to_all([torch.ones(4) for _ in range(size)], parts, async_op=async_op),
            c10d.all_to_all_single(torch.empty(4 * size), all_ranks, async_op=async_op),
            c10d.barrier(async_op=async_op),
        ]
        for work in works:
            if work is not None:
                work.wait()
    c10d.all_reduce(torch.ones(2, 2).to_sparse())
    c10d.all_reduce_coalesced([torch.ones(3), torch.ones(2)])
    with c10d._coalescing_manager(async_ops=True) as manager:
        c10d.all_reduce(torch.ones(3))
        c10d.all_reduce(torch.ones(5))
    manager.wait()
    _messages(rank, size)


def _messages(rank: int, size: int) -> None:
    left, right = (rank - 1) % size, (rank + 1) % size
    works = [c10d.isend(torch.ones(3), right), c10d.irecv(torch.empty(3), left)]
    works += c10d.batch_isend_irecv(
        [c10d.P2POp(c10d.isend, torch.ones(3), right), c10d.P2POp(c10d.irecv, torch.empty(3), left)]
    )
    works += [c10d.isend(torch.ones(3), right, tag=5)]
    c10d.recv(torch.empty(3), tag=5)
    for work in works:
        work.wait()


def _objects() -> None:
    size, rank = c10d.get_world_size(), c10d.get_rank()
    everything: list[Any] = [None] * size
    c10d.all_gather_object(everything, {"rank": rank})
    assert [one["rank"] for one in everything] == list(range(size))
    c10d.gather_object(rank, everything if rank == 0 else None)
    c10d.broadcast_object_list([rank, "x"], src=1)
    c10d.scatter_object_list([None], everything if rank == 0 else None)
    if rank == 0:
        c10d.send_object_list([1, 2], dst=1)
    elif rank == 1:
        c10d.recv_object_list([None, None], src=0)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def _ddp() -> None:
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=1)
    for _ in range(3):
        model(torch.ones(6, 8) * c10d.get_rank()).square().mean().backward()
    with model.join():
        for _ in range(1 + c10d.get_rank()):
            model(torch.ones(6, 8)).sum().backward()


def _fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(6, 8)).square().mean().backward()
        optimizer.step()


def _functional() -> None:
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    group = c10d.group.WORLD
    funcol.all_reduce(torch.ones(4), "sum", group).sum()
    funcol.all_gather_tensor(torch.ones(4), 0, group).sum()
    mesh = c10d.init_device_mesh("cpu", (c10d.get_world_size(),))
    distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum()


_PROGRAMS: list[Callable[[], None]] = [_collectives, _objects, _ddp, _fsdp, _functional]


def _past_the_inner_gloo(context: RankContext) -> dict[str, Any]:
    before = _own_sockets()
    context.start("shm")
    listening = [address for address, state in _own_sockets() if state == LISTENS]
    for address, state in before:
        if state == LISTENS:
            listening.remove(address)
    inner, connections = _inner(), len(_own_sockets())
    assert isinstance(inner, c10d.ProcessGroupGloo)
    counts = {}
    for program in _PROGRAMS:
        program()
        counts[program.__name__] = inner._get_sequence_number_for_group()
    opened = len(_own_sockets()) - connections
    inner.allreduce([torch.ones(2)]).wait()  # the count counts: this one reaches it
    return {
        "listening": listening,
        "counts": counts,
        "opened": opened,
        "control": inner._get_sequence_number_for_group(),
        "control_opened": len(_own_sockets()) - connections,
    }


def test_nothing_reaches_the_inner_gloo_which_listens_on_loopback_only(pool: RankPool) -> None:
    pool.replace()  # ranks keep their group, and this test counts what a new one opens
    for found in pool.run(_past_the_inner_gloo, world_size=2, timeout=120):
        assert found["counts"] == dict.fromkeys((program.__name__ for program in _PROGRAMS), 0)
        assert found["opened"] <= 0, "its ranks are not even connected"
        assert (found["control"], found["control_opened"]) == (1, 1)
        assert len(found["listening"]) >= 1
        assert set(found["listening"]) <= LOOPBACK


# The entry point


def _starts_on_shm(program: str, backend: str = "shm") -> None:
    """Runs the program in a separate process. After it, torch must know the backend by name."""
    program += (
        f"c10d.init_process_group({backend!r}, store=c10d.HashStore(), rank=0, world_size=1)\n"
        "print(type(c10d.group.WORLD).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["Bridge"]), done.stderr[-2000:]  # 2.8's gloo prints too


@pytest.mark.processes
def test_torch_finds_the_backend_without_an_import(tmp_path: Path) -> None:
    """From 2.14 on torch looks for the name. Before, it calls `ringway_autoload` when it is imported."""
    declared = read_file(Path(__file__).parents[2] / "pyproject.toml", "the project")["project"]["entry-points"]
    installed = tmp_path / "a_package-1.dist-info"  # what pip makes of them
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1\n")
    lines = [line for group, found in declared.items() for line in (f"[{group}]", *map(" = ".join, found.items()))]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import torch.distributed as c10d\n"
        "assert 'ringway' not in sys.modules\n"
        "names = {'shm', 'mpi4py', 'hierarchical', 'hierarchical_mpi'}\n"
        "assert hasattr(c10d.Backend, '_ensure_backend_registered') or names <= set(c10d.Backend.backend_list)\n"
        "assert c10d.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
    )
    _starts_on_shm(program)
    # A program that names gloo, and knows nothing of ringway.
    replaced = f"import os, sys; os.environ['RINGWAY_REPLACE'] = 'gloo:shm'; sys.path.append({str(tmp_path)!r})\n"
    _starts_on_shm(f"{replaced}import torch.distributed as c10d\n", backend="gloo")


def test_the_entry_point_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(c10d.Backend.backend_list)
    ringway_autoload.register()  # ringway is imported already: this changes nothing
    assert c10d.Backend.backend_list == names
    monkeypatch.setattr(c10d, "Backend", None)
    ringway_autoload.register()
    monkeypatch.setattr(c10d, "is_available", lambda: False)
    ringway_autoload.register()


INSTALLED = bool(entry_points(group="torch.distributed.backends", name="shm"))
from_an_installation = pytest.mark.skipif(not INSTALLED, reason="ringway is not installed: this is a bare source tree")


@from_an_installation
@pytest.mark.processes
def test_torch_finds_the_backend_by_its_entry_point() -> None:
    """From 2.14 on, if a program names an unknown backend, torch loads the entry point of that name and calls it, which
    registers the backend."""
    program = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'  # before 2.14 torch has called another one\n"
        "from importlib.metadata import entry_points\n"
        "import sys, torch.distributed as c10d\n"
        "for name in ('shm', 'mpi4py', 'hierarchical', 'hierarchical_mpi'):\n"
        "    assert name not in c10d.Backend.backend_list and 'ringway' not in sys.modules or name != 'shm'\n"
        "    (found,) = entry_points(group='torch.distributed.backends', name=name)\n"
        "    found.load()()\n"
        "    assert name in c10d.Backend.backend_list and c10d.Backend._plugins[name.upper()].extended_api\n"
    )
    _starts_on_shm(program)


@from_an_installation
def test_calling_the_entry_point_again_changes_nothing() -> None:
    defaults = dict(c10d.Backend.default_device_backend_map)
    names = list(c10d.Backend.backend_list)
    (found,) = entry_points(group="torch.distributed.backends", name="shm")
    found.load()()
    assert (c10d.Backend.default_device_backend_map, c10d.Backend.backend_list) == (defaults, names)


# The profiler


def _events(context: RankContext) -> list[tuple[str, bool, list[int]]]:
    context.start("shm")
    size, rank = context.world_size, context.rank
    dist.all_reduce(torch.ones(3))
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        c10d.all_reduce(torch.ones(3, 2))
        dist.all_reduce(torch.ones(4))
        dist.barrier()
        if rank == 1:
            context.store.wait(["rank 0 waits"])
        work = dist.all_reduce(torch.ones(5), async_op=True)
        assert work is not None
        if rank == 0:
            context.store.set("rank 0 waits", "")
        work.wait()
        other = dist.isend(torch.ones(6), (rank + 1) % size)
        dist.recv(torch.empty(6), (rank - 1) % size)
        assert other is not None
        other.wait()
        late = dist.all_reduce(torch.ones(700), async_op=True)
    assert late is not None
    late.wait()  # its event ends after the profiler has stopped
    dist.all_reduce(torch.ones(8))
    found = [event for event in profiler.events() if event.name.startswith("shm:")]
    return [(event.name, bool(event.is_async), (event.input_shapes or [[]])[0]) for event in found]


def test_calls_are_events_of_the_profiler(pool: RankPool) -> None:
    reported = pool.run(_events, world_size=2)
    if TORCH >= (2, 13):  # earlier profilers drop an event that ends on another thread
        (is_async,) = (event[1] for event in reported[0] if event[0] == "shm:all_reduce" and event[2] == [5])
        # torch's CUDA builds do not tell a native thread from the one that began the event.
        assert is_async or torch.version.cuda is not None
    for found in reported:
        names = [name for name, _, _ in found]
        assert names[:3] == ["shm:all_reduce", "shm:all_reduce", "shm:barrier"]
        assert found[0][2] == [3, 2]
        assert found[1][2] == [4]
        assert {"shm:send", "shm:recv"} < set(names)


# The timeout


def _new_timeout(context: RankContext, quick: bool) -> tuple[str, float]:
    context.start("shm")
    dist.all_reduce(torch.ones(2))
    set_timeout = getattr(c10d, "set_timeout", c10d.distributed_c10d._set_pg_timeout)  # torch's name from 2.15 on
    set_timeout(timedelta(seconds=0.5))
    assert dist.communicator().info.timeout == 0.5
    if context.rank == 1:
        context.store.wait(["rank 0 gave up"])
    call = dist.all_reduce if quick else lambda tensor: c10d.all_gather([tensor, tensor], torch.ones(2))
    with pytest.raises(dist.errors.CommTimeout) as caught:
        call(torch.ones(2))
    if context.rank == 0:
        context.store.set("rank 0 gave up", "")
    return str(caught.value), caught.value.waited or 0.0


@pytest.mark.parametrize("quick", [True, False])
def test_the_timeout_that_torch_sets_is_obeyed(pool: RankPool, quick: bool) -> None:
    (text, waited), _ = pool.run(_new_timeout, quick, world_size=2, timeout=60)
    pool.replace()
    assert "rank 1 did not arrive within the timeout of" in text
    assert 0.5 <= waited < 60
