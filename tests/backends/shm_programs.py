"""Random programs on shm, compared with plain torch: mixed ops, groups, dtypes, sizes, layouts, sync, async, messages.

A program depends only on its seed. So every rank makes the same program, knows every rank's input, and can compute
every result by itself. A failure names the seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ringway as dist
from ringway.call import Reduce, premul_sum, reduces
from ringway.testing import RankContext
from ringway.testing.reference import bits, reduced, relative_tolerance, small_values

STEPS = 12
COUNTS = (0, 1, 3, 8, 33, 500, 4_096, 9_000, 20_011, 70_000, 200_003)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
OPS = {
    Reduce.SUM: dist.ReduceOp.SUM,
    Reduce.AVG: dist.ReduceOp.AVG,
    Reduce.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduce.MIN: dist.ReduceOp.MIN,
    Reduce.MAX: dist.ReduceOp.MAX,
    Reduce.BAND: dist.ReduceOp.BAND,
    Reduce.BOR: dist.ReduceOp.BOR,
    Reduce.BXOR: dist.ReduceOp.BXOR,
}


@dataclass
class Step:
    """One call of a program: the same on every member, except for the input of `rank`."""

    group: Any
    size: int
    rank: int
    dtype: torch.dtype
    count: int
    reduce: Reduce
    root: int
    strided: bool
    asynchronous: bool
    salt: int
    device: str = "cpu"

    def given(self, rank: int, block: int = 0) -> Tensor:
        """A rank's input, or the part of it for one other rank, on the CPU."""
        return small_values(self.count, self.dtype, (rank + 3 * block + self.salt) % 8, self.reduce)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values on the device, perhaps with a gap after each."""
        if not self.strided:
            return tensor.clone().to(self.device)
        wide = tensor.new_zeros(2 * tensor.numel(), device=self.device)
        wide[::2] = tensor.to(self.device)
        return wide[::2]

    def blank(self, blocks: int = 1) -> Tensor:
        return self.laid_out(torch.zeros(self.count * blocks, dtype=self.dtype))

    @property
    def op(self) -> Any:
        return premul_sum(0.5) if self.reduce is Reduce.PREMUL_SUM else OPS[self.reduce]

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def same(self, found: Tensor, right: Tensor, exact: bool = True) -> None:
        found = found.cpu()
        tolerance = 0.0 if exact else relative_tolerance(self.dtype, self.reduce, self.size)
        if tolerance:
            torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
        else:
            dense = found.new_empty(found.shape).copy_(found)
            assert torch.equal(bits(dense), bits(right)), f"{found} instead of {right}"


Check = Callable[[], None]


def call_all_reduce(s: Step) -> tuple[Any, Check]:
    tensor = s.laid_out(s.given(s.rank))
    work = dist.all_reduce(tensor, op=s.op, **s.options)
    right = reduced([s.given(rank) for rank in range(s.size)], s.reduce)
    return work, lambda: s.same(tensor, right, exact=False)


def call_reduce(s: Step) -> tuple[Any, Check]:
    tensor = s.laid_out(s.given(s.rank))
    work = dist.reduce(tensor, group_dst=s.root, op=s.op, **s.options)
    right = reduced([s.given(rank) for rank in range(s.size)], s.reduce)
    return work, lambda: s.same(tensor, right, exact=False) if s.rank == s.root else None


def call_broadcast(s: Step) -> tuple[Any, Check]:
    tensor = s.laid_out(s.given(s.rank))
    work = dist.broadcast(tensor, group_src=s.root, **s.options)
    return work, lambda: s.same(tensor, s.given(s.root))


def call_all_gather(s: Step) -> tuple[Any, Check]:
    outputs = [s.blank() for _ in range(s.size)]
    work = dist.all_gather(outputs, s.laid_out(s.given(s.rank)), **s.options)
    return work, lambda: [s.same(output, s.given(rank)) for rank, output in enumerate(outputs)] and None


def call_all_gather_single(s: Step) -> tuple[Any, Check]:
    """Every second call is in place: the input is this rank's slice of the output."""
    output = s.zeros(s.count * s.size)
    own = s.laid_out(s.given(s.rank))
    if s.salt % 2:
        own = output[s.rank * s.count : (s.rank + 1) * s.count]
        own.copy_(s.given(s.rank))
    work = dist.all_gather_into_tensor(output, own, **s.options)
    return work, lambda: s.same(output, torch.cat([s.given(rank) for rank in range(s.size)]))


def call_gather(s: Step) -> tuple[Any, Check]:
    outputs = [s.blank() for _ in range(s.size)] if s.rank == s.root else None
    work = dist.gather(s.laid_out(s.given(s.rank)), outputs, group_dst=s.root, **s.options)
    return work, lambda: [s.same(output, s.given(rank)) for rank, output in enumerate(outputs or ())] and None


def call_scatter(s: Step) -> tuple[Any, Check]:
    inputs = [s.laid_out(s.given(s.root, block)) for block in range(s.size)] if s.rank == s.root else None
    output = s.blank()
    work = dist.scatter(output, inputs, group_src=s.root, **s.options)
    return work, lambda: s.same(output, s.given(s.root, s.rank))


