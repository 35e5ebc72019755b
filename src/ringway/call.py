"""The vocabulary of a collective: its op, its dtype, its reduction, and the call itself.

`OPS` is the one table of facts about each op. The logger, the bench and the trace read it; nothing else knows how many
bytes an op counts, or which factor turns its rate into bus bandwidth. What the ranks must agree on is read from the
native core (`csrc/agreement.h`). Codes are shared with the native core (`csrc/codes.h`), and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import ringway._core as _core
from ringway.errors import CommTimeout, UsageError
from ringway.torch_versions import premul_factor

ReduceOp = c10d.ReduceOp
"""torch's class of reductions: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, and what `premul_sum` returns."""

ANY_SOURCE = -1
"""`Call.peer` of a receive that accepts a message from any rank."""


@dataclass(frozen=True, slots=True)
class Op:
    """The facts about one collective.

    `counts` says which side nccl-tests counts as the size of the message: the call's inputs or its outputs
    (for gather and all_gather everything that is gathered, for reduce_scatter everything that is reduced).
    `agree` names what must be the same on every rank, out of 'bytes', 'dtype', 'reduce', 'root'.
    """

    code: int
    name: str
    counts: str
    bus_factor: Callable[[int], float]
    collective: bool = True
    agree: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "agree", _core.agreement(self.code))

    def __repr__(self) -> str:
        return self.name


def _once(size: int) -> float:
    return 1.0


