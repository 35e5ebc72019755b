"""Slurm's two shorthands: host lists (`node[01-03,07],gpu1`) and tasks per node (`2(x3),1`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MAX_HOSTS = 1 << 16

_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]\s]*\]|,")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """Every host of a list, in order. Several brackets in one name multiply, and the last varies fastest."""
    hosts: list[str] = []
    names: list[str] | None = None
    end = 0
    for part in _PART.finditer(text):
        if part.start() != end:
            raise ValueError(f"unexpected {text[end]!r} in host list {text!r}")
        end = part.end()
        token = part.group()
        if token == ",":
            hosts += _finished(names, text)
            names = None
        else:
            choices = list(_bracket(token[1:-1], text)) if token.startswith("[") else [token]
            if len(hosts) + len(names or [""]) * len(choices) > MAX_HOSTS:
                raise ValueError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
            names = [name + choice for name in (names or [""]) for choice in choices]
    if end != len(text):
        raise ValueError(f"unexpected {text[end]!r} in host list {text!r}")
    return hosts + _finished(names, text)


def _finished(names: list[str] | None, text: str) -> list[str]:
    if not names:
        raise ValueError(f"a host without a name in host list {text!r}")
    return names


def _bracket(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"'{item}' is not a range in host list {text!r}")
        first, last = match.group(1), match.group(2) or match.group(1)
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise ValueError(f"range '{item}' in host list {text!r} is backwards or too long")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def compress_hosts(hosts: Sequence[str]) -> str:
    """A list that `expand_hosts` turns back into the same hosts. Consecutive numbers share a bracket."""
    runs: list[tuple[str, list[str]]] = []
    for host in hosts:
        digits = re.search(r"[0-9]{0,18}$", host)
        number = digits.group() if digits else ""
        prefix = host[: len(host) - len(number)]
        if runs and number and runs[-1][0] == prefix and _follows(runs[-1][1][-1], number):
            runs[-1][1].append(number)
        else:
            runs.append((prefix, [number]))
    return ",".join(
        f"{prefix}[{numbers[0]}-{numbers[-1]}]" if len(numbers) > 1 else prefix + numbers[0] for prefix, numbers in runs
    )


def _follows(before: str, number: str) -> bool:
    if not before or int(number) != int(before) + 1:
        return False
    return number == str(int(number)).zfill(len(before))


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is three nodes with two tasks and one with one."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"'{item}' is not a task count in {text!r}")
        repeat = int(match.group(2) or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise ValueError(f"{text!r} describes more than {MAX_HOSTS} nodes")
        counts += [int(match.group(1))] * repeat
    return counts
