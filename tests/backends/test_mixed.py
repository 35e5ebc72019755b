"""Groups with several backends: the policy chooses a backend for each call, and calls run in issue order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from ringway.backends import registry
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.compose import routes_of
from ringway.backends.several import policy
from ringway.backends.several.mixed import MixedBackend, _on_devices, agree
from ringway.backends.several.policy import Rule
from ringway.call import ALL_REDUCE, BROADCAST, Call
from ringway.errors import BackendUnavailable, CollectiveMismatch, CommTimeout, ConfigError, RingwayError
from ringway.groups.world import world
from ringway.testing import RankContext, RankPool
from ringway.work import DONE, Handle, PendingHandle

TABLE = {
    "world_size": 2,
    "rules": [
        {"op": "all_reduce", "up_to": 1024, "backend": "gloo"},
        {"op": "all_reduce", "dtype": "float16", "backend": "gloo"},
        {"op": "broadcast", "backend": "gloo"},
    ],
}
IN_TURNS = {
    "world_size": 2,
    "rules": [{"op": "all_reduce", "backend": "gloo"}, {"op": "all_gather_into_tensor", "backend": "gloo"}],
}


@contextmanager
def mixing(table: dict[str, Any], size: int) -> Iterator[None]:
    """Groups made in this context are mixed by the table."""
    world.policy = policy.load(table, size)
    try:
        yield
    finally:
        world.policy = None


def _mixed_calls(context: RankContext) -> dict[str, Any]:
    """Which backend runs each call, in an shm world in which some calls go to gloo."""
    with mixing(TABLE, context.world_size):
        dist = context.start("shm", group_name="mixed")
    backend = dist.communicator().backend
    assert isinstance(backend, MixedBackend)
    chosen = {}
    for name, tensor in {
        "small": torch.ones(256),
        "large": torch.ones(257),
        "half": torch.ones(1000, dtype=torch.float16),
        "huge": torch.ones(1 << 20),
    }.items():
        chosen[name] = backend.choose(ALL_REDUCE, tensor.nbytes, tensor.dtype, "cpu")
        dist.all_reduce(tensor)
        assert bool((tensor == context.world_size).all())
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert bool((tensor == context.world_size**2).all())
    value = torch.full((5,), float(context.rank))
    dist.broadcast(value, 1)
    gathered = [torch.zeros(5) for _ in range(context.world_size)]
    dist.all_gather(gathered, torch.full((5,), float(context.rank)))
    pair = dist.new_group([0], backend="gloo")
    if context.rank == 0:
        dist.all_reduce(torch.ones(1), group=pair)
    found = {
        "chosen": chosen,
        "broadcast": value[0].item(),
        "gathered": [t[0].item() for t in gathered],
        "origins": dist.communicator().origins()["cpu"],
        "name": dist.get_backend(),
    }
    dist.destroy_process_group()
    return found


def test_the_table_decides_which_backend_runs_a_call(pool: RankPool) -> None:
    for found in pool.run(_mixed_calls, world_size=2):
        assert found["chosen"] == {"small": "gloo", "large": "shm", "half": "gloo", "huge": "shm"}
        assert found["broadcast"] == 1.0
        assert found["gathered"] == [0.0, 1.0]
        assert found["origins"]["all_reduce"] == "gloo up to 1024 B, else gloo of float16, else shm"
        assert found["origins"]["all_gather"] == "shm"
        assert found["name"] == "shm"


def _one_after_the_other(context: RankContext) -> list[float]:
    """Calls on the same tensor without waits between them: each must see the result of the previous one."""
    with mixing(IN_TURNS, context.world_size):
        dist = context.start("shm", group_name="turns")
    results = []
    for _ in range(5):
        tensor = torch.full((1 << 20,), float(context.rank + 1))
        small = torch.full((4,), float(context.rank))
        dist.all_reduce(tensor, async_op=True)  # gloo: 3 everywhere
        dist.broadcast(tensor, 0)  # shm, on its fast path; the values stay the same if it runs second
        works = [dist.all_reduce(tensor, async_op=True)]  # gloo: 6
        works.append(dist.broadcast(tensor, 1, async_op=True))  # shm
        works.append(dist.all_reduce(tensor, async_op=True))  # gloo: 12
        dist.barrier()  # shm, after all of them
        assert all(work.is_completed() for work in works)
        dist.all_reduce(small)
        results.append(float(tensor.sum() / tensor.numel()) + small[0].item() / 10)
    dist.destroy_process_group()
    return results


def test_calls_run_in_the_order_of_issue_whatever_their_backend(pool: RankPool) -> None:
    for found in pool.run(_one_after_the_other, world_size=2):
        assert found == pytest.approx([12.1] * 5)


def _from_a_callback(context: RankContext) -> list[float]:
    """A callback makes a collective on another backend while its own call has not ended."""
    with mixing(IN_TURNS, context.world_size):
        dist = context.start("shm", group_name="callbacks")
    first, second, third = (torch.full((1 << 18,), float(context.rank + 1)) for _ in range(3))
    work = dist.all_reduce(first, async_op=True)  # gloo
    work.get_future().then(lambda _: dist.broadcast(second, 1)).wait()  # shm
    dist.broadcast(third, 0, async_op=True).wait()
    found = [first[0].item(), second[0].item(), third[0].item()]
    dist.destroy_process_group()
    return found


def test_a_callback_may_use_another_backend(pool: RankPool) -> None:
    assert pool.run(_from_a_callback, world_size=2) == [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]


def _callbacks_inside_a_starting_call(context: RankContext) -> float:
    """A synchronous call on gloo waits for one on shm, and may run its callback, which makes a call too."""
    with mixing(TABLE, context.world_size):
        dist = context.start("shm", group_name="inline callbacks", timeout=timedelta(seconds=30))
    total = 0.0
    for turn in range(100):
        strided, small, inner = torch.ones(5000, 2)[:, 0], torch.ones(4), torch.ones(4)
        if context.rank == 1:
            time.sleep(0.001 * (turn % 7))
        future = dist.all_reduce(strided, async_op=True).get_future()
        after = future.then(lambda _, inner=inner: dist.all_reduce(inner))
        dist.all_reduce(small)
        after.wait()
        total += strided[0].item() + small[0].item() + inner[0].item()
    dist.destroy_process_group()
    return total


def test_a_callback_that_runs_inside_a_starting_call_may_make_calls(pool: RankPool) -> None:
    assert pool.run(_callbacks_inside_a_starting_call, world_size=2, timeout=60) == [600.0, 600.0]


def _destroyed(context: RankContext) -> tuple[list[str], float]:
    """A group is destroyed with calls in flight on two backends that the other rank never makes."""
    with mixing(IN_TURNS, context.world_size):
        dist = context.start("shm", group_name="left", timeout=timedelta(seconds=60))
    said = []
    began = time.monotonic()
    if context.rank == 0:
        works = [dist.all_reduce(torch.ones(8), async_op=True), dist.broadcast(torch.ones(8), 0, async_op=True)]
        context.store.set("issued", "")
        dist.destroy_process_group()
        for work in works:
            try:
                work.wait()
            except RingwayError as error:
                said.append(str(error))
    else:
        context.store.wait(["issued"])
        dist.destroy_process_group()
    return said, time.monotonic() - began


def test_a_group_can_be_destroyed_with_calls_in_flight(pool: RankPool) -> None:
    (said, seconds), _ = pool.run(_destroyed, world_size=2)
    assert len(said) == 2, said  # gloo may notice first that the other rank has left; then both messages say so
    assert seconds < 40


def _different_backends(context: RankContext, first: int) -> tuple[str, float]:
    """The ranks' calls go to different backends, so they would wait forever."""
    with mixing(IN_TURNS, context.world_size):
        dist = context.start("shm", group_name="different backends", timeout=timedelta(seconds=100))
    if context.rank != first:
        time.sleep(0.5)
    began = time.monotonic()
    try:
        if context.rank == 0:
            dist.all_reduce(torch.ones(4))  # gloo
        else:
            dist.broadcast(torch.ones(4), 0)  # shm
    except CollectiveMismatch as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_whose_calls_go_to_different_backends_get_an_error(pool: RankPool, first: int) -> None:
    for said, seconds in pool.run(_different_backends, first, world_size=2):
        assert "rank 0: all_reduce #0" in said
        assert "rank 1: broadcast #0" in said
        assert seconds < 30


