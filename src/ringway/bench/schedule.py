"""What a benchmark run measures, and in which order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from ringway.bench.cases import CASES
from ringway.errors import UsageError

Mode = Literal["sync", "async", "overlap"]
MODES: tuple[Mode, ...] = ("sync", "async", "overlap")
PAIRS = "pairs"
"""The item that measures every pair of ranks."""
PAIR_SIZES = (8, 4 << 20)
BRIEF_SIZES = (8, 64 << 10, 4 << 20, 1 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Those of a run without arguments, the most telling ones first: a limit of time cuts the end off."""
_MOST_BYTES = 1 << 40
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Item:
    """One measurement: all candidates of an op at one size, in turns."""

    op: str
    nbytes: int = 0
    dtype: str = "float32"
    mode: Mode = "sync"

    def __str__(self) -> str:
        size = "" if self.op in ("barrier", PAIRS) else f" {in_units(self.nbytes)}"
        mode = "" if self.mode == "sync" else f" {self.mode}"
        return f"{self.op}{size}{'' if self.dtype == 'float32' else ' ' + self.dtype}{mode}"


@dataclass(frozen=True)
class Schedule:
    items: tuple[Item, ...]
    backends: tuple[str, ...] = ()
    """Empty: all that work here."""
    codecs: tuple[str, ...] = ()
    device: str = "cpu"
    rounds: int = 21
    seconds: float | None = None
    """No item begins later than this."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        facts = json.loads(text)
        for name in ("backends", "codecs"):
            facts[name] = tuple(facts[name])
        return cls(**{**facts, "items": tuple(Item(**entry) for entry in facts["items"])})


def parse_sizes(text: str) -> tuple[int, ...]:
    """`8,64K,4M`, or a range such as `8:256M:x4`: from 8 bytes to 256 MiB, each four times the one before."""
    sizes: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if ":" in part:
            sizes += _range(part)
        else:
            sizes.append(_bytes(part))
    if not sizes:
        raise UsageError(f"--sizes {text!r} names no size; write 8,64K,4M or 8:256M:x4")
    return tuple(dict.fromkeys(sizes))


def _range(text: str) -> Iterator[int]:
    first, last, step, *_ = (*text.split(":"), "x2")
    factor = re.fullmatch(r"[x*](\d+)", step)
    if factor is None or int(factor[1]) < 2 or text.count(":") > 2:
        raise UsageError(f"--sizes {text!r}: write FIRST:LAST:xN, such as 8:256M:x4")
    size, end = _bytes(first), _bytes(last)
    while size <= end:
        yield size
        size *= int(factor[1])


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found is not None else 0
    if not 0 < size <= _MOST_BYTES:
        raise UsageError(f"--sizes: {text!r} is no size; write bytes, or 64K, 4M, 1G")
    return size


def in_units(nbytes: int) -> str:
    for unit in ("G", "M", "K"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def _holds_numbers(dtype: object) -> bool:
    """False for names that are no dtype, and for torch's quantized and raw ones."""
    if not isinstance(dtype, torch.dtype):
        return False
    try:
        torch.arange(1).to(dtype).zero_()
    except (RuntimeError, TypeError):
        return False
    return True


def make_items(
    ops: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str] = ("float32",), modes: Sequence[Mode] = ("sync",)
) -> tuple[Item, ...]:
    """Sizes come last, so that a limit of time leaves every op with some."""
    for op in ops:
        if op not in CASES and op != PAIRS:
            raise UsageError(f"--ops: '{op}' is none; choose from {', '.join([*CASES, PAIRS])}")
    for dtype in dtypes:
        if not _holds_numbers(getattr(torch, dtype, None)):
            raise UsageError(f"--dtypes: '{dtype}' is none; write float32, bfloat16, int64, ...")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes: '{mode}' is none; choose from {', '.join(MODES)}")
    once = [Item(op) for op in ops if op in ("barrier", PAIRS)]
    sized = [op for op in ops if op not in ("barrier", PAIRS)]
    return tuple(
        once + [Item(op, size, dtype, mode) for size in sizes for op in sized for dtype in dtypes for mode in modes]
    )
