"""What the ranks of the compatibility tests run."""

from __future__ import annotations

import deepspeed_formulas
import pytest
import torch

from ringway.compat.compressed import CompressedBackend, MpiBackend, NcclBackend, scale_bound
from ringway.errors import UsageError
from ringway.testing import RankContext

STEPS = 50


def buffers_of(step: int, ranks: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


def fifty_steps(context: RankContext, numel: int) -> None:
    """Every step equals DeepSpeed's formulas bit by bit on the reference path, with residuals carried over."""
    context.start("gloo")
    ranks = context.world_size
    padded = -(-numel // (8 * ranks)) * 8 * ranks
    backend = NcclBackend(kernels="reference")
    worker, server = torch.zeros(padded), torch.zeros(padded // ranks)
    workers = [torch.zeros(padded) for _ in range(ranks)]
    servers = [torch.zeros(padded // ranks) for _ in range(ranks)]
    for step in range(STEPS):
        buffers = buffers_of(step, ranks, numel)
        extended = [torch.nn.functional.pad(buffer, (0, padded - numel)) for buffer in buffers]
        expected = deepspeed_formulas.step(extended, workers, servers)
        mine = buffers[context.rank]
        result = backend.compressed_allreduce(mine, worker, server, 0)
        assert torch.equal(result, expected[:numel]), f"step {step}"
        assert torch.equal(worker, workers[context.rank]), f"step {step}"
        assert torch.equal(server, servers[context.rank]), f"step {step}"


def fused_step(context: RankContext) -> None:
    """One step on the fused path: the scale is within the stated bound, and signs are equal away from the edge."""
    context.start("gloo")
    ranks, numel = context.world_size, 4800
    bound = scale_bound(numel)
    buffers = buffers_of(0, ranks, numel)
    workers = [torch.zeros(numel) for _ in range(ranks)]
    servers = [torch.zeros(numel // ranks) for _ in range(ranks)]
    expected = deepspeed_formulas.step(buffers, workers, servers)
    for backend in (NcclBackend(), CompressedBackend(), MpiBackend(False)):
        mine = buffers[context.rank].clone().view(48, 100)
        worker, server = torch.zeros(numel), torch.zeros(numel // ranks)
        result = backend.compressed_allreduce(mine, worker, server, 0)
        assert result.shape == mine.shape
        assert torch.equal(result, mine), "the buffer is averaged in place"
        near_zero = (workers[context.rank].abs().max() * bound).item()
        equal = torch.isclose(result.flatten(), expected, rtol=bound, atol=0.0)
        assert equal.float().mean() > 0.999, near_zero
        torch.testing.assert_close(worker, workers[context.rank], rtol=bound, atol=1e-3)


def gathers(context: RankContext) -> None:
    """my_gather and my_igather bring every rank's buffer to the root; empty buffers clear the errors."""
    context.start("gloo")
    backend = NcclBackend()
    mine = torch.full((4,), float(context.rank))
    for root in range(context.world_size):
        received = torch.zeros(context.world_size, 4)
        backend.my_gather(context.rank, context.world_size, backend.world_group, mine, received, root)
        again = torch.zeros(context.world_size, 4)
        for request in backend.my_igather(context.rank, context.world_size, backend.world_group, mine, again, root):
            request.wait()
        if context.rank == root:
            expected = torch.arange(context.world_size).float().view(-1, 1).expand(-1, 4)
            assert torch.equal(received, expected)
            assert torch.equal(again, expected)
    worker, server = torch.ones(8 * context.world_size), torch.ones(8)
    assert backend.compressed_allreduce(torch.zeros(0), worker, server, 0).numel() == 0
    assert not worker.any()
    assert not server.any()
    with pytest.raises(UsageError, match="multiple of"):
        backend.compressed_allreduce(torch.zeros(9), torch.zeros(9), torch.zeros(3), 0)
    packed = CompressedBackend().pack(torch.tensor([1.0, -1, 1, 1, -1, -1, -1, 0]), 1)
    assert packed.tolist() == [[0b10110001]]
    assert CompressedBackend().unpack(packed, 1, torch.float32).tolist() == [[1, -1, 1, 1, -1, -1, -1, 1]]