def _different_tables(context: RankContext) -> str:
    rules = [{"op": "all_reduce", "up_to": 1024 + context.rank, "backend": "gloo"}]
    try:
        with mixing({"world_size": 2, "rules": rules}, 2):
            context.start("shm", group_name="differing")
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_tables_get_an_error(pool: RankPool) -> None:
    for said in pool.run(_different_tables, world_size=2):
        assert "rank 1 loaded another policy than rank 0" in said


def _lacking(context: RankContext) -> str:
    """Only rank 0 appears to have mpi4py."""
    from ringway.backends import select
    from ringway.backends.several import mixed

    if context.rank == 0:
        mixed.obstacle = lambda name: None
    else:
        mixed.obstacle = lambda name: select.Obstacle("mpi4py is not installed") if name == "mpi" else None
    try:
        with mixing({"world_size": 2, "rules": [{"op": "all_reduce", "backend": "mpi"}]}, 2):
            context.start("shm", group_name="lacking")
    except BackendUnavailable as error:
        return str(error)
    finally:
        mixed.obstacle = select.obstacle
    return ""


def test_a_backend_that_one_rank_lacks_is_an_error_on_all(pool: RankPool) -> None:
    for said in pool.run(_lacking, world_size=2):
        assert "mpi4py is not installed (rank 1)" in said
        assert "ringway tune" in said


