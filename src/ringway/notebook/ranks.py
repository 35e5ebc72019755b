"""The ranks of a notebook, as the notebook sees them."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from ringway import threads
from ringway.backends import registry, select
from ringway.errors import BackendUnavailable, RingwayError, UsageError
from ringway.notebook.channel import TOKEN, TOKEN_BYTES, Channel, Unreadable, accept

_START_SECONDS = 300.0
_OTHERS_SECONDS = 3.0
_STOP_SECONDS = 10.0
_INTERRUPT_SECONDS = 10.0


class CellFailed(RingwayError):
    """A cell raised on some ranks, or ranks ended in it. `errors` has each rank's traceback."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of the frames between the notebook and its ranks."""
        return [f"CellFailed: {self}"]


def check(number: int, backend: str | None) -> None:
    """Raises if ranks cannot be started with these arguments."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{number!r} is not a number of ranks: start at least one, as in start(2)")
    for name in () if backend is None else registry.parse(backend).values():
        obstacle = select.obstacle(name)
        if obstacle is not None:
            raise BackendUnavailable(name, obstacle.reason, remedy=obstacle.remedy)


class Ranks:
    """Ranks that run cells."""

    def __init__(self, number: int, backend: str | None = None) -> None:
        check(number, backend)
        self.number, self._backend, self._cells = number, backend, 0
        self._channels: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._in_order = True
        self._launcher: subprocess.Popen[bytes] | None = None
        self._start()

    def __repr__(self) -> str:
        return f"<{len(self._channels)} of {self.number} ranks>"

    def run(self, code: str, ranks: Collection[int] | None = None) -> None:
        """Run this code on all ranks, or on these. Shows what they print, and the value of a last expression."""
        self._cells += 1
        self._show(self._ask(ranks, "run", code, f"<cell {self._cells}>"))

    def pull(self, expression: str, ranks: Collection[int] | None = None) -> list[Any]:
        """The value of an expression on each rank."""
        return list(self._ask(ranks, "pull", expression).values())

    def push(self, ranks: Collection[int] | None = None, /, **values: Any) -> None:
        """Give variables to the ranks."""
        self._ask(ranks, "push", values)

    def restart(self) -> None:
        """End the ranks and start new ones, whose variables are gone."""
        self.stop()
        self._in_order = True
        self._start()

    def stop(self, *, at_once: bool = False) -> None:
        """End the ranks. A rank that waits for a cell ends by itself; `at_once` does not wait for that."""
        for channel in self._channels.values():
            channel.connection.close()
        self._channels.clear()
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        try:
            for end in (launcher.terminate, launcher.kill) if at_once else (None, launcher.terminate, launcher.kill):
                if end is not None:
                    end()
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(_STOP_SECONDS if end != launcher.terminate else 3 * _STOP_SECONDS)
                    return
        except KeyboardInterrupt:
            launcher.kill()  # its ranks end with it
            raise

    def _start(self) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        with tempfile.TemporaryDirectory(prefix="ringway-notebook-") as folder:  # only this user may enter it
            path = str(Path(folder, "socket"))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(path)
                listener.listen(self.number + 1)
                arguments = [path, str(self.number), *([] if self._backend is None else [self._backend])]
                # In a session of its own: a terminal's Ctrl-C is meant for the cell, not for the ranks.
                self._launcher = subprocess.Popen(
                    [sys.executable, "-m", "ringway.notebook.launcher", *arguments],
                    env={**os.environ, TOKEN: token.hex()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                assert self._launcher.stdout is not None
                output = _Output(self._launcher.stdout)
                try:
                    start = _Start(listener, token, self.number)
                    self._channels, self._pids, errors = start.channels, start.pids, start.wait(self._launcher)
                    if errors:
                        self.stop(at_once=True)
                        words = output.last_words(start.ended, self.number)
                        self._raise({rank: words.get(rank, "") + error for rank, error in errors.items()})
                except BaseException:
                    self.stop(at_once=True)
                    raise
                finally:
                    output.show()

    def _ask(self, ranks: Collection[int] | None, *question: Any) -> dict[int, Any]:
        """What the ranks answer, in their order."""
        if self._launcher is None:
            raise CellFailed("these ranks were stopped: restart() starts new ones", {})
        if not self._in_order and len(self._channels) == self.number:
            self._in_order = True
            print(
                "the ranks join a new group: a call that was interrupted or failed ended the last one", file=sys.stderr
            )
            failed = {rank: text for rank, text in self._ask(None, "join").items() if text is not None}
            if failed:
                self._in_order = False
                self._raise(failed)
        asked = sorted(range(self.number) if ranks is None else set(ranks))
        unknown = [rank for rank in asked if not 0 <= rank < self.number]
        if unknown:
            raise UsageError(f"there is no rank {unknown[0]}: they are 0 to {self.number - 1}")
        ended = [rank for rank in asked if rank not in self._channels]
        if ended:
            raise CellFailed(f"rank {ended[0]} has ended: restart() starts new ranks", {})
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending: set[int] = set()
        try:
            with _CtrlC() as ctrl_c:
                for rank in asked:
                    if ctrl_c.came:
                        break
                    pending.add(rank)
                    with suppress(OSError):  # it has ended, which _collect finds
                        self._channels[rank].send(*question, given_up=lambda: ctrl_c.came)
                        self._channels[rank].owed += 1
                self._collect(pending, answers, errors, lambda: ctrl_c.came)
            interrupted = ctrl_c.came
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            self._interrupt(pending, answers, errors)
        if errors:
            self._raise(errors)
        return {rank: answers[rank] for rank in asked}

    def _interrupt(self, pending: set[int], answers: dict[int, Any], errors: dict[int, str]) -> NoReturn:
        self._in_order = False
        for rank in pending:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGINT)
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        with _CtrlC() as again:
            self._collect(pending, answers, errors, lambda: again.came or time.monotonic() > deadline)
        if pending:
            listed = ", ".join(map(str, sorted(pending)))
            raise CellFailed(f"interrupted, and rank {listed} goes on: restart() starts new ranks", errors)
        raise CellFailed("interrupted; the ranks are ready for another cell", errors)

    def _collect(
        self, pending: set[int], answers: dict[int, Any], errors: dict[int, str], given_up: Callable[[], bool]
    ) -> None:
        """Reads what the ranks print and answer, until all have answered or ended."""
        with selectors.DefaultSelector() as selector:
            for rank in pending:
                selector.register(self._channels[rank].connection, selectors.EVENT_READ, rank)
            while pending and not given_up():
                for key, _ in selector.select(0.2):
                    rank = int(key.data)
                    try:
                        what, *rest = self._channels[rank].receive()
                    except Unreadable as error:
                        what, rest = "done", [f"its answer cannot be read here: {error}\n", None, True]
                    except OSError:
                        what, rest = "done", ["it has ended: restart() starts new ranks\n", None, False]
                        self._channels.pop(rank).connection.close()
                    if what == "text":
                        _print(rank, rest[0], rest[1])
                        continue
                    failed, answer, in_order = rest
                    self._in_order = self._in_order and in_order
                    channel = self._channels.get(rank)
                    if channel is not None:
                        channel.owed -= 1
                        if channel.owed > 0:
                            continue  # the answer to an earlier question, for which nobody waits any more
                    selector.unregister(key.fileobj)
                    pending.discard(rank)
                    answers[rank] = answer
                    if failed is not None:
                        errors[rank] = failed

    def _show(self, answers: dict[int, Any]) -> None:
        for rank, text in answers.items():
            if text is not None:
                _print(rank, "stdout", f"{text}\n")

    def _raise(self, errors: dict[int, str]) -> None:
        """Shows equal tracebacks once."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(errors.items()):
            by_text.setdefault(text, []).append(rank)
        for text, ranks in by_text.items():
            named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            print(f"[{named}] {text}", end="", file=sys.stderr)
        raise CellFailed(f"{len(errors)} of {self.number} ranks failed: {_reason(next(iter(errors.values())))}", errors)


