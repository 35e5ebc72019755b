"""The stall watch: a call that waits too long reports which ranks it waits for, and why.

One thread per rank checks the calls in flight four times a second; the check is local and takes a few microseconds.
Nothing is sent while calls complete in time. When a call has waited `stall_after` seconds, the thread asks the other
ranks of its group where they are and prints one verdict; a rank that is asked prints which ranks wait for it. A second
thread only answers with the Python stacks, so two ranks can ask each other at the same time. When the call fails,
`explain.py` turns the same answers into the error that is raised.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.backends.nccl.group import Aborts
from ringway.config import MAX_SECONDS, resolve
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Group, Listener
from ringway.groups.reconfigure import ReconfigurableBridge
from ringway.groups.world import world
from ringway.observe.recorder import RecordedCall, recent_calls, recorded
from ringway.observe.stall import fault_board
from ringway.observe.stall.job import Job
from ringway.observe.stall.peers import Address, Answer, ask_all
from ringway.observe.stall.verdict import Verdict, judge, named, own_stack
from ringway.store import unwrapped
from ringway.threads import start

STALL_AFTER = 30.0
_LOOK_MOST = 0.25
_LOOK_LEAST = 0.05
_KEPT_VERDICTS = 32
_LOOK_FOR_DEAD = 0.3
_BACKENDS_TURN = 1.0
"""Seconds a call waits before the watch checks the processes of its group. A backend that notices deaths comes first:
it knows more about them."""
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):", re.MULTILINE)
"""How faulthandler begins a thread's stack; from Python 3.14 on with its name."""


