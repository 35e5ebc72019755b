"""The configuration, and where each value came from.

ringway's settings are in two blocks of a configuration: `ringway` and `comms_logger`. They can be in a dictionary, in a
JSON (also with comments) or TOML file, or in a whole DeepSpeed configuration. Other blocks are kept in `Config.others`,
for `ringway.initialize`. Later sources override earlier ones:

    default  <  RINGWAY_CONFIG (a file)  <  the `config` argument  <  RINGWAY_* variables

An unknown key in one of the two blocks is an error. `Config.source` says which source gave a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from ringway.config_file import from_base64, read_file
from ringway.errors import ConfigError, nearest
from ringway.forwarding import attributes_of

BLOCK = "ringway"
LOGGER_BLOCK = "comms_logger"
CHECKS = ("always", "sample", "stall")
MAX_SECONDS = 1e8
"""About three years: every wait has a deadline that fits in torch's millisecond counters."""

_PREFIX = "RINGWAY_"
_LOGGER_PREFIX = "RINGWAY_COMMS_LOGGER_"


@dataclass(frozen=True)
class Kind:
    """One type of setting: how a value is checked, how text is parsed, and its JSON schema.

    `check` returns the value to keep, or raises ValueError with what was expected.
    """

    check: Callable[[object], Any]
    parse: Callable[[str], object]
    schema: Mapping[str, Any]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a number of seconds")
    if not 0 < value <= MAX_SECONDS:  # false for NaN too
        raise ValueError(f"a number of seconds above 0 and at most {MAX_SECONDS:.0f}")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise ValueError("a whole number above 0")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


def lenient_flag(value: object) -> bool:
    """What DeepSpeed's configuration accepts as a flag: also 0 and 1, and these words."""
    word = str(value).lower()
    if isinstance(value, (bool, int, str)) and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    raise ValueError("true or false")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a name")
    return value.strip()


def _check_mode(value: object) -> str:
    if value not in CHECKS:
        raise ValueError("one of " + ", ".join(CHECKS))
    return str(value)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


def _policy(value: object) -> str | dict[str, Any]:
    if isinstance(value, (str, os.PathLike)) and str(value):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError("a path or a table")


def _parallel(value: object) -> dict[str, Any]:
    """The block `ringway.parallel`. What a codec or a plan means is checked where it is used."""
    if not isinstance(value, Mapping):
        raise ValueError("a table")
    unknown = [str(key) for key in value if key not in PARALLEL]
    if unknown:
        raise ValueError(f"a table of {', '.join(PARALLEL)}, not {unknown[0]!r}{nearest(unknown[0], PARALLEL)}")
    for key, check in PARALLEL.items():
        if value.get(key) is not None:
            try:
                check(value[key])
            except ValueError as error:
                raise ValueError(f"{key} to be {error}, not {value[key]!r}") from None
    return {key: content for key, content in value.items() if content is not None}


