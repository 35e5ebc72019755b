"""deepspeed's CommsLogger and its functions, over ringway's logger."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

from ringway.api.groups import get_world_size, is_initialized
from ringway.call import OP_BY_NAME
from ringway.groups.world import world
from ringway.observe.log import logger as log
from ringway.observe.log.summary import USER_OP
from ringway.observe.log.timed import timed_op as _timed_op
from ringway.observe.recorder import profiled as profiled_calls

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

# deepspeed logs these ops under another op's name.
_LOGGED_AS = {"inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce"}


class CommsLogger:
    """deepspeed's logger object. A process has one logger, which all objects of this class show.

    ringway keeps histograms, not every latency. Where deepspeed lists the latency of each call, the mean is repeated
    that many times, so that the count, sum and average are right.
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
            return self.get_raw_data()
        value = getattr(log.logger.settings, name)
        return list(value) if name == "prof_ops" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in CommsLogger.__annotations__:
            raise AttributeError(f"'{name}' of the comms logger cannot be set; reset_data() clears the log")
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

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return {
            name: {
                size: [
                    line.count,
                    *([mean] * line.count for mean in (line.mean_ms, line.algorithm_gbps, line.bus_gbps)),
                ]
                for size, line in sizes.items()
            }
            for name, sizes in log.logger.table().items()
        }

    def has_data(self) -> bool:
        return log.has_comm_data()

    def reset_data(self) -> None:
        log.reset_log()

    def get_operation_names(self) -> list[str]:
        return log.get_logged_comm_ops()

    def get_total_operations(self) -> int:
        return log.get_comm_operation_count()

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        found = log.logger.table().get(operation_name)
        return None if found is None else {size: line.as_dict() for size, line in found.items()}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Like `log_summary`, but prints on every rank that calls it."""
        report = log.summarize(show_straggler, prints=print_log)
        return report if return_dict else None


comms_logger = CommsLogger()


def as_config(config: Any) -> Any:
    """Convert deepspeed's configuration objects to what `ringway.config.resolve` accepts."""
    whole = getattr(config, "_param_dict", None)  # DeepSpeedConfig
    if isinstance(whole, Mapping):
        return whole
    config = getattr(config, "comms_config", config)
    block = getattr(config, "comms_logger", None)  # DeepSpeedCommsConfig, of deepspeed's configuration object
    if block is None:
        return {} if hasattr(config, "comms_logger_enabled") else config
    keys = ("enabled", "verbose", "prof_all", "debug", "prof_ops")
    return {"comms_logger": {key: getattr(block, key) for key in keys}}


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
            return call(**signature.bind(*args, **kwargs).arguments)
        label = {"label": None if log_name == default else log_name} if takes_label else {}
        with profiled_calls() if prof else nullcontext():
            return function(*args, **label, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class Timer:
    """One stopwatch, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self._began = 0.0
        self._spans: list[float] = []

    def start(self) -> None:
        self._began, self.started = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if reset:
            self._spans.clear()
        if self.started:
            self._spans.append((time.perf_counter() - self._began) * 1e3)
            self.started = False

    def reset(self) -> None:
        self.started = False
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        total = sum(self._spans)
        if reset:
            self.reset()
        return total

    def mean(self) -> float:
        return sum(self._spans) / len(self._spans) if self._spans else 0.0


class Timers:
    """Stopwatches by name. ringway's own timing is native; these are for programs that used deepspeed's."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers


timers = Timers()
timer_summary: dict[str, Any] = {}