def _conform(context: RankContext) -> int:
    """Runs some cases of the conformance suite on a mixed group."""
    from ringway.testing.conformance import Setting, all_cases
    from ringway.testing.probe import Probe

    with mixing(TABLE, context.world_size):
        dist = context.start("shm", group_name="conforming")
    setting, ran = Setting("shm", context.world_size), 0
    for name in ("all_reduce", "broadcast", "every_op_in_flight_at_once", "strided_broadcast", "both_send_first"):
        case = all_cases()[name]
        assert setting.admits(case)
        probe = Probe(dist, None, context.rank, list(range(context.world_size)), context.store, name)
        case.run(probe)
        assert probe.findings == []
        ran += 1
    dist.destroy_process_group()
    return ran


def test_a_mixed_group_conforms(pool: RankPool) -> None:
    assert pool.run(_conform, world_size=2) == [5, 5]


def _sub_groups(context: RankContext) -> dict[str, str]:
    """The table applies to the world; a rule with `ranks` applies to groups of that size."""
    rules = [{"op": "all_reduce", "backend": "gloo"}, {"op": "all_reduce", "ranks": 2, "backend": "gloo"}]
    with mixing({"world_size": 3, "rules": rules}, 3):
        dist = context.start("shm", group_name="parts")
        pair = dist.new_group([0, 2])
        alone = dist.new_group([1])
    found = {}
    for name, group in {"world": None, "pair": pair, "alone": alone}.items():
        if dist.get_rank(group) >= 0:
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            assert tensor[0].item() == dist.get_world_size(group)
            found[name] = dist.communicator(group).origins()["cpu"]["all_reduce"]
    dist.destroy_process_group()
    return found


def test_sub_groups_have_their_own_rules(pool: RankPool) -> None:
    first, second, third = pool.run(_sub_groups, world_size=3)
    assert first == third == {"world": "gloo", "pair": "gloo"}
    assert second == {"world": "gloo", "alone": "native"}


def _limited(context: RankContext, count: int) -> float:
    rules = [{"op": "all_reduce", "up_to": 64, "backend": "gloo"}, {"op": "all_reduce", "backend": "shm"}]
    with mixing({"world_size": 2, "rules": rules}, 2):
        dist = context.start("shm", group_name="limited", timeout=timedelta(seconds=100))
    dist.all_reduce(torch.ones(count))
    dist.communicator().set_timeout(1.0)
    if context.rank == 1:
        context.store.wait(["rank 0 gave up"])
        return 0.0
    began = time.monotonic()
    with pytest.raises(CommTimeout):
        dist.all_reduce(torch.ones(count))
    context.store.set("rank 0 gave up", "")
    return time.monotonic() - began


def test_a_new_timeout_applies_to_the_fast_paths_of_all_backends(pool: RankPool) -> None:
    for count in (4, 400):
        waited, _ = pool.run(_limited, count, world_size=2, timeout=120)
        pool.replace()
        assert 1.0 <= waited < 50


