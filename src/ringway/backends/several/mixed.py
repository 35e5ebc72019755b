"""Several backends of one group as one. The policy (`policy.py`) chooses the backend of each call. If only the size
matters, the choice is one lookup in a sorted list, and the backends' fast paths still apply.

Calls on CPU tensors keep one order (`call_order.py`). Calls on CUDA tensors do not: every backend enqueues them in the
order of issue, and streams order what follows, as torch's do.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as c10d

import ringway._core as _core
from ringway.backends import registry
from ringway.backends.base import Backend, GroupInfo, Health
from ringway.backends.compose import Routes, routes_of
from ringway.backends.exchange import exchange
from ringway.backends.select import obstacle
from ringway.backends.several.parts import BackendOfParts
from ringway.backends.several.policy import ANY, Policy, Rule
from ringway.call import OPS, Call, Op
from ringway.errors import BackendUnavailable, ConfigError
from ringway.work import Handle

_EVERY_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class Agreement:
    """The rules of a policy for one group, which all its ranks have."""

    rules: Sequence[Rule]
    source: str
    lacking: Mapping[str, str]
    """By backend: why a rank cannot use it."""
    has_cuda: bool
    """Whether every rank has a GPU. If not, rules for CUDA tensors apply to none of them."""

    def mixed(self, backend: Backend, info: GroupInfo) -> Backend:
        """The group's first backend, or several as one."""
        devices = [device for device in backend.devices if device == "cpu" or self.has_cuda]
        return self._mixed(backend, info, [one for rule in self.rules for one in _on_devices(rule, devices)])

    def mixed_on(self, device: str, backend: Backend, info: GroupInfo) -> Backend:
        """The same for a backend that serves a further device of the group. Rules must name that device, or a backend
        that has no other: a rule for all devices is about the group's first backend."""
        rules = [rule for rule in self.rules if device in (rule.device, *_only_device(rule.backend))]
        if not self.has_cuda or all(rule.backend == backend.name for rule in rules):
            return backend
        return self._mixed(backend, info, [one for rule in rules for one in _on_devices(rule, [device])])

    def _mixed(self, backend: Backend, info: GroupInfo, rules: Sequence[Rule]) -> Backend:
        for name in sorted({rule.backend.rpartition(":")[2] for rule in rules}):
            if name in self.lacking:
                raise BackendUnavailable(
                    name,
                    self.lacking[name],
                    remedy=f"The policy in {self.source} uses it; make one for this job with ringway tune",
                )
        return MixedBackend(info, backend, rules) if rules else backend


def agree(policy: Policy | None, info: GroupInfo) -> Agreement | None:
    """The rules for a group, or None if there are none. Every rank of the group calls this. Raises on all of them if
    their tables differ."""
    rules = policy.rules_for(info.size) if policy is not None else []
    if policy is None or not rules:
        return None
    lacking = {rule.backend: what.reason for rule in rules if (what := obstacle(rule.backend)) is not None}
    mine = json.dumps({"digest": policy.digest, "lacking": lacking, "cuda": torch.cuda.is_available()})
    reports = [json.loads(text) for text in exchange(info, "policy", mine.encode())]
    different = [info.ranks[rank] for rank, report in enumerate(reports) if report["digest"] != reports[0]["digest"]]
    if different:
        raise ConfigError(
            f"rank {', '.join(map(str, different))} loaded another policy than rank {info.ranks[0]} "
            f"(this rank has {policy.source}); all ranks must decide alike",
            key="policy",
            source=policy.source,
        )
    reasons = {
        name: f"{reason} (rank {info.ranks[rank]})"
        for rank, report in enumerate(reports)
        for name, reason in report["lacking"].items()
    }
    return Agreement(rules, policy.source, reasons, all(report["cuda"] for report in reports))


def _only_device(name: str) -> tuple[str, ...]:
    registration = registry.own(name)
    return registration.devices if registration is not None and len(registration.devices) == 1 else ()


def mixes(policy: Policy | None, own: str, size: int) -> bool:
    """Whether a group of this size, made on the backend `own`, uses others too."""
    return policy is not None and any(rule.backend != own for rule in policy.rules_for(size))


