"""The comms logger: DeepSpeed's configuration, table and dictionary.

Calls are counted natively when they end (`csrc/record/ledger.h`), so a logged call waits for nothing and costs some
tens of nanoseconds. Only `verbose`, which prints each call, runs Python for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch.distributed as c10d

import ringway._core as _core
from ringway.call import OP_BY_NAME, Call
from ringway.config import CommsLogger, Config, checked, resolve
from ringway.groups.listener import Listener
from ringway.groups.world import world
from ringway.observe.log import straggler
from ringway.observe.log.summary import CallTotals, bus_factor, printable, record_name, size_text, table_text, totals

# Names that users know for ops that are recorded under another name.
_ALIASES = {"isend": "send", "irecv": "recv", "inference_all_reduce": "all_reduce"}

_HOW_TO_TURN_ON = (
    "ringway: nothing was logged, because the comms logger is off. Turn it on with ringway.configure(enabled=True), "
    'with {"comms_logger": {"enabled": true}} in the configuration, or with RINGWAY_COMMS_LOGGER_ENABLED=1.'
)


class Logger:
    """The logger's settings and counts. There is one per process, like the recorder."""

    def __init__(self) -> None:
        self.settings = CommsLogger()
        self._printer: _Printer | None = None
        self._lock = threading.RLock()

    def choose(self, settings: CommsLogger) -> None:
        """Apply `settings` from now on. Existing counts stay."""
        with self._lock:
            self.settings = settings
            self._configure_recorder(settings)
        if self._printer is not None:
            world.unlisten(self._printer)
            self._printer = None
        if settings.enabled and settings.verbose:
            self._printer = _Printer(settings)
            world.listen(self._printer)

    def _configure_recorder(self, settings: CommsLogger) -> None:
        ops = {_ALIASES.get(name, name) for name in settings.prof_ops}
        codes = [OP_BY_NAME[name].code for name in ops if name in OP_BY_NAME]
        labels = [name for name in ops if name]
        world.recorder.choose(settings.enabled, settings.prof_all, settings.debug, codes, labels)

    def table(self) -> dict[str, dict[int, CallTotals]]:
        return totals(world.recorder.logged())


class _Printer(Listener):
    """`verbose`: prints a line for each call, on rank 0, in DeepSpeed's format."""

    sees_calls = True

    def __init__(self, settings: CommsLogger) -> None:
        self._all = settings.prof_all
        self._names = {_ALIASES.get(name, name) for name in settings.prof_ops}
        self._chosen: set[int] = set()
        self._lock = threading.Lock()

    def issued(self, call: Call) -> None:
        chosen = self._all or call.op.name in self._names or call.label in self._names or _core.is_profiled()
        if chosen and not _core.is_quiet():
            with self._lock:
                self._chosen.add(id(call))

    def completed(self, call: Call, error: BaseException | None) -> None:
        with self._lock:
            if id(call) not in self._chosen:
                return
            self._chosen.remove(id(call))
        if error is not None:
            return
        if c10d.is_initialized() and c10d.get_rank() != 0:
            return
        took, nbytes = max(call.completed - call.issued, 1), call.nbytes
        rate = nbytes * 8 / took
        print(
            f"comm op: {printable(record_name(call.op.code, call.label or '', None))} | time (ms): {took / 1e6:.2f} | "
            f"msg size: {size_text(nbytes)} | algbw (Gbps): {rate:.2f} | "
            f"busbw (Gbps): {rate * bus_factor(call.op.code, '', call.size):.2f}",
            flush=True,
        )


logger = Logger()


def configure(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the comms logger. `config` is a whole configuration, ringway's or DeepSpeed's, whose block
    `comms_logger` is used. The other arguments override it, and settings that nothing mentions stay unchanged."""
    settings = logger.settings
    if config is not None:
        settings = (config if isinstance(config, Config) else resolve(config)).comms_logger
    said = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    values = {
        name: checked(f"comms_logger.{name}", value, "configure()") for name, value in said.items() if value is not None
    }
    logger.choose(replace(settings, **values))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print what was logged, on rank 0, as DeepSpeed's table; with `return_dict`, return it, on every rank.

    With `show_straggler`, every rank must call this: the ranks compare when each arrived at each call, and the table is
    followed by a ranking of the ranks that others waited for.
    """
    report = summarize(show_straggler, prints=_rank() == 0)
    return report if return_dict else None


def _rank() -> int:
    return c10d.get_rank() if c10d.is_initialized() else 0


def summarize(show_straggler: bool, *, prints: bool) -> dict[str, Any]:
    """What was logged, as DeepSpeed's dictionary. `prints` prints it on this rank as a table too."""
    table = logger.table()
    analysis = straggler.analyse() if show_straggler else None
    if prints:
        text = table_text(table) if table or logger.settings.enabled else _HOW_TO_TURN_ON
        if analysis is not None:
            text += "\n" + straggler.text(analysis)
        print(text, flush=True)
    return {
        "summary": {name: {size: line.as_dict() for size, line in sizes.items()} for name, sizes in table.items()},
        "straggler_analysis": None if analysis is None else analysis.breakdown_dict(),
        "straggler_ranking": None if analysis is None else analysis.ranking_dict(),
        "metadata": {
            "world_size": c10d.get_world_size() if c10d.is_initialized() else 1,
            "rank": _rank(),
            "timestamp": datetime.now().isoformat(),
        },
    }


def reset_log() -> None:
    """Clear the log."""
    world.recorder.reset_log()


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return bool(world.recorder.logged())


def get_comm_operation_count() -> int:
    """The number of logged calls."""
    return sum(row[5] for row in world.recorder.logged())


def get_logged_comm_ops() -> list[str]:
    """The names (labels, or otherwise ops) under which calls were logged."""
    return list(logger.table())
