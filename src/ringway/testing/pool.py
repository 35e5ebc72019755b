"""Ranks for tests and benchmarks: long-lived processes that run a function together.

    with RankPool(4) as pool:
        pool.run(my_function, argument, world_size=2)  # -> [result of rank 0, result of rank 1]

`my_function(context, argument)` is a module-level function; `context` is a `RankContext`. Ranks are forked from a
process that has imported torch (`forkserver.py`), reused by the next run, and replaced after a run that failed in any
way. Every run has a time limit: a rank that hangs is named, with its Python stack.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from ringway.errors import restored
from ringway.testing.forkserver import MESSAGE_BYTES
from ringway.testing.rank import STACK_SIGNAL, Answer, FunctionRef, Job, RankContext, receive, send

T = TypeVar("T")

PRELOAD = ("torch", "torch.distributed", "numpy", "ringway")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_OUTPUT_SHOWN = 20_000
_START_SECONDS = 300.0
_STACK_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_BOOT = (
    "import json, sys; fd, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from ringway.testing.forkserver import main; main(fd, preload)"
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended on one rank, as exactly one of the kinds. `output` is what it printed."""

    rank: int
    kind: str
    """'returned', 'raised', 'died' or 'hung'."""
    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    """The traceback of an error, the cause of a death, or the stack of a rank that hung."""
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "returned"

    def __str__(self) -> str:
        lines = [f"rank {self.rank} {self.kind}"]
        if self.detail:
            lines[0] += ":"
            lines.append(_indented(self.detail))
        if self.output:
            lines += ["  it printed:", _indented(self.output)]
        return "\n".join(lines)


