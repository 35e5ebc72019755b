"""How a process leaves its groups: at interpreter exit, and in a forked child."""

from __future__ import annotations

import faulthandler
import gc
from contextlib import suppress
from pathlib import Path

import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.backends.torch.handles import PendingCallbacks, WaiterThreads
from ringway.errors import UsageError
from ringway.groups.bridge import Bridge
from ringway.groups.world import FORKED, world
from ringway.references import never_destroy
from ringway.store import Deadline, beneath_prefixes

_SECONDS = 2.0
"""How long a rank that exits waits for calls in flight: its peers may still need them."""
_MONITOR_SECONDS = 0.2


def leave_at_exit() -> None:
    """Closes every group without waiting for other ranks. No group written in Python may outlive the interpreter."""
    quiet, waiters = world.process.part(PendingCallbacks).wait_for_quiet(_SECONDS), world.process.part(WaiterThreads)
    if not quiet or waiters.busy():
        # Threads inside torch wake up when a peer exits, perhaps while this interpreter is being finalized.
        faulthandler.disable()  # its own end would put the earlier signal handlers back
        gloo = [] if quiet else _threads("pt_gloo_runloop")  # run its collectives and their callbacks
        _core.leave_threads_behind(waiters.native_ids() + gloo)
    for communicator in world.communicators():
        if not quiet:  # keep its connections until the process ends: closing them could wake threads that still wait
            communicator.devices.abandon()
        communicator.close(wait=False)
    if not quiet:  # destroying a group joins its threads, which sleep by now
        for group in c10d_module._world.pg_map:
            never_destroy(group)
    if any(isinstance(group, Bridge) for group in c10d_module._world.pg_map):
        c10d_module._world.pg_map.clear()
        c10d_module._world.pg_names.clear()
        c10d_module._world.pg_group_ranks.clear()
        c10d_module._unregister_all_process_groups()
        c10d_module._update_default_pg(None)
    # Those of groups that are closed end by themselves; a group that the program made with torch and did not destroy
    # goes on.
    if Deadline(_MONITOR_SECONDS).poll(lambda: not _has_monitors() or None) is None:
        for group in c10d_module._world.pg_map:  # its destructor would wait for a monitor that sleeps by then
            never_destroy(group)
        faulthandler.disable()
        # A monitor is not sent to sleep: it may be about to take the GIL, and hold the lock that guards it.
        _core.leave_threads_behind([])
    _core.begin_exit()


def _has_monitors() -> bool:
    """Whether threads of torch's nccl groups ask a store that is written in Python, as that of a job with a secret.
    They ask once a second, and CPython ends a thread that asks an interpreter which is being finalized."""
    if world.store is None or type(beneath_prefixes(world.store)).__module__.startswith("torch"):
        return False
    return bool(_threads("pt_nccl_heartbt"))


def _threads(*names: str) -> list[int]:
    """The threads of this process with these names, by the kernel's numbers."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended in between
            if (task / "comm").read_text().strip() in names:
                found.append(int(task.name))
    return found


def leave_in_child() -> None:
    """A forked child is not a member of its parent's groups: its calls on them are refused, and its exit must not
    disturb them."""
    # Destroying a group joins its threads, which do not exist in the child. Never destroy the parent's groups here:
    # neither those in use nor those that wait for the garbage collector.
    gc.freeze()
    for group in c10d_module._world.pg_map:
        never_destroy(group)
    error = UsageError(FORKED)
    for communicator in world.start_over():
        never_destroy(communicator)
        communicator.health.poison(error)
    world.process.forked()
