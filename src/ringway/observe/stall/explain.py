"""Explains failed calls: adds what the other ranks and the store know to the backend's error.

A connection that a living peer closed is a timeout, not a loss. A rank that slept through a timeout learns so. The
first rank that knows why a group failed writes it to the store, so every rank raises the same error.
"""

from __future__ import annotations

import ringway._core as _core
from ringway.errors import CollectiveMismatch, CommTimeout, PeerLost
from ringway.groups.listener import Group, Listener
from ringway.groups.world import world
from ringway.observe.recorder import RecordedCall, recent_calls
from ringway.observe.stall import fault_board
from ringway.observe.stall.job import Job
from ringway.observe.stall.verdict import Verdict
from ringway.observe.stall.watch import StallWatch
from ringway.threads import start


class FailureExplainer(Listener):
    """Replaces the error of a group's first failed call by one that names the ranks and the reason."""

    def __init__(self, watch: StallWatch) -> None:
        self._watch = watch

    def failed(self, group: Group, error: BaseException) -> BaseException:
        job = self._watch.job
        # After `ended` this rank is leaving, and the others know.
        if group.fault is not None or job is None or group.size == 1 or self._watch.ended:
            return error
        explained = error
        try:
            if isinstance(error, (PeerLost, CommTimeout)):
                explained = self._explained(job, group, error)
            elif isinstance(error, CollectiveMismatch) and group.spans_hosts:
                self._publish(job, group, error)
        except Exception as trouble:  # a failed explanation must not hide the error itself
            self._watch.trouble("a failed call could not be explained", trouble)
        return explained

    def _publish(self, job: Job, group: Group, error: BaseException) -> None:
        """Writes the error to the store and wakes the other ranks to read it: some may wait for data that will never
        come, on connections that are still open. The program may destroy the group before the thread runs."""
        fault_board.write(job, group, error)
        start("ringway-wake", self._watch.wake, group.name, tuple(group.ranks))

    def _explained(self, job: Job, group: Group, error: PeerLost | CommTimeout) -> BaseException:
        published = fault_board.read(job, group)
        if published is not None:
            return published
        if isinstance(error, PeerLost) and error.rank is not None:
            explained: BaseException = error  # the backend knows for certain
        else:
            call = _failed_call(group)
            if call is None:
                return error
            waited = ((call.completed_ns or _core.monotonic_ns()) - call.issued_ns) / 1e9
            explained = self._judged(job, call, waited, self._watch.investigate(call, waited), error)
        self._publish(job, group, explained)
        return explained

    def _judged(
        self, job: Job, call: RecordedCall, waited: float, verdict: Verdict, error: PeerLost | CommTimeout
    ) -> BaseException:
        if verdict.mismatch is not None:
            return verdict.mismatch
        if verdict.gone:
            rank = verdict.gone[0]
            answer = self._watch.with_farewells(self._watch.ask(call.group, stacks=False)).get(rank)
            return fault_board.lost(rank, answer, verdict.text)
        if isinstance(error, PeerLost) and job.store_gone:
            return error  # the store died with the connection and no rank could be asked: keep the backend's error
        known, limit = (error.missing, error.waited) if isinstance(error, CommTimeout) else ([], None)
        if known:  # the backend knows which ranks are missing, the verdict where they are
            text = f"{error}; {verdict.text}" if set(verdict.missing) & set(known) else str(error)
        else:
            text = verdict.text if verdict.missing else str(error)
        return CommTimeout(
            text,
            op=call.op,
            sequence=call.sequence,
            waited=waited if limit is None else limit,  # the rank that gave up may have waited longer than this one
            missing=known or list(verdict.missing),
        )


def _failed_call(group: Group) -> RecordedCall | None:
    """The call that failed last, or else the one that has waited longest: on a device, it ends after the group."""
    calls = [call for call in recent_calls(world.recorder.capacity) if call.group == group.name]
    failed = [call for call in calls if call.state == "failed"]
    pending = (call for call in calls if call.state == "issued")
    return max(failed, key=lambda call: call.completed_ns, default=None) or next(pending, None)
