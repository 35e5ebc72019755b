"""torch's ProcessGroupNCCL, made so that ringway decides what happens when a call fails.

Left to itself, torch's watchdog ends the process at a timeout or an error. Here it only cleans up, and its timeout is
out of reach: ringway notices dead peers, overdue calls and mismatches first, aborts the communicator, and raises.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d

from ringway import torch_versions
from ringway.backends.base import GroupInfo
from ringway.backends.exchange import exchange
from ringway.backends.nccl.connections import Connecting
from ringway.errors import BackendUnavailable, RendezvousError

_NEVER = timedelta(days=365)
"""torch's timeout for the group's calls. Each call's real deadline is kept by the device watch."""

_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up, but leave the process alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that ends the process when the watchdog seems stuck
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no flag in the store at which other ranks end their processes
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long, with its lock held
}
_environment = threading.Lock()


_TorchsNccl: Any = c10d.ProcessGroupNCCL if c10d.is_nccl_available() else object


class Nccl(_TorchsNccl):  # type: ignore[misc]
    """torch's nccl. If torch changes the group's timeout (`_set_pg_timeout`), it reports that and keeps its own."""

    timeout_changed: Callable[[float], None] | None = None
    connects_later = True
    """Whether torch makes its communicators in the calls that need them."""
    meet: Callable[[], object] | None = None
    """Waits for the other ranks, for the group's timeout."""
    limit = _NEVER.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        if self.timeout_changed is not None:
            self.timeout_changed(timeout.total_seconds())

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """torch calls this while it makes a group that is bound to a device. NCCL waits for the ranks, and nothing can
        end that (`connections.py`), so they wait for each other first."""
        if self.meet is not None:
            self.meet()
        connect = super().eager_connect_single_device

        def on_its_device() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            connect(device)

        connecting = Connecting(on_its_device)
        connecting.begin()
        if not connecting.wait(self.limit):
            raise RendezvousError(f"NCCL has not connected within {self.limit:g} s: a rank may have died meanwhile")
        self.connects_later = False


def make_nccl(info: GroupInfo) -> Any:
    """torch's nccl for the group, with the user's options. It connects at the first call, or at once if the group is
    bound to a device."""
    if not c10d.is_nccl_available():
        raise BackendUnavailable("nccl", "this build of torch has no NCCL", remedy="Install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise BackendUnavailable("nccl", "no CUDA device is visible")
    options = _options(info)
    with _watchdog_only_cleans_up():
        group = Nccl(c10d.PrefixStore("cuda", info.store), info.rank, info.size, options)
    group._set_sequence_number_for_group()
    if info.size > 1:
        group.meet, group.limit = partial(exchange, info, "NCCL's connection", b""), info.timeout
    return group


def _options(info: GroupInfo) -> Any:
    kind = c10d.ProcessGroupNCCL.Options
    # A copy: torch changes the options of a group, and the user may make several groups with the same ones.
    options = copy.deepcopy(info.options) if isinstance(info.options, kind) else kind()
    options._timeout = _NEVER
    options.global_ranks_in_group = list(info.ranks)
    options.group_name = info.name  # type: ignore[assignment]
    if info.split_from is not None:
        options.split_from = info.split_from
        options.split_color = torch_versions.split_color(info.ranks)
    return options


@contextmanager
def _watchdog_only_cleans_up() -> Iterator[None]:
    """torch reads these variables when it makes a group. The user's values are put back for torch's own groups."""
    with _environment:
        before = {name: os.environ.get(name) for name in _WATCHDOG}
        os.environ.update(_WATCHDOG)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def split_nccl(parent: Any, info: GroupInfo, ranks: list[int], options: Any, name: str, description: str) -> Any:
    """torch's nccl for some of the ranks of the group `info`, whose nccl is `parent`, made by ncclCommSplit. Every rank
    of that group calls this; None on those that are not among `ranks`."""
    options = copy.deepcopy(parent.options if options is None else options)
    options._timeout = _NEVER
    # A plain group of torch's around the parent: it knows how to split its backends.
    whole: Any = c10d.ProcessGroup(info.store, info.rank, info.size)
    whole._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    whole._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, parent)
    with _watchdog_only_cleans_up():
        part = whole.split_group(ranks, timeout=_NEVER, opts=options, group_name=name, group_desc=description)
    return None if part is None else part._get_backend(torch.device("cuda"))


class Aborts:
    """Aborts communicators. Part of `Process`.

    A rank that died is often a member of several groups. NCCL may wait for one communicator's kernels while it aborts
    another, so all of them are aborted in one NCCL group.
    """

    def __init__(self) -> None:
        self._collecting = threading.local()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is aborted inside is aborted at the end, in one go."""
        groups = self._collecting.groups = []
        try:
            yield
        finally:
            self._collecting.groups = None
            if groups:
                _abort_all(groups)

    def abort(self, group: Any) -> None:
        collected = getattr(self._collecting, "groups", None)
        if collected is None:
            _abort_all([group])
        else:
            collected.append(group)


def _abort_all(groups: list[Any]) -> None:
    groups[0]._group_start()
    try:
        for group in groups:
            with suppress(RuntimeError):  # a group that never connected has nothing to abort
                group.abort()
    finally:
        with suppress(RuntimeError):
            groups[0]._group_end()
