"""`ringway run`: several ranks of one program on this host.

torch's elastic multiprocessing handles the processes, their output and their signals. This module adds the store, which
lives in the launcher so that any rank may die, and the handling of a rank's death.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ringway.errors import UsageError
from ringway.launch import ports
from ringway.launch.rendezvous import host_store, identity
from ringway.launch.sources import LOOPBACK

ON_DEATH = ("stop", "keep")
_POLL = 0.05
_STORE_TIMEOUT = 1800.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_PREFIX = "[rank "
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code, and one line that says what happened."""

    code: int
    summary: str


def run(command: Sequence[str], ranks: int, *, on_death: str = "stop", grace: int = 30) -> Outcome:
    """Start `ranks` copies of a command and wait for them to end.

    With `on_death="stop"`, the first rank that fails ends the others, which get `grace` seconds to exit; with "keep",
    they continue without it.
    """
    # torch's loggers report each signal sent; the last line of the run says the same once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    run_id = secrets.token_hex(16)
    listener = ports.listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    job = identity(run_id, os.environ.get("RINGWAY_JOB_TOKEN", ""))
    store = host_store(listener, LOOPBACK, job, ranks, _STORE_TIMEOUT)
    logs = tempfile.mkdtemp(prefix="ringway-run-")
    handlers = {number: signal.getsignal(number) for number in (*_ENDING, *_PASSED_ON)}
    started = time.monotonic()
    context: PContext | None = None
    forwarder = _SignalForwarder()
    shown = _WholeLines(sys.stdout), _WholeLines(sys.stderr)
    try:
        with redirect_stdout(shown[0]), redirect_stderr(shown[1]):  # torch takes both streams from sys
            context = start_processes(
                name="rank",
                entrypoint=command[0],
                args={rank: tuple(command[1:]) for rank in range(ranks)},
                envs={rank: _environment(rank, ranks, port, run_id) for rank in range(ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ALL),
                log_line_prefixes={rank: f"{_PREFIX}{rank}] " for rank in range(ranks)},
            )
        assert isinstance(context, SubprocessContext)
        forwarder.to(context)
        return _supervise(context, on_death, grace, started)
    except SignalException as caught:  # start_processes ends its ranks itself if the signal came during it
        if context is not None:
            _close(context, caught.sigval, grace)
        name = _signal_name(caught.sigval)
        return Outcome(128 + caught.sigval, f"ended by {name} after {_seconds(started)}")
    except OSError as error:
        if context is not None:
            raise
        raise UsageError(f"cannot start '{command[0]}': {error.strerror or error}") from error
    finally:
        del store
        for output in shown:
            output.end()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(logs, ignore_errors=True)


def _environment(rank: int, ranks: int, port: int, run_id: str) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "RINGWAY_RUN_ID": run_id,
        # A plain torch.distributed program uses the launcher's store too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return environment


def _supervise(context: SubprocessContext, on_death: str, grace: int, started: float) -> Outcome:
    """Wait for the ranks, and end those that are left."""
    failed: list[int] = []
    running = set(context.subprocess_handlers)
    while running and not (failed and on_death == "stop"):
        time.sleep(_POLL)
        ended = [rank for rank in sorted(running) if _code(context, rank) is not None]
        running.difference_update(ended)
        failed += [rank for rank in ended if _code(context, rank) != 0]
    _close(context, signal.SIGTERM, grace)
    return _outcome(context, failed, sorted(running), started)


def _close(context: PContext, number: signal.Signals, grace: int) -> None:
    """End the remaining ranks with this signal, then with SIGKILL after `grace` seconds or a second Ctrl-C."""
    try:
        context.close(number, timeout=grace)
    except SignalException:  # a second Ctrl-C; more may follow while the killed ranks are reaped
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_IGN)
        context.close(signal.SIGKILL, timeout=grace)


class _WholeLines(io.TextIOBase):
    """Joins pieces of lines. torch's tail passes on whatever it finds, even half a line, and prefixes each piece. Here
    a line waits for its end, so that no prefix and no other rank's output appears in the middle of it."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            # A rank may print characters that the terminal's encoding lacks: escape them instead of failing.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        self._stream = stream
        self._begun: dict[str, str] = {}
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        prefix, _, piece = text.partition("] ")
        with self._lock:
            if not prefix.startswith(_PREFIX):  # output of the launcher itself, such as a warning
                return self._stream.write(text)
            line = self._begun.pop(prefix, "") + piece
            if not line.endswith("\n") and len(line) < _LONGEST_LINE:
                self._begun[prefix] = line
            else:
                self._show(prefix, line)
        return len(text)

    def end(self) -> None:
        """No more output will come: end the unfinished lines."""
        for prefix, line in self._begun.items():
            self._show(prefix, line)

    def _show(self, prefix: str, line: str) -> None:
        self._stream.write(f"{prefix}] {line}" + ("" if line.endswith("\n") else "\n"))


class _SignalForwarder:
    """Forwards signals that programs define for themselves, such as one that saves a checkpoint, to every rank. Signals
    that arrive while the ranks are starting are forwarded once they have started."""

    def __init__(self) -> None:
        self._context: SubprocessContext | None = None
        self._early: list[int] = []
        for number in _PASSED_ON:
            signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._context is None:
            self._early.append(number)
            return
        for handler in self._context.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.send_signal(number)

    def to(self, context: SubprocessContext) -> None:
        self._context = context
        for number in self._early:
            self._caught(number, None)


def _code(context: SubprocessContext, rank: int) -> int | None:
    code: int | None = context.subprocess_handlers[rank].proc.poll()
    return code


def _outcome(context: SubprocessContext, failed: list[int], stopped: list[int], started: float) -> Outcome:
    ranks = len(context.subprocess_handlers)
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if not failed:
        return Outcome(0, f"{many} finished in {_seconds(started)}")
    first = failed[0]
    code = _code(context, first) or 0
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    pid = context.pids()[first]
    line = f"rank {first} (pid {pid}) {how} after {_seconds(started)}"
    if failed[1:]:
        line += f"; then failed: {', '.join(map(str, failed[1:]))}"
    if stopped:
        line += f"; stopped: {', '.join(map(str, stopped))}"
    finished = [rank for rank in range(ranks) if rank not in failed and rank not in stopped]
    if finished:
        line += f"; finished: {', '.join(map(str, finished))}"
    return Outcome(128 - code if code < 0 else code, line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {number}"


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