class RanksFailed(AssertionError):
    """A run did not return on every rank. `outcomes` has all ranks, `failed` those that did not return."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.failed = [outcome for outcome in outcomes if not outcome.ok]
        ranks = ", ".join(str(outcome.rank) for outcome in self.failed)
        story = "\n".join(str(outcome) for outcome in self.failed)
        super().__init__(f"{what} failed on rank {ranks} of {len(outcomes)}\n{story}")

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), self.args), self.__dict__


class RankPool:
    """Up to `size` ranks on this machine. Not thread-safe."""

    def __init__(self, size: int, *, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._ranks: dict[int, _Process] = {}
        self._server: _ForkServer | None = None
        self._preload = (*PRELOAD, *preload)
        self._store: TCPStore | None = None
        self._runs = 0
        self._generation = 0
        self._last_world: tuple[int, ...] = ()
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., T] | str,
        *arguments: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
        environment: dict[str, str | None] | None = None,
        grace: float = 15.0,
    ) -> list[T]:
        """Run `function(context, *arguments)` on ranks 0 to `world_size` - 1, and return what each returned.

        Raises `RanksFailed` unless all return within `timeout` seconds. Once one rank has failed, the others have
        `grace` seconds left, since they may be waiting for it.
        """
        outcomes = self.try_run(
            function,
            *arguments,
            world_size=world_size,
            timeout=timeout,
            environment=environment,
            grace=grace,
        )
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(FunctionRef.of(function).qualname, outcomes)
        return [outcome.value for outcome in outcomes]

    def try_run(
        self,
        function: Callable[..., Any] | str,
        *arguments: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
        environment: dict[str, str | None] | None = None,
        grace: float | None = None,
    ) -> list[Outcome]:
        """Like `run`, but for tests in which ranks are expected to fail: returns how each ended."""
        size = self.size if world_size is None else world_size
        if not 1 <= size <= self.size:
            raise ValueError(f"world_size={size} is not between 1 and the pool's size {self.size}")
        reference, packed = FunctionRef.of(function), pickle.dumps(arguments)
        ranks = [self._rank(number) for number in range(size)]
        pids = tuple(rank.pid for rank in ranks)
        if pids != self._last_world:
            self._generation, self._last_world = self._generation + 1, pids
        self._runs += 1
        for number, rank in enumerate(ranks):
            rank.give(
                Job(
                    self._runs,
                    self._generation,
                    number,
                    size,
                    reference,
                    packed,
                    self._store_address(),
                    timeout,
                    sys.path,
                    environment or {},
                )
            )
        try:
            outcomes = _collect(ranks, timeout, grace)
        except BaseException:  # most likely Ctrl-C: the state of the ranks is unknown
            self.replace(range(size))
            raise
        if not all(outcome.ok for outcome in outcomes):
            self.replace(range(size))
        return outcomes

    def pids(self) -> dict[int, int]:
        """The process id of each rank that is alive, for tests that kill one from outside."""
        return {number: rank.pid for number, rank in list(self._ranks.items())}  # while a run changes them

    def replace(self, ranks: Sequence[int] | None = None) -> None:
        """End these ranks, or all. The next run that needs them starts new ones."""
        ended = [self._ranks.pop(n) for n in (self._ranks.copy() if ranks is None else ranks) if n in self._ranks]
        for rank in ended:
            rank.end()

    def close(self) -> None:
        """End all ranks and the fork server. Idempotent."""
        atexit.unregister(self.close)
        self.replace()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rank(self, number: int) -> _Process:
        rank = self._ranks.get(number)
        if rank is not None and rank.dead():
            self.replace([number])
            rank = None
        if rank is None:
            if self._server is None or not self._server.alive():
                self.replace()
                self._server = _ForkServer(self._preload)
            rank = self._ranks[number] = _Process(number, self._server)
        return rank

    def _store_address(self) -> tuple[str, int]:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self._store.port


class _ForkServer:
    """The client side of `forkserver.py`."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argument = json.dumps([theirs.fileno(), sys.path, list(dict.fromkeys(preload))])
        # A separate session: Ctrl-C goes to the parent, which then closes the pool.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, argument],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
        theirs.close()
        self._socket.settimeout(_START_SECONDS)
        self._answer("start")

    def fork(self, control: socket.socket, output_fd: int) -> int:
        message = pickle.dumps(("fork", None))
        socket.send_fds(self._socket, [message], [control.fileno(), output_fd])
        pid: int = self._answer("fork a rank")
        return pid

    def reap(self, pid: int) -> int:
        """The wait status of a rank that has ended."""
        self._socket.send(pickle.dumps(("reap", pid)))
        status: int = self._answer(f"reap rank process {pid}")
        return status

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, what: str) -> Any:
        try:
            message = self._socket.recv(MESSAGE_BYTES)
        except TimeoutError:
            message = b""
        if not message:
            self._process.kill()
            raise RuntimeError(
                f"the fork server of the rank pool could not {what} (exit status {self._process.wait()}); "
                "its own error, if any, was printed above"
            )
        return pickle.loads(message)


