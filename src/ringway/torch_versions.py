"""Everything that makes up for differences between versions of torch. Each piece names the versions it serves.

Three pieces are methods that torch calls, and live with their classes: `Bridge.set_timeout` (torch calls it from 2.15
on), `Gloo._set_default_timeout` (torch calls it before 2.15), and the old and new names of `Bridge`'s collectives.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module
from torch._C import _distributed_c10d as native
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel

from ringway.torch_patches import enabled, patch

T = TypeVar("T")
Called = TypeVar("Called", bound=Callable[..., Any])

_BEYOND_ANY_COUNT = 1 << 40
"""More groups than torch will ever count."""


class GroupCounts:
    """How many groups each set of ranks has made on its own. All versions.

    Groups that only their members make (`use_local_synchronization`) need a name on which the members agree. torch
    derives it from numbers that differ between ranks: before 2.15 from the number of groups that the rank is in, from
    2.15 on from a count that the group itself raises on its members alone. The ranks would then wait for each other
    forever, at this group or at a later one. So these groups are counted here, for each set of members.
    """

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[c10d.ProcessGroup, Counter[frozenset[int]]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def members_only(self, ranks: Sequence[Any]) -> Iterator[None]:
        """Wrap the creation of a group that only its members make."""
        if not enabled("new_group"):
            yield
            return
        torch_world, members = c10d_module._world, frozenset(map(index, ranks))
        counts = self._counts.setdefault(c10d_module._get_default_group(), Counter())
        number = _BEYOND_ANY_COUNT + counts[members]
        count, hashed = torch_world.group_count, getattr(c10d_module, "_hash_ranks_to_str", None)
        named = False

        def name(ranks: Sequence[int]) -> str:
            nonlocal named
            named = True
            return hashlib.sha1(f"{'_'.join(map(str, ranks))}_{number}".encode(), usedforsecurity=False).hexdigest()

        torch_world.group_count = number
        if hashed is not None:
            c10d_module._hash_ranks_to_str = name
        try:
            yield
        finally:
            if named or torch_world.group_count != number:  # torch did not refuse to make the group
                counts[members] += 1
            torch_world.group_count = count
            if hashed is not None:
                c10d_module._hash_ranks_to_str = hashed


def undo_failed_start() -> None:
    """After a failed `init_process_group`. All versions: torch has counted a group that does not exist, so the next
    start would name its groups differently from the other ranks."""
    if not c10d.is_initialized():
        c10d_module._world.group_count = 0


def reconfigures() -> bool:
    """Whether `init_process_group` has the argument `enable_reconfigure`. From 2.15 on."""
    return "enable_reconfigure" in inspect.signature(c10d.init_process_group).parameters


def sorts_ranks() -> bool:
    """Whether `new_group` sorts the ranks of every group. Versions before 2.13 may have no argument `sort_ranks`."""
    return "sort_ranks" not in inspect.signature(c10d.new_group).parameters


def is_async(options: Any) -> bool:
    """Whether a call with torch's options is asynchronous, as one without options is. Versions before 2.13 may have
    options without this field."""
    return bool(getattr(options, "asyncOp", True))


def set_async(options: Any, async_op: bool) -> None:
    """Has torch run a synchronous call on the current stream, if its options have this field. Versions before 2.13 may
    have options without it."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM. Older versions than 2.13 may expose it only to pickle."""
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


def dlpack_exchange_api() -> Any:
    """The C functions with which native code reads tensors. None in torch 2.8 and 2.9, which have no such functions."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def flight_trace() -> dict[str, Any]:
    """The contents of torch's flight recorder. Older versions have it only in builds with nccl, under another name."""
    dump = getattr(native, "_dump_fr_trace", None) or getattr(native, "_dump_nccl_trace", None)
    trace: dict[str, Any] = {} if dump is None else pickle.loads(dump())
    return trace


