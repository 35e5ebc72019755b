"""The world: the state of this process's job. docs/architecture.md lists the caches and counters that single modules
keep.

A group that ringway made is a Bridge and carries its communicator. A group that torch made is adopted when it is first
used, without any communication, and forgotten when torch forgets it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.backends.base import GroupInfo
from ringway.backends.process import Process
from ringway.backends.several.policy import Policy
from ringway.config import resolve
from ringway.errors import UsageError
from ringway.groups.adoption import read_group
from ringway.groups.bridge import Bridge
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Listener
from ringway.store import beneath_prefixes
from ringway.torch_versions import GroupCounts

NON_MEMBER = c10d.GroupMember.NON_GROUP_MEMBER
FORKED = (
    "this process was forked from a rank and is not a member of its groups; make collective calls in "
    "the rank itself, or start workers with the 'spawn' method and init_process_group of their own"
)

_RECORDER_CAPACITY = 4096

L = TypeVar("L", bound=Listener)


class World:
    """The registry: communicators by group, the listeners, the recorder, and the settings that new groups use."""

    def __init__(self) -> None:
        self.recorder = _core.Recorder(_RECORDER_CAPACITY)
        self.listeners: list[Listener] = []
        self.listeners_of_every_job: Callable[[], Sequence[Listener]] | None = None
        """Makes the listeners that are installed before the first group is made. None once they are."""
        self.process = Process()
        self.group_counts = GroupCounts()
        self.next_backend: str | None = None
        self.backend_reason: str | None = None
        self.local_rank: int | None = None
        self.policy: Policy | None = None
        self.store: c10d.Store | None = None
        """The job's store, if ringway started the job: torch's C++ code holds only the C++ half of a store written in
        Python."""
        self.makes_reconfigurable = False
        self.next_name: str | None = None
        """What messages and traces call the next group, if not by torch's name."""
        self._binding: torch.device | None = None
        self._adopting = threading.Lock()
        self._installing = threading.RLock()
        self._left_behind: weakref.WeakSet[c10d.ProcessGroup] = weakref.WeakSet()
        """In a forked child: the groups of its parent."""
        self._adopted: weakref.WeakKeyDictionary[c10d.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._default: Communicator | None = None
        self._default_group: Callable[[], c10d.ProcessGroup | None] = lambda: None
        self.fast = _core.WorldFastPath(c10d_module, Bridge, self._fast_failure)
        """The fast paths of the default group, and of bridges. Until `communicator` has found the default group, and
        while a group's paths are closed, they take no call."""

    @cached_property
    def max_object_bytes(self) -> int:
        """Size limit of a message with objects. Read on first use, so that a bad value is an error of the call that
        needs it, not of the import."""
        return resolve().max_object_bytes

    @cached_property
    def check(self) -> str:
        """When calls are compared across hosts. Read on first use, like `max_object_bytes`."""
        return resolve().check

    # The device that groups are bound to

    @contextmanager
    def binding(self, device: torch.device | int | None) -> Iterator[None]:
        """Groups made inside are bound to this device."""
        self._binding = torch.device("cuda", device) if isinstance(device, int) else device
        try:
            yield
        finally:
            self._binding = None

    def bound_device(self) -> torch.device | None:
        """The device of a group that is being made: the one named for it, or else the default group's."""
        default = c10d_module._world.default_pg
        return self._binding or (None if default is None else default.bound_device_id)

    # Communicators

    def communicator(self, group: c10d.ProcessGroup | None) -> Communicator:
        """The communicator of a group; None means the default group."""
        if group is None:
            torch_world: Any = c10d_module._world
            group = torch_world._default_pg
            if group is None:
                self._forget()
                raise UsageError("there is no group yet: call ringway.init_distributed() or init_process_group() first")
            if self._default is not None and group is self._default_group():
                return self._default
            self._default = self._find(group)
            self._default_group = weakref.ref(group)
            self.fast.serve(group, self._default.paths)
            return self._default
        return self._find(group)

    def _forget(self) -> None:
        """Look for the default group again."""
        self._default = None
        self.fast.serve(None, None)

    def _fast_failure(self, error: BaseException, group: Bridge | None) -> BaseException:
        failed = self._default if group is None else group.communicator
        return error if failed is None else failed.calls.fast_failure(error)

    def _find(self, group: Any) -> Communicator:
        if isinstance(group, Bridge):
            return group.communicator
        if group == NON_MEMBER:
            raise UsageError("this rank is not a member of the group, so it has no communicator for it")
        if not isinstance(group, c10d.ProcessGroup):
            raise UsageError(f"group= takes a ProcessGroup, not {type(group).__name__}")
        known = self._adopted.get(group)
        if known is None:
            with self._adopting:  # two threads must not adopt the same group and number its calls separately
                known = self._adopted.get(group)
                if known is None:
                    if group in self._left_behind:
                        raise UsageError(FORKED)
                    known = self._adopted[group] = self.add(*read_group(group, self.process))
        return known

    def add(self, info: GroupInfo, backends: dict[str, Any]) -> Communicator:
        """Makes the communicator of a new group."""
        self._install_listeners()
        communicator = Communicator(info, backends, self.recorder, self.listeners)
        for listener in list(self.listeners):
            listener.created(communicator)
        self._all.add(communicator)  # last: the listeners are ready before a thread can find it
        return communicator

    def communicators(self) -> list[Communicator]:
        """The communicators that are not closed, largest group first, then by name."""
        return sorted((c for c in self._all if not c.closed), key=lambda c: (-c.size, c.name))

    def adopted(self, group: c10d.ProcessGroup | None) -> list[Communicator]:
        """The communicators of a group that torch made, or with None of all such groups; only those in use."""
        known = self._adopted.values() if group is None else [self._adopted.get(group)]
        return [communicator for communicator in known if communicator is not None]

    def has_bridges(self) -> bool:
        """Whether ringway made any of the groups of this process."""
        return any(isinstance(group, Bridge) for group in c10d_module._world.pg_map)

    def has_met_at(self, store: c10d.Store) -> bool:
        """Whether the store is a part of the one at which ringway started the job."""
        return self.store is not None and beneath_prefixes(self.store) is beneath_prefixes(store)

    def reconfigured(self) -> None:
        """A group has another communicator: look for the default group's again."""
        self._forget()

    @contextmanager
    def naming(self, name: str | None) -> Iterator[None]:
        """Groups made inside have this name in messages and traces."""
        self.next_name = name
        try:
            yield
        finally:
            self.next_name = None

    @contextmanager
    def reconfigurable(self) -> Iterator[None]:
        """Groups made inside can be reconfigured. For versions of torch that do not pass this on."""
        self.makes_reconfigurable = True
        try:
            yield
        finally:
            self.makes_reconfigurable = False

    def forget_default(self) -> None:
        """After the default group was destroyed: releases what it holds, such as the job's store."""
        self._forget()
        self.store = None

    def start_over(self) -> list[Communicator]:
        """In a forked child: forgets the parent's groups. Returns their communicators."""
        # The parent's may be held by a thread that does not exist here.
        self._adopting, self._installing = threading.Lock(), threading.RLock()
        self._left_behind = weakref.WeakSet(c10d_module._world.pg_map)
        inherited, self._all = list(self._all), weakref.WeakSet()
        return inherited

    # Listeners

    def listen(self, listener: Listener) -> None:
        """Installs a listener for every group, present and future."""
        if listener not in self.listeners:
            self.listeners.append(listener)
            self._listeners_changed()

    def unlisten(self, listener: Listener) -> None:
        """Removes a listener; does nothing if it is not installed."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            self._listeners_changed()

    def listener(self, kind: type[L]) -> L:
        """The installed listener of that class."""
        self._install_listeners()
        return next(listener for listener in self.listeners if isinstance(listener, kind))

    def _install_listeners(self) -> None:
        with self._installing:  # a second thread waits until they are there
            make, self.listeners_of_every_job = self.listeners_of_every_job, None
            if make is None:
                return
            try:
                self.listeners[:0] = make()  # the program's own, if there are any, see what these make of an error
            except BaseException:
                self.listeners_of_every_job = make
                raise

    def _listeners_changed(self) -> None:
        for communicator in list(self._all):
            communicator.calls.refresh()


world = World()