def _ranges(context: RankContext) -> dict[str, Any]:
    """Fast paths take only the sizes that the table assigns to their backend."""
    rules = [
        {"op": "all_reduce", "up_to": 64, "backend": "shm"},
        {"op": "all_reduce", "up_to": 1024, "backend": "gloo"},
        {"op": "all_reduce", "backend": "shm"},
        {"op": "broadcast", "up_to": 64, "backend": "gloo"},
    ]
    with mixing({"world_size": 2, "rules": rules}, 2):
        dist = context.start("shm", group_name="ranges")
    communicator = dist.communicator()
    sums = []
    for count in (1, 16, 17, 256, 257, 5000):
        tensor = torch.ones(count)
        assert communicator.calls.run_fast(ALL_REDUCE.code, tensor, tensor) is True
        sums.append(tensor[-1].item())
    values = []
    for count in (16, 17):
        value = torch.full((count,), float(context.rank))
        values.append((communicator.calls.run_fast(BROADCAST.code, value, value, 1), value[-1].item()))
    with pytest.raises(RingwayError, match="not str"):
        dist.all_reduce("no tensor")
    dist.destroy_process_group()
    return {"sums": sums, "values": values}


def test_fast_paths_take_only_their_sizes(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(_ranges, world_size=2)):
        assert found["sums"] == [2.0] * 6
        assert found["values"] == [(False, float(rank)), (True, 1.0)]


def test_a_rule_applies_only_to_devices_that_its_backend_supports() -> None:
    """shm must never get a tensor on a GPU, even if the group's own backend supports it."""
    assert _on_devices(Rule("shm"), ["cpu", "cuda"]) == [Rule("shm", device="cpu")]
    assert _on_devices(Rule("shm"), ["cpu"]) == [Rule("shm")]
    assert _on_devices(Rule("mpi"), ["cpu", "cuda"]) == [Rule("mpi")]
    assert _on_devices(Rule("mpi", device="cuda"), ["cpu", "cuda"]) == [Rule("mpi", device="cuda")]
    assert _on_devices(Rule("mpi", device="cuda"), ["cpu"]) == []
    assert _on_devices(Rule("mpi", device="cpu"), ["cpu"]) == [Rule("mpi")]
    assert _on_devices(Rule("shm", device="cuda"), ["cpu", "cuda"]) == [Rule("cuda:shm", device="cuda")]
    assert _on_devices(Rule("shm", device="cuda"), ["cuda"]) == [Rule("shm")]
    assert _on_devices(Rule("nccl"), ["cpu"]) == []


class InFlight(PendingHandle):
    def wait(self, timeout: float | None = None) -> None:
        raise AssertionError("the host waits for the device")


class OnGpu(Backend):
    """Stands in for a backend of CUDA tensors: it notes its calls, which never end."""

    devices = ("cuda",)

    def __init__(self, name: str, coalesces: bool, notices_deaths: bool) -> None:
        super().__init__(GroupInfo(rank=0, size=2, ranks=[0, 1], store=c10d.HashStore(), name=name, timeout=5))
        self.name = name  # type: ignore[misc]
        self.coalesces = coalesces  # type: ignore[misc]
        self.notices_deaths = notices_deaths  # type: ignore[misc]
        self.sizes: list[int] = []
        self.blocks: list[str] = []

    def all_reduce(self, call: Call) -> Handle:
        self.sizes.append(call.nbytes)
        return InFlight() if call.async_op else DONE

    broadcast = reduce = all_gather = all_gather_into_tensor = gather = scatter = send = recv = all_reduce
    reduce_scatter = reduce_scatter_tensor = all_to_all = all_to_all_single = barrier = all_reduce

    def start_coalescing(self, device: torch.device) -> None:
        self.blocks.append("start")

    def end_coalescing(self, device: torch.device) -> Handle:
        self.blocks.append("end")
        return DONE


