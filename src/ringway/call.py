"""The vocabulary of a collective: its op, its dtype, its reduction, and the call itself.

`OPS` is the one table of facts about each op. The logger, the bench, the trace and the mismatch check
read it; nothing else knows how many bytes an op counts or which factor turns its rate into bus bandwidth.
Codes are shared with the native core (`csrc/codes.h`), and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.errors import CommTimeout, UsageError

ReduceOp = c10d.ReduceOp

ANY_SOURCE = -1
"""`Call.peer` of a receive that takes a message from whoever sent one."""


@dataclass(frozen=True, slots=True)
class Op:
    """The facts about one collective.

    `counts` says which side nccl-tests counts as the size of the message: the call's inputs or outputs
    (for a gather or an all_gather the gathered whole, for a reduce_scatter the whole that is reduced).
    `agree` names what must be the same on every rank: 'bytes', 'dtype', 'reduce', 'root'.
    """

    code: int
    name: str
    counts: str
    bus_factor: Callable[[int], float]
    agree: tuple[str, ...]
    collective: bool = True

    def __repr__(self) -> str:
        return self.name


def _once(size: int) -> float:
    return 1.0


def _all_but_own(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


BROADCAST = Op(0, "broadcast", "outputs", _once, ("bytes", "dtype", "root"))
ALL_REDUCE = Op(1, "all_reduce", "inputs", _there_and_back, ("bytes", "dtype", "reduce"))
REDUCE = Op(2, "reduce", "inputs", _once, ("bytes", "dtype", "reduce", "root"))
ALL_GATHER = Op(3, "all_gather", "outputs", _all_but_own, ("bytes", "dtype"))
ALL_GATHER_SINGLE = Op(4, "all_gather_into_tensor", "outputs", _all_but_own, ("bytes", "dtype"))
GATHER = Op(5, "gather", "inputs", _all_but_own, ("bytes", "dtype", "root"))
SCATTER = Op(6, "scatter", "outputs", _all_but_own, ("bytes", "dtype", "root"))
REDUCE_SCATTER = Op(7, "reduce_scatter", "inputs", _all_but_own, ("bytes", "dtype", "reduce"))
REDUCE_SCATTER_SINGLE = Op(8, "reduce_scatter_tensor", "inputs", _all_but_own, ("bytes", "dtype", "reduce"))
ALL_TO_ALL = Op(9, "all_to_all", "inputs", _all_but_own, ("dtype",))
ALL_TO_ALL_SINGLE = Op(10, "all_to_all_single", "inputs", _all_but_own, ("dtype",))
BARRIER = Op(11, "barrier", "inputs", _once, ())
SEND = Op(12, "send", "inputs", _once, (), collective=False)
RECV = Op(13, "recv", "outputs", _once, (), collective=False)
ALL_REDUCE_COALESCED = Op(14, "all_reduce_coalesced", "inputs", _there_and_back, ("bytes", "dtype", "reduce"))
ALL_GATHER_COALESCED = Op(15, "all_gather_coalesced", "outputs", _all_but_own, ("bytes", "dtype"))
REDUCE_SCATTER_COALESCED = Op(16, "reduce_scatter_coalesced", "inputs", _all_but_own, ("bytes", "dtype", "reduce"))

OPS: tuple[Op, ...] = (
    BROADCAST,
    ALL_REDUCE,
    REDUCE,
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    GATHER,
    SCATTER,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    SEND,
    RECV,
    ALL_REDUCE_COALESCED,
    ALL_GATHER_COALESCED,
    REDUCE_SCATTER_COALESCED,
)
OP_BY_NAME = {op.name: op for op in OPS}


class Reduce(IntEnum):
    """Reductions, by the native core's codes."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


_REDUCE_BY_TORCH = {int(getattr(ReduceOp, member.name)): member for member in Reduce}
_SUM = ReduceOp.SUM


def premul_sum(factor: float | Tensor) -> ReduceOp:
    """A reduction that multiplies each rank's input by `factor` before it sums."""
    return c10d._make_nccl_premul_sum(factor)