def call_reduce_scatter(s: Step) -> tuple[Any, Check]:
    inputs = [s.given(s.rank, block) for block in range(s.size)]
    right = reduced([s.given(rank, s.rank) for rank in range(s.size)], s.reduce)
    output = s.blank()
    if s.salt % 2:
        work = dist.reduce_scatter(output, [s.laid_out(tensor) for tensor in inputs], op=s.op, **s.options)
    else:
        whole = torch.cat(inputs).to(s.device)
        if s.salt % 4:  # the output is a slice of the input
            output = whole[s.rank * s.count : (s.rank + 1) * s.count]
        work = dist.reduce_scatter_tensor(output, whole, op=s.op, **s.options)
    return work, lambda: s.same(output, right, exact=False)


def call_all_to_all(s: Step) -> tuple[Any, Check]:
    """Blocks of different sizes: each is a part of the count."""

    def part(source: int, target: int) -> Tensor:
        return s.given(source, target)[: s.count * ((source + 2 * target + s.salt) % 3) // 2]

    sent = [part(s.rank, target) for target in range(s.size)]
    right = [part(source, s.rank) for source in range(s.size)]
    if s.salt % 2:
        outputs = [s.zeros(tensor.numel()) for tensor in right]
        work = dist.all_to_all(outputs, [s.laid_out(tensor) for tensor in sent], **s.options)
        return work, lambda: [s.same(output, tensor) for output, tensor in zip(outputs, right, strict=True)] and None
    flat = s.zeros(sum(tensor.numel() for tensor in right))
    splits = [[tensor.numel() for tensor in tensors] for tensors in (right, sent)]
    work = dist.all_to_all_single(flat, torch.cat(sent).to(s.device), *splits, **s.options)
    return work, lambda: s.same(flat, torch.cat(right))


def call_barrier(s: Step) -> tuple[Any, Check]:
    return dist.barrier(**s.options), lambda: None


def call_ring(s: Step) -> tuple[Any, Check]:
    """Every rank sends to the next one and receives from the previous one, sends first, with crossed tags."""
    to, source = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    if s.size == 1:
        return None, lambda: None
    got = {tag: s.blank() for tag in (5, 2)}
    options = {"group": s.group}
    works = [dist.isend(s.laid_out(s.given(s.rank, tag)), group_dst=to, tag=tag, **options) for tag in (2, 5)]
    for tag, tensor in got.items():
        anyone = {} if s.size == 2 and s.salt % 2 else {"group_src": source}
        works.append(dist.irecv(tensor, tag=tag, **anyone, **options))
    if s.asynchronous:
        return works, lambda: [s.same(tensor, s.given(source, tag)) for tag, tensor in got.items()] and None
    for work in works:
        work.wait()
    return None, lambda: [s.same(tensor, s.given(source, tag)) for tag, tensor in got.items()] and None


CALLS: list[Callable[[Step], tuple[Any, Check]]] = [
    call_all_reduce, call_reduce, call_broadcast, call_all_gather, call_all_gather_single, call_gather, call_scatter,
    call_reduce_scatter, call_all_to_all, call_barrier, call_ring,
]  # fmt: skip


@dataclass
class Pending:
    """Calls that have been issued but not waited for yet."""

    started: list[tuple[str, Any, Check]] = field(default_factory=list)

    def settle(self, generator: random.Random) -> None:
        generator.shuffle(self.started)
        for what, work, check in self.started:
            for one in work if isinstance(work, list) else [work]:
                one.wait()
            _checked(what, check)
        self.started.clear()


def _checked(what: str, check: Check) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def _program(seed: int, groups: list[tuple[Any, list[int]]], me: int, device: str) -> None:
    generator = random.Random(seed)
    shuffles = random.Random(seed * 1000 + me)  # each rank waits for works in its own order
    pending = Pending()
    for number in range(STEPS):
        group, ranks = generator.choice(groups)
        call = generator.choice(CALLS)
        dtype = generator.choice(DTYPES)
        allowed = [reduce for reduce in Reduce if reduces(dtype, reduce)]
        step = Step(
            group=group,
            size=len(ranks),
            rank=ranks.index(me) if me in ranks else -1,
            dtype=dtype,
            count=generator.choice(COUNTS),
            reduce=generator.choice(allowed),
            root=generator.randrange(len(ranks)),
            strided=generator.random() < 0.2,
            asynchronous=generator.random() < 0.5,
            salt=generator.randrange(8),
            device=device,
        )
        settles = generator.random() < 0.3
        if step.rank >= 0:
            what = f"seed {seed}, step {number}, {call.__name__}, {step}"
            work, check = call(step)
            if work is None:
                _checked(what, check)
            else:
                pending.started.append((what, work, check))
        if settles:
            pending.settle(shuffles)
    pending.settle(shuffles)


def share_a_core(context: RankContext) -> None:
    """All ranks on one core, where the last rank gets little time unless the others wait: they run ahead as far as
    possible. (An idle rank, SCHED_IDLE, would get none beside other tests.)"""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if context.rank == context.world_size - 1:
        os.nice(19)


def run_programs(
    context: RankContext, first: int, count: int, uneven: bool = False, backend: str = "shm", device: str = "cpu"
) -> None:
    if uneven:
        share_a_core(context)
    context.start(backend)
    everybody = list(range(context.world_size))
    sets = [everybody, everybody[::2], everybody[1:]] if context.world_size > 2 else [everybody]
    groups = [(dist.new_group(ranks), ranks) for ranks in sets]
    for seed in range(first, first + count):
        _program(seed, groups, context.rank, device)
    for group, ranks in groups:
        if context.rank in ranks:
            dist.destroy_process_group(group)
