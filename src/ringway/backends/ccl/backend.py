"""oneCCL on CPU tensors, through its C API.

A call of oneCCL on host memory blocks until its part is done and cannot be interrupted. So each runs on the group's
thread (`backends/queue.py`), and its caller waits elsewhere, until the deadline or Ctrl-C.

oneCCL has no gather, no barrier and no bitwise reductions; they are composed here. Its messages have neither tags nor
"from anyone", and two ranks that both send first block each other, so messages go through gloo.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.backends.base import Backend, GroupInfo
from ringway.backends.ccl import library as ccl_library
from ringway.backends.ccl.library import BYTES, DATATYPES, REDUCTIONS, UniqueId
from ringway.backends.compose import reduced, reduced_share
from ringway.backends.exchange import exchange, from_rank_0
from ringway.backends.queue import CallQueue, Deadlines, queued
from ringway.backends.several.hosts import host_identity
from ringway.backends.tensors import even_splits, overlap, row_bytes
from ringway.backends.torch.gloo import GlooBackend
from ringway.call import BARRIER, Call, Reduce, reduces
from ringway.errors import BackendUnavailable, RingwayError
from ringway.work import Handle

_LEAVE_SECONDS = 10.0
_BITWISE = frozenset({Reduce.BAND, Reduce.BOR, Reduce.BXOR})


def obstacle() -> str | None:
    """What keeps this process from using oneCCL, if anything."""
    try:
        ccl_library.load()
    except BackendUnavailable as error:
        return error.reason
    return None


def configure(hosts: Sequence[str], rank: int) -> None:
    """oneCCL is configured by the environment only, and its defaults expect Intel MPI's launcher. The user's settings
    stay."""
    neighbours = [place for place, host in enumerate(hosts) if host == hosts[rank]]
    settings = {
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOCAL_RANK": str(neighbours.index(rank)),
        "CCL_LOCAL_SIZE": str(len(neighbours)),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


class CclBackend(Backend):
    """One communicator of oneCCL."""

    name = "ccl"
    origins: ClassVar[Mapping[str, str]] = {"send": "through gloo", "recv": "through gloo"}

    def __init__(self, info: GroupInfo) -> None:
        super().__init__(info)
        self._library = ccl_library.load()
        hosts = [said.decode() for said in exchange(info, "ccl", host_identity().encode())]
        configure(hosts, info.rank)
        self._comm = ctypes.c_void_p()
        self._closed = False
        self._queue = CallQueue(f"ccl-{info.name}", info.timeout, info.process.part(Deadlines))
        self._queue.submit(Call(BARRIER, async_op=True, group=info.name), self._connect).wait()
        corner = replace(info, store=c10d.PrefixStore("ringway/messages", info.store))
        self._messages = GlooBackend(corner)
        self.torch_group = self._messages.torch_group

    def _connect(self) -> None:
        unique = UniqueId()
        if self.rank == 0:
            self._checked("onecclGetUniqueId", ctypes.byref(unique))
        reported = from_rank_0(self.group, "ccl/id", bytes(unique) if self.rank == 0 else None)
        unique = UniqueId.from_buffer_copy(reported)
        self._checked("onecclCommInitRank", ctypes.byref(self._comm), self.size, unique, self.rank)

    def _checked(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != ccl_library.SUCCESS:
            words = self._library.onecclGetErrorString(result)
            last = self._library.onecclGetLastError(self._comm) if self._comm else None
            said = b": ".join(text for text in (words, last) if text).decode(errors="replace")
            raise RingwayError(f"{function} of group {self.group.name} failed with {result} ({said})")

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        if reduce in _BITWISE:
            return dtype is not torch.bool and reduces(dtype, reduce)
        return dtype in DATATYPES and reduce in REDUCTIONS

    def _submit(self, call: Call, body: Callable[[Call], None]) -> Handle:
        return self._queue.submit(call, lambda: body(call))

    def _run(self, function: str, *arguments: Any) -> None:
        """A collective on host memory. The communicator comes last, and no stream."""
        self._checked(function, *arguments, self._comm, None)

    # Collectives

    @queued
    def barrier(self, call: Call) -> None:
        token = torch.ones(1, device="cpu")
        place, datatype, total = token.data_ptr(), DATATYPES[token.dtype], REDUCTIONS[Reduce.SUM]
        self._run("onecclAllReduce", place, place, 1, datatype, total)

    @queued
    def broadcast(self, call: Call) -> None:
        tensor = call.outputs[0]
        if tensor.nbytes:
            self._run("onecclBroadcast", tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes, BYTES, call.peer)

    @queued
    def all_reduce(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if not source.numel():
            return
        if call.reduce in _BITWISE:
            target.copy_(reduced(call, self._exchange_evenly, self._gather_all))
            return
        self._run(
            "onecclAllReduce",
            source.data_ptr(),
            target.data_ptr(),
            source.numel(),
            DATATYPES[source.dtype],
            REDUCTIONS[call.reduce],
        )

    def _exchange_evenly(self, source: Tensor, target: Tensor) -> None:
        shares = [source.nbytes // self.size] * self.size
        self._exchange(source, shares, target, shares)

    def _exchange(self, source: Tensor, given: Sequence[int], target: Tensor, taken: Sequence[int]) -> None:
        """Bytes for every rank from `source`, bytes from every rank into `target`."""
        counts = ctypes.c_size_t * self.size
        self._run("onecclAllToAllV", source.data_ptr(), counts(*given), target.data_ptr(), counts(*taken), BYTES)

    def _gather_all(self, source: Tensor, target: Tensor) -> None:
        self._run("onecclAllGather", source.data_ptr(), target.data_ptr(), source.nbytes, BYTES)

    @queued
    def reduce(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if not source.numel():
            return
        if call.reduce in _BITWISE:
            total = reduced(call, self._exchange_evenly, self._gather_all)
            if self.rank == call.peer:
                target.copy_(total)
            return
        # oneCCL may write to the buffers of ranks that are not the root: the user's stay untouched.
        into = torch.empty_like(target)
        self._run(
            "onecclReduce",
            source.data_ptr(),
            into.data_ptr(),
            source.numel(),
            DATATYPES[source.dtype],
            REDUCTIONS[call.reduce],
            call.peer,
        )
        if self.rank == call.peer:
            target.copy_(into)

    @queued
    def reduce_scatter_tensor(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if not source.numel():
            return
        if call.reduce in _BITWISE:
            target.copy_(reduced_share(call, self._exchange_evenly).view(target.shape))
            return
        into = torch.empty_like(target) if overlap(source, target) else target
        self._run(
            "onecclReduceScatter",
            source.data_ptr(),
            into.data_ptr(),
            target.numel(),
            DATATYPES[source.dtype],
            REDUCTIONS[call.reduce],
        )
        if into is not target:
            target.copy_(into)

    @queued
    def all_gather_into_tensor(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if source.nbytes:
            self._gather_all(source.clone() if overlap(source, target) else source, target)

    @queued
    def gather(self, call: Call) -> None:
        """Every rank sends to the root, and only the root receives."""
        source, at_root = call.inputs[0], self.rank == call.peer
        if not source.nbytes:
            return
        gathered = source.new_empty((self.size, source.numel()) if at_root else 1)
        to_root = [source.nbytes if rank == call.peer else 0 for rank in range(self.size)]
        from_all = [source.nbytes if at_root else 0] * self.size
        self._exchange(source, to_root, gathered, from_all)
        for output, row in zip(call.outputs, gathered if at_root else (), strict=True):
            output.copy_(row.view(output.shape))

    @queued
    def scatter(self, call: Call) -> None:
        target, at_root = call.outputs[0], self.rank == call.peer
        if not target.nbytes:
            return
        parts = torch.cat([t.reshape(-1) for t in call.inputs]) if at_root else torch.empty_like(target)
        given = [target.nbytes if at_root else 0] * self.size
        taken = [target.nbytes if rank == call.peer else 0 for rank in range(self.size)]
        self._exchange(parts, given, target, taken)

    @queued
    def all_to_all_single(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        given = [rows * row_bytes(source) for rows in call.input_splits or even_splits(source, self.size)]
        taken = [rows * row_bytes(target) for rows in call.output_splits or even_splits(target, self.size)]
        self._exchange(source.clone() if overlap(source, target) else source, given, target, taken)

    # Messages

    def send(self, call: Call) -> Handle:
        return self._messages.send(replace(call, inputs=[_as_bytes(call.inputs[0])]))

    def recv(self, call: Call) -> Handle:
        return self._messages.recv(replace(call, outputs=[_as_bytes(call.outputs[0])]))

    # The end

    def close(self) -> None:
        self._end(wait=True)

    def abort(self) -> None:
        self._end(wait=False)

    def _end(self, wait: bool) -> None:
        """A communicator that is in use, or that a rank may still be waiting on, is not destroyed: that would crash or
        block."""
        if self._closed:
            return
        self._closed = True
        if wait and not self._queue.failed:
            last = Call(BARRIER, async_op=True, group=self.group.name)
            with suppress(RingwayError):  # other ranks may be gone; the process's exit will free it
                self._queue.submit(last, self._destroy).wait(_LEAVE_SECONDS)
        self._queue.stop(RingwayError(f"the group {self.group.name} was destroyed"))
        self._messages.close()

    def _destroy(self) -> None:
        self._checked("onecclCommDestroy", self._comm)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
