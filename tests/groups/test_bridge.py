"""The bridge: torch's features run on ringway's process group, and every collective they make is recorded.

The same programs run on each backend of BACKENDS; a later backend adds one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn

import ringway as dist
from ringway.errors import UsageError
from ringway.groups import factory
from ringway.store import PASSING
from ringway.testing import RankContext, RankPool

BACKENDS = ["gloo", "shm"]


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    torch.manual_seed(100 + 10 * step + rank)
    return torch.randn(8, 16)


def _recorded(op: str) -> int:
    return sum(call.op == op and call.state == "completed" for call in dist.recent_calls(4096))


def _averaged_gradients(size: int) -> list[torch.Tensor]:
    """The expected result of data-parallel training, computed on one rank."""
    model = _model()
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(size):
        model.zero_grad()
        model(_batch(rank)).square().mean().backward()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad / size
    return totals


def _close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6)


def _ddp(context: RankContext, backend: str) -> None:
    context.start(backend)
    before = _recorded("all_reduce")
    model = nn.parallel.DistributedDataParallel(_model(seed=dist.get_rank()), bucket_cap_mb=0.001)
    model(_batch(dist.get_rank())).square().mean().backward()
    # DDP started from rank 0's parameters, so the gradients are those of seed 0.
    _close([p.grad for p in model.parameters()], _averaged_gradients(dist.get_world_size()))
    assert _recorded("all_reduce") > before, "DDP's buckets are in the recorder"
    for _ in range(2):  # DDP rebuilds its buckets after the first step, smaller ones
        before = _recorded("all_reduce")
        model(_batch(dist.get_rank())).square().mean().backward()
    assert _recorded("all_reduce") - before >= 2
    assert _recorded("broadcast") > 0, "so is its start"


def _ddp_hooks(context: RankContext, backend: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    context.start(backend)
    expected = _averaged_gradients(dist.get_world_size())
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = nn.parallel.DistributedDataParallel(_model())
        model.register_comm_hook(None, hook)
        model(_batch(dist.get_rank())).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0.05, atol=0.01)
    model = nn.parallel.DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(_batch(dist.get_rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = torch.empty(dist.get_world_size(), parameters.numel())
    dist.all_gather_into_tensor(gathered, parameters)
    assert all(torch.equal(row, gathered[0]) for row in gathered), "ranks end with the same parameters"


def _ddp_join(context: RankContext, backend: str) -> None:
    context.start(backend)
    model = nn.parallel.DistributedDataParallel(_model())
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            model(_batch(dist.get_rank(), step)).square().mean().backward()


def _fsdp(context: RankContext, backend: str) -> None:
    from torch.distributed.fsdp import fully_shard

    context.start(backend)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert type(mesh.get_group()).__name__ == "Bridge"
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = _recorded("all_gather_into_tensor"), _recorded("reduce_scatter_tensor")
    model(_batch(dist.get_rank())).square().mean().backward()
    full = [p.grad.full_tensor() for p in model.parameters()]
    _close(full, _averaged_gradients(dist.get_world_size()))
    assert _recorded("all_gather_into_tensor") > before[0]
    assert _recorded("reduce_scatter_tensor") > before[1]


def _dtensor(context: RankContext, backend: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    context.start(backend)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    left, right = torch.randn(12, 8), torch.randn(8, 12)
    a, b = distribute_tensor(left, mesh, [Shard(0)]), distribute_tensor(right, mesh, [Shard(1)])
    product = a @ b.redistribute(mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    reduced = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(reduced.redistribute(mesh, [Replicate()]).to_local(), left @ right)


def _functional(context: RankContext, backend: str) -> None:
    import torch.distributed._functional_collectives as funcol

    context.start(backend)
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.get_world_group()
    ones = torch.full((size * 2,), float(rank + 1))
    total = float(sum(range(1, size + 1)))
    assert funcol.all_reduce(ones, "sum", group).tolist() == [total] * (2 * size)
    assert funcol.all_reduce(ones, "avg", group).tolist() == [total / size] * (2 * size)
    gathered = funcol.all_gather_tensor(ones, 0, group)
    assert gathered.view(size, -1)[:, 0].tolist() == [float(r + 1) for r in range(size)]
    assert funcol.reduce_scatter_tensor(ones, "sum", 0, group).tolist() == [total] * 2
    moved = funcol.all_to_all_single(ones, None, None, group)
    assert moved.view(size, -1)[:, 0].tolist() == [float(r + 1) for r in range(size)]
    assert funcol.broadcast(ones, 0, group).tolist() == [1.0] * (2 * size)
    several = funcol.all_reduce_coalesced([ones, ones * 2], "sum", group)
    assert several[1][0] == 2 * total
    both = funcol.all_gather_into_tensor_coalesced([ones, ones * 2], group)
    assert both[1].view(size, -1)[:, 0].tolist() == [2.0 * (r + 1) for r in range(size)]
    shares = funcol.reduce_scatter_tensor_coalesced([ones, ones * 2], "sum", [0, 0], group)
    assert shares[1].tolist() == [2 * total] * 2


def _compiled(context: RankContext, backend: str) -> None:
    context.start(backend)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    total = sum(range(1, dist.get_world_size() + 1))
    assert step(torch.full((3,), float(dist.get_rank() + 1))).tolist() == [2.0 * total] * 3


def _coalescing(context: RankContext, backend: str) -> None:
    context.start(backend)
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.get_world_group()
    one, two = torch.full((3,), float(rank)), torch.full((5,), 2.0 * rank)
    for module in (c10d, dist):
        a, b = one.clone(), two.clone()
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            module.all_reduce(a)
            module.all_reduce(b)
        manager.wait()
        assert a[0] == sum(range(size)), module
        assert b[0] == 2 * sum(range(size)), module
    received = torch.empty(2)
    for make, start in ((c10d.P2POp, c10d), (dist.P2POp, dist)):
        ops = [
            make(start.isend, torch.full((2,), float(rank)), (rank + 1) % size),
            make(start.irecv, received, (rank - 1) % size),
        ]
        for batch in (c10d.batch_isend_irecv, dist.batch_isend_irecv):
            for work in batch(ops):
                work.wait()
            assert received[0] == (rank - 1) % size
    part = dist.new_group()
    for make, start in ((c10d.P2POp, c10d), (dist.P2POp, dist)):
        ops = [
            make(start.isend, torch.zeros(2), (rank + 1) % size),
            make(start.irecv, received, (rank - 1) % size, group=part),
        ]
        with pytest.raises(UsageError, match="of one group"):
            dist.batch_isend_irecv(ops)
    dist.barrier(group=part)  # nothing was sent


def _mesh(context: RankContext, backend: str) -> None:
    context.start(backend)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    for name, expected in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == expected
        assert dist.get_backend(group) == backend
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        assert total == sum(expected)


def _checkpoint(context: RankContext, backend: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    context.start(backend)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    full = torch.randn(9, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder)
        state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)]), "step": 0}
        dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close(state["w"].full_tensor(), full)
    assert state["step"] == 7


def _torch_functions(context: RankContext, backend: str) -> None:
    """torch.distributed's own functions on ringway's groups, including sub-groups, go through the communicator."""
    context.start(backend)
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.tensor([float(rank)])
    before = dist.communicator().record.collectives
    c10d.all_reduce(value)
    c10d.barrier()
    objects: list[Any] = [None] * size
    c10d.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(size))
    assert value == sum(range(size))
    assert dist.communicator().record.collectives >= before + 3
    pair = c10d.new_group([0, size - 1])
    if rank in (0, size - 1):
        other = torch.tensor([float(rank)])
        c10d.all_reduce(other, group=pair)
        assert other == size - 1
        assert dist.communicator(pair).record.collectives == 1


def _sparse(context: RankContext, backend: str) -> None:
    """Sparse tensors are summed by torch's function, by ringway's, and by DDP."""
    context.start(backend)
    size, rank = dist.get_world_size(), dist.get_rank()
    for all_reduce in (c10d.all_reduce, dist.all_reduce):
        for async_op in (False, True):
            # Each rank has one entry more than the last, and all have entry 0.
            own = torch.sparse_coo_tensor(torch.arange(rank + 1)[None], torch.ones(rank + 1, 3), (size, 3))
            work = all_reduce(own, async_op=async_op)
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
            expected = torch.arange(size, 0, -1.0)[:, None].expand(size, 3)
            torch.testing.assert_close(own.to_dense(), expected)
    with pytest.raises(dist.errors.UsageError, match="can only sum"):
        c10d.all_reduce(own, c10d.ReduceOp.MAX)
    with pytest.raises(dist.errors.CollectiveMismatch, match=f"rank {size - 1}: shape \\[{size + 1}"):
        c10d.all_reduce(torch.zeros(2 + rank).to_sparse())

    model = nn.parallel.DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    model(torch.tensor([0, 1 + rank])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    expected = torch.zeros(8, 4)
    expected[0] = 1
    expected[1 : 1 + size] = 1 / size
    torch.testing.assert_close(gradient.to_dense(), expected)


def _monitored(context: RankContext, backend: str) -> None:
    """monitored_barrier names missing ranks in torch's words, and its timeout is obeyed."""
    context.start(backend)
    rank = dist.get_rank()
    group = c10d.distributed_c10d._get_default_group()
    group.monitored_barrier(timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(dist.errors.CommTimeout, match="Rank 1 failed to pass monitoredBarrier") as raised:
            group.monitored_barrier(timedelta(0))
        assert raised.value.missing == [1]
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.errors.CommTimeout, match="rank 0 had already given up"):
            group.monitored_barrier(timedelta(0))
        words = "Rank 1 successfully reached monitoredBarrier.* send/recv from rank 0: Rank 0 failed to pass"
        with pytest.raises(dist.errors.CommTimeout, match=words):
            group.monitored_barrier(timedelta(0))
    if rank == 0:  # it missed the last one, and finds the other rank at the next
        group.communicator.info.store.wait([f"{PASSING}barrier/4/1"], timedelta(seconds=60))
    group.monitored_barrier(timedelta(seconds=60))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program",
    [
        _ddp,
        _ddp_hooks,
        _ddp_join,
        _fsdp,
        _dtensor,
        _functional,
        _compiled,
        _coalescing,
        _torch_functions,
        _sparse,
        _monitored,
    ],
    ids=lambda program: program.__name__.strip("_"),
)
def test_torch_features_run_on_ringways_group(pool: RankPool, backend: str, program: Any) -> None:
    pool.replace()  # with an empty recorder: a full one does not show that calls were added
    pool.run(program, backend, world_size=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_device_mesh(pool: RankPool, backend: str) -> None:
    pool.run(_mesh, backend, world_size=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distributed_checkpoint(pool: RankPool, backend: str, tmp_path: Path) -> None:
    pool.run(_checkpoint, backend, str(tmp_path / "checkpoint"), world_size=2)


def _wrong_ranks(context: RankContext, backend: str) -> list[str]:
    """Ranks outside the group, through torch's own functions, which pass them on."""
    context.start(backend)
    tensor, tensors = torch.ones(2), [torch.ones(2)] * 2
    calls: list[Callable[[], Any]] = [
        lambda: c10d.broadcast(tensor, group_src=-1),
        lambda: c10d.broadcast(tensor, group_src=7, async_op=True),
        lambda: c10d.reduce(tensor, group_dst=-1),
        lambda: c10d.gather(tensor, None, group_dst=7),
        lambda: c10d.scatter(tensor, None, group_src=7),
        lambda: c10d.isend(tensor, group_dst=7),
        lambda: c10d.irecv(tensor, group_src=7),
        lambda: c10d.send(tensor, group_dst=-3),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError, match="rank") as refused:
            call()
        said.append(str(refused.value))
    dist.all_gather(tensors, tensor)  # the group is unharmed
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_outside_the_group_are_refused(pool: RankPool, backend: str) -> None:
    for said in pool.run(_wrong_ranks, backend, world_size=2):
        assert "the root is rank -1 of the group" in said[0]
        assert "whose ranks are 0 to 1" in said[0]
        assert "the destination is rank 7 of the group" in said[5]


def _splits(context: RankContext) -> tuple[str, float]:
    context.start("gloo", timeout=timedelta(seconds=20))
    stand_in = c10d.ProcessGroupGloo(c10d.HashStore(), 0, 1, timedelta(seconds=20))  # for nccl; no tensor is on a GPU
    factory.split_nccl = lambda *given: stand_in
    whole: Any = c10d.group.WORLD
    whole._torchs["cuda"] = stand_in
    tensor = torch.ones(1)
    part: Any = None
    for number in range(2):  # torch's name has the number of a rank's groups in it
        part = whole.split_group([1, 0], group_name=f"{context.rank + number} groups")
        part.allreduce([tensor]).wait()
    return part.communicator.name, tensor.item()


def test_a_split_group_needs_no_name_that_all_ranks_know(pool: RankPool) -> None:
    first, second = pool.run(_splits, world_size=2)
    pool.replace()  # its ranks have a stand-in in them
    assert first == second
    assert first[1] == 4.0
