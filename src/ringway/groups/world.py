"""The only mutable global: communicators by group, the listeners, the recorder.

A group that ringway made is a Bridge and carries its communicator. A group that torch made is adopted when it
is first used, without any communication, and forgotten when torch forgets it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from operator import index
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.backends import registry
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.nccl.backend import NcclBackend
from ringway.backends.several.mixed import mixed, mixes
from ringway.backends.several.policy import Policy
from ringway.backends.torch.adopt import adopt
from ringway.backends.torch.backend import GlooBackend, make_gloo
from ringway.backends.torch.handles import announcements
from ringway.compare.across_hosts import join_comparison, reserve_prefix
from ringway.compare.one_host import join_board, spans_hosts
from ringway.config import resolve
from ringway.errors import UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Listener
from ringway.references import keep_for_ever

NON_MEMBER = c10d.GroupMember.NON_GROUP_MEMBER

L = TypeVar("L", bound=Listener)

RECORDER_CAPACITY = 4096
LEAVING_SECONDS = 10.0
LEAVING_EACH_SECONDS = 2.0
"""Calls that were given up end only when a peer's process does, and must end before this interpreter does. Where
several ranks wait for that, they go one after the other, and each ends the wait of the next."""


_BEYOND_TORCHS = 1 << 40
"""More groups than torch will ever count."""

_FORKED = (
    "this process was forked from a rank and is no member of its groups; make collective calls in "
    "the rank itself, or start workers with the 'spawn' method and init_process_group of their own"
)


def _default_group() -> c10d.ProcessGroup | None:
    return c10d_module._world._default_pg


class World:
    """What this process knows of its job."""

    def __init__(self) -> None:
        self.recorder = _core.Recorder(RECORDER_CAPACITY)
        self.listeners: list[Listener] = []
        self.next_backend: str | None = None
        self.backend_reason: str | None = None
        self.local_rank: int | None = None
        self.policy: Policy | None = None
        self._adopting = threading.Lock()
        self._left_behind: weakref.WeakSet[c10d.ProcessGroup] = weakref.WeakSet()
        """In a forked child: the groups of its parent."""
        self._adopted: weakref.WeakKeyDictionary[c10d.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._default: Communicator | None = None
        self._default_group: Callable[[], c10d.ProcessGroup | None] = lambda: None

    @cached_property
    def max_object_bytes(self) -> int:
        """The largest object message that is accepted. Read when first needed, so that a value that cannot be is an
        error of the call that needs it, not of the import."""
        return resolve().max_object_bytes

    @cached_property
    def check(self) -> str:
        """When calls are compared across hosts; read like `max_object_bytes`."""
        return resolve().check

    def communicator(self, group: c10d.ProcessGroup | None) -> Communicator:
        """The communicator of a group; None is the world."""
        if group is None:
            group = _default_group()
            if group is None:
                self._default = None
                raise UsageError("there is no group yet: call ringway.init_distributed() or init_process_group() first")
            if self._default is not None and group is self._default_group():
                return self._default
            self._default = self._find(group)
            self._default_group = weakref.ref(group)
            return self._default
        return self._find(group)

    def _find(self, group: Any) -> Communicator:
        if isinstance(group, Bridge):
            return group.communicator
        if group == NON_MEMBER:
            raise UsageError("this rank is no member of the group, so it has no communicator for it")
        if not isinstance(group, c10d.ProcessGroup):
            raise UsageError(f"group= takes a ProcessGroup, not {type(group).__name__}")
        known = self._adopted.get(group)
        if known is None:
            with self._adopting:  # two threads that come first must not number the group's calls apart
                known = self._adopted.get(group)
                if known is None:
                    known = self._adopted[group] = self._adopt(group)
        return known

    def forget_default(self) -> None:
        """The world's group was destroyed: what it held, such as the job's store, is to end now."""
        self._default = None

    def adopted(self, group: c10d.ProcessGroup | None) -> list[Communicator]:
        """The communicators of a group that torch made, or with None of all such groups; only those in use."""
        known = self._adopted.values() if group is None else [self._adopted.get(group)]
        return [communicator for communicator in known if communicator is not None]

    def _adopt(self, group: c10d.ProcessGroup) -> Communicator:
        if group in self._left_behind:
            raise UsageError(_FORKED)
        entry = c10d_module._world.pg_map.get(group)
        if entry is None:
            raise UsageError("this group is not one of torch.distributed's; was it destroyed?")
        backend, store = entry
        ranks = sorted(c10d.get_process_group_ranks(group), key=lambda rank: c10d.get_group_rank(group, rank))
        info = GroupInfo(
            rank=group.rank(),
            size=group.size(),
            ranks=ranks,
            store=store,
            name=c10d_module._world.pg_names[group],
            timeout=_timeout_of(group).total_seconds(),
        )
        return self.add(info, _torch_backends(info, group, str(backend)))

    def add(self, info: GroupInfo, backends: dict[str, Any]) -> Communicator:
        communicator = Communicator(info, backends, self.recorder, self.listeners)
        self._all.add(communicator)
        for listener in list(self.listeners):
            listener.created(communicator)
        return communicator

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
        return next(listener for listener in self.listeners if isinstance(listener, kind))

    def _listeners_changed(self) -> None:
        for communicator in list(self._all):
            communicator.listeners_changed()

    def communicators(self) -> list[Communicator]:
        """All that live, the world's first, then by name."""
        return sorted((c for c in self._all if not c.closed), key=lambda c: (-c.size, c.name))

    def forked(self) -> None:
        """A forked child holds no membership: its calls are refused, and its end disturbs nobody."""
        self._adopting = threading.Lock()  # the parent's may be held by a thread that does not exist here
        self._left_behind = weakref.WeakSet(c10d_module._world.pg_map)
        # To end a group is to join its threads, which do not exist here: none of the parent's ends here.
        for group in c10d_module._world.pg_map:
            keep_for_ever(group)
        error = UsageError(_FORKED)
        for communicator in list(self._all):
            keep_for_ever(communicator)
            communicator.poison(error)
        self._all = weakref.WeakSet()
        announcements.forget()