@pytest.fixture
def nccl_and_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, OnGpu, OnGpu]]:
    """A group on nccl whose small calls go to shm."""
    nccl, shm = OnGpu("nccl", True, False), OnGpu("shm", False, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ringway.backends.several.mixed.obstacle", lambda name: None)
    monkeypatch.setattr("ringway.backends.several.mixed.exchange", lambda info, what, mine: [mine, mine])
    asked = []
    monkeypatch.setattr(registry, "make", lambda registration, info: asked.append(registration) or shm)
    rules = [
        {"backend": "shm", "op": "all_reduce", "up_to": 1024, "device": "cuda"},
        {"backend": "gloo", "op": "all_reduce", "up_to": 1 << 20},  # for the group's first device
    ]
    agreement = agree(policy.load({"world_size": 2, "rules": rules}), nccl.group)
    assert agreement is not None
    mixed = agreement.mixed_on("cuda", nccl, nccl.group)
    assert asked == [registry.on_device("shm", "cuda")]
    yield mixed, nccl, shm
    mixed.close()


def _summed(backend: Backend, nbytes: int, async_op: bool = False) -> Handle:
    tensor = torch.ones(nbytes // 4)
    call = Call(ALL_REDUCE, inputs=[tensor], outputs=[tensor], async_op=async_op, size=2, ranks=[0, 1])
    return routes_of(backend).runners["all_reduce"](call)


def test_calls_on_cuda_tensors_go_straight_to_their_backend(nccl_and_shm: tuple[Any, OnGpu, OnGpu]) -> None:
    """Streams order them: a call does not wait on the host for one that is in flight elsewhere."""
    mixed, nccl, shm = nccl_and_shm
    handles = [_summed(mixed, nbytes, async_op=True) for nbytes in (4096, 512, 4096, 1024)]
    assert (nccl.sizes, shm.sizes) == ([4096, 4096], [512, 1024])
    assert not any(handle.done() for handle in handles)
    assert mixed.name == "nccl"
    assert not mixed.notices_deaths


def test_a_block_of_calls_is_one_backends(nccl_and_shm: tuple[Any, OnGpu, OnGpu]) -> None:
    mixed, nccl, shm = nccl_and_shm
    device = torch.device("cuda")
    mixed.start_coalescing(device)
    _summed(mixed, 512)
    mixed.end_coalescing(device)
    _summed(mixed, 512)
    assert mixed.coalesces
    assert (nccl.blocks, nccl.sizes, shm.sizes) == (["start", "end"], [512], [512])


def test_a_rule_for_all_devices_is_about_the_first(nccl_and_shm: tuple[Any, OnGpu, OnGpu]) -> None:
    _, nccl, _ = nccl_and_shm
    for rules in ([{"backend": "gloo"}, {"backend": "shm"}], [{"backend": "nccl"}]):
        agreement = agree(policy.load({"world_size": 2, "rules": rules}), nccl.group)
        assert agreement is not None
        assert agreement.mixed_on("cuda", nccl, nccl.group) is nccl
    assert agree(None, nccl.group) is None


def test_rules_for_cuda_need_a_gpu_on_every_rank(
    nccl_and_shm: tuple[Any, OnGpu, OnGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without one would make no backend for it, and the others would wait for them."""
    _, nccl, _ = nccl_and_shm
    rules = [{"backend": "shm", "device": "cuda"}]

    def one_has_none(info: GroupInfo, what: str, mine: bytes) -> list[bytes]:
        return [mine, mine.replace(b'"cuda": true', b'"cuda": false')]

    monkeypatch.setattr("ringway.backends.several.mixed.exchange", one_has_none)
    agreement = agree(policy.load({"world_size": 2, "rules": rules}), nccl.group)
    assert agreement is not None
    assert agreement.mixed_on("cuda", nccl, nccl.group) is nccl


def test_sizes_become_one_sorted_list() -> None:
    from ringway.backends.torch.gloo import GlooBackend

    info = GroupInfo(rank=0, size=1, ranks=[0], store=c10d.HashStore(), name="alone", timeout=5)
    own = GlooBackend(info)
    rules = [
        Rule("gloo", "all_reduce", up_to=64, device="cpu"),
        Rule("shm", "all_reduce", up_to=32),  # never reached
        Rule("shm", "all_reduce", up_to=1024),
        Rule("shm", "all_reduce", up_to=2048),
        Rule("shm", "broadcast", dtype="float16"),
    ]
    mixed = MixedBackend(info, own, [one for rule in rules for one in _on_devices(rule, ["cpu"])])
    every = (1 << 63) - 1
    assert mixed._by_size(ALL_REDUCE) == [(64, "gloo"), (2048, "shm"), (every, "gloo")]
    assert mixed._by_size(BROADCAST) is None
    mixed.close()