class _Start:
    """Waits until all ranks have joined a group, or one of them cannot."""

    def __init__(self, listener: socket.socket, token: bytes, number: int) -> None:
        self.channels: dict[int, Channel] = {}
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        """The ranks whose process has ended."""
        self._listener, self._token, self._number = listener, token, number
        self._errors: dict[int, str] = {}

    def wait(self, launcher: subprocess.Popen[bytes]) -> dict[int, str]:
        """What went wrong on which rank."""
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self.pids) + len(self._errors) < self._number and not self.ended:
                if launcher.poll() is not None:
                    raise CellFailed("the ranks did not start; what they said is above", {})
                if time.monotonic() > deadline:
                    break
                for key, _ in selector.select(0.2):
                    if key.data is None:
                        self._accept(selector)
                    elif not self._receive(*key.data):
                        selector.unregister(key.fileobj)  # how a rank ended is for the launcher to say
                if self._errors:  # the others may fail likewise, or wait for this rank
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        if len(self.pids) < self._number and not self._errors:
            missing = sorted(set(range(self._number)) - set(self.pids))
            self._errors = dict.fromkeys(missing, f"it did not start within {_START_SECONDS:.0f} s\n")
        return self._errors

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        came = accept(connection, self._token)
        if came is None:
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ, came)
        if came[0] < self._number:
            self.channels[came[0]] = came[1]

    def _receive(self, rank: int, channel: Channel) -> bool:
        """Takes a message of a rank, or of the launcher, whose number is the one after theirs."""
        try:
            what, *rest = channel.receive()
        except OSError:
            return False
        if what == "ended":
            rank, how = rest
            self.ended.add(rank)
            self._errors[rank] = f"it {how} while it started\n"
        elif what == "text":
            _print(rank, rest[0], rest[1])
        else:
            pid, failed = rest
            if failed is None:
                self.pids[rank] = pid
            else:
                self._errors[rank] = failed
        return True