class StallWatch(Listener):
    """Watches this process's calls. `world.listener(StallWatch)` finds the installed one; its threads start with the
    first group."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.seconds = STALL_AFTER
        self.configured = False
        self.job: Job | None = None
        self.verdicts: deque[str] = deque(maxlen=_KEPT_VERDICTS)
        self.responder: _core.Responder | None = None
        self.ended = False
        self._threads: tuple[threading.Thread, ...] = ()
        self._was_asked = threading.Event()
        self._limits: list[tuple[int, int | None, float]] = []
        self._reported: set[int] = set()
        self._reported_waiters: set[tuple[str, int]] = set()
        self._troubles: set[str] = set()
        self._lock = threading.Lock()

    # Joining and leaving

    def created(self, group: Group) -> None:
        default = c10d_module._world.default_pg
        if default is not None and self.job is not None and self.job.lives:
            return
        with self._carrying_on("calls that stall will not be explained"):
            if default is None or isinstance(default, ReconfigurableBridge):  # its new members are a job of their own
                self._start(Job(group, group.size, group.info.store, group.info.mark))
            else:
                self._start(Job(group, default.size(), c10d_module._world.pg_map[default][1]))

    def _start(self, job: Job) -> None:
        if not self.configured:  # the program called torch's init_process_group, not init_distributed
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
        self._reported_waiters.clear()
        if not self._threads:
            self._threads = (
                start("ringway-stall-watch", self._run),
                start("ringway-stall-answers", self._answer, self.responder),
            )

    def leave(self) -> None:
        """At interpreter exit: tells the ranks that still wait for this one why it will not come."""
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
        """In a forked child: closes the sockets inherited from the parent and starts over."""
        if self.responder is not None:
            self.responder.close()
        self._reset()

    # Limits

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Calls issued in this context count as stalled after `seconds`."""
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
            # Read the addresses early: the store may die as early as any rank.
            asked = self._was_asked.wait(self._pause() if learned is job else _LOOK_LEAST)
            if self.ended:
                return
            # No error may end this thread.
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
            if "interpreter shutdown" not in str(error):  # threads can no longer be started
                self.trouble(what, error)

    def wake(self, group: str, members: Sequence[int]) -> None:
        """Asks the other ranks of a group, so that waiting ranks look in the store for the reason. The group may be
        destroyed by now."""
        with self._carrying_on("other ranks could not be informed of a failure"):
            self._ask_members(group, members)  # for stacks: only that question wakes the rank

    def trouble(self, what: str, error: Exception) -> None:
        """Reports a failure of the watch itself once, in one line: it must neither disturb training nor stay hidden."""
        if what not in self._troubles:
            self._troubles.add(what)
            self._print(f"{what} (reported once): {type(error).__name__}: {error}")

    def _look(self) -> None:
        # Not in the thread's own frame, which would keep the last group alive while the thread sleeps.
        for group in world.communicators():
            group.health.end_if_calls_differ()
        now = _core.monotonic_ns()
        calls = world.recorder.under_way()
        self._reported &= {token for token, _ in calls}
        groups_seen: set[str] = set()
        for token, row in calls:
            call = recorded(row)
            waited = (now - call.issued_ns) / 1e9
            behind = call.group in groups_seen  # it waits for the one before it
            groups_seen.add(call.group)
            if not behind and waited >= _LOOK_FOR_DEAD:
                self._end_for_the_dead(call, waited)
                self._end_if_tampered(call)
            if not behind and token not in self._reported and waited >= self._limit_of(token):
                self._reported.add(token)
                self._say(self.investigate(call, waited).text)

    def _end_for_the_dead(self, call: RecordedCall, waited: float) -> None:
        """Ends a call that waits for a dead process of this host: its backend may have no connection to that rank and
        would wait until the timeout."""
        job, group = self.job, self._alive(call.group)
        if job is None or group is None:
            return
        if waited < _BACKENDS_TURN and all(backend.notices_deaths for backend in group.devices.made()):
            return
        known = (job.addresses.get(rank) for rank in group.ranks if rank != job.rank)
        if not any(address is not None and address.seems_gone() for address in known):
            return
        answers = self.with_farewells(self.ask(call.group))
        verdict = self._verdict(call, waited, answers)
        if verdict.gone:
            rank = verdict.gone[0]
            error = fault_board.lost(rank, answers.get(rank), verdict.text)
            waiting = {recorded(row).group for _, row in world.recorder.under_way()}
            others = [
                other
                for other in world.communicators()
                if other is not group and other.name in waiting and rank in other.ranks and other.fault is None
            ]
            for each in (group, *others):
                fault_board.write(job, each, error)
            with world.process.part(Aborts).together():
                for each in (group, *others):
                    each.health.end(error)

    def _end_if_tampered(self, call: RecordedCall) -> None:
        """Ends a call that may wait for a rank that a stranger keeps away: that rank waits for a key of the store, and
        only this one knows that the key was there."""
        job, group = self.job, self._alive(call.group)
        error = None if job is None or group is None else job.tampering()
        if group is not None and error is not None:
            group.health.end(error)

    def _alive(self, name: str) -> Communicator | None:
        return next((each for each in world.communicators() if each.name == name and each.fault is None), None)

    def _say(self, text: str) -> None:
        self.verdicts.append(text)
        self._print(text)

    def _print(self, text: str) -> None:
        rank = "" if self.job is None else f"rank {self.job.rank}: "
        with suppress(OSError, ValueError):  # stderr is closed, or its reader is gone
            print(f"ringway: {rank}{text}", file=sys.stderr, flush=True)

    # Asking

    def members(self, group: str) -> Sequence[int]:
        return next((each.ranks for each in world.communicators() if each.name == group), ())

    def own_answer(self) -> Answer:
        rank = 0 if self.job is None else self.job.rank
        calls = tuple(recent_calls(world.recorder.capacity))
        return Answer(rank, "here", calls=calls, now_ns=_core.monotonic_ns())

    def ask(self, group: str, *, stacks: bool = True) -> dict[int, Answer]:
        """Where the other ranks of a group are."""
        return self._ask_members(group, self.members(group), stacks=stacks)

    def _ask_members(self, group: str, members: Sequence[int], *, stacks: bool = True) -> dict[int, Answer]:
        job = self.job
        if job is None:
            return {}
        job.learn()
        return ask_all(
            [job.addresses[r] for r in members if r != job.rank and r in job.addresses], group, stacks=stacks
        )

    def investigate(self, call: RecordedCall, waited: float) -> Verdict:
        return self._verdict(call, waited, self.with_farewells(self.ask(call.group)))

    def _verdict(self, call: RecordedCall, waited: float, answers: dict[int, Answer]) -> Verdict:
        verdict = judge(call, waited, self.own_answer(), self.members(call.group), answers)
        job = self.job
        if job is not None and verdict.gone and job.read("ringway") is None and job.store_gone:
            return Verdict(
                verdict.text + "; the job's store is gone with its host, so no new group can be made",
                verdict.missing,
                verdict.gone,
            )
        return verdict

    def with_farewells(self, answers: dict[int, Answer]) -> dict[int, Answer]:
        """Adds the reasons that dead ranks left in the store, if it is still there."""
        job = self.job
        known = {}
        for rank, answer in answers.items():
            farewell = job.read(f"ringway/end/{rank}") if answer.state == "gone" and job is not None else None
            if farewell is not None:
                answer = replace(answer, detail=f"its process is gone: {farewell}")
            known[rank] = answer
        return known

    def _give_up_what_failed(self) -> None:
        """Ends the groups that failed on another rank: calls in flight whose backend still waits, and later calls."""
        groups = world.communicators()
        job = self.job  # read last: the job before may have failed in a group of the same name
        if job is None:
            return
        for group in groups:
            if group.fault is None:
                error = fault_board.read(job, group)
                if error is not None:
                    group.health.end(error)

    def _asked(self) -> None:
        """Another rank waits. If it waits for this rank, print that here too, where this rank's user looks."""
        job = self.job
        if job is None:
            return
        for group in world.communicators():
            own = {c.sequence for c in self.own_answer().of_group(group.name).values()}
            waiting: dict[int, tuple[RecordedCall, list[int]]] = {}
            for rank, answer in self.ask(group.name, stacks=False).items():
                for call in answer.under_way():
                    newer = (
                        call.group == group.name and call.sequence not in own and call.sequence > max(own, default=-1)
                    )
                    if newer and call.op not in ("send", "recv"):
                        waiting.setdefault(call.sequence, (call, []))[1].append(rank)
            for number, (call, ranks) in waiting.items():
                if (group.name, number) not in self._reported_waiters:
                    self._reported_waiters.add((group.name, number))
                    who = named(ranks) + (" wait" if len(ranks) > 1 else " waits")
                    stack = own_stack(stacks_text())
                    self._say(f"{who} in {call.describe()} for this rank, whose Python stack is:\n{stack}")


