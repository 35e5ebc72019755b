"""The listeners of `observe`: installed before the first group is made, and configured when a job starts."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Sequence

import ringway._core as _core
from ringway.config import Config
from ringway.errors import ConfigError
from ringway.groups.listener import Listener
from ringway.groups.world import world
from ringway.observe import flight
from ringway.observe.files import filled
from ringway.observe.stall.explain import FailureExplainer
from ringway.observe.stall.watch import StallWatch

_DUMP_FILE = "ringway-rank{rank}.json"
_NOT_FOR_DUMPS = {
    signal.SIGKILL,
    signal.SIGSTOP,  # no process can handle these two; after the others the program cannot continue
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
}


def listeners() -> Sequence[Listener]:
    """The stall watch, the explaining of failures and the dumps on errors. The order matters: other ranks wait for the
    explanation, so it comes before the dump."""
    watch = StallWatch()
    return watch, FailureExplainer(watch), flight.ErrorDumps()


def forked() -> None:
    """In a forked child: the parent's job is not this process's."""
    world.listener(StallWatch).forked()


def leave() -> None:
    """At interpreter exit: the other ranks are told why this one leaves."""
    world.listener(StallWatch).leave()


def prepare(settings: Config, rank: int) -> None:
    """Before the first group is made: sets up its recorder, and when a call counts as stalled."""
    if settings.dump_signal is not None:
        _require_signal(settings)
    watch = world.listener(StallWatch)
    watch.seconds = settings.stall_after
    watch.configured = True
    if settings.recorder_file is not None:
        path = filled(settings.recorder_file, rank)
        try:
            world.recorder = _core.Recorder(settings.recorder_size, path)
            return
        except RuntimeError as error:  # a full disk must not prevent a job from starting
            warnings.warn(f"ringway: {error}; the recorder stays in memory", stacklevel=3)
    if settings.recorder_size != world.recorder.capacity:
        try:
            world.recorder = _core.Recorder(settings.recorder_size)
        except RuntimeError as error:
            source = settings.source("recorder_size")
            raise ConfigError(
                f"recorder_size is {settings.recorder_size} in {source}: {error}", key="recorder_size", source=source
            ) from None


def _require_signal(settings: Config) -> None:
    name = settings.dump_signal or ""
    if name in signal.Signals.__members__ and signal.Signals[name] not in _NOT_FOR_DUMPS:
        return
    source = settings.source("dump_signal")
    raise ConfigError(
        f"dump_signal is {name!r} in {source}; expected the name of a signal that a process can handle and "
        f"survive, such as SIGUSR2",
        key="dump_signal",
        source=source,
    )


def begin(settings: Config) -> None:
    """After the first group was made: sets up dumps."""
    world.listener(flight.ErrorDumps).path = settings.dump_file
    if settings.dump_signal is not None:
        flight.dump_on_signal(settings.dump_signal, settings.dump_file or _DUMP_FILE)