class _Output:
    """What the launcher writes: what ranks write past Python's streams, or before the notebook hears of them. It is
    shown once they have started."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._held_back: list[str] | None = []
        self._thread = threads.start("ringway-notebook-output", self._read, pipe)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                with self._lock:
                    if self._held_back is None:
                        print(text, end="", file=sys.stderr, flush=True)
                    else:
                        self._held_back.append(text)

    def show(self) -> None:
        with self._lock:
            print("".join(self._held_back or ()), end="", file=sys.stderr, flush=True)
            self._held_back = None

    def last_words(self, ranks: Collection[int], number: int) -> dict[int, str]:
        """What these ranks wrote, once the launcher has ended. The other lines are shown."""
        self._thread.join()
        names = {rank: f"[rank {rank}] " if number > 1 else "" for rank in ranks}
        words = dict.fromkeys(ranks, "")
        for line in self._held_back or ():
            rank = next((rank for rank, name in names.items() if line.startswith(name)), None)
            if rank is None:
                print(line, end="", file=sys.stderr, flush=True)
            else:
                words[rank] += line.removeprefix(names[rank])
        return words


class _CtrlC:
    """Notes Ctrl-C instead of raising it. Raised while a message is sent or received, it would lose how much of it has
    gone or come."""

    def __init__(self) -> None:
        self.came = False
        self._replaced = False

    def __enter__(self) -> _CtrlC:
        # Only the main thread is interrupted. A program's own handler stays.
        if threading.current_thread() is threading.main_thread():
            self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if self._replaced:
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def _reason(text: str) -> str:
    """The line of a traceback that names the error. Its notes follow it."""
    lines = text.strip().splitlines() or [""]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    behind = (line for line in lines[frames[-1] :] if not line.startswith(" ")) if frames else iter(())
    return next(behind, lines[-1])


def _print(rank: int, stream: str, text: str) -> None:
    file = sys.stderr if stream == "stderr" else sys.stdout
    for line in text.splitlines():
        print(f"[rank {rank}] {line}", file=file)
