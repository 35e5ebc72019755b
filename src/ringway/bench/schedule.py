"""What a benchmark run measures, and in which order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from ringway.bench.cases import CASES
from ringway.errors import UsageError

Mode = Literal["sync", "async", "overlap"]
MODES: tuple[Mode, ...] = ("sync", "async", "overlap")
SCHEDULE, EVENTS = "schedule.json", "events.jsonl"
"""The files of a run whose ranks are processes of their own: what to measure, and what happened."""
PAIRS = "pairs"
"""The item that measures every pair of ranks."""
PAIR_SIZES = (8, 4 << 20)
BRIEF_SIZES = (8, 64 << 10, 4 << 20, 1 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Those of a run without arguments, the most telling ones first: a limit of time cuts the end off."""
LEAST_COMPRESSED = 1024
"""Bytes: nobody compresses less."""
_MOST_BYTES = 1 << 40
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Item:
    """One measurement: all candidates of an op at one size, in turns."""

    op: str
    nbytes: int = 0
    dtype: str = "float32"
    mode: Mode = "sync"
    codecs: tuple[str, ...] = ()
    """Those of compressed all_reduces that are measured beside the plain one."""

    def __str__(self) -> str:
        size = "" if self.op in ("barrier", PAIRS) else f" {in_units(self.nbytes)}"
        mode = "" if self.mode == "sync" else f" {self.mode}"
        return f"{self.op}{size}{'' if self.dtype == 'float32' else ' ' + self.dtype}{mode}"


@dataclass(frozen=True)
class Schedule:
    items: tuple[Item, ...]
    backends: tuple[str, ...] = ()
    """Empty: all that work here."""
    device: str = "cpu"
    rounds: int = 21
    seconds: float | None = None
    """No item begins later than this."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        facts = json.loads(text)
        items = tuple(Item(**{**entry, "codecs": tuple(entry["codecs"])}) for entry in facts["items"])
        return cls(**{**facts, "backends": tuple(facts["backends"]), "items": items})


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
    ops: Sequence[str],
    sizes: Sequence[int],
    dtypes: Sequence[str] = ("float32",),
    modes: Sequence[Mode] = ("sync",),
    codecs: Sequence[str] = (),
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
    items = [Item(op, size, dtype, mode) for size in sizes for op in sized for dtype in dtypes for mode in modes]
    return tuple(once + [replace(item, codecs=tuple(codecs)) if _can_be_compressed(item) else item for item in items])


def _can_be_compressed(item: Item) -> bool:
    floating = getattr(torch, item.dtype).is_floating_point
    return floating and (item.op, item.mode) == ("all_reduce", "sync") and item.nbytes >= LEAST_COMPRESSED


def brief_items(ops: Sequence[str]) -> tuple[Item, ...]:
    """Those of a run without arguments: behind the most telling sizes, a few of what else can be measured."""
    first = make_items(ops, BRIEF_SIZES[:3])
    large = BRIEF_SIZES[2]
    others = (
        *(Item("all_reduce", size, mode="async") for size in BRIEF_SIZES[:2]),
        Item("all_reduce", large, mode="overlap"),
        Item("all_reduce", large, codecs=("int8", "onebit")),
    )
    rest = tuple(item for item in make_items(ops, BRIEF_SIZES[3:]) if item.nbytes)
    return tuple(item for item in first if item != Item("all_reduce", large)) + others + rest