class _Process:
    """One rank, as seen by the parent."""

    def __init__(self, number: int, server: _ForkServer) -> None:
        self.number = number
        self._server = server
        self._printed = 0
        self._output_fd = os.memfd_create(f"ringway-rank-{number}")
        fcntl.fcntl(self._output_fd, fcntl.F_SETFL, os.O_APPEND)
        self.control, theirs = socket.socketpair()
        with theirs:
            self.pid = server.fork(theirs, self._output_fd)
        # The fork server reaps only on request, so the pid cannot have been reused.
        self.pidfd = os.pidfd_open(self.pid)

    def give(self, job: Job) -> None:
        os.ftruncate(self._output_fd, 0)
        with suppress(BrokenPipeError, ConnectionResetError):  # `_collect` notices the death
            send(self.control, pickle.dumps(job))

    def dead(self) -> bool:
        return bool(_ready([self.pidfd], 0))

    def output(self) -> str:
        size = os.fstat(self._output_fd).st_size
        text = os.pread(self._output_fd, _OUTPUT_SHOWN, max(0, size - _OUTPUT_SHOWN)).decode(errors="replace")
        return ("[...]" if size > _OUTPUT_SHOWN else "") + text.rstrip()

    def answered(self) -> Outcome:
        """The outcome of a rank that has answered or died."""
        # Everything a dead rank sent is already here; one of its children may keep the connection open forever.
        self.control.settimeout(0 if self.dead() else _ANSWER_SECONDS)
        message = receive(self.control)
        if message is None:
            return self._died()
        answer: Answer = pickle.loads(message)
        try:
            value = None if answer.value is None else pickle.loads(answer.value)
            error = None if answer.error is None else pickle.loads(answer.error)
        except Exception:
            text = f"its answer cannot be read here:\n{traceback.format_exc()}"
            return Outcome(self.number, "raised", detail=text, output=self.output())
        kind = "raised" if answer.value is None else "returned"
        return Outcome(self.number, kind, value, error, answer.error_text, self.output())

    def _died(self) -> Outcome:
        _kill(self.pid)
        status = self._server.reap(self.pid)
        self.pid = -1
        if os.WIFSIGNALED(status):
            cause = f"killed by {_signal_name(os.WTERMSIG(status))}"
        else:
            cause = f"it left the process with status {os.WEXITSTATUS(status)}"
        return Outcome(self.number, "died", detail=cause, output=self.output())

    def ask_for_stack(self) -> None:
        self._printed = os.fstat(self._output_fd).st_size
        os.kill(self.pid, STACK_SIGNAL)

    def hung(self, after: float, deadline: float) -> Outcome:
        """The outcome of a rank that did not answer in time, with the stack it was asked for."""
        size, unchanged = self._printed, 0
        while time.monotonic() < deadline and unchanged < 5:  # the stack is printed line by line
            time.sleep(0.05)
            before, size = size, os.fstat(self._output_fd).st_size
            unchanged = unchanged + 1 if size == before > self._printed else 0
        stack = os.pread(self._output_fd, _OUTPUT_SHOWN, self._printed).decode(errors="replace").rstrip()
        os.ftruncate(self._output_fd, self._printed)
        detail = f"no answer within {after:.1f} s; its stack:\n{stack or 'it did not react to a signal'}"
        return Outcome(self.number, "hung", detail=detail, output=self.output())

    def end(self) -> None:
        if self.pid > 0:
            _kill(self.pid)
            with suppress(RuntimeError, OSError):  # if the fork server is gone, so are its ranks
                self._server.reap(self.pid)
        self.control.close()
        os.close(self.pidfd)
        os.close(self._output_fd)


def _collect(ranks: Sequence[_Process], timeout: float, grace: float | None) -> list[Outcome]:
    """Wait until each rank answers, dies, or runs out of time."""
    started = time.monotonic()
    deadline = started + timeout
    outcomes: dict[int, Outcome] = {}
    waiting = {rank.control.fileno(): rank for rank in ranks}
    by_pidfd = {rank.pidfd: rank for rank in ranks}
    while waiting and (left := deadline - time.monotonic()) > 0:
        watched = [*waiting, *(fd for fd, rank in by_pidfd.items() if rank in waiting.values())]
        for rank in dict.fromkeys(waiting.get(fd) or by_pidfd[fd] for fd in _ready(watched, left)):
            del waiting[rank.control.fileno()]
            outcome = outcomes[rank.number] = rank.answered()
            if grace is not None and not outcome.ok:
                deadline = min(deadline, time.monotonic() + grace)
    given_up = time.monotonic()
    for rank in waiting.values():
        rank.ask_for_stack()
    for rank in waiting.values():
        outcomes[rank.number] = rank.hung(given_up - started, given_up + _STACK_SECONDS)
    return [outcomes[rank.number] for rank in ranks]


def _ready(fds: Sequence[int], seconds: float) -> list[int]:
    """Those of the descriptors that can be read, or whose process has ended."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def _signal_name(number: int) -> str:
    with suppress(ValueError):  # only the first and the last real-time signals have names
        return signal.Signals(number).name
    return f"signal {number}"


def _kill(pid: int) -> None:
    """Kill a rank and all processes it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


__all__ = ["Outcome", "RankContext", "RankPool", "RanksFailed"]