def stacks_text() -> str:
    """The stack of each thread at one moment, innermost frame first.

    faulthandler writes them down in one step. Python code that walks the frames of other threads lets those run in
    between: one such walk ended a rank with a segmentation fault in CPython 3.11.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    try:
        with open(os.memfd_create("ringway-stacks"), "w+b") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dumped = file.read().decode(errors="replace")
    except OSError as error:  # this process may have no descriptor left
        return f"Thread MainThread (most recent call first):\n  unknown: {error.strerror}"

    def named_thread(found: re.Match[str]) -> str:
        ident = int(found[1], 16)
        return f"Thread {names.get(ident, found[1])} (most recent call first):"

    return _THREAD.sub(named_thread, dumped).rstrip("\n")


def farewell_text() -> str:
    """Why this process ends, for the ranks that still wait for it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return "its program has ended"
    return f"its program ended with {type(error).__name__}: {str(error)[:500]}"


def _own_ip(store: Any) -> str:
    """The address of this host as the store's host sees it."""
    inner = unwrapped(store)
    host = getattr(inner, "host", None)
    if not host:
        return "127.0.0.1"
    family, _, _, _, where = socket.getaddrinfo(host, getattr(inner, "port", 1) or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        ip: str = probe.getsockname()[0]
        return ip


def _stacks_by_signal(responder: _core.Responder) -> None:
    """From Python 3.13 on the interpreter does not export its stack dump, so faulthandler's signal handler takes it."""
    if _core.dumps_stacks():
        return
    number = signal.SIGRTMAX - 2
    if signal.getsignal(number) is not signal.SIG_DFL:
        return
    fd = os.memfd_create("ringway-stacks")
    faulthandler.register(number, file=fd, all_threads=True)
    responder.use_signal(number, fd)


def stall_after(seconds: float) -> Any:
    """A context in which a call that waits longer than `seconds` prints which ranks it waits for."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"stall_after takes a number of seconds above 0, not {seconds!r}")
    return world.listener(StallWatch).limit(seconds)
