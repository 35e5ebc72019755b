"""Why a call waits: turns the answers of all ranks into one verdict in words.

Nothing here communicates: `watch.py` asks the ranks, this module judges their answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringway.call import OP_BY_NAME
from ringway.errors import CollectiveMismatch, mismatch_error
from ringway.observe.recorder import RecordedCall
from ringway.observe.stall.peers import Answer

_STACK_LINES = 14
_NOT_THE_PROGRAMS = ("ringway-", "pytest_timeout")


@dataclass(frozen=True)
class Verdict:
    """`missing` are the global ranks that the call waits for, `gone` those of them whose process is gone;
    `mismatch` is the error to raise if the ranks called different things."""

    text: str
    missing: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    mismatch: CollectiveMismatch | None = None


def judge(
    call: RecordedCall, waited: float, own: Answer, ranks: Sequence[int], answers: Mapping[int, Answer]
) -> Verdict:
    """The verdict on this rank's `call`, which has waited `waited` seconds. `ranks` are the global ranks of the group's
    members. `answers` has an answer for each other rank whose address is known."""
    difference = _first_difference(call, own, answers)
    if difference is not None:
        return difference
    relevant = _awaited(call, own.rank, ranks)
    missing: list[int] = []
    gone: list[int] = []
    stories: list[str] = []
    gave_up: list[str] = []
    for rank in relevant:
        answer = answers.get(rank)
        surrender = None if answer is None else _surrender(call, answer)
        if surrender is not None:
            gave_up.append(surrender)
            continue
        story = f"rank {rank} has not published its address" if answer is None else _story(call, answer)
        if story is not None:
            missing.append(rank)
            stories.append(story)
            if answer is not None and answer.state in ("gone", "leaving"):
                gone.append(rank)
    head = f"{call.describe()} has waited {waited:.0f} s"
    if not missing and gave_up:
        text = f"{call.describe()} came too late: {'; '.join(gave_up)}, waiting for this rank {own.rank}"
        return Verdict(text, (own.rank,))
    if not missing:
        return Verdict(f"{head}; every rank has arrived, so the data itself is slow or stuck in transit")
    return Verdict(f"{head} for {named(missing)}; " + "; ".join(stories), tuple(missing), tuple(gone))


def _awaited(call: RecordedCall, rank: int, ranks: Sequence[int]) -> list[int]:
    """The ranks that must arrive before the call can complete."""
    if not OP_BY_NAME[call.op].collective and call.peer is not None and call.peer in ranks:
        return [call.peer]
    return [other for other in ranks if other != rank]


def _first_difference(call: RecordedCall, own: Answer, answers: Mapping[int, Answer]) -> Verdict | None:
    """The first call of the group, up to the waiting one, at which the ranks called different things."""
    if not OP_BY_NAME[call.op].collective:
        return None
    mine = {**own.of_group(call.group), call.sequence: call}
    first: int | None = None
    for answer in answers.values():
        theirs = answer.of_group(call.group)
        differ = [n for n in mine if n in theirs and mine[n].signature() != theirs[n].signature()]
        if differ:
            first = min(differ) if first is None else min(first, *differ)
    if first is None:
        return None
    calls = {own.rank: mine[first]} if first in mine else {}
    calls |= {a.rank: a.of_group(call.group)[first] for a in answers.values() if first in a.of_group(call.group)}
    sides = {rank: calls[rank].describe() for rank in sorted(calls)}
    odd = tuple(rank for rank in sides if calls[rank].signature() != mine[first].signature())
    mismatch = mismatch_error(call.group, sides, first, ended=False)
    return Verdict(str(mismatch), odd, mismatch=mismatch)


def _story(call: RecordedCall, answer: Answer) -> str | None:
    """Why the call still waits for this rank; None if the rank has arrived."""
    if answer.state == "gone":
        return f"{answer.who}: {answer.detail}"
    if answer.state == "leaving":
        return f"{answer.who} is leaving: {answer.detail}"
    if answer.state == "silent":
        return f"{answer.who} does not answer: {answer.detail}"
    if OP_BY_NAME[call.op].collective:
        theirs = answer.of_group(call.group)
        if call.sequence in theirs or any(number > call.sequence for number in theirs):
            return None
    return whereabouts(answer)


def _surrender(call: RecordedCall, answer: Answer) -> str | None:
    """Says that a live rank arrived at the call and gave up; None if it did not give up."""
    if answer.state != "here" or not OP_BY_NAME[call.op].collective:
        return None
    same = answer.of_group(call.group).get(call.sequence)
    if same is None or same.state != "failed":
        return None
    lasted = (same.completed_ns - same.issued_ns) / 1e9
    return f"{answer.who} gave up {same.op} #{same.sequence} at {same.place} after {lasted:.0f} s"


def whereabouts(answer: Answer) -> str:
    """What a live rank is doing."""
    busy = answer.under_way()
    if busy:
        oldest = busy[0]
        since = (answer.now_ns - oldest.issued_ns) / 1e9
        return f"{answer.who} has been in {oldest.describe()} for {since:.0f} s"
    if answer.calls:
        latest = max(answer.calls, key=lambda call: call.completed_ns)
        idle = (answer.now_ns - latest.completed_ns) / 1e9
        text = (
            f"{answer.who} has issued nothing for {idle:.0f} s, since {latest.op} #{latest.sequence} at {latest.place}"
        )
    else:
        text = f"{answer.who} has issued nothing at all"
    stack = own_stack(answer.stacks)
    return text + (f"; its Python stack:\n{stack}" if stack else "; its Python stack is unavailable")


def own_stack(stacks: str) -> str:
    """The main thread's stack, out of those of all threads, innermost frame first."""
    threads = [part for part in re.split(r"\n(?=(?:Current t|T)hread )", stacks.strip()) if part]
    programs = [part for part in threads if not any(name in part.splitlines()[0] for name in _NOT_THE_PROGRAMS)]
    chosen = next((part for part in programs if "MainThread" in part.splitlines()[0]), None)
    # The interpreter's own dump has no names; it lists the newest thread first, so the main thread is last.
    chosen = chosen or (programs[-1] if programs else "")
    lines = [f"    {line.strip()}" for line in chosen.splitlines()[1:]]
    return "\n".join(lines[:_STACK_LINES] + (["    ..."] if len(lines) > _STACK_LINES else []))


def named(ranks: Sequence[int]) -> str:
    """rank 3; ranks 3, 5"""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
