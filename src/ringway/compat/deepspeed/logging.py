"""deepspeed's CommsLogger and its functions, over ringway's logger."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import wraps
from typing import Any, TypeVar

import ringway._core as _core
from ringway.api.groups import get_world_size, is_initialized
from ringway.call import OP_BY_NAME
from ringway.compat.deepspeed.timers import OneTimer, SynchronizedWallClockTimer, timers, trim_mean
from ringway.compat.deepspeed.utils import get_debug_log_name
from ringway.errors import UsageError, nearest
from ringway.groups.world import world
from ringway.observe.log import logger as log
from ringway.observe.log.summary import USER_OP, CallTotals, record_name, size_text
from ringway.observe.log.timed import timed_op as _timed_op
from ringway.observe.recorder import profiled as profiled_calls
from ringway.work import Work

# Their names before they had deepspeed's.
Timer, Timers = OneTimer, SynchronizedWallClockTimer

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

# deepspeed multiplies the size of these ops by the number of ranks.
_WHOLE_IS_COUNTED = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_ALIASES = {"isend": "send", "irecv": "recv", "inference_all_reduce": "all_reduce"}

# deepspeed logs these ops under another op's name.
_LOGGED_AS = {"inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce"}


Raw = dict[str, dict[int, list[Any]]]
"""{name: {message size: [count, latencies in ms, algorithm bandwidths, bus bandwidths in Gbps]}}"""

_assigned: Raw = {}
"""What a program assigned to `comms_dict`. Calls that were logged since are added to it."""


class CommsDict(dict[str, dict[int, list[Any]]]):
    """The log as deepspeed's dictionary: a copy, but `clear()` clears the log. To change the log, assign
    `comms_dict`."""

    def clear(self) -> None:
        super().clear()
        comms_logger.reset_data()


class CommsLogger:
    """deepspeed's logger object. A process has one logger, which all objects of this class show.

    The lists of `comms_dict` have the latest calls' own latencies, as far as the recorder still has them, and the mean
    of the others for each earlier call. So count, sum and average are right.
    """

    enabled: bool
    verbose: bool
    debug: bool
    prof_all: bool
    prof_ops: list[str]

    def __init__(self) -> None:
        """There is no state of its own."""

    def __getattr__(self, name: str) -> Any:
        if name == "comms_dict":
            return CommsDict(self.get_raw_data())
        value = getattr(log.logger.settings, name)
        return list(value) if name == "prof_ops" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "comms_dict":
            given = deepcopy(dict(value))
            self.reset_data()
            _assigned.update(given)
        elif name not in CommsLogger.__annotations__:
            raise AttributeError(f"the comms logger has no attribute '{name}' that can be set")
        else:
            log.configure(**{name: value})

    def configure(self, comms_config: Any) -> None:
        """Accepts a DeepSpeedCommsConfig, or anything that `ringway.configure` accepts."""
        log.configure(as_config(comms_config))

    def start_profiling_comms(self) -> None:
        log.configure(prof_all=True)

    def stop_profiling_comms(self) -> None:
        log.configure(prof_all=False)

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        log.configure(prof_ops=sorted({*self.prof_ops, *op_name_list}))

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        stopped = set(op_name_list)
        log.configure(prof_ops=[name for name in self.prof_ops if name not in stopped])

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Log a call that was timed elsewhere, with `latency` in milliseconds."""
        op = OP_BY_NAME.get(raw_name)
        code = USER_OP if op is None else op.code
        size = get_world_size() if is_initialized() else 1
        world.recorder.log(code, record_name, size, msg_size, int(latency * 1e6), always=True)

    def get_raw_data(self) -> Raw:
        raw = deepcopy(_assigned)
        latencies = _recorded_latencies()
        for name, sizes in log.logger.table().items():
            for size, line in sizes.items():
                entry = raw.setdefault(name, {}).setdefault(size, [0, [], [], []])
                for values, added in zip(entry[1:], _lists(line, latencies[name, size]), strict=True):
                    values.extend(added)
                entry[0] += line.count
        return raw

    def has_data(self) -> bool:
        return bool(_assigned) or log.has_comm_data()

    def reset_data(self) -> None:
        _assigned.clear()
        log.reset_log()

    def get_operation_names(self) -> list[str]:
        return list({**_assigned, **log.logger.table()})

    def get_total_operations(self) -> int:
        assigned = sum(entry[0] for sizes in _assigned.values() for entry in sizes.values())
        return int(assigned) + log.get_comm_operation_count()

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        if operation_name in _assigned:
            return {size: _summary(size, *entry) for size, entry in self.get_raw_data()[operation_name].items()}
        found = log.logger.table().get(operation_name)
        return None if found is None else {size: line.as_dict() for size, line in found.items()}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Like `log_summary`, but prints on every rank that calls it."""
        report = log.summarize(show_straggler, prints=print_log)
        report["summary"].update({name: self.get_operation_summary(name) for name in _assigned})
        return report if return_dict else None


def _recorded_latencies() -> dict[tuple[str, int], list[float]]:
    """The latencies, in ms, of the logged calls that the recorder still has, by name and message size."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _, _, op, nbytes, issued, completed, site, label, _ in world.recorder.arrivals():
        name = record_name(op, label, site if log.logger.settings.debug else None)
        found[name, nbytes].append((completed - issued) / 1e6)
    return found


