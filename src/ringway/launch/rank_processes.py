"""The processes that a launcher starts, and the signals that it gets while they run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ringway.descriptors import is_shortage
from ringway.errors import UsageError
from ringway.launch.binding import Binding, bound
from ringway.launch.guard import Guard
from ringway.launch.output import Output

_POLL = 0.05
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class RankProcesses:
    """The processes of the ranks of one launcher, each in a session of its own. Methods count them from 0; `first` is
    the first one's rank in the job."""

    def __init__(self, mark: str, output: Output, first: int, bindings: Sequence[Binding] | None = None) -> None:
        """`bindings` say on which CPUs each of them runs."""
        self._output = output
        self._first = first
        self._bindings = bindings
        self._guard = Guard(mark)
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
        made = self._started(rank, command, environment)
        self._before.append(self._all[rank])
        self._all[rank] = made

    def _started(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            with bound(None if self._bindings is None else self._bindings[rank]):
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
        self._output.show(self._first + rank, process.stdout, process.stderr)
        return process

    def name(self, rank: int) -> str:
        return f"rank {self._first + rank} (pid {self.pid(rank)})"

    def names(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self._first + rank) for rank in ranks)

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

    def end(self, number: int, grace: float, signals: Signals) -> None:
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


class Signals:
    """The signals that this process gets during a run. They are noted, and handled between two looks at the ranks, so
    that none gets lost while ranks start."""

    def __init__(self) -> None:
        self.ending: int | None = None
        """The first signal that asks the launcher to end."""
        self.count = 0
        """The number of those."""
        self._others: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
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