def parse_reduce(op: object) -> tuple[Reduce, Any]:
    """What torch's `ReduceOp`, or one of its members, means: our code, and PREMUL_SUM's factor."""
    if op is _SUM:
        return Reduce.SUM, None
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op={op!r} is not a ReduceOp; use one of {', '.join(m.name for m in Reduce)}")
    kind: Any = getattr(op, "op", op)
    reduce = _REDUCE_BY_TORCH[int(kind)]
    if reduce is not Reduce.PREMUL_SUM:
        return reduce, None
    # Older versions of torch show the factor only to pickle.
    premultiplied: Any = op
    return reduce, premultiplied.factor if hasattr(op, "factor") else premultiplied.__getstate__()[1]


DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex32,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""A dtype's code is its place here."""

DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
UNKNOWN_DTYPE = 255


def dtype_bits(dtypes: Iterable[torch.dtype]) -> int:
    """The dtypes as the native core takes several: a bit for each code."""
    return sum(1 << DTYPE_CODE[dtype] for dtype in dtypes)


_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool})
_REALS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_LINEAR = frozenset({Reduce.SUM, Reduce.AVG, Reduce.PREMUL_SUM})
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})


def reduces(dtype: torch.dtype, reduce: Reduce) -> bool:
    """Whether the reduction has a meaning for the dtype.

    Integers: all but PREMUL_SUM; AVG divides towards zero. bool: SUM and MAX are `or`, PRODUCT and MIN
    are `and`, no AVG. Floating point: all but the bitwise ones. Complex: the linear ones only.
    """
    if dtype in _INTEGERS:
        if reduce is Reduce.AVG:
            return dtype is not torch.bool
        return reduce is not Reduce.PREMUL_SUM
    if dtype in _REALS:
        return reduce not in _BITWISE
    return dtype in _COMPLEX and reduce in _LINEAR


@dataclass(slots=True)
class Call:
    """One collective of one rank: what crosses the seam between communicator and backend.

    `inputs` and `outputs` may be the same tensors (a call in place). For `gather` the outputs, and for
    `scatter` the inputs, are empty except at the root. Coalesced calls carry one entry a tensor, and
    `all_gather_coalesced` its outputs flattened, rank by rank within each input. `peer` is the root, the
    destination or the source, as a rank *of the group*; ANY_SOURCE for a receive from anyone.
    """

    op: Op
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    reduce: Reduce = Reduce.SUM
    factor: Any = None
    peer: int = -1
    tag: int = 0
    input_splits: Sequence[int] | None = None
    output_splits: Sequence[int] | None = None
    async_op: bool = False
    timeout: float | None = None
    label: str | None = None
    sequence: int = -1
    group: str = ""
    size: int = 1
    issued: int = 0
    completed: int = 0
    check: Callable[[], None] | None = None
    """Raises where ranks were found to have called different things; for whoever waits in slices."""

    @property
    def nbytes(self) -> int:
        """The size of the message as nccl-tests counts it."""
        if self.op is GATHER:
            return self.inputs[0].nbytes * self.size
        if self.op is SCATTER:
            return self.outputs[0].nbytes * self.size
        counted = self.inputs if self.op.counts == "inputs" else self.outputs
        return counted[0].nbytes if len(counted) == 1 else sum(t.nbytes for t in counted)

    @property
    def dtype(self) -> torch.dtype | None:
        for tensor in (*self.inputs, *self.outputs):
            return tensor.dtype
        return None

    def not_done(self, timeout: float | None) -> CommTimeout:
        """What a wait of so many seconds raises that the call has outlasted."""
        return CommTimeout(
            f"{self.describe()} is not done after {timeout} s of waiting; it goes on",
            op=self.op.name,
            sequence=self.sequence,
            waited=timeout,
        )

    def describe(self) -> str:
        """The call in words, for messages: all_reduce #12 (float32[1024], SUM, group dp)."""
        facts = []
        tensors = self.inputs or self.outputs
        if tensors:
            name = str(tensors[0].dtype).removeprefix("torch.")
            facts.append(f"{name}[{', '.join(str(t.numel()) for t in tensors[:4])}]")
        if "reduce" in self.op.agree:
            facts.append(self.reduce.name)
        if "root" in self.op.agree:
            facts.append(f"root {self.peer}")
        if not self.op.collective:
            facts.append(f"peer {'any' if self.peer == ANY_SOURCE else self.peer}, tag {self.tag}")
        if self.group:
            facts.append(f"group {self.group}")
        number = f" #{self.sequence}" if self.sequence >= 0 else ""
        return f"{self.op.name}{number} ({', '.join(facts)})"