def _lists(line: CallTotals, latest: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Latencies, algorithm and bus bandwidths of every call of one name and size."""
    latest = latest[-line.count :]
    earlier = line.count - len(latest)
    mean = max(line.total_ns / 1e6 - sum(latest), 0.0) / earlier if earlier else 0.0
    latencies = [mean] * earlier + latest
    rates = [line.nbytes * 8 / (latency * 1e6) if latency else 0.0 for latency in latencies]
    factor = line.moved_on_bus / line.moved if line.moved else 0.0
    return latencies, rates, [rate * factor for rate in rates]


def _summary(size: int, count: int, latencies: list[float], algorithm: list[float], bus: list[float]) -> dict[str, Any]:
    """deepspeed's summary of an entry that a program assigned."""
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": trim_mean(latencies, 0.1),
        "tput_avg_gbps": trim_mean(algorithm, 0.1),
        "busbw_avg_gbps": trim_mean(bus, 0.1),
        "msg_size_bytes": size,
        "msg_size_str": size_text(size),
    }


comms_logger = CommsLogger()


def reset_log() -> None:
    comms_logger.reset_data()


def has_comm_data() -> bool:
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    return comms_logger.get_operation_names()


def print_rank_0(message: Any) -> None:
    """Print on rank 0, or if there is no job yet."""
    if not is_initialized() or world.communicator(None).rank == 0:
        print(message, flush=True)


def convert_size(size_bytes: float) -> str:
    """1048576 -> '1.0 MB'."""
    return size_text(size_bytes)


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in Gbps of an op that took `duration` ms, over the world.

    As in deepspeed, `size` is one rank's part for all_gather and reduce_scatter. The formulas are those of nccl-tests:
    deepspeed counts the algorithm bandwidth of all_reduce twice.
    """
    op = OP_BY_NAME.get(_ALIASES.get(comm_op, comm_op))
    if op is None:
        raise UsageError(f"there is no op '{comm_op}'{nearest(comm_op, OP_BY_NAME)}")
    if duration <= 0:
        raise UsageError(f"duration={duration} is not above 0")
    ranks = get_world_size() if is_initialized() else 1
    rate = size * (ranks if comm_op in _WHOLE_IS_COUNTED else 1) * 8 / (duration * 1e6)
    return rate, rate * op.bus_factor(ranks)


def as_config(config: Any) -> Any:
    """Convert deepspeed's configuration objects to what `ringway.config.resolve` accepts."""
    whole = getattr(config, "_param_dict", None)  # DeepSpeedConfig
    if isinstance(whole, Mapping):
        return whole
    config = getattr(config, "comms_config", config)
    block = getattr(config, "comms_logger", None)  # DeepSpeedCommsConfig, of deepspeed's configuration object
    if block is None:
        return {} if hasattr(config, "comms_logger_enabled") else config
    keys: Iterable[str] = ("enabled", "verbose", "prof_all", "debug", "prof_ops")
    said = getattr(block, "model_fields_set", keys)  # deepspeed's own is a pydantic model
    return {"comms_logger": {key: getattr(block, key) for key in keys if key in said}}


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the logger. `deepspeed_config` may be deepspeed's object, a dictionary or a file."""
    config = None if deepspeed_config is None else as_config(deepspeed_config)
    log.configure(config, enabled, prof_all, prof_ops, verbose, debug)


def timed_op(func: F) -> F:
    """Log a function that communicates; see `ringway.timed_op`."""
    return _timed_op(func)


def profiled(function: Callable[..., R]) -> Callable[..., R]:
    """Add deepspeed's last three parameters. `prof=True` logs this one call even if its op is not selected, and
    `log_name` is its label, which `function` receives as `label` (None if it only repeats the default)."""
    own = inspect.signature(function)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "label"]
    count, takes_label = len(parameters), "label" in own.parameters
    default = _LOGGED_AS.get(function.__name__, function.__name__)
    for name, value, kind in (("prof", False, "bool"), ("log_name", default, "str"), ("debug", None, "Any")):
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value, annotation=kind)
        )
    signature = own.replace(parameters=parameters)

    @wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = default, debug: Any = None, **kwargs: Any) -> R:
        if len(args) > count:  # some of the three are given by position
            given = signature.bind(*args, **kwargs).arguments
            prof, log_name = given.pop("prof", False), given.pop("log_name", default)
            given.pop("debug", None)
            args, kwargs = (), given
        label = {"label": None if log_name == default else log_name} if takes_label else {}
        settings = log.logger.settings
        selected = settings.prof_all or log_name in settings.prof_ops or function.__name__ in settings.prof_ops
        with profiled_calls() if prof else nullcontext():
            if not settings.enabled or not (prof or selected) or _core.is_quiet():
                return function(*args, **label, **kwargs)
            timer = timers(get_debug_log_name({"log_name": log_name}, settings.debug))
            began = _core.monotonic_ns()
            result = function(*args, **label, **kwargs)

        def ended(error: BaseException | None = None) -> None:
            if error is None:
                timer.add((_core.monotonic_ns() - began) / 1e6)

        if isinstance(result, Work):
            result.on_complete(ended)
        else:
            ended()
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


timer_summary: dict[str, Any] = {}