_members_counts: weakref.WeakKeyDictionary[c10d.ProcessGroup, Counter[frozenset[int]]] = weakref.WeakKeyDictionary()
"""By world and ranks: how many groups these have made among themselves."""


@contextmanager
def counted_apart(ranks: Sequence[Any]) -> Iterator[None]:
    """For a group that only its members make. torch names groups by their count, and from 2.15 on counts such groups
    too: then the ranks no longer agree about the names of later groups, and wait for each other for ever."""
    torchs = c10d_module._world
    count, members = torchs.group_count, frozenset(map(index, ranks))
    counts = _members_counts.setdefault(c10d_module._get_default_group(), Counter())
    torchs.group_count = _BEYOND_TORCHS + counts[members]
    try:
        yield
    finally:
        counts[members] = torchs.group_count - _BEYOND_TORCHS  # what torch refused it has not counted
        torchs.group_count = count


def _timeout_of(group: c10d.ProcessGroup) -> timedelta:
    """What torch was told when it made the group; its default where the group's backend does not say."""
    for device in group._device_types:
        said = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(said, timedelta):
            return said
    return c10d.default_pg_timeout


def _torch_backends(info: GroupInfo, group: c10d.ProcessGroup, backend: str) -> dict[str, Any]:
    """The backends of a group that torch made, by device. CPU tensors on a group without one go to a gloo
    that is made when the first of them comes."""
    if ":" in backend:
        config = dict(part.split(":", 1) for part in backend.split(","))
    else:
        config = {str(device.type): backend for device in group._device_types}
    # torch's backend objects rather than the group: whoever held the group would keep it from being forgotten.
    known = weakref.ref(group)
    backends: dict[str, Any] = {
        device: adopt(
            info,
            group._get_backend(torch.device(device)),
            registry.user_spelling(name),
            destroyed=lambda: known() not in c10d_module._world.pg_map,
        )
        for device, name in config.items()
    }
    if "cpu" not in backends:

        def cpu() -> Backend:
            corner = c10d.PrefixStore("ringway/cpu", info.store)
            return GlooBackend(GroupInfo(**{**info.__dict__, "store": corner}))

        backends["cpu"] = cpu
    return backends


