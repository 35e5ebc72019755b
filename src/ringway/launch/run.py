"""`ringway run`: several ranks of one program on this host.

The store lives in the launcher, so any rank may die. Only the ranks can use it (`run_store.py`). They write to pipes
(`output.py`), and nothing of a run outlives it: neither files nor processes (`guard.py`).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ringway.descriptors import is_shortage, shortage_named
from ringway.errors import UsageError
from ringway.launch import ports
from ringway.launch.cpus import usable_cpus
from ringway.launch.guard import RUN_ID, Guard
from ringway.launch.identity import job_key
from ringway.launch.invitation import Invitation
from ringway.launch.output import Output
from ringway.launch.run_store import PrivateSocket, StoreServer
from ringway.launch.secret import SECRET, SECRET_FILE, PrivateSecret
from ringway.launch.sources import LOOPBACK

ON_DEATH = ("stop", "keep")
_POLL = 0.05
_LONGEST_PAUSE = 30.0  # before a rank is started again
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Elastic:
    """A run whose ranks are started again when they fail, each at most `restarts` times. It ends if fewer than `fewest`
    are left."""

    fewest: int = 1
    restarts: int = 3


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code, and one line that says what happened."""

    code: int
    summary: str


def run(
    command: Sequence[str], ranks: int, *, on_death: str = "stop", grace: int = 30, elastic: Elastic | None = None
) -> Outcome:
    """Start `ranks` copies of a command and wait for them to end.

    With `on_death="stop"`, the first rank that fails ends the others, which get `grace` seconds to exit; with "keep",
    they continue without it. With `elastic`, it is started again. Processes that ranks started and left behind end with
    the run, or with the launcher, even if that is killed.
    """
    with shortage_named(f"a run of {ranks} ranks"), store_of_a_run() as variables:
        if elastic is None:
            return _run(command, ranks, variables, on_death, grace)
        environment = {**variables, "RINGWAY_MIN_RANKS": str(elastic.fewest)}
        with Invitation(environment, ranks):
            _say(f"more ranks can join with: ringway run --join {os.getpid()} -n 1 ...")
            return _run(command, ranks, environment, on_death, grace, elastic)


def join(command: Sequence[str], ranks: int, launcher: int, *, grace: int = 30) -> Outcome:
    """Start `ranks` more copies of a command for the elastic run of another launcher of this user, by its pid."""
    variables, size = Invitation.of(launcher)
    return _run(command, ranks, variables, "keep", grace, joins=size)


@contextmanager
def store_of_a_run() -> Iterator[dict[str, str]]:
    """A store for the ranks of one run, and the environment variables with which they find it."""
    run_id = secrets.token_hex(16)
    with PrivateSecret() as secret, PrivateSocket() as socket, ports.reserve() as reserved:
        store = StoreServer(socket.listener, job_key(secret.key, run_id, os.environ.get("RINGWAY_JOB_TOKEN", "")))
        try:
            yield {
                RUN_ID: run_id,
                "RINGWAY_RUN_STORE": socket.path,
                SECRET_FILE: secret.path,
                SECRET: "",  # each run has a secret of its own
                # For programs of plain torch: their rank 0 opens a store of its own there.
                "MASTER_PORT": str(reserved.getsockname()[1]),
            }
        finally:
            store.close()


def _run(
    command: Sequence[str],
    ranks: int,
    variables: dict[str, str],
    on_death: str,
    grace: int,
    elastic: Elastic | None = None,
    joins: int = 0,
) -> Outcome:
    """`joins` is the size of the job that the ranks join, if they do."""
    started = time.monotonic()
    output = Output(labelled=ranks > 1 or bool(joins) or elastic is not None)
    with _Signals() as signals:
        processes = _Processes(variables[RUN_ID], output)
        size = joins or ranks
        environments = [variables | _environment(min(rank, size - 1), size) for rank in range(ranks)]
        try:
            for environment in environments:
                if signals.ending is not None:
                    break
                processes.start(command, environment)
            if elastic is None:
                failed, stopped = _supervise(processes, signals, on_death)
            else:
                failed, stopped = _supervise_elastic(processes, signals, elastic, command, environments)
            ended_by = signals.ending
            processes.end(ended_by or signal.SIGTERM, grace, signals)
        finally:
            processes.close()
            known = signals.count
            output.close(lambda: signals.count > known)
    if ended_by is not None:
        return Outcome(128 + ended_by, f"ended by {_signal_name(ended_by)} after {_seconds(started)}")
    return _outcome(processes, failed, stopped, started)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // ranks))
    return environment


def _supervise(processes: _Processes, signals: _Signals, on_death: str) -> tuple[list[int], list[int]]:
    """Wait until all ranks have ended, or until the others must end. Returns the ranks that failed, in their order,
    and those that still run."""
    failed: list[int] = []
    running = list(range(len(processes)))
    while running and signals.ending is None and not (failed and on_death == "stop"):
        time.sleep(_POLL)
        signals.pass_on(processes.send)
        codes = {rank: processes.code(rank) for rank in running}
        failed += [rank for rank, code in codes.items() if code]
        running = [rank for rank, code in codes.items() if code is None]
    return failed, running


