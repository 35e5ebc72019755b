"""What is measured: one row per op, with its buffers, its call and the check of its result.

Sizes are counted as in `ringway.call` (nccl-tests' definitions): for a gather, the gathered whole; for a
reduce_scatter, the whole that is reduced. Inputs are small integers that differ by rank and position. As long as the
sums are exact in the dtype, a result is either right or wrong, never just close. The sums of many ranks are too large
for that in a narrow dtype (bfloat16: from 21 ranks on), and then may differ by the rounding of each addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringway import call as ops
from ringway.bench.runner import Candidate

_PERIOD = 7
_COALESCED = 4


class WrongResult(AssertionError):
    """A candidate computed a wrong result, so its time would be meaningless."""


@dataclass(frozen=True)
class Place:
    """Where a case runs: the group, this rank's place in it, and the size of the message."""

    rank: int
    size: int
    nbytes: int
    group: Any = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def whole(self) -> int:
        """Elements of the message, a multiple of the number of ranks."""
        return self.part * self.size

    @property
    def part(self) -> int:
        """Elements of one rank's part."""
        return max(1, self.nbytes // self.dtype.itemsize // self.size)

    def values(self, rank: int, start: int, count: int) -> Tensor:
        """The input of a rank, starting at an element."""
        places = torch.arange(start, start + count, device=self.device)
        return (places % _PERIOD + rank + 1).to(self.dtype)

    def total(self, start: int, count: int) -> Tensor:
        """The sum of all ranks' inputs."""
        places = torch.arange(start, start + count, device=self.device)
        return (self.size * (places % _PERIOD) + self.size * (self.size + 1) // 2).to(self.dtype)

    def blank(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)


@dataclass
class Buffers:
    """The memory of one candidate. For an in-place op, `given` and `taken` are the same tensors."""

    given: list[Tensor]
    taken: list[Tensor]


@dataclass(frozen=True)
class BenchCase:
    """One op. `call` makes the call that is timed: its arguments are looked up once, as they are not the op's cost.
    `expected` is None for each output that the op leaves undefined on this rank."""

    op: ops.Op
    buffers: Callable[[Place], Buffers]
    call: Callable[[Any, Buffers, Place], Callable[[], object]]
    expected: Callable[[Place], list[Tensor | None]]
    min_size: int = 1

    def candidate(
        self,
        name: str,
        dist: Any,
        place: Place,
        finish: Callable[[], object] | None = None,
        buffers: Buffers | None = None,
    ) -> Candidate:
        """This case on a module like torch.distributed, ready to be timed. Candidates may share `buffers`, so that none
        has an advantage from the location of its memory."""
        buffers = buffers or self.buffers(place)
        originals = [tensor.clone() for tensor in buffers.given]

        def prepare() -> None:
            for tensor in buffers.taken:
                tensor.zero_()
            for tensor, original in zip(buffers.given, originals, strict=True):
                tensor.copy_(original)

        run = self.call(dist, buffers, place)

        def verify() -> None:
            prepare()
            run()
            if finish is not None:
                finish()
            for number, (taken, wanted) in enumerate(zip(buffers.taken, self.expected(place), strict=True)):
                if wanted is not None and (wrong := _wrong_elements(taken, wanted, place.size)):
                    raise WrongResult(
                        f"{name}: {self.op.name} of {place.nbytes} bytes on rank {place.rank} of {place.size}: "
                        f"{wrong} of {wanted.numel()} elements of output {number} are wrong"
                    )

        return Candidate(name, run, prepare, finish, verify)


def _wrong_elements(taken: Tensor, wanted: Tensor, ranks: int) -> int:
    if wanted.is_floating_point() and wanted.itemsize < 4:
        unit = torch.finfo(wanted.dtype).eps
        taken, wanted = taken.float(), wanted.float()  # torch compares no float8
        if wanted.numel() and float(wanted.max()) * unit > 2:  # larger integers are not all exact
            return int((~((taken - wanted).abs() <= wanted * ranks * unit)).sum())  # NaN counts as wrong
    return int((taken != wanted).sum())


def _in_place(place: Place) -> Buffers:
    tensors = [place.values(place.rank, 0, place.whole)]
    return Buffers(tensors, tensors)


def _whole_to_nothing(place: Place) -> Buffers:
    return Buffers([], [])


def _part_to_whole(place: Place) -> Buffers:
    return Buffers([place.values(place.rank, 0, place.part)], [place.blank(place.whole)])


def _part_to_parts(place: Place) -> Buffers:
    return Buffers([place.values(place.rank, 0, place.part)], [place.blank(place.part) for _ in range(place.size)])


def _whole_to_part(place: Place) -> Buffers:
    return Buffers([place.values(place.rank, 0, place.whole)], [place.blank(place.part)])


def _own_parts(place: Place) -> list[Tensor]:
    return [place.values(place.rank, part * place.part, place.part) for part in range(place.size)]


def _parts_to_part(place: Place) -> Buffers:
    return Buffers(_own_parts(place), [place.blank(place.part)])


def _parts_to_parts(place: Place) -> Buffers:
    return Buffers(_own_parts(place), [place.blank(place.part) for _ in range(place.size)])


def _whole_to_whole(place: Place) -> Buffers:
    return Buffers([place.values(place.rank, 0, place.whole)], [place.blank(place.whole)])


def _pieces(place: Place) -> list[tuple[int, int]]:
    """Start and length of each tensor in a coalesced call."""
    length = place.whole // _COALESCED
    starts = [number * length for number in range(_COALESCED)]
    return [(start, length if number < _COALESCED - 1 else place.whole - start) for number, start in enumerate(starts)]


def _pieces_in_place(place: Place) -> Buffers:
    tensors = [place.values(place.rank, start, length) for start, length in _pieces(place)]
    return Buffers(tensors, tensors)


def _gathered(place: Place) -> list[Tensor | None]:
    return [place.values(rank, 0, place.part) for rank in range(place.size)]


def _own_total(place: Place) -> list[Tensor | None]:
    return [place.total(place.rank * place.part, place.part)]


def _exchanged(place: Place) -> list[Tensor]:
    return [place.values(rank, place.rank * place.part, place.part) for rank in range(place.size)]


def _only_at_root(place: Place, tensors: list[Tensor | None]) -> list[Tensor | None]:
    return tensors if place.rank == 0 else [None] * len(tensors)


def _gather(dist: Any, buffers: Buffers, place: Place) -> Callable[[], object]:
    into = buffers.taken if place.rank == 0 else None
    return partial(dist.gather, buffers.given[0], into, group=place.group, group_dst=0)


def _scatter(dist: Any, buffers: Buffers, place: Place) -> Callable[[], object]:
    parts = buffers.given if place.rank == 0 else None
    return partial(dist.scatter, buffers.taken[0], parts, group=place.group, group_src=0)


def _send_round(dist: Any, buffers: Buffers, place: Place) -> Callable[[], object]:
    """Each rank sends to the next and receives from the previous one."""
    target, source = (place.rank + 1) % place.size, (place.rank - 1) % place.size
    send = partial(dist.isend, buffers.given[0], group=place.group, group_dst=target)
    receive = partial(dist.recv, buffers.taken[0], group=place.group, group_src=source)

    def both() -> None:
        work = send()
        receive()
        work.wait()

    return both


def _all_gather_coalesced(dist: Any, buffers: Buffers, place: Place) -> Callable[[], object]:
    outputs = [[tensor] for tensor in buffers.taken]
    return partial(dist.all_gather_coalesced, outputs, buffers.given, group=place.group)


def _reduce_scatter_coalesced(dist: Any, buffers: Buffers, place: Place) -> Callable[[], object]:
    return lambda: buffers.taken[0].copy_(dist.reduce_scatter_coalesced(buffers.given, group=place.group)[0])


CASES: dict[str, BenchCase] = {
    case.op.name: case
    for case in (
        BenchCase(
            ops.BROADCAST,
            _in_place,
            lambda dist, b, p: partial(dist.broadcast, b.taken[0], group=p.group, group_src=0),
            lambda p: [p.values(0, 0, p.whole)],
        ),
        BenchCase(
            ops.ALL_REDUCE,
            _in_place,
            lambda dist, b, p: partial(dist.all_reduce, b.taken[0], group=p.group),
            lambda p: [p.total(0, p.whole)],
        ),
        BenchCase(
            replace(ops.ALL_REDUCE, name="inference_all_reduce"),
            _in_place,
            lambda dist, b, p: partial(dist.inference_all_reduce, b.taken[0], group=p.group),
            lambda p: [p.total(0, p.whole)],
        ),
        BenchCase(
            ops.REDUCE,
            _in_place,
            lambda dist, b, p: partial(dist.reduce, b.taken[0], group=p.group, group_dst=0),
            lambda p: _only_at_root(p, [p.total(0, p.whole)]),
        ),
        BenchCase(
            ops.ALL_GATHER,
            _part_to_parts,
            lambda dist, b, p: partial(dist.all_gather, b.taken, b.given[0], group=p.group),
            _gathered,
        ),
        BenchCase(
            ops.ALL_GATHER_SINGLE,
            _part_to_whole,
            lambda dist, b, p: partial(dist.all_gather_into_tensor, b.taken[0], b.given[0], group=p.group),
            lambda p: [torch.cat([p.values(rank, 0, p.part) for rank in range(p.size)])],
        ),
        BenchCase(ops.GATHER, _part_to_parts, _gather, lambda p: _only_at_root(p, _gathered(p))),
        BenchCase(ops.SCATTER, _parts_to_part, _scatter, lambda p: [p.values(0, p.rank * p.part, p.part)]),
        BenchCase(
            ops.REDUCE_SCATTER,
            _parts_to_part,
            lambda dist, b, p: partial(dist.reduce_scatter, b.taken[0], b.given, group=p.group),
            _own_total,
        ),
        BenchCase(
            ops.REDUCE_SCATTER_SINGLE,
            _whole_to_part,
            lambda dist, b, p: partial(dist.reduce_scatter_tensor, b.taken[0], b.given[0], group=p.group),
            _own_total,
        ),
        BenchCase(
            ops.ALL_TO_ALL,
            _parts_to_parts,
            lambda dist, b, p: partial(dist.all_to_all, b.taken, b.given, group=p.group),
            lambda p: list(_exchanged(p)),
        ),
        BenchCase(
            ops.ALL_TO_ALL_SINGLE,
            _whole_to_whole,
            lambda dist, b, p: partial(dist.all_to_all_single, b.taken[0], b.given[0], group=p.group),
            lambda p: [torch.cat(_exchanged(p))],
        ),
        BenchCase(
            ops.BARRIER, _whole_to_nothing, lambda dist, b, p: partial(dist.barrier, group=p.group), lambda p: []
        ),
        BenchCase(
            ops.SEND,
            _whole_to_whole,
            _send_round,
            lambda p: [p.values((p.rank - 1) % p.size, 0, p.whole)],
            min_size=2,
        ),
        BenchCase(
            ops.ALL_REDUCE_COALESCED,
            _pieces_in_place,
            lambda dist, b, p: partial(dist.all_reduce_coalesced, b.taken, group=p.group),
            lambda p: [p.total(start, length) for start, length in _pieces(p)],
        ),
        BenchCase(ops.ALL_GATHER_COALESCED, _part_to_parts, _all_gather_coalesced, _gathered),
        BenchCase(
            ops.REDUCE_SCATTER_COALESCED,
            _whole_to_part,
            _reduce_scatter_coalesced,
            _own_total,
        ),
    )
}
"""By op name. `recv` is measured together with `send`."""
