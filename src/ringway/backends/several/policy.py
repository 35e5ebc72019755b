"""Which backend runs a call: one group may use several, by op, size, dtype and device.

A policy is a table of rules. The first rule that fits a call names its backend; if none fits, the group's own backend
runs it. `ringway tune` measures and writes a policy, and users may write one in the configuration. All ranks must
decide alike, so they compare their tables when a group is made, and a rule may use only what all ranks of a call agree
on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ringway.backends import registry
from ringway.call import DTYPES, OP_BY_NAME, OPS, Op
from ringway.config_file import read_file
from ringway.errors import ConfigError, nearest

VERSION = 1
ANY = "*"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_MIXED = {op.name: op for op in OPS if op.collective}


@dataclass(frozen=True)
class Rule:
    """One line of the table. None fits everything. `up_to` is in bytes as nccl-tests counts them; `ranks` is the size
    of the group, by default the world's."""

    backend: str
    op: str = ANY
    up_to: int | None = None
    dtype: str | None = None
    device: str | None = None
    ranks: int | None = None

    def fits(self, op: Op, nbytes: int, dtype: torch.dtype | None, device: str) -> bool:
        return (
            self.op in (ANY, op.name)
            and (self.up_to is None or nbytes <= self.up_to)
            and (self.dtype is None or _DTYPES[self.dtype] is dtype)
            and (self.device is None or self.device == device)
        )

    def in_words(self) -> str:
        limits = [
            "" if self.up_to is None else f"up to {self.up_to} B",
            "" if self.dtype is None else f"of {self.dtype}",
            "" if self.device is None else f"on {self.device}",
        ]
        return " ".join([self.backend, *filter(None, limits)])


@dataclass(frozen=True)
class Policy:
    """A table for a world of `world_size` ranks. `source` says where it came from."""

    world_size: int
    rules: tuple[Rule, ...]
    measured: Mapping[str, Any]
    source: str

    @property
    def digest(self) -> str:
        """Equal on two ranks if and only if they decide alike."""
        table = [self.world_size, [asdict(rule) for rule in self.rules]]
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    def rules_for(self, size: int) -> list[Rule]:
        """The rules for a group of `size` ranks."""
        return [rule for rule in self.rules if (rule.ranks or self.world_size) == size]

    def document(self) -> dict[str, Any]:
        """The table in the form of a policy file."""
        rules = [{key: value for key, value in asdict(rule).items() if value is not None} for rule in self.rules]
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "rules": rules,
            "measured": dict(self.measured),
        }


def consult(given: str | os.PathLike[str] | Mapping[str, Any] | None, world_size: int) -> Policy | ConfigError | None:
    """What a rank reports to the others: its policy, the error in it, or None."""
    try:
        return None if given is None else load(given, world_size)
    except ConfigError as error:
        return error


def load(given: str | os.PathLike[str] | Mapping[str, Any], world_size: int | None = None) -> Policy:
    """Loads a policy from a file (JSON or TOML) or a table. With `world_size`, refuses one for another world size."""
    if isinstance(given, Mapping):
        return _parsed(given, "the configuration", world_size)
    return _parsed(read_file(given, "the policy"), os.fspath(given), world_size)


def _parsed(table: Mapping[str, Any], source: str, world_size: int | None) -> Policy:
    known = ("version", "world_size", "rules", "measured")
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in the policy of {source}{nearest(str(key), known)}", source=source)
    if table.get("version", VERSION) != VERSION:
        raise ConfigError(
            f"the policy in {source} has version {table['version']}, and this ringway reads {VERSION}; "
            "make a new one with ringway tune",
            source=source,
        )
    written_for = table.get("world_size", world_size)
    if not isinstance(written_for, int) or isinstance(written_for, bool) or written_for < 1:
        raise ConfigError(
            f"the policy in {source} says world_size {written_for!r}, not a number of ranks", source=source
        )
    if world_size is not None and written_for != world_size:
        raise ConfigError(
            f"the policy in {source} was made for {written_for} ranks, and this job has {world_size}; "
            "make one for it with ringway tune",
            key="world_size",
            source=source,
        )
    rules = table.get("rules", [])
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise ConfigError(f"'rules' of the policy in {source} is not a list", source=source)
    parsed = tuple(_rule(rule, f"rule {number} of {source}") for number, rule in enumerate(rules, 1))
    measured = table.get("measured") or {}
    if not isinstance(measured, Mapping):
        raise ConfigError(f"'measured' of the policy in {source} is not a table", source=source)
    return Policy(written_for, parsed, dict(measured), source)


def _rule(given: Any, where: str) -> Rule:
    keys = [field.name for field in fields(Rule)]
    if not isinstance(given, Mapping) or "backend" not in given:
        raise ConfigError(f"{where} names no backend: {given!r}", source=where)
    for key in given:
        if key not in keys:
            raise ConfigError(f"unknown key {key!r} in {where}{nearest(str(key), keys)}", key=str(key), source=where)
    rule = Rule(**given)
    for key in ("backend", "op", "dtype", "device"):
        value = getattr(rule, key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{key} is {value!r} in {where}; expected a name", key=key, source=where)
    for key, least in (("up_to", 0), ("ranks", 1)):
        value = getattr(rule, key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(
                f"{key} is {value!r} in {where}; expected a whole number from {least} on", key=key, source=where
            )
    _check_names(rule, where)
    if rule.up_to is not None and (rule.op == ANY or "bytes" not in OP_BY_NAME[rule.op].agree):
        raise ConfigError(
            f"{where} decides about {rule.op} by its size, on which the ranks of a call need not agree; "
            "give it a backend for all sizes",
            key="up_to",
            source=where,
        )
    return rule


def _check_names(rule: Rule, where: str) -> None:
    registration = registry.own(rule.backend)
    if registration is None:
        known = registry.own_names()
        raise ConfigError(
            f"{where} names the backend {rule.backend!r}{nearest(str(rule.backend), known)}; a policy can mix "
            f"{', '.join(known)}",
            key="backend",
            source=where,
        )
    if rule.op != ANY and rule.op not in _MIXED:
        raise ConfigError(
            f"{where} names the op {rule.op!r}{nearest(str(rule.op), _MIXED)}; a policy decides about "
            f"{', '.join(_MIXED)} (messages always go through the group's own backend)",
            key="op",
            source=where,
        )
    if rule.dtype is not None and rule.dtype not in _DTYPES:
        raise ConfigError(
            f"{where} names the dtype {rule.dtype!r}{nearest(str(rule.dtype), _DTYPES)}", key="dtype", source=where
        )
    if rule.device is not None and registry.on_device(rule.backend, rule.device) is None:
        raise ConfigError(
            f"{where} gives tensors on {rule.device!r} to {rule.backend}, which takes those on "
            f"{' and '.join(registration.devices)}",
            key="device",
            source=where,
        )