def _supervise_elastic(
    processes: _Processes,
    signals: _Signals,
    elastic: Elastic,
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
) -> tuple[list[int], list[int]]:
    """Start ranks that fail again, until all have ended or too few are left. Once a rank has finished, the job is done,
    and no rank is started again. Returns the ranks that failed for good, and those that still run."""
    restarts = [0] * len(processes)
    due: dict[int, float] = {}
    failed: list[int] = []
    running = list(range(len(processes)))
    finished = False
    while (running or due) and signals.ending is None:
        time.sleep(_POLL)
        signals.pass_on(processes.send)
        for rank in [rank for rank in running if processes.code(rank) is not None]:
            running.remove(rank)
            code = processes.code(rank) or 0
            finished = finished or code == 0
            line = f"rank {rank} (pid {processes.pid(rank)}) {_how(code)}; {len(running)} of {len(processes)} run"
            if code and restarts[rank] < elastic.restarts:
                pause = min(2.0 ** restarts[rank], _LONGEST_PAUSE)
                due[rank] = time.monotonic() + pause
                restarts[rank] += 1
                _say(f"{line}; it starts again in {pause:g} s (restart {restarts[rank]} of {elastic.restarts})")
            elif code:
                failed.append(rank)
                _say(line)
        if finished:
            due.clear()
        elif len(running) + len(due) < elastic.fewest:
            _say(f"{len(running)} ranks are left, and the job needs {elastic.fewest}: it ends")
            return [*failed, *due], running
        for rank in [rank for rank, moment in due.items() if moment <= time.monotonic()]:
            del due[rank]
            processes.start_again(rank, command, environments[rank])
            running.append(rank)
    return [] if finished else [*failed, *due], running


class _Processes:
    """The processes of the ranks, each in a session of its own."""

    def __init__(self, run_id: str, output: Output) -> None:
        self._output = output
        self._guard = Guard(run_id)
        self._all: list[subprocess.Popen[bytes]] = []
        self._before: list[subprocess.Popen[bytes]] = []
        """Processes of ranks that were started again. They stay zombies too."""

    def __len__(self) -> int:
        return len(self._all)

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the next rank."""
        self._all.append(self._started(len(self._all), command, environment))

    def start_again(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start a rank that has ended once more."""
        self._before.append(self._all[rank])
        self._all[rank] = self._started(rank, command, environment)

    def _started(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            if is_shortage(error):
                raise
            raise UsageError(f"cannot start '{command[0]}': {error.strerror or error}") from error
        self._guard.add(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        self._output.show(rank, process.stdout, process.stderr)
        return process

    def pid(self, rank: int) -> int:
        return self._all[rank].pid

    def code(self, rank: int) -> int | None:
        """The exit code, or minus the signal that killed the rank; None while it runs. A rank that has ended stays a
        zombie until the run ends, so that its process id, which is also its session's, is not given to others."""
        ended = self._all[rank].returncode
        if ended is not None:
            return ended
        status = os.waitid(os.P_PID, self.pid(rank), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def send(self, number: int) -> None:
        """Send a signal to each rank that runs."""
        for rank in range(len(self)):
            if self.code(rank) is None:
                os.kill(self.pid(rank), number)

    def end(self, number: int, grace: float, signals: _Signals) -> None:
        """End the remaining ranks and what runs in the foreground of each with this signal, then with SIGKILL: after
        `grace` seconds, or if the launcher is told to end once more."""
        known = signals.count
        self._signal_groups(number)
        deadline = time.monotonic() + grace
        while self._runs() and time.monotonic() < deadline and signals.count == known:
            time.sleep(_POLL)
        self._signal_groups(signal.SIGKILL)
        while self._runs():
            time.sleep(_POLL)

    def _runs(self) -> bool:
        return any(self.code(rank) is None for rank in range(len(self)))

    def _signal_groups(self, number: int) -> None:
        for rank in range(len(self)):
            if self.code(rank) is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid(rank), number)

    def close(self) -> None:
        """End everything that is left of the run."""
        self._guard.close()
        for process in (*self._all, *self._before):
            process.wait()


class _Signals:
    """The signals that this process gets during a run. They are noted, and handled between two looks at the ranks, so
    that none gets lost while ranks start."""

    def __init__(self) -> None:
        self.ending: int | None = None
        """The first signal that asks the launcher to end."""
        self.count = 0
        """The number of those."""
        self._others: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._handlers = {number: signal.signal(number, self._caught) for number in (*_ENDING, *_PASSED_ON)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if number in _PASSED_ON:
            self._others.append(number)
        else:
            self.ending = self.ending or number
            self.count += 1

    def pass_on(self, send: Callable[[int], None]) -> None:
        """Forward the signals that programs define for themselves, such as one that saves a checkpoint."""
        while self._others:
            send(self._others.pop(0))


def _outcome(processes: _Processes, failed: list[int], stopped: list[int], started: float) -> Outcome:
    ranks = len(processes)
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if not failed:
        return Outcome(0, f"{many} finished in {_seconds(started)}")
    first = failed[0]
    code = processes.code(first) or 0
    line = f"rank {first} (pid {processes.pid(first)}) {_how(code)} after {_seconds(started)}"
    if failed[1:]:
        line += f"; then failed: {', '.join(map(str, failed[1:]))}"
    if stopped:
        line += f"; stopped: {', '.join(map(str, stopped))}"
    finished = [rank for rank in range(ranks) if rank not in failed and rank not in stopped]
    if finished:
        line += f"; finished: {', '.join(map(str, finished))}"
    return Outcome(128 - code if code < 0 else code, line)


def _how(code: int) -> str:
    if code == 0:
        return "finished"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {number}"


def _say(line: str) -> None:
    print(f"ringway run: {line}", file=sys.stderr, flush=True)


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