class MixedBackend(BackendOfParts):
    """Several backends of one group, chosen call by call. Each converts what it does not accept by its own routes. The
    rules are those for the group's devices."""

    def __init__(self, info: GroupInfo, own: Backend, rules: Sequence[Rule]) -> None:
        super().__init__(info)
        self.name = own.name  # type: ignore[misc]
        self.devices = own.devices  # type: ignore[misc]
        self.coalesces = own.coalesces  # type: ignore[misc]
        self.torch_group = own.torch_group
        self._own = own
        self._in_block = False
        self._other_paths: list[_core.FastPath] = []
        self._rules = list(rules)
        self._backends[own.name] = own
        with ExitStack() as unless_all_are_made:
            unless_all_are_made.callback(self.close)
            for name in sorted({rule.backend for rule in self._rules} - {own.name}):
                registration = _registration(name, own.devices)
                corner = replace(info, store=c10d.PrefixStore(f"ringway/policy/{name}", info.store))
                self._backends[name] = registry.make(registration, corner)
            self.notices_deaths = all(part.notices_deaths for part in self._backends.values())  # type: ignore[misc]
            routes = {name: routes_of(backend) for name, backend in self._backends.items()}
            unless_all_are_made.pop_all()
        self._own_runners = routes[own.name].runners
        self.own_routes = Routes(
            {op.name: self._runner(op, routes) for op in OPS}, {op.name: self._in_words(op) for op in OPS}
        )

    def choose(self, op: Op, nbytes: int, dtype: torch.dtype | None, device: str) -> str:
        """The name of the backend for this call."""
        if not op.collective:
            return self._own.name
        return next((rule.backend for rule in self._rules if rule.fits(op, nbytes, dtype, device)), self._own.name)

    def _runner(self, op: Op, routes: Mapping[str, Routes]) -> Callable[[Call], Handle]:
        if not op.collective:  # messages have their own order
            return routes[self._own.name].runners[op.name]
        runners = {name: made.runners[op.name] for name, made in routes.items()}
        start = self._order.start if self.devices == ("cpu",) else self._start
        by_size = self._by_size(op)
        if by_size is None:

            def by_rule(call: Call) -> Handle:
                tensors = call.inputs or call.outputs
                device = tensors[0].device.type if tensors else self.devices[0]
                name = self.choose(op, call.nbytes, call.dtype, device)
                return start(name, runners[name], call)

            return by_rule
        limits = [limit for limit, _ in by_size]
        choices = [(name, runners[name]) for _, name in by_size]

        def run(call: Call) -> Handle:
            name, runner = choices[0] if len(choices) == 1 else choices[bisect_left(limits, call.nbytes)]
            return start(name, runner, call)

        return run

    def _start(self, name: str, runner: Callable[[Call], Handle], call: Call) -> Handle:
        """A call of a group with CUDA tensors."""
        if self._in_block:
            return self._own_runners[call.op.name](call)
        if "cpu" in self.devices and all(t.device.type == "cpu" for t in (*call.inputs[:1], *call.outputs[:1])):
            return self._order.start(name, runner, call)
        handle = runner(call)
        handle.wait_for_launch()  # another backend's call must not be enqueued before it
        return handle

    def _about(self, op: Op) -> list[Rule]:
        return [rule for rule in self._rules if op.collective and rule.op in (ANY, op.name)]

    def _by_size(self, op: Op) -> list[tuple[int, str]] | None:
        """The size limits and their backends, in ascending order; None if more than the size decides."""
        found: list[tuple[int, str]] = []
        for rule in [*self._about(op), Rule(self._own.name)]:
            if rule.dtype is not None or rule.device is not None:
                return None
            limit = _EVERY_SIZE if rule.up_to is None else rule.up_to
            if found and limit <= found[-1][0]:
                continue
            if found and found[-1][1] == rule.backend:
                found.pop()
            found.append((limit, rule.backend))
            if limit == _EVERY_SIZE:
                break
        return found

    def _in_words(self, op: Op) -> str:
        if not op.collective:
            return self._own.name
        about = self._about(op)
        certain = bool(about) and about[-1].up_to is None and about[-1].dtype is None and about[-1].device is None
        return ", else ".join([rule.in_words() for rule in about] + ([] if certain else [self._own.name]))

    def belongs_to(self, record: _core.GroupRecord, health: Health) -> None:
        for backend in self._backends.values():
            backend.belongs_to(record, health)

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        """Each backend's own, for the ops and sizes that go to it, while nothing is in flight on another backend."""
        found = []
        for name, backend in self._backends.items():
            for path in backend.fast_paths(record, health):
                for op in OPS:
                    if path.has(op.code):
                        path.serve(op.code, self._ranges(op, name))
                if "cpu" in self.devices:
                    self._order.holding(name, path.hold)
                if backend is not self._own:
                    self._other_paths.append(path)
                found.append(path)
        return found

    # A block of calls that start together is the group's own backend's.

    def start_coalescing(self, device: torch.device) -> None:
        self._own.start_coalescing(device)
        self._in_block = True
        for path in self._other_paths:
            path.hold(1)

    def end_coalescing(self, device: torch.device) -> Handle:
        self._in_block = False
        for path in self._other_paths:
            path.hold(-1)
        return self._own.end_coalescing(device)

    def _ranges(self, op: Op, name: str) -> list[tuple[int, int]]:
        """The sizes for which the backend does the op; none if more than the size decides."""
        ranges, least = [], 0
        for most, does in self._by_size(op) or ():
            if does == name:
                ranges.append((least, most))
            least = most + 1
        return ranges


def _on_devices(rule: Rule, devices: Sequence[str]) -> list[Rule]:
    """The rule for a group with tensors on these devices. Its backend may accept only some of them; a rule for all of
    them need not look at the device."""
    registration = registry.own(rule.backend)
    assert registration is not None
    wanted = registration.devices if rule.device is None else (rule.device,)
    taken = [device for device in devices if device in wanted]
    if taken == list(devices):
        return [replace(rule, device=None)]
    return [replace(rule, device=device, backend=_spelled(rule.backend, device)) for device in taken]


def _spelled(name: str, device: str) -> str:
    """In a group with several devices: 'cuda:shm', if another class serves the backend's tensors there."""
    return name if registry.on_device(name, device) is registry.own(name) else f"{device}:{name}"


def _registration(spelled: str, devices: Sequence[str]) -> registry.Registration:
    device, _, name = spelled.rpartition(":")
    registration = registry.on_device(name, device or devices[0]) or registry.own(name)
    assert registration is not None
    return registration
