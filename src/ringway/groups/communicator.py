"""A communicator: ringway's object for one group. Its methods are the collectives, as torch spells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor

import ringway._core as _core
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.compose import padded
from ringway.backends.process import Parts
from ringway.call import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    ANY_SOURCE,
    BARRIER,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
    SEND,
    Call,
    ReduceOp,
    parse_reduce,
)
from ringway.errors import UsageError
from ringway.groups.barrier import monitored_barrier, next_barrier
from ringway.groups.call_path import CallPath
from ringway.groups.checks import listed
from ringway.groups.devices import Devices
from ringway.groups.fast_path import FastPaths
from ringway.groups.health import Health
from ringway.groups.listener import Listener
from ringway.groups.members import Members
from ringway.groups.object_frames import Frames
from ringway.groups.sparse import all_reduce_sparse
from ringway.launch.secret import given_key
from ringway.store import key_of
from ringway.work import Work, seconds

_SUM = ReduceOp.SUM
_ALL_REDUCE = ALL_REDUCE.code
_SEND, _RECV = SEND.code, RECV.code
_NO_TAG = 0
_MOST_TAG = 2**31 - 1


class Communicator:
    """The collectives of one group. Ranks in `src` and `dst` are global, in `group_src` and `group_dst` the
    group's own, as in torch. A synchronous call that succeeded returns None."""

    def __init__(
        self,
        info: GroupInfo,
        backends: Mapping[str, Backend | Callable[[], Backend]],
        recorder: _core.Recorder,
        listeners: Sequence[Listener],
    ) -> None:
        """`backends` are by device; a function instead of a backend makes it when the first call needs it."""
        self.info = info
        self.rank = info.rank
        self.size = info.size
        self.name = info.name
        self.members = Members(info.name, info.ranks)
        self.ranks = self.members.ranks
        self.record = _core.GroupRecord(recorder, info.name, info.size, self.ranks)
        self.devices = Devices(info.name, backends)
        self.paths = FastPaths(self.record)
        self.health = Health(self, info.name, self.record, self.devices, self.paths, listeners)
        self.calls = CallPath(info, recorder, self.record, self.health, self.devices, self.paths, listeners)
        self.parts = Parts()
        """What features keep for this group."""
        self._barriers = 0
        self.spans_hosts = False

    @property
    def backend(self) -> Backend:
        """The backend of the group's first device."""
        return self.devices.first

    @cached_property
    def frames(self) -> Frames:
        """What object messages of this group are made with."""
        key = key_of(self.info.store)
        if key.open:  # torch made the store: the ranks had no roll call
            key = given_key()
        return Frames(key.derive("objects", self.name))

    @property
    def fault(self) -> BaseException | None:
        """What ended the group: every further call raises it again."""
        return self.health.fault

    @property
    def closed(self) -> bool:
        return self.health.closed

    def origins(self) -> dict[str, dict[str, str]]:
        """Where each op comes from, by device: native, or composed of another op."""
        return self.devices.origins()

    def set_timeout(self, seconds: float) -> None:
        """The deadline of calls that name none, from now on."""
        self.info = replace(self.info, timeout=seconds)
        self.calls.set_timeout(seconds)

    def close(self, wait: bool = True) -> None:
        """Ends the group. Idempotent; pending calls end with an error."""
        self.health.close(wait)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        root = self.members.place("src", src, group_src)
        if log_name is None:
            done = self.calls.run_fast(BROADCAST.code, tensor, tensor, root, async_op)
            if done:
                return None if done is True else done
        return self.calls.issue(Call(BROADCAST, (tensor,), (tensor,), peer=root, async_op=async_op, label=log_name))

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, async_op: bool = False, *, log_name: str | None = None
    ) -> Work | None:
        if op is _SUM and log_name is None:
            done = self.calls.run_fast(_ALL_REDUCE, tensor, tensor, -1, async_op)
            if done:
                return None if done is True else done
        reduce, factor = parse_reduce(op)
        if getattr(tensor, "layout", None) is torch.sparse_coo:
            return all_reduce_sparse(self, tensor, reduce, async_op)
        return self.calls.issue(
            Call(ALL_REDUCE, (tensor,), (tensor,), reduce, factor, async_op=async_op, label=log_name)
        )

    def inference_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """The all_reduce with the lowest latency: always synchronous."""
        self.all_reduce(tensor, op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        root = self.members.place("dst", dst, group_dst)
        plain = op is _SUM and not async_op and log_name is None
        if plain and self.calls.run_fast(REDUCE.code, tensor, tensor, root):
            return None
        reduce, factor = parse_reduce(op)
        return self.calls.issue(
            Call(REDUCE, (tensor,), (tensor,), reduce, factor, peer=root, async_op=async_op, label=log_name)
        )

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        if not async_op and log_name is None and self.calls.run_fast(ALL_GATHER.code, tensor_list, tensor):
            return None
        return self.calls.issue(
            Call(
                ALL_GATHER, (tensor,), listed(ALL_GATHER, "tensor_list", tensor_list), async_op=async_op, label=log_name
            )
        )

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, async_op: bool = False, *, log_name: str | None = None
    ) -> Work | None:
        if log_name is None:
            done = self.calls.run_fast(ALL_GATHER_SINGLE.code, output_tensor, input_tensor, -1, async_op)
            if done:
                return None if done is True else done
        return self.calls.issue(
            Call(ALL_GATHER_SINGLE, (input_tensor,), (output_tensor,), async_op=async_op, label=log_name)
        )

    def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        root = self.members.place("dst", dst, group_dst, default=0)
        plain = not async_op and log_name is None
        if plain and self.calls.run_fast(GATHER.code, gather_list, tensor, root):
            return None
        outputs = [] if gather_list is None else listed(GATHER, "gather_list", gather_list)
        return self.calls.issue(Call(GATHER, (tensor,), outputs, peer=root, async_op=async_op, label=log_name))

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        root = self.members.place("src", src, group_src, default=0)
        plain = not async_op and log_name is None
        if plain and self.calls.run_fast(SCATTER.code, tensor, scatter_list, root):
            return None
        inputs = [] if scatter_list is None else listed(SCATTER, "scatter_list", scatter_list)
        return self.calls.issue(Call(SCATTER, inputs, (tensor,), peer=root, async_op=async_op, label=log_name))

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        plain = op is _SUM and not async_op and log_name is None
        if plain and self.calls.run_fast(REDUCE_SCATTER.code, output, input_list):
            return None
        reduce, factor = parse_reduce(op)
        inputs = listed(REDUCE_SCATTER, "input_list", input_list)
        return self.calls.issue(
            Call(REDUCE_SCATTER, inputs, (output,), reduce, factor, async_op=async_op, label=log_name)
        )

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        if op is _SUM and log_name is None:
            done = self.calls.run_fast(REDUCE_SCATTER_SINGLE.code, output, input, -1, async_op)
            if done:
                return None if done is True else done
        reduce, factor = parse_reduce(op)
        return self.calls.issue(
            Call(REDUCE_SCATTER_SINGLE, (input,), (output,), reduce, factor, async_op=async_op, label=log_name)
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor_list: Sequence[Tensor],
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        outputs = listed(ALL_TO_ALL, "output_tensor_list", output_tensor_list)
        inputs = listed(ALL_TO_ALL, "input_tensor_list", input_tensor_list)
        return self.calls.issue(Call(ALL_TO_ALL, inputs, outputs, async_op=async_op, label=log_name))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        if not (output_split_sizes or input_split_sizes) and log_name is None:
            done = self.calls.run_fast(ALL_TO_ALL_SINGLE.code, output, input, -1, async_op)
            if done:
                return None if done is True else done
        return self.calls.issue(
            Call(
                ALL_TO_ALL_SINGLE,
                (input,),
                (output,),
                input_splits=_splits("input", input_split_sizes),
                output_splits=_splits("output", output_split_sizes),
                async_op=async_op,
                label=log_name,
            )
        )

    # Coalesced forms

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        reduce, factor = parse_reduce(op)
        members = listed(ALL_REDUCE_COALESCED, "tensors", tensors)
        return self.calls.issue(
            Call(ALL_REDUCE_COALESCED, members, members, reduce, factor, async_op=async_op, label=log_name)
        )

    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[Sequence[Tensor]],
        input_tensor_list: Sequence[Tensor],
        async_op: bool = False,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        """`output_tensor_lists[r][i]` receives rank r's input i, as torch has it."""
        inputs = listed(ALL_GATHER_COALESCED, "input_tensor_list", input_tensor_list)
        rows = [
            listed(ALL_GATHER_COALESCED, f"output_tensor_lists[{rank}]", row)
            for rank, row in enumerate(listed(ALL_GATHER_COALESCED, "output_tensor_lists", output_tensor_lists))
        ]
        if len(rows) != self.size:
            raise UsageError(
                f"all_gather_coalesced: output_tensor_lists has {len(rows)} lists, one for each of the group's "
                f"{self.size} ranks is needed"
            )
        for rank, row in enumerate(rows):
            if len(row) != len(inputs):
                raise UsageError(
                    f"all_gather_coalesced: output_tensor_lists[{rank}] has {len(row)} tensors for {len(inputs)} inputs"
                )
        by_input = [row[i] for i in range(len(inputs)) for row in rows]
        return self.calls.issue(Call(ALL_GATHER_COALESCED, inputs, by_input, async_op=async_op, label=log_name))

    def reduce_scatter_coalesced(
        self, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, *, log_name: str | None = None
    ) -> list[Tensor]:
        """Reduces each tensor and returns this rank's flat share of each. The last share is shorter, or empty, if a
        tensor's size does not divide by the group's."""
        reduce, factor = parse_reduce(op)
        members = listed(REDUCE_SCATTER_COALESCED, "tensors", tensors)
        sources = [padded(_flat(tensor), self.size) for tensor in members]
        shares = [tensor.new_empty(tensor.numel() // self.size) for tensor in sources]
        self.calls.issue(Call(REDUCE_SCATTER_COALESCED, sources, shares, reduce, factor, label=log_name))
        return [
            share[: max(0, min(share.numel(), tensor.numel() - self.rank * share.numel()))]
            for tensor, share in zip(members, shares, strict=True)
        ]

    # Point-to-point

    def send(
        self,
        tensor: Tensor,
        dst: int | None = None,
        tag: int = 0,
        group_dst: int | None = None,
        *,
        log_name: str | None = None,
    ) -> None:
        self._send(tensor, dst, tag, group_dst, log_name, async_op=False)

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        tag: int = 0,
        group_dst: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        return self._send(tensor, dst, tag, group_dst, log_name, async_op=True)

    def _send(
        self, tensor: Tensor, dst: int | None, tag: int, group_dst: int | None, label: str | None, async_op: bool
    ) -> Work | None:
        peer = self.members.place("dst", dst, group_dst)
        if peer == self.rank:
            raise UsageError("a rank cannot send to itself")
        if tag is not _NO_TAG:
            tag = _tag(tag)
        if label is None:
            done = self.calls.run_fast(_SEND, (), tensor, peer, async_op, tag)
            if done:
                return None if done is True else done
        return self.calls.issue(Call(SEND, (tensor,), (), peer=peer, tag=tag, async_op=async_op, label=label))

    def recv(
        self,
        tensor: Tensor,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        *,
        log_name: str | None = None,
    ) -> int:
        """Returns the global rank that the message came from."""
        peer = self._source(src, group_src)
        if tag is not _NO_TAG:
            tag = _tag(tag)
        if log_name is None and self.calls.run_fast(_RECV, tensor, (), peer, False, tag):
            return self.ranks[peer]
        call = Call(RECV, (), (tensor,), peer=peer, tag=tag, label=log_name)
        self.calls.issue(call)
        return self.ranks[call.peer]

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        peer = self._source(src, group_src)
        if tag is not _NO_TAG:
            tag = _tag(tag)
        if log_name is None:
            done = self.calls.run_fast(_RECV, tensor, (), peer, True, tag)
            if done:
                return None if done is True else done
        return self.calls.issue(Call(RECV, (), (tensor,), peer=peer, tag=tag, async_op=True, label=log_name))

    def _source(self, src: int | None, group_src: int | None) -> int:
        peer = ANY_SOURCE if src is None and group_src is None else self.members.place("src", src, group_src)
        if peer == self.rank:
            raise UsageError("a rank cannot receive from itself")
        return peer

    # Barriers

    def barrier(
        self,
        async_op: bool = False,
        device_ids: Sequence[int] | None = None,
        timeout: timedelta | float | None = None,
        *,
        log_name: str | None = None,
    ) -> Work | None:
        plain = timeout is None and not async_op and log_name is None
        if plain and self.calls.run_fast(BARRIER.code, (), ()):
            return None
        device = torch.device("cuda", device_ids[0]) if device_ids else None
        return self.calls.issue(
            Call(BARRIER, async_op=async_op, timeout=seconds(timeout), label=log_name, device=device)
        )

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False, *, log_name: str | None = None
    ) -> None:
        """A barrier through the store, on any backend, whose error names the missing ranks."""
        self.health.require()
        at_once = timeout in (0, timedelta(0))
        limit = 0.0 if at_once else seconds(timeout) or self.info.timeout
        self._barriers = next_barrier(self.info, self._barriers)
        with self.calls.recorded(BARRIER, log_name or "monitored_barrier"):
            monitored_barrier(self.info, self._barriers, limit, wait_all_ranks)


def _splits(what: str, sizes: Sequence[int] | None) -> list[int] | None:
    """None or an empty list means equal shares, as in torch."""
    try:
        return None if sizes is None else [index(size) for size in sizes] or None
    except TypeError:
        raise UsageError(f"all_to_all_single: {what}_split_sizes is a list of integers, not {sizes!r}") from None


def _tag(tag: int) -> int:
    try:
        number = index(tag)
    except TypeError:
        raise UsageError(f"tag={tag!r} is not an integer") from None
    if not -_MOST_TAG <= number <= _MOST_TAG:
        raise UsageError(f"tag={tag} is not between -{_MOST_TAG} and {_MOST_TAG}")
    return number


def _flat(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"reduce_scatter_coalesced takes tensors, not {type(tensor).__name__}")
    return tensor.detach().reshape(-1)
