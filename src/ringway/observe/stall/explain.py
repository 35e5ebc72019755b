"""What a failed call is raised as: the backend's error, with the facts that the other ranks and the store know.

A connection that a living peer closed is a timeout, not a loss; a rank that slept through a timeout is told so. The
first rank that knows why a group failed leaves it in the store, so that all raise the same.
"""

from __future__ import annotations

import weakref

from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost
from ringway.groups.call_path import Issuer
from ringway.groups.world import world
from ringway.observe.files import filled
from ringway.observe.flight import dump, own_rank
from ringway.observe.recorder import RecordedCall, recent_calls
from ringway.observe.stall import fault_board as told
from ringway.observe.stall.verdict import Verdict
from ringway.observe.stall.watch import StallWatch, watch
from ringway.threads import start

_dump_path: str | None = None
_written_down: weakref.WeakSet[Issuer] = weakref.WeakSet()


def dump_errors_to(path: str | None) -> None:
    """From now on the recorder is written there when a call fails; `{rank}` and `{pid}` are filled in."""
    global _dump_path
    _dump_path = path


def explain(issuer: Issuer, error: BaseException) -> BaseException:
    """The error to raise instead; the same where nothing more is known."""
    job = watch.job
    if job is None or issuer.size == 1 or watch.ended:  # a rank that leaves has said so
        return error
    explained = error
    try:
        if isinstance(error, (PeerLost, CommTimeout)):
            explained = _explained(watch, issuer, error)
        elif isinstance(error, CollectiveMismatch) and issuer.spans_hosts:
            _tell(watch, issuer, error)
    except Exception as trouble:  # the explanation may fail, the error itself must not be lost
        watch.trouble("a failed call could not be explained", trouble)
    return explained


def _write_down(issuer: Issuer) -> None:
    """Dumps the recorder at the first failed call of a group, whoever found out that it failed."""
    if _dump_path is not None and issuer not in _written_down:
        _written_down.add(issuer)
        dump(filled(_dump_path, own_rank()))


def _tell(watch: StallWatch, issuer: Issuer, error: BaseException) -> None:
    """Leaves the error for the others. Some may wait for data that will not come, on connections that nobody has
    closed: they are woken to read it."""
    assert watch.job is not None
    told.write(watch.job, issuer, error)
    start("ringway-tell", watch.ask, issuer.name)


def _explained(watch: StallWatch, issuer: Issuer, error: PeerLost | CommTimeout) -> BaseException:
    assert watch.job is not None
    before = told.read(watch.job, issuer)
    if before is not None:
        return before
    if isinstance(error, PeerLost) and error.rank is not None:
        explained: BaseException = error  # the backend knows for certain
    else:
        call = _failed_call(issuer)
        if call is None:
            return error
        waited = (call.completed_ns - call.issued_ns) / 1e9
        verdict = watch.investigate(call, waited)
        explained = _judged(watch, issuer, call, waited, verdict, error)
    _tell(watch, issuer, explained)
    return explained


def _failed_call(issuer: Issuer) -> RecordedCall | None:
    calls = [c for c in recent_calls(world.recorder.capacity) if c.group == issuer.name and c.state == "failed"]
    return max(calls, key=lambda call: call.completed_ns, default=None)


def _judged(
    watch: StallWatch,
    issuer: Issuer,
    call: RecordedCall,
    waited: float,
    verdict: Verdict,
    error: PeerLost | CommTimeout,
) -> BaseException:
    if verdict.sides:
        return CollectiveMismatch(verdict.text, sides=verdict.sides, sequence=verdict.parted_at)
    if verdict.gone:
        rank = verdict.gone[0]
        answer = watch._with_ends(watch.ask(call.group, stacks=False)).get(rank)
        return told.lost(rank, answer, verdict.text)
    if isinstance(error, PeerLost) and watch.job is not None and watch.job.store_gone:
        return error  # the store went with the connection, and nobody could be asked: the backend's word stands
    known, limit = (error.missing, error.waited) if isinstance(error, CommTimeout) else ([], None)
    if known:  # the backend knows who, the verdict knows where they are
        text = f"{error}; {verdict.text}" if set(verdict.missing) & set(known) else str(error)
    else:
        text = verdict.text if verdict.missing else str(error)
    return CommTimeout(
        text,
        op=call.op,
        sequence=call.sequence,
        waited=waited if limit is None else limit,  # the one that gave up may have come before this rank
        missing=known or list(verdict.missing),
    )


def _attend(issuer: Issuer) -> None:
    issuer.explain = explain
    issuer.failed = _write_down


world.newcomers.append(_attend)