def _all_but_own(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


BROADCAST = Op(0, "broadcast", "outputs", _once)
ALL_REDUCE = Op(1, "all_reduce", "inputs", _there_and_back)
REDUCE = Op(2, "reduce", "inputs", _once)
ALL_GATHER = Op(3, "all_gather", "outputs", _all_but_own)
ALL_GATHER_SINGLE = Op(4, "all_gather_into_tensor", "outputs", _all_but_own)
GATHER = Op(5, "gather", "inputs", _all_but_own)
SCATTER = Op(6, "scatter", "outputs", _all_but_own)
REDUCE_SCATTER = Op(7, "reduce_scatter", "inputs", _all_but_own)
REDUCE_SCATTER_SINGLE = Op(8, "reduce_scatter_tensor", "inputs", _all_but_own)
ALL_TO_ALL = Op(9, "all_to_all", "inputs", _all_but_own)
ALL_TO_ALL_SINGLE = Op(10, "all_to_all_single", "inputs", _all_but_own)
BARRIER = Op(11, "barrier", "inputs", _once)
SEND = Op(12, "send", "inputs", _once, collective=False)
RECV = Op(13, "recv", "outputs", _once, collective=False)
ALL_REDUCE_COALESCED = Op(14, "all_reduce_coalesced", "inputs", _there_and_back)
ALL_GATHER_COALESCED = Op(15, "all_gather_coalesced", "outputs", _all_but_own)
REDUCE_SCATTER_COALESCED = Op(16, "reduce_scatter_coalesced", "inputs", _all_but_own)

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
    if op is _SUM or op == _SUM:  # torch makes a new object for each question
        return Reduce.SUM, None
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op={op!r} is not a ReduceOp; use one of {', '.join(m.name for m in Reduce)}")
    kind: Any = getattr(op, "op", op)
    reduce = _REDUCE_BY_TORCH[int(kind)]
    if reduce is not Reduce.PREMUL_SUM:
        return reduce, None
    return reduce, premul_factor(op)


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


def op_bits(ops: Iterable[Op]) -> int:
    """Several ops as the native core takes them: a bit for each code."""
    return sum(1 << op.code for op in ops)


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
    """One collective of one rank: what a communicator passes to a backend.

    `inputs` and `outputs` may be the same tensors (a call in place). For `gather` the outputs, and for
    `scatter` the inputs, are empty except at the root. Coalesced calls carry one entry per tensor;
    `all_gather_coalesced` carries its outputs flattened, rank by rank within each input. `peer` is the root, the
    destination or the source, as a rank *of the group*; ANY_SOURCE for a receive from any rank. `ranks` are the global
    ranks of the group's members, in order.
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
    site: int = 0
    """The recorder's number for the line of the program that made the call."""
    group: str = ""
    ranks: Sequence[int] = ()
    size: int = 1
    issued: int = 0
    completed: int = 0
    device: torch.device | None = None
    """Of a barrier, if the program names one."""
    check: Callable[[], None] | None = None
    """Raises if the ranks were found to have called different things. For code that waits in slices."""

    record: Any = field(default=None, init=False, repr=False, compare=False)
    """The group's record, which a backend informs that the call has started if its method waits. `replace` drops it: a
    call may start in several parts."""
    _dtype_code: int = field(default=-1, init=False, repr=False, compare=False)

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

    @property
    def dtype_code(self) -> int:
        """The native core's code for the dtype."""
        if self._dtype_code < 0:
            dtype = self.dtype
            self._dtype_code = UNKNOWN_DTYPE if dtype is None else DTYPE_CODE.get(dtype, UNKNOWN_DTYPE)
        return self._dtype_code

    def not_done(self, timeout: float | None) -> CommTimeout:
        """The error for a wait that ended before the call did."""
        return CommTimeout(
            f"{self.describe()} is not done after {timeout} s of waiting; it continues",
            op=self.op.name,
            sequence=self.sequence,
            waited=timeout,
        )

    def behind_others(self, waited: float) -> CommTimeout:
        """The error for a call whose turn did not come."""
        return CommTimeout(
            f"{self.describe()}: calls that this process issued earlier in other groups have not met after {waited} s. "
            "Calls of different groups must be issued in the same order on all ranks that share them",
            op=self.op.name,
            sequence=self.sequence,
            waited=waited,
        )

    def describe(self) -> str:
        """The call in words: `all_reduce #12 (float32[1024], SUM, group dp)`."""
        tensors = self.inputs or self.outputs
        return describe_call(
            self.op,
            self.sequence,
            dtype=self.dtype,
            counts=[tensor.numel() for tensor in tensors],
            reduce=self.reduce,
            peer=self.ranks[self.peer] if 0 <= self.peer < len(self.ranks) else self.peer,
            tag=None if self.op.collective else self.tag,
            group=self.group,
        )


_COUNTS_SHOWN = 4


def describe_call(
    op: Op,
    sequence: int = -1,
    *,
    dtype: torch.dtype | None = None,
    counts: Sequence[int] = (),
    nbytes: int | None = None,
    reduce: Reduce | None = None,
    peer: int | None = None,
    tag: int | None = None,
    group: str = "",
    label: str = "",
    place: str = "",
) -> str:
    """A call in words, as every message of ringway spells it. Unknown facts are left out.

    all_reduce 'gradients' #12 (float32[1024], SUM, group dp) at train.py:88
    broadcast #3 (float32, 4096 bytes, root 2, group 0) at train.py:90
    recv #0 (float32[4], peer any, tag 7, group 0)

    `counts` are the elements of each tensor. `nbytes` replaces them if only the size of the message is known.
    `peer` is a global rank: the root, the destination or the source.
    """
    facts = []
    element = "" if dtype is None else str(dtype).removeprefix("torch.")
    if counts:
        more = ", ..." if len(counts) > _COUNTS_SHOWN else ""
        facts.append(f"{element or 'elements'}[{', '.join(map(str, counts[:_COUNTS_SHOWN]))}{more}]")
    elif element:
        facts.append(element)
    if nbytes is not None and op is not BARRIER:
        facts.append(f"{nbytes} bytes")
    if reduce is not None and "reduce" in op.agree:
        facts.append(reduce.name)
    if peer is not None and "root" in op.agree:
        facts.append(f"root {peer}")
    elif peer is not None and not op.collective:
        facts.append(f"peer {'any' if peer == ANY_SOURCE else peer}")
    if tag is not None:
        facts.append(f"tag {tag}")
    if group:
        facts.append(f"group {group}")
    named = f" '{label}'" if label else ""
    number = f" #{sequence}" if sequence >= 0 else ""
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{op.name}{named}{number}{details}" + (f" at {place}" if place else "")
