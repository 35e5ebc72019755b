"""The stall watch: a call that waits too long says whom it waits for, and why.

One thread a rank looks once a second at what is under way: that is local and costs a few microseconds. While all
is well nothing is sent. When a call has waited `stall_after` seconds, the thread asks the other ranks of its group
where they are and prints one verdict; a rank that is asked prints who is waiting for it. A second thread does
nothing but answer with the Python stacks, so that two ranks may ask each other at once. At the call's end
`faults.py` turns the same answers into the error that is raised.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.config import MAX_SECONDS, resolve
from ringway.errors import UsageError
from ringway.groups.call_path import Issuer
from ringway.groups.world import world
from ringway.observe.recorder import RecordedCall, recent_calls, recorded
from ringway.observe.stall import fault_board as told
from ringway.observe.stall.job import Job
from ringway.observe.stall.peers import Address, Answer, ask_all
from ringway.observe.stall.verdict import Verdict, judge, named, own_stack
from ringway.threads import start

STALL_AFTER = 30.0
_LOOK_MOST = 1.0
_LOOK_LEAST = 0.05
_KEPT_VERDICTS = 32
_LOOK_FOR_DEAD = 0.5
"""Seconds that a call waits before the processes of its group are looked at: most backends see a death sooner."""


class StallWatch:
    """Watches this process's calls. There is one, made by the first group."""

    def __init__(self) -> None:
        self.seconds = STALL_AFTER
        self.configured = False
        self.job: Job | None = None
        self.verdicts: deque[str] = deque(maxlen=_KEPT_VERDICTS)
        self.responder: _core.Responder | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        self._was_asked = threading.Event()
        self.ended = False
        self._limits: list[tuple[int, int | None, float]] = []
        self._told: set[int] = set()
        self._told_waiters: set[tuple[str, int]] = set()
        self._troubles: set[str] = set()
        self._lock = threading.Lock()

    # Joining and leaving

    def joined(self, issuer: Issuer) -> None:
        """A group was made."""
        default = c10d_module._world.default_pg
        if default is not None and self.job is not None and self.job.lives:
            return
        store = issuer.info.store if default is None else c10d_module._world.pg_map[default][1]
        size = issuer.size if default is None else default.size()
        with self._carrying_on("calls that stall will not be explained"):
            self._start(Job(issuer, size, store))

    def _start(self, job: Job) -> None:
        if not self.configured:  # a program that knows torch's init_process_group only
            self.configured = True
            self.seconds = resolve().stall_after
        ip = _own_ip(job.store)
        facts = json.dumps({"job": job.name, "rank": job.rank, "size": job.size, "host": socket.gethostname()})
        if self.responder is None:
            self._token = secrets.token_hex(16)
            self.responder = _core.Responder(world.recorder, ip, self._token, facts)
            self._ip = ip
            _stacks_by_signal(self.responder)
        self.responder.tell_of(world.recorder, facts)
        job.publish(Address(job.rank, socket.gethostname(), self._ip, self.responder.port, self._token, os.getpid()))
        self.job = job
        self._told_waiters.clear()
        if not self._threads:
            self._threads = (
                start("ringway-stall-watch", self._run),
                start("ringway-stall-answers", self._answer, self.responder),
            )

    def leave(self) -> None:
        """At the interpreter's end: whoever still waits for this rank is told why it will not come."""
        if self.responder is None:
            return
        why = farewell_text()
        self.responder.farewell(why)
        if self.job is not None and self.job.size > 1 and self.job.lives:
            self.job.write(f"ringway/end/{self.job.rank}", why)
        self.ended = True
        self._was_asked.set()
        for thread in self._threads:
            thread.join(1.0)

    def forked(self) -> None:
        """A child has none of this: its parent's sockets are closed in it."""
        if self.responder is not None:
            self.responder.close()
        self.__init__()  # type: ignore[misc]

    # Limits

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Calls issued meanwhile stall after so many seconds instead."""
        with self._lock:
            first = world.recorder.total + 1
            self._limits = [*self._limits[-63:], (first, None, seconds)]
        try:
            yield
        finally:
            with self._lock:
                last = world.recorder.total
                self._limits = [(a, last if a == first and b is None else b, s) for a, b, s in self._limits]

    def _limit_of(self, token: int) -> float:
        for first, last, seconds in reversed(self._limits):
            if token >= first and (last is None or token <= last):
                return seconds
        return self.seconds

    def _pause(self) -> float:
        shortest = min([self.seconds, *(limit[2] for limit in self._limits)])
        return min(max(shortest / 4, _LOOK_LEAST), _LOOK_MOST)

    # The threads

    def _answer(self, responder: _core.Responder) -> None:
        while responder.wait():
            responder.answer(stacks_text())
            self._was_asked.set()

    def _run(self) -> None:
        learned: Job | None = None
        while True:
            job = self.job
            # Addresses are wanted soon: the store may die as early as any rank.
            asked = self._was_asked.wait(self._pause() if learned is job else _LOOK_LEAST)
            if self.ended:
                return
            # Nothing that goes wrong here may take the watch away.
            with self._carrying_on("a question could not be answered"):
                if asked:
                    self._was_asked.clear()
                    self._give_up_what_failed()
                    self._asked()
                if job is not None and learned is not job and (not job.lives or job.learn() or job.store_gone):
                    learned = job
            with self._carrying_on("waiting calls could not be looked at"):
                self._look()

    @contextmanager
    def _carrying_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if "interpreter shutdown" not in str(error):  # no thread can be started any more: the end has come
                self.trouble(what, error)

    def trouble(self, what: str, error: Exception) -> None:
        """What fails in here disturbs no training, but does not pass unseen: one line, the first time."""
        if what not in self._troubles:
            self._troubles.add(what)
            self._print(f"{what} (told once): {type(error).__name__}: {error}")

    def _look(self) -> None:
        # Not in the thread's own frame: that would hold the last group while it sleeps.
        for issuer in open_groups():
            issuer.look_for_parting()
        now = _core.monotonic_ns()
        calls = world.recorder.under_way()
        self._told &= {token for token, _ in calls}
        groups_seen: set[str] = set()
        for token, row in calls:
            call = recorded(row)
            waited = (now - call.issued_ns) / 1e9
            behind = call.group in groups_seen  # it waits for the one before it
            groups_seen.add(call.group)
            if not behind and waited >= _LOOK_FOR_DEAD:
                self._end_for_the_dead(call, waited)
            if not behind and token not in self._told and waited >= self._limit_of(token):
                self._told.add(token)
                self._say(self.investigate(call, waited).text)

    def _end_for_the_dead(self, call: RecordedCall, waited: float) -> None:
        """A call that waits for a process of this host that is gone ends now: its backend may have no connection to
        that rank, and would wait until the timeout."""
        job = self.job
        issuer = next((each for each in open_groups() if each.name == call.group), None)
        if job is None or issuer is None or issuer.fault is not None:
            return
        known = (job.addresses.get(rank) for rank in issuer.ranks if rank != job.rank)
        if not any(address is not None and address.seems_gone() for address in known):
            return
        verdict = self.investigate(call, waited)
        if verdict.gone:
            rank = verdict.gone[0]
            error = told.lost(rank, self.ask(call.group, stacks=False).get(rank), verdict.text)
            told.write(job, issuer, error)
            issuer.give_up(error)

    def _say(self, text: str) -> None:
        self.verdicts.append(text)
        self._print(text)

    def _print(self, text: str) -> None:
        rank = "" if self.job is None else f"rank {self.job.rank}: "
        with suppress(OSError, ValueError):  # stderr is closed, or its reader gone
            print(f"ringway: {rank}{text}", file=sys.stderr, flush=True)

    # Asking

    def members(self, group: str) -> Sequence[int]:
        for issuer in open_groups():
            if issuer.name == group:
                return issuer.ranks
        return ()

    def own_answer(self) -> Answer:
        rank = 0 if self.job is None else self.job.rank
        calls = tuple(recent_calls(world.recorder.capacity))
        return Answer(rank, "here", calls=calls, now_ns=_core.monotonic_ns())

    def ask(self, group: str, *, stacks: bool = True) -> dict[int, Answer]:
        """Where the other ranks of a group are."""
        job = self.job
        if job is None:
            return {}
        job.learn()
        members = self.members(group)
        return ask_all(
            [job.addresses[r] for r in members if r != job.rank and r in job.addresses], group, stacks=stacks
        )

    def investigate(self, call: RecordedCall, waited: float) -> Verdict:
        answers = self.ask(call.group)
        own = self.own_answer()
        verdict = judge(call, waited, own, self.members(call.group), self._with_ends(answers))
        job = self.job
        if job is not None and verdict.gone and job.read("ringway") is None and job.store_gone:
            return Verdict(
                verdict.text + "; the job's store is gone with its host, so no new group can be made",
                verdict.missing,
                verdict.gone,
            )
        return verdict

    def _with_ends(self, answers: dict[int, Answer]) -> dict[int, Answer]:
        """What ranks that are gone said of their end, where the store still knows it."""
        job = self.job
        told = {}
        for rank, answer in answers.items():
            end = job.read(f"ringway/end/{rank}") if answer.state == "gone" and job is not None else None
            if end is not None:
                answer = replace(answer, detail=f"its process is gone: {end}")
            told[rank] = answer
        return told

    def _give_up_what_failed(self) -> None:
        """Ends groups that failed on another rank: what is under way there, though its backend still waits, and
        whatever this rank would call next."""
        job = self.job
        if job is None:
            return
        for issuer in open_groups():
            if issuer.fault is None:
                error = told.read(job, issuer)
                if error is not None:
                    issuer.give_up(error)

    def _asked(self) -> None:
        """Somebody waits; if it is for this rank, say so here too, where its user looks."""
        job = self.job
        if job is None:
            return
        for issuer in open_groups():
            own = {c.sequence for c in self.own_answer().of_group(issuer.name).values()}
            waiting: dict[int, tuple[RecordedCall, list[int]]] = {}
            for rank, answer in self.ask(issuer.name, stacks=False).items():
                for call in answer.under_way():
                    newer = (
                        call.group == issuer.name and call.sequence not in own and call.sequence > max(own, default=-1)
                    )
                    if newer and call.op not in ("send", "recv"):
                        waiting.setdefault(call.sequence, (call, []))[1].append(rank)
            for number, (call, ranks) in waiting.items():
                if (issuer.name, number) not in self._told_waiters:
                    self._told_waiters.add((issuer.name, number))
                    who = named(ranks) + (" wait" if len(ranks) > 1 else " waits")
                    stack = own_stack(stacks_text())
                    self._say(f"{who} in {call.describe()} for this rank, whose Python stack is:\n{stack}")


def open_groups() -> list[Issuer]:
    """The groups that have not been destroyed: a destroyed one may linger, with a name that is used again."""
    return [each for each in world.communicators() if not each.closed]


def stacks_text() -> str:
    """The stack of each thread, taken with the GIL, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"{ident:#x}")
        frames = reversed(traceback.extract_stack(frame))
        lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in frames]
        parts.append("\n".join([f"Thread {name} (most recent call first):", *lines]))
    return "\n\n".join(parts)


