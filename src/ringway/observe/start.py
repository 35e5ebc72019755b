"""What the configuration says about watching, put into effect when a job starts."""

from __future__ import annotations

import signal
import warnings

from ringway import _core
from ringway.config import Config
from ringway.errors import ConfigError
from ringway.observe import flight
from ringway.observe.faults import dump_errors_to
from ringway.observe.files import filled
from ringway.observe.stall import watch
from ringway.world import world

_DUMP_FILE = "ringway-rank{rank}.json"


def prepare(settings: Config, rank: int) -> None:
    """Before the first group is made: the recorder it will write to, and when a call counts as stalled."""
    watch.seconds = settings.stall_after
    watch.configured = True
    if settings.dump_signal is not None and settings.dump_signal not in signal.Signals.__members__:
        raise ConfigError(
            f"dump_signal is {settings.dump_signal!r} in {settings.source('dump_signal')}; expected a name as SIGUSR2",
            key="dump_signal",
            source=settings.source("dump_signal"),
        )
    if settings.recorder_file is None:
        if settings.recorder_size != world.recorder.capacity:
            world.recorder = _core.Recorder(settings.recorder_size)
    else:
        path = filled(settings.recorder_file, rank)
        try:
            world.recorder = _core.Recorder(settings.recorder_size, path)
        except RuntimeError as error:  # a full disk must not keep a job from starting
            warnings.warn(f"ringway: {error}; the recorder stays in memory", stacklevel=3)
            world.recorder = _core.Recorder(settings.recorder_size)


def begin(settings: Config) -> None:
    """After the first group was made."""
    dump_errors_to(settings.dump_file)
    if settings.dump_signal is not None:
        flight.dump_on_signal(settings.dump_signal, settings.dump_file or _DUMP_FILE)