def _size(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError("a number above 0")


def _plan(value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ValueError("a table of layers and styles")


PARALLEL: Mapping[str, Callable[[object], object]] = {
    "bucket_mb": _size,
    "codec": _text,
    "plan": _plan,
    "model_parallel_size": _count,
}
"""The keys of `ringway.parallel`, which are arguments of `ringway.initialize`, and their checks."""


def _parse_flag(text: str) -> object:
    return {"1": True, "true": True, "yes": True, "on": True}.get(
        text.lower(), False if text.lower() in ("0", "false", "no", "off") else text
    )


def _parse_number(text: str) -> object:
    if not text.isascii() or "_" in text:  # Python also accepts digits of other scripts, and '1_0'
        return text
    try:
        return int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError:
        return text


def _parse_names(text: str) -> object:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_policy(text: str) -> object:
    return _parse_table(text) if text.lstrip().startswith("{") else text


def _parse_table(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a table as JSON") from None


_SECONDS = Kind(_number, _parse_number, {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS})
_COUNT = Kind(_count, _parse_number, {"type": "integer", "minimum": 1})
_FLAG = Kind(_flag, _parse_flag, {"type": "boolean"})
_LENIENT_FLAG = Kind(lenient_flag, str.strip, {"enum": [True, False, 1, 0, *_TRUE, *_FALSE]})
_NAME = Kind(_text, str, {"type": "string", "minLength": 1})
_CHECK = Kind(_check_mode, str.strip, {"enum": list(CHECKS)})
_NAMES = Kind(_names, _parse_names, {"type": "array", "items": {"type": "string"}})
_PARALLEL = Kind(_parallel, _parse_table, {"type": "object", "properties": {key: {} for key in PARALLEL}})
_POLICY = Kind(_policy, _parse_policy, {"type": ["string", "object"]})


def _about(kind: Kind, about: str) -> dict[str, Any]:
    return {"kind": kind, "about": about}


@dataclass(frozen=True, kw_only=True)
class CommsLogger:
    """The block `comms_logger`, with DeepSpeed's keys and defaults. As in DeepSpeed, a block that does not mention
    `enabled` turns the logger on."""

    enabled: bool = field(default=False, metadata=_about(_LENIENT_FLAG, "log collectives"))
    verbose: bool = field(default=False, metadata=_about(_LENIENT_FLAG, "print every logged call as it completes"))
    prof_all: bool = field(
        default=True,
        metadata=_about(_LENIENT_FLAG, "log every op; otherwise only those in prof_ops, or with prof=True"),
    )
    debug: bool = field(default=False, metadata=_about(_LENIENT_FLAG, "add the caller's name to the label"))
    prof_ops: tuple[str, ...] = field(
        default=(), metadata=_about(_NAMES, "ops or labels to log when prof_all is false")
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved configuration: the block `ringway`, and the logger's block as one attribute."""

    backend: str | None = field(
        default=None, metadata=_about(_NAME, "backend by name, or by device as in cpu:shm,cuda:nccl")
    )
    timeout: float = field(
        default=1800.0, metadata=_about(_SECONDS, "seconds until a rendezvous or a collective gives up")
    )
    stall_after: float = field(
        default=30.0, metadata=_about(_SECONDS, "seconds until a waiting call prints which ranks it waits for")
    )
    max_object_bytes: int = field(default=1 << 30, metadata=_about(_COUNT, "largest object message to accept"))
    recorder_size: int = field(default=4096, metadata=_about(_COUNT, "number of calls that the recorder keeps"))
    recorder_file: str | None = field(
        default=None, metadata=_about(_NAME, "file that keeps the recorder after the process is gone, {rank} filled in")
    )
    dump_file: str | None = field(
        default=None, metadata=_about(_NAME, "where the recorder is written on an error, {rank} and {pid} filled in")
    )
    dump_signal: str | None = field(
        default=None, metadata=_about(_NAME, "signal that writes the recorder, as in SIGUSR2")
    )
    check: str = field(
        default="sample", metadata=_about(_CHECK, "when to compare the calls of different ranks across hosts")
    )
    policy: str | dict[str, Any] | None = field(
        default=None, metadata=_about(_POLICY, "which backend to use for each op and size: a file, or its table")
    )
    require_secret: bool = field(
        default=False, metadata=_about(_FLAG, "refuse to start a job of several ranks that has no secret")
    )
    require_launcher: bool = field(
        default=False, metadata=_about(_FLAG, "refuse to start a world of one if no launcher is found")
    )
    parallel: dict[str, Any] | None = field(
        default=None,
        metadata=_about(_PARALLEL, "bucket_mb, codec, plan and model_parallel_size for initialize()"),
    )
    comms_logger: CommsLogger = CommsLogger()
    others: Mapping[str, Any] = field(default_factory=dict)
    """Blocks that are not ringway's, such as those of a DeepSpeed configuration."""
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def source(self, key: str) -> str:
        """The source of the value of `timeout`, or of `comms_logger.enabled`."""
        if key not in SETTINGS:
            raise ConfigError(f"there is no setting '{key}'{nearest(key, SETTINGS)}", key=key)
        return self.sources.get(key, "default")

    def value(self, key: str) -> Any:
        """The value of a key, named as for `source`."""
        self.source(key)
        block, _, name = key.rpartition(".")
        return getattr(self.comms_logger if block else self, name)


@dataclass(frozen=True)
class Setting:
    """One entry in the table of all settings."""

    key: str
    variable: str
    kind: Kind
    default: Any
    about: str


def _table() -> Mapping[str, Setting]:
    table = {}
    for owner, prefix, variables in ((Config, "", _PREFIX), (CommsLogger, "comms_logger.", _LOGGER_PREFIX)):
        for item in fields(owner):
            if "kind" in item.metadata:
                key = prefix + item.name
                kind, about = item.metadata["kind"], item.metadata["about"]
                table[key] = Setting(key, variables + item.name.upper(), kind, item.default, about)
    return MappingProxyType(table)


SETTINGS = _table()
"""Every setting by its key: `timeout`, `comms_logger.enabled`."""

# Variables that belong to ringway but are not settings: set by `ringway run`, naming a file, or read at import.
_OTHER_VARIABLES = (
    "RINGWAY_CONFIG",
    "RINGWAY_RUN_ID",
    "RINGWAY_RUN_STORE",
    "RINGWAY_LAUNCHER",
    "RINGWAY_MIN_RANKS",
    "RINGWAY_WITNESS",
    "RINGWAY_JOB_TOKEN",
    "RINGWAY_JOB_SECRET",
    "RINGWAY_JOB_SECRET_FILE",
    "RINGWAY_NO_PATCH",
    "RINGWAY_REPLACE",
    "RINGWAY_VLLM",
)


def resolve(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge all sources into one configuration that knows the source of each value."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    others: dict[str, Any] = {}
    if environ.get("RINGWAY_CONFIG"):
        path = environ["RINGWAY_CONFIG"]
        others |= _take_blocks(read_file(path, "RINGWAY_CONFIG"), f"{path} (RINGWAY_CONFIG)", values, sources)
    if isinstance(config, Mapping):
        others |= _take_blocks(config, "config argument", values, sources)
    elif isinstance(config, str) and (encoded := from_base64(config)) is not None:
        others |= _take_blocks(encoded, "config argument (base64)", values, sources)
    elif isinstance(config, (str, os.PathLike)):
        others |= _take_blocks(read_file(config, "config argument"), os.fspath(config), values, sources)
    elif config is not None:
        raise ConfigError(
            f"config is a {type(config).__name__}; pass a dictionary, or the path of a JSON or TOML file",
            source="config argument",
        )
    notes = _take_variables(environ, values, sources)
    logger = {key.partition(".")[2]: value for key, value in values.items() if "." in key}
    return Config(
        **{key: value for key, value in values.items() if "." not in key},
        comms_logger=CommsLogger(**logger),
        others=MappingProxyType(others),
        sources=MappingProxyType(sources),
        notes=tuple(notes),
    )


def _take_blocks(
    blocks: Mapping[str, Any], source: str, values: dict[str, Any], sources: dict[str, str]
) -> dict[str, Any]:
    """Take ringway's blocks; return the others."""
    for block, prefix in ((BLOCK, ""), (LOGGER_BLOCK, "comms_logger.")):
        content = blocks.get(block)
        if content is None:
            continue
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"'{block}' in {source} is a {type(content).__name__}, not a table", key=block, source=source
            )
        known = {key.removeprefix(prefix): key for key in SETTINGS if ("." in key) == bool(prefix)}
        for name, value in content.items():
            if name not in known:
                raise ConfigError(
                    f"unknown key {name!r} in block '{block}' of {source}{nearest(str(name), known)}",
                    key=str(name),
                    source=source,
                )
            if value is not None:  # JSON's null means "the default"
                values[known[name]] = _checked(SETTINGS[known[name]], value, source)
                sources[known[name]] = source
        if prefix and "enabled" not in content and "comms_logger.enabled" not in values:
            values["comms_logger.enabled"], sources["comms_logger.enabled"] = True, source
    return {name: content for name, content in blocks.items() if name not in (BLOCK, LOGGER_BLOCK)}


def _take_variables(environ: Mapping[str, str], values: dict[str, Any], sources: dict[str, str]) -> list[str]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    bare = {variable.removeprefix(_PREFIX): variable for variable in by_variable}
    notes = []
    for variable in sorted(name for name in environ if name.startswith(_PREFIX)):
        setting = by_variable.get(variable)
        if not environ[variable].strip():
            continue  # an empty variable counts as not set
        if setting is not None:
            values[setting.key] = _checked(setting, environ[variable], variable, text=True)
            sources[setting.key] = variable
        elif variable not in _OTHER_VARIABLES:
            # The variable may belong to one of the user's tools, so this is a note, not an error.
            close = get_close_matches(variable.removeprefix(_PREFIX), bare, n=1)
            if close:
                notes.append(f"{variable} is not a setting; did you mean {bare[close[0]]}?")
    return notes


def checked(key: str, value: object, source: str) -> Any:
    """The value of a setting, checked. Raises ConfigError if it is invalid."""
    return _checked(SETTINGS[key], value, source)


def _checked(setting: Setting, value: object, source: str, *, text: bool = False) -> Any:
    try:
        return setting.kind.check(setting.kind.parse(str(value)) if text else value)
    except ValueError as error:
        raise ConfigError(
            f"{setting.key} is {value!r} in {source}; expected {error}", key=setting.key, source=source
        ) from None


def schema() -> dict[str, Any]:
    """The JSON schema of ringway's two blocks; other blocks are allowed next to them."""

    def block(prefix: str) -> dict[str, Any]:
        properties = {}
        for setting in SETTINGS.values():
            if ("." in setting.key) == bool(prefix):
                entry = {**setting.kind.schema, "description": setting.about}
                if setting.default is not None:
                    entry["default"] = list(setting.default) if isinstance(setting.default, tuple) else setting.default
                properties[setting.key.removeprefix(prefix)] = entry
        return {"type": "object", "properties": properties, "additionalProperties": False}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ringway",
        "type": "object",
        "properties": {BLOCK: block(""), LOGGER_BLOCK: block("comms_logger.")},
        "additionalProperties": True,
    }


__getattr__ = attributes_of("config")