def make_bridge(registration: registry.Registration, options: Any, extra: Any) -> Bridge:
    """What torch calls to make one of our groups."""
    size = options.group_size
    info = GroupInfo(
        rank=options.group_rank,
        size=size,
        ranks=list(options.global_ranks_in_group) or list(range(size)),
        store=options.store,
        name=options.group_id,
        timeout=options.timeout.total_seconds(),
        options=extra,
    )
    # shm compares in its own segment, but only what goes through it.
    compared = not registration.one_host or mixes(world.policy, registration.name, size)
    board, created = join_board(info) if compared else (None, None)
    if compared:
        reserve_prefix(info)
    backend = mixed(world.policy, registry.make(registration, info), info)
    corner = GroupInfo(**{**info.__dict__, "store": c10d.PrefixStore("ringway/inner", info.store)})
    inner = backend.torch_group or make_gloo(corner, loopback=registration.one_host)
    backends: dict[str, Any] = dict.fromkeys(registration.devices, backend)
    others: dict[str, Any] = {}
    if "cuda" not in backends and c10d.is_nccl_available() and torch.cuda.is_available():
        nccl = _make_nccl(info)
        others["cuda"] = nccl
        backends["cuda"] = NcclBackend(info, nccl, ours=True)
    communicator = world.add(info, backends)
    communicator.compare(board, created)
    if compared and spans_hosts(info):
        communicator.compare_across(join_comparison(info, world.check, world.recorder))
    return Bridge(registration.torch_name, communicator, inner, others)


def _make_nccl(info: GroupInfo) -> Any:
    """torch stops looking for further devices at a group written in Python, so nccl is added here. It connects
    when the first CUDA tensor comes."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = c10d.default_pg_timeout
    options.global_ranks_in_group = list(info.ranks)
    options.group_name = c10d_module.GroupName(info.name)
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda", info.store), info.rank, info.size, options)


def register_with_torch(registration: registry.Registration) -> None:
    """Makes the name known to `torch.distributed.init_process_group`."""

    def create(options: Any, extra: Any) -> Bridge:
        return make_bridge(registration, options, extra)

    defaults = dict(c10d.Backend.default_device_backend_map)
    c10d.Backend.register_backend(
        registration.torch_name, create, extended_api=True, devices=list(registration.devices)
    )
    # Being known does not make it the default of a program that names no backend.
    c10d.Backend.default_device_backend_map.clear()
    c10d.Backend.default_device_backend_map.update(defaults)


def introduce_to_torch() -> None:
    """Makes the names of all our backends known to torch. From 2.14 on torch calls it by itself, through an entry
    point, when a program names one of them that has not imported ringway."""
    for registration in registry.registrations():
        register_with_torch(registration)


def leave() -> None:
    """At the interpreter's end: nobody is waited for, and no group written in Python outlives it."""
    communicators = world.communicators()
    turn = max((communicator.ranks[communicator.rank] for communicator in communicators), default=0)
    quiet = announcements.wait_for_quiet(min(LEAVING_EACH_SECONDS * (turn + 1), LEAVING_SECONDS))
    for communicator in communicators:
        if not quiet:  # its connections end with the process, and not before: that might wake what still waits
            communicator.abandon()
        communicator.close(wait=False)
    if any(isinstance(group, Bridge) for group in c10d_module._world.pg_map):
        c10d_module._world.pg_map.clear()
        c10d_module._world.pg_names.clear()
        c10d_module._world.pg_group_ranks.clear()
        c10d_module._unregister_all_process_groups()
        c10d_module._update_default_pg(None)


world = World()