def register_backend(name: str, create: Any, devices: Sequence[str]) -> None:
    """Makes a backend's name known to torch. All versions: torch makes the first backend registered for a device the
    default of programs that name none; this undoes that."""
    defaults = dict(c10d.Backend.default_device_backend_map)
    c10d.Backend.register_backend(name, create, extended_api=True, devices=list(devices))
    c10d.Backend.default_device_backend_map.clear()
    c10d.Backend.default_device_backend_map.update(defaults)


def split_source(options: Any) -> Any:
    """torch's backend whose communicator a new group shares, or None. If there is one, the ranks that are not members
    split it too, so the members must. Before 2.15 torch does not pass it to a backend's maker."""
    if hasattr(options, "split_from"):
        return options.split_from
    if not c10d.is_initialized() or c10d_module._get_default_group().bound_device_id is None:
        return None
    return c10d_module._get_split_source(c10d_module._get_default_group())


def split_color(ranks: Sequence[int]) -> int:
    """The number by which the members of a split group find each other. All versions."""
    color: int = c10d_module._process_group_color(list(ranks))
    return color


def untraced(kind: type[T]) -> type[T]:
    """Class decorator: `torch.compile` runs the methods of this class as they are, and what they call. All versions:
    DDP's C++ calls a group's methods in the middle of a compiled region, where torch would trace them and fail.
    `torch.compiler.disable` would do the same, but imports the compiler and adds a wrapper to each call."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)

    def mark(code: CodeType) -> None:
        eval_frame.set_code_exec_strategy(code, skip)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                mark(inner)

    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            mark(method.__code__)
    return kind


def constant_in_graphs(function: Called) -> Called:
    """Function decorator: `torch.compile` calls the function while it traces, and the graph uses what it returned. All
    versions: `torch.compiler.assume_constant_result` sets the same mark, but imports the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def actual_group(group: T) -> T:
    """The group that a function of `constant_in_graphs` was given. From 2.13 on, it gets torch's stand-in for it."""
    return getattr(group, "real_obj", group)


def batch_messages(kind: type[c10d.ProcessGroup], batch: Callable[[Any], Any]) -> None:
    """Gives `batch` the messages of torch's `batch_isend_irecv` on groups of this kind. Before 2.15 torch starts
    messages together only if the group's type is exactly ProcessGroup. On nccl a receive would then wait for a send
    behind it."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        return

    def by(torchs: Any) -> Any:
        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            group = p2p_op_list[0].group if p2p_op_list and isinstance(p2p_op_list[0], c10d.P2POp) else None
            ours = isinstance(group or c10d_module._world.default_pg, kind)
            return batch(p2p_op_list) if ours else torchs(p2p_op_list)

        return batch_isend_irecv

    patch("batch_isend_irecv", "batch_isend_irecv", c10d_module, c10d, by=by)


def builtin_comm_hooks(kind: type[c10d.ProcessGroup]) -> None:
    """Makes DDP's built-in hook FP16_COMPRESS work on groups of this kind. All versions: the hook requires that the
    future of the all_reduce holds a list of tensors in C++, and a future that is made in Python holds a Python object.
    torch has the same hook in Python."""

    def by(torchs: Any) -> Any:
        def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
            if isinstance(self.process_group, kind) and comm_hook_type == native.BuiltinCommHookType.FP16_COMPRESS:
                from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

                self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
            else:
                torchs(self, comm_hook_type)

        return _register_builtin_comm_hook

    patch("builtin_comm_hook", "_register_builtin_comm_hook", DistributedDataParallel, by=by)


def monitored_barriers(kind: Any) -> None:
    """Lets torch's `monitored_barrier` take groups of this kind. All versions: it takes only groups named gloo."""

    def by(torchs: Any) -> Any:
        def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
            own: Any = group or c10d_module._world.default_pg
            if not isinstance(own, kind):
                return torchs(group, timeout, wait_all_ranks)
            return own.monitored_barrier(timeout, wait_all_ranks)

        return monitored_barrier

    patch("monitored_barrier", "monitored_barrier", c10d_module, c10d, by=by)