def farewell_text() -> str:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return "its program has ended"
    return f"its program ended with {type(error).__name__}: {str(error)[:500]}"


def _own_ip(store: Any) -> str:
    """The address of this host that the host of the store sees."""
    inner = store
    while isinstance(inner, c10d.PrefixStore):
        inner = inner.underlying_store
    host = getattr(inner, "host", None)
    if not host:
        return "127.0.0.1"
    family, _, _, _, where = socket.getaddrinfo(host, getattr(inner, "port", 1) or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        ip: str = probe.getsockname()[0]
        return ip


def _stacks_by_signal(responder: _core.Responder) -> None:
    """Interpreters that do not export their dump (3.13 on) are asked through faulthandler's handler."""
    if _core.dumps_stacks():
        return
    number = signal.SIGRTMAX - 2
    if signal.getsignal(number) is not signal.SIG_DFL:
        return
    fd = os.memfd_create("ringway-stacks")
    faulthandler.register(number, file=fd, all_threads=True)
    responder.use_signal(number, fd)


watch = StallWatch()


def stall_after(seconds: float) -> Any:
    """A context: calls issued in it that wait longer than so many seconds print who they wait for."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"stall_after takes a number of seconds above 0, not {seconds!r}")
    return watch.limit(seconds)


world.newcomers.append(watch.joined)
os.register_at_fork(after_in_child=watch.forked)
atexit.register(watch.leave)
