"""The object collectives as functions: torch's six, and three that return their result.

`weights_only=True` (torch has it from 2.15 on) sends tensors, numbers, text and containers of them, and runs no code
when they are read.
"""

from __future__ import annotations

from typing import Any

import torch

from ringway.api.collectives import Group, member_of
from ringway.call import ReduceOp
from ringway.errors import UsageError
from ringway.groups.objects import ObjectChannel, reduce_objects
from ringway.groups.world import world


def _channel(group: Group, op: str, weights_only: bool = False) -> ObjectChannel | None:
    member = member_of(group, op)
    return None if member is None else ObjectChannel(member, world.max_object_bytes, weights_only)


def _places(op: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{op}: {name} must be a list, not {type(value).__name__}")
    return value


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None, weights_only: bool = False) -> None:
    """Fill `object_list` with all ranks' objects, in rank order."""
    channel = _channel(group, "all_gather_object", weights_only)
    if channel is None:
        return
    size = channel.communicator.size
    if len(_places("all_gather_object", "object_list", object_list)) < size:
        raise UsageError(f"all_gather_object: object_list has {len(object_list)} places for {size} ranks")
    for place, value in enumerate(channel.all_gather(obj)):
        object_list[place] = value


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Fill the destination's `object_gather_list` with all ranks' objects, in rank order."""
    channel = _channel(group, "gather_object", weights_only)
    if channel is None:
        return
    member = channel.communicator
    root = member.members.place("dst", dst, group_dst, default=0)
    if member.rank == root and (object_gather_list is None or len(object_gather_list) < member.size):
        raise UsageError(f"gather_object: the destination needs an object_gather_list of {member.size} places")
    if member.rank != root and object_gather_list is not None:
        raise UsageError("gather_object: only the destination passes object_gather_list")
    gathered = channel.gather(obj, root)
    if gathered is not None and object_gather_list is not None:
        object_gather_list[: member.size] = gathered


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Fill every rank's `object_list` with the source's objects. `device` is accepted for compatibility with torch;
    objects always travel on the CPU."""
    channel = _channel(group, "broadcast_object_list", weights_only)
    if channel is None:
        return
    root = channel.communicator.members.place("src", src, group_src, default=0)
    _places("broadcast_object_list", "object_list", object_list)
    _fill("broadcast_object_list", object_list, channel.broadcast(object_list, root))


def _fill(op: str, places: list[Any], values: list[Any]) -> None:
    if len(values) != len(places):
        raise UsageError(f"{op}: the sender's list has {len(values)} objects, but this rank's has {len(places)} places")
    places[:] = values


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Put one object of the source's list into each rank's output list."""
    channel = _channel(group, "scatter_object_list", weights_only)
    if channel is None:
        return
    member = channel.communicator
    root = member.members.place("src", src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise UsageError("scatter_object_list: scatter_object_output_list must be a list with at least one place")
    if member.rank == root and (scatter_object_input_list is None or len(scatter_object_input_list) != member.size):
        raise UsageError(f"scatter_object_list: the source needs {member.size} objects, one per rank")
    scatter_object_output_list[0] = channel.scatter(scatter_object_input_list, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send one rank the objects of this list. `device` and `use_batch` are accepted for compatibility with torch;
    objects always travel on the CPU."""
    channel = _channel(group, "send_object_list", weights_only)
    if channel is not None:
        objects = _places("send_object_list", "object_list", object_list)
        channel.send(objects, channel.communicator.members.place("dst", dst, group_dst))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Fill `object_list` with the objects that a rank sends. Returns the global rank of the sender; -1 on a rank
    outside the group."""
    channel = _channel(group, "recv_object_list", weights_only)
    if channel is None:
        return -1
    member = channel.communicator
    anyone = src is None and group_src is None
    _places("recv_object_list", "object_list", object_list)
    values, sender = channel.recv(None if anyone else member.members.place("src", src, group_src))
    _fill("recv_object_list", object_list, values)
    return member.ranks[sender]


def allgather_object(obj: Any, group: Group = None) -> list[Any]:
    """All ranks' objects, in rank order."""
    channel = _channel(group, "allgather_object")
    return [] if channel is None else channel.all_gather(obj)


def broadcast_object(obj: Any, src: int = 0, group: Group = None) -> Any:
    """The object of rank `src` (a global rank)."""
    channel = _channel(group, "broadcast_object")
    return obj if channel is None else channel.broadcast(obj, channel.communicator.members.place("src", src, None))


def reduce_object(obj: Any, op: Any = ReduceOp.SUM, group: Group = None) -> Any:
    """Reduce all ranks' objects in rank order, and return the result on every rank. Objects are numbers, tensors,
    arrays, and dicts, lists and tuples of them; `op` may be a function of two objects."""
    member = member_of(group, "reduce_object")
    if member is None:
        return obj
    gathered = ObjectChannel(member, world.max_object_bytes).all_gather(obj)
    return reduce_objects(gathered, member.ranks, op)
