"""What a conformance case gets: the group under test, this rank's place in it, and checks that do not raise.

A failed check is recorded and the case continues, so that one wrong number on one rank does not leave the other ranks
waiting. Only an error raised by the group itself ends a case early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringway.call import DTYPES, Reduce, premul_sum, reduces
from ringway.testing.reference import PREMUL_FACTOR, bits

SIZES = (0, 1, 7, 1031)
"""Element counts that every op is tried with: zero, one, odd, and more than a page of most dtypes."""
LARGE = 1 << 20 | 3
"""Elements of a large tensor: 4 MiB of float32, and not a round number."""
_SHOWN_FAILURES = 20


@dataclass(frozen=True)
class Finding:
    """One check that failed."""

    case: str
    rank: int
    parameters: str
    text: str

    def __str__(self) -> str:
        return f"{self.case}, rank {self.rank}, {self.parameters or 'no parameters'}: {self.text}"


@dataclass
class Probe:
    """One rank's view of the group under test: its `rank` in the group, and the group's `ranks` in the world."""

    dist: Any
    group: Any
    rank: int
    ranks: Sequence[int]
    store: Any
    case: str = ""
    findings: list[Finding] = field(default_factory=list)
    _parameters: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def next(self) -> int:
        """The next rank of the group, wrapping around."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    def at(self, **parameters: object) -> None:
        """Set the parameters that the following findings report."""
        self._parameters = ", ".join(f"{name}={value}" for name, value in parameters.items())

    @property
    def parameters(self) -> str:
        return self._parameters

    def root(self, number: int, side: str = "src") -> dict[str, int]:
        """The keyword for a root: by its rank in the world or by its rank in the group, in turn."""
        number %= self.size * 2
        rank = number % self.size
        return {side: self.ranks[rank]} if number < self.size else {f"group_{side}": rank}

    def equal(self, actual: object, expected: object, what: str = "result") -> None:
        """Check that two values, not tensors, are equal."""
        if not (type(actual) is type(expected) and actual == expected):
            self.fail(f"{what} is {actual!r}, expected {expected!r}")

    def holds(self, condition: bool, text: str) -> None:
        if not condition:
            self.fail(text)

    def same(self, actual: Tensor, expected: Tensor, what: str = "result", rtol: float = 0.0) -> None:
        """Check that tensors are equal: exactly, or within a relative tolerance."""
        if actual.dtype is not expected.dtype or actual.shape != expected.shape:
            self.fail(f"{what} is {_kind(actual)}, expected {_kind(expected)}")
            return
        if torch.equal(bits(actual), bits(expected)):
            return
        if rtol or actual.dtype.is_floating_point or actual.dtype.is_complex:
            # Equal values are enough for arithmetic: -0.0 and 0.0 differ only in their bits.
            wide = torch.complex128 if actual.dtype.is_complex else torch.float64
            if torch.allclose(actual.to(wide), expected.to(wide), rtol=rtol, atol=0.0):
                return
        self.fail(f"{what} is wrong in {_difference(actual, expected)}")

    def same_bits(self, actual: Tensor, expected: Tensor, what: str = "result") -> None:
        """Check that tensors are equal bit by bit, for data that is moved."""
        if _kind(actual) != _kind(expected):
            self.fail(f"{what} is {_kind(actual)}, expected {_kind(expected)}")
        elif not torch.equal(bits(actual), bits(expected)):
            self.fail(f"{what} is wrong in {_difference(actual, expected)}")

    def raises(
        self,
        kinds: type[BaseException] | tuple[type[BaseException], ...],
        function: Callable[..., Any],
        *args: Any,
        **kw: Any,
    ) -> BaseException | None:
        """Check that the call raises one of these errors, and return it."""
        try:
            function(*args, **kw)
        except kinds as error:
            return error
        except Exception as error:
            self.fail(f"raised {type(error).__name__}: {error}; expected {kinds}")
            return error
        self.fail(f"did not raise; expected {kinds}")
        return None

    def fail(self, text: str) -> None:
        if len(self.findings) < _SHOWN_FAILURES:
            self.findings.append(Finding(self.case, self.rank, self._parameters, text))

    def still_works(self) -> None:
        """Check that the group still computes correctly, after a call that was rejected."""
        tensor = torch.full((5,), float(self.rank + 1))
        self.dist.all_reduce(tensor, group=self.group)
        self.same(tensor, torch.full((5,), float(sum(range(1, self.size + 1)))), "an all_reduce afterwards")

    def eventually(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"{what} did not happen within {seconds:.0f} s")
                return
            time.sleep(0.001)


def reductions(dtypes: Iterable[torch.dtype] = DTYPES) -> list[tuple[torch.dtype, Reduce]]:
    """Every valid reduction."""
    return [(dtype, reduce) for dtype in dtypes for reduce in Reduce if reduces(dtype, reduce)]


def torch_op(dist: Any, reduce: Reduce) -> Any:
    """The value a user passes as `op`."""
    if reduce is Reduce.PREMUL_SUM:
        return premul_sum(PREMUL_FACTOR)
    return getattr(dist.ReduceOp, reduce.name)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _difference(actual: Tensor, expected: Tensor) -> str:
    width = actual.element_size()
    wrong = (bits(actual).view(-1, width) != bits(expected).view(-1, width)).any(1).nonzero().flatten()
    first = int(wrong[0])
    got, wanted = (tensor.detach().reshape(-1)[first] for tensor in (actual, expected))
    return (
        f"{len(wrong)} of {actual.numel()} elements of {_kind(actual)}, "
        f"first at {first}: {got.item()!r}, expected {wanted.item()!r}"
    )
