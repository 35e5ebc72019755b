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

    def add(self, op_code: int, name: str, size: int, nbytes: int, nanoseconds: int) -> None:
        """Log one call under any name: the recorder accepts the name while this call is written."""
        with self._lock:
            settings = self.settings
            if not (settings.enabled and settings.prof_all):
                chosen = settings.prof_ops if settings.enabled else ()
                self._configure_recorder(replace(settings, enabled=True, prof_all=False, prof_ops=chosen), name)
            try:
                world.recorder.log(op_code, name, size, nbytes, nanoseconds)
            finally:
                self._configure_recorder(settings)

    def _configure_recorder(self, settings: CommsLogger, *labels: str) -> None:
        ops = {_ALIASES.get(name, name) for name in settings.prof_ops}
        codes = [OP_BY_NAME[name].code for name in ops if name in OP_BY_NAME]
        names = [name for name in (*ops, *labels) if name]
        world.recorder.choose(settings.enabled, settings.prof_all, settings.debug, codes, names)

    def table(self) -> dict[str, dict[int, CallTotals]]:
        return totals(world.recorder.logged())


class _Printer(Listener):
    """`verbose`: prints a line for each call, on rank 0, in DeepSpeed's format."""

    sees_calls = True

    def __init__(self, settings: CommsLogger) -> None:
        self._all = settings.prof_all
        self._names = {_ALIASES.get(name, name) for name in settings.prof_ops}
        self._quiet: set[int] = set()
        self._lock = threading.Lock()

    def issued(self, call: Call) -> None:
        if _core.is_quiet():
            with self._lock:
                self._quiet.add(id(call))

    def completed(self, call: Call, error: BaseException | None) -> None:
        with self._lock:
            if id(call) in self._quiet:
                self._quiet.remove(id(call))
                return
        if error is not None or not (self._all or call.op.name in self._names or call.label in self._names):
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
    initialized = c10d.is_initialized()
    rank = c10d.get_rank() if initialized else 0
    table = logger.table()
    analysis = straggler.analyse() if show_straggler else None
    if rank == 0:
        text = table_text(table)
        if analysis is not None:
            text += "\n" + straggler.text(analysis)
        print(text, flush=True)
    if not return_dict:
        return None
    return {
        "summary": {name: {size: line.as_dict() for size, line in sizes.items()} for name, sizes in table.items()},
        "straggler_analysis": None if analysis is None else analysis.breakdown_dict(),
        "straggler_ranking": None if analysis is None else analysis.ranking_dict(),
        "metadata": {
            "world_size": c10d.get_world_size() if initialized else 1,
            "rank": rank,
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
