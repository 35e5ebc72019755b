"""`shm` for CUDA tensors: ranks of one host that share a GPU, or GPUs with peer access.

Every call goes one of two ways, the same on every rank:

- **direct**: the ranks meet in the group's segment, where they compare the call and show each other where its memory
  is (csrc/shm/device_link.h). Each maps the others' memory and enqueues its part: copies, or a kernel that reduces its
  share. The streams of the ranks wait for each other without the host. A synchronous call returns when its part is
  enqueued. An asynchronous one meets on the engine's thread, and its part goes to a stream of its own.
- **through the host**: the tensors are copied to host memory, shm's own collective runs there, and the results are
  copied back. That is quicker for small messages, and works for everything.

PREMUL_SUM and reductions of bool always go through the host, and so does everything if the ranks cannot share device
memory. Messages are direct once the ranks have met in a collective: the sender copies the tensor to memory that it
shares, and the receiver copies it from there.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import profiler

import ringway._core as _core
from ringway import call as ops
from ringway.backends.base import GroupInfo, Health
from ringway.backends.compose import in_parts
from ringway.backends.device_watch import DeviceWatch
from ringway.backends.shm.backend import ShmBackend
from ringway.backends.shm.cuda_device import Cuda, reduces_as
from ringway.backends.shm.cuda_handles import DirectHandle, HostHandle
from ringway.backends.shm.cuda_parts import PARTS, Part, Span, count_of, reduced_as, rounded
from ringway.call import OPS, Call, Op, Reduce
from ringway.errors import RingwayError, UsageError
from ringway.work import DONE, Handle

_FACTS_BYTES = 512
_PROBE_BYTES = 2 << 20
_CAPTURED = 1 << 35
_SLICE = 0.05
_ROOM_BYTES = 1 << 20
"""Messages that are not larger have room in pinned memory, in case they come through the host."""
_BY_ONE_RANK = (ops.ALL_REDUCE, ops.REDUCE, ops.BROADCAST, ops.GATHER)
"""Calls of which one rank does all the work if the ranks' processes take turns on a GPU."""
_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What bytes are moved as."""


class ShmCudaBackend(ShmBackend):
    """One rank's CUDA tensors, in a group whose ranks share a host."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    make_device: ClassVar[type[Cuda]] = Cuda

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.device = self.make_device()
        self.watch = group.process.part(DeviceWatch)
        self._order = group.process.part(_core.LaunchOrder)
        self._link: _core.ShmDevice | None = None
        self._met = group.size == 1 or group.size > _core.SHM_DEVICE_RANKS
        self._from: list[int] = []
        self._reduces = False
        self._switches = self.takes_turns = self.one_gpu = False
        self._staging: Span = (0, 0)
        self._ending = threading.Lock()
        self._record: _core.GroupRecord | None = None
        self._health: Health | None = None
        self._path: _core.ShmDeviceFastPath | None = None
        self.why_host = f"groups of more than {_core.SHM_DEVICE_RANKS} ranks use host memory" if self._met else ""

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        self._record, self._health = record, health
        device = self.device
        self._path = _core.ShmDeviceFastPath(
            self._native, record, device.kind, vars(profiler), device.stream_of, device.kernel_of
        )
        self._attach_path()
        return (self._path,)

    def _attach_path(self) -> None:
        if self._path is not None:
            link = self._link if self._met else None
            self._path.attach(link, self._from, self._reduces, self.takes_turns, self.one_gpu)

    def fault(self) -> BaseException | None:
        """What ended the group, if anything did."""
        found = self._native.fault()
        return None if found is None else self._faults.error(1, found)

    # The two ways

    def _collective(self, call: Call) -> Handle:
        near = next(iter((*call.outputs, *call.inputs)), None)
        if near is None:
            return super()._collective(call)
        if self.size == 1:
            return self._alone(call)
        captured = self.device.is_capturing()
        with in_parts():
            self._meet_first(call, near)
        if self._is_direct(call, captured):
            return self._directly(call, near, captured)
        if captured:
            reason = self.why_host or f"{call.op.name} of {call.dtype} with {call.reduce.name} needs host memory"
            raise UsageError(f"{call.describe()} cannot be captured in a CUDA graph on shm: {reason}")
        return self._through_host(call, near)

    broadcast = all_reduce = reduce = all_gather = all_gather_into_tensor = gather = scatter = _collective
    reduce_scatter = reduce_scatter_tensor = all_to_all = all_to_all_single = barrier = _collective

    def _is_direct(self, call: Call, captured: bool) -> bool:
        """Decided by what all ranks agree on. An all_to_all's sizes may differ, so they do not matter."""
        if self._link is None:
            return False
        if "reduce" in call.op.agree and not (self._reduces and reduces_as(call.inputs[0].dtype, call.reduce)):
            return False
        paired = call.op is ops.ALL_TO_ALL or call.op is ops.ALL_TO_ALL_SINGLE
        return captured or paired or call.nbytes >= self._from[call.op.code]

    def direct_from(self, op: Op) -> int:
        """The bytes from which a call is direct: more ranks take longer to meet (measured on one GPU)."""
        if op is ops.SEND:
            return (1 << 20) if self._switches else (8 << 10)
        if self._switches:
            return 0 if self.takes_turns and op in _BY_ONE_RANK else (256 << 10) * self.size
        if op is ops.GATHER or op is ops.SCATTER:
            return 0  # their lists have no quick way through the host
        return ((16 if op is ops.BROADCAST else 8) << 10) * self.size

    def _alone(self, call: Call) -> Handle:
        for source, target in zip(call.inputs, call.outputs, strict=True):
            if call.reduce is Reduce.PREMUL_SUM and "reduce" in call.op.agree:
                target.copy_(source * call.factor)
            elif source is not target:
                target.copy_(source.view(target.shape))
        return DONE

    # Through the host

    def _through_host(self, call: Call, near: Tensor) -> Handle:
        reads = self._reads(call)
        tensors = {id(tensor): tensor for tensor in (*call.inputs, *call.outputs)}
        hosts = {key: self.device.on_host(tensor) for key, tensor in tensors.items()}
        self.device.download([(hosts[id(tensor)], tensor) for tensor in reads], near)
        inner = replace(
            call,
            inputs=[hosts[id(tensor)] for tensor in call.inputs],
            outputs=[hosts[id(tensor)] for tensor in call.outputs],
        )
        inner.record = call.record
        handle = super()._collective(inner)
        results = [(tensor, hosts[id(tensor)]) for tensor in self._writes(call)]
        if not call.async_op:
            self.device.upload(results)
            return DONE
        return HostHandle(self.device, near, handle, lambda: self.device.upload(results))

    def _reads(self, call: Call) -> Sequence[Tensor]:
        return () if call.op is ops.BROADCAST and self.rank != call.peer else call.inputs

    def _writes(self, call: Call) -> Sequence[Tensor]:
        if call.op is ops.BROADCAST and self.rank == call.peer:
            return ()
        return () if call.op is ops.REDUCE and self.rank != call.peer else call.outputs

    # Messages. The sender decides how one travels, so a receive takes both: the bytes, or where on the device they are.

    def _start_message(self, call: Call) -> Handle:
        near = (*call.inputs, *call.outputs)[0]
        if self.device.is_capturing():
            raise UsageError(f"{call.describe()} cannot be captured in a CUDA graph on shm: it needs the host")
        return self._send(call, near) if call.op is ops.SEND else self._receive(call, near)

    def _send(self, call: Call, near: Tensor) -> Handle:
        link = self._link
        if link is not None and self._met and self._sends_directly(link, near):
            stream, memory = self.device.raw(self.device.current(near)), (near.data_ptr(), near.nbytes)
            task = link.send(self._native, call, self._timeout(call), stream, memory, call.peer)
            if task is not None:
                return self._under_way(call, task)
        host = self.device.on_host(near)
        self.device.download([(host, near)], near)
        inner = replace(call, inputs=[host])
        inner.record = call.record
        return super()._start_message(inner)

    def _sends_directly(self, link: _core.ShmDevice, near: Tensor) -> bool:
        fits = self.device.index(near) == link.device_index and near.nbytes > 0
        return fits and near.nbytes >= self._from[ops.SEND.code]

    def _receive(self, call: Call, near: Tensor) -> Handle:
        always_host = self._met and self._link is None
        host = self.device.on_host(
            near if always_host or near.nbytes <= _ROOM_BYTES else torch.empty(1, dtype=near.dtype)
        )
        if call.async_op:
            self.device.download([], near)  # the current stream may still use the memory that the message comes to
        handle = self._under_way(call, self._native.message(call, self._timeout(call), room=host))

        def deliver() -> None:
            reference, link = handle.task.reference(), self._link
            if reference is None:
                owned = handle.task.owned()
                source = host if owned is None else torch.frombuffer(bytearray(owned), dtype=near.dtype)
                self.device.upload([(near, source.view(near.shape))])
                return
            if link is None:
                raise RingwayError(f"{call.describe()}: the group was closed by another thread")
            target = near
            if self.device.index(near) != link.device_index:
                target = torch.empty_like(near, device=torch.device("cuda", link.device_index))
            stream, to = self.device.raw(self.device.current(target)), (target.data_ptr(), target.nbytes)
            link.fetch(stream, handle.source, reference, to, call, near.numel(), self._timeout(call))
            if target is not near:
                near.copy_(target)

        if call.async_op:
            return HostHandle(self.device, near, handle, deliver)
        deliver()
        return handle

    # Meeting

    def _meet_first(self, call: Call, near: Tensor) -> None:
        """Once, at the first collective: whether the ranks can map each other's device memory, and how they differ."""
        if self._met:
            return
        facts: dict[str, Any] = {"no_kernels": self.device.lacks()}
        offer: bytes | int = -1
        try:
            link = _core.ShmDevice(
                self._native, self.device.library, self.device.index(near), self._record, self._order
            )
            self._link = link
            facts |= {"uuid": link.uuid, "mps": link.has_mps}
            offer = link.offer([(link.allocate(_PROBE_BYTES), _PROBE_BYTES)], False)
        except RuntimeError as error:
            facts["refused"] = str(error)[: _FACTS_BYTES // 4]
        if isinstance(offer, int):
            facts.setdefault("refused", "the driver exports no memory (MIG?)")
            offer = bytes(_core.ShmDevice.offer_bytes())
        said, offers = self._all_say(call, near, facts, offer)
        refused = [what.get("refused") for what in said]
        if self._link is not None and not any(refused):
            others = [(rank, 0) for rank in range(self.size) if rank != self.rank]
            try:
                self._link.accept(offers, others, False)
            except RuntimeError as error:
                refused[self.rank] = str(error)[: _FACTS_BYTES // 4]
        opened, _ = self._all_say(call, near, {"refused": refused[self.rank]}, b"\0")
        self._decide(said, [what["refused"] for what in opened])
        self._met = True
        self._attach_path()

    def _decide(self, said: list[dict[str, Any]], refused: list[str | None]) -> None:
        found = next(((rank, why) for rank, why in enumerate(refused) if why), None)
        if found is not None:
            rank, why = self.group.ranks[found[0]], found[1]
            self.why_host = f"rank {rank} cannot share device memory ({why})"
            if self._link is not None:
                self._link.close()
                self._link = None
            if self.rank == 0:
                logging.getLogger("ringway").warning(
                    "group %s: CUDA tensors on shm go through host memory: %s", self.group.name, self.why_host
                )
            return
        lacking = next((what["no_kernels"] for what in said if what["no_kernels"]), None)
        self._reduces = lacking is None
        self.why_host = "" if lacking is None else lacking
        gpus, at_once = len({what["uuid"] for what in said}), all(what["mps"] for what in said)
        self._switches = gpus < self.size and not at_once
        self.takes_turns = gpus == 1 and self._switches
        self.one_gpu = gpus == 1 and self._reduces
        self._from = [self.direct_from(op) for op in OPS]

    def _all_say(self, call: Call, near: Tensor, facts: dict[str, Any], more: bytes) -> tuple[list[Any], bytes]:
        """Every rank's facts, in rank order, and the rest of what they said."""
        words = json.dumps(facts).encode()
        shown = words.ljust(_FACTS_BYTES) + more
        seen = self._native.show(
            replace(call, async_op=False), self._timeout(call), count_of(call), shown, _core.SHM_DIRECT | _CAPTURED
        )
        assert isinstance(seen, bytes)
        parts = [seen[i : i + len(shown)] for i in range(0, len(seen), len(shown))]
        return [json.loads(part[:_FACTS_BYTES]) for part in parts], b"".join(part[_FACTS_BYTES:] for part in parts)

    # Direct calls

    def _directly(self, call: Call, near: Tensor, captured: bool) -> Handle:
        link = self._link
        assert link is not None
        if self.device.index(near) != link.device_index:
            raise UsageError(
                f"{call.describe()}: the tensors are on {near.device}, and the group's earlier ones were on cuda:"
                f"{link.device_index}. A group of shm has one GPU for each rank: make another group for this GPU"
            )
        part = PARTS[call.op.name](self, call)
        staged = self._staged(part, captured)
        offer = link.offer(part.offered if staged is None else staged, captured)
        if isinstance(offer, int) and staged is None:
            staged = self._stage(part, captured)
            offer = link.offer(staged, captured)
        if isinstance(offer, int):
            raise RingwayError(f"{call.describe()}: the driver does not export the memory that it allocated for this")
        if part.expected:
            offer += struct.pack(f"{self.size}q", *part.expected)
        handle = DirectHandle(self, call, near, captured)
        manner = _core.SHM_DIRECT | (_CAPTURED if captured else 0)
        if not call.async_op or captured:
            # Without its record, the call is starting until it is launched: a signal handler's would be launched first.
            inner = replace(call, async_op=False)
            stream = self.device.current(near)
            place = link.enter()
            try:
                seen = self._native.show(inner, self._timeout(call), count_of(call), offer, manner)
                assert isinstance(seen, bytes)
                with in_parts():
                    self._wait_for_earlier(link, place, call)
                    return handle.begun(self._launch(call, part, staged, seen, stream, captured))
            finally:
                link.leave(place)
        stream, launched = self.device.side(near), handle.queued()
        issued = self.device.mark(self.device.current(near))
        place = link.enter()

        def met() -> None:
            assert isinstance(task, _core.ShmTask)
            outcome = task.outcome()
            try:
                if outcome != 0:
                    raise self._faults.error(outcome, task.fault())
                self._wait_for_earlier(link, place, call)
                with self.device.on(stream):
                    self.device.wait(stream, issued)
                    event = self._launch(call, part, staged, task.seen(), stream, captured=False)
                    steps = handle.last_steps()
                    for step in steps:
                        self.device.step(event, step)
                    handle.begun(self.device.mark(stream) if steps else event)
            except BaseException as error:
                if outcome == 0:
                    self._native.fail()  # the others wait for this rank's part
                handle.last_steps()
                link.leave(place)
                launched.finish(error)
            else:
                link.leave(place)
                launched.finish(None)

        task: _core.ShmTask | bytes = b""
        try:
            task = self._native.show(call, self._timeout(call), count_of(call), offer, manner)
            assert isinstance(task, _core.ShmTask)
            task.when_done(met)
        except BaseException:
            link.leave(place)
            if task:
                self._native.fail()  # the others wait for this rank's part
            raise
        return handle

    def _wait_for_earlier(self, link: _core.ShmDevice, place: int, call: Call) -> None:
        """Until the calls that this process issued earlier in other groups are launched (csrc/shm/launch_order.h).
        Signals are handled between the slices."""
        until = time.monotonic() + self._timeout(call)
        while not link.wait_for_earlier(place, _SLICE):
            if self.fault() is not None or time.monotonic() > until:
                raise self.fault() or call.behind_others(self._timeout(call))

    def _launch(
        self, call: Call, part: Part, staged: list[Span] | None, seen: bytes, stream: Any, captured: bool
    ) -> Any:
        link = self._link
        if link is None:
            raise RingwayError(f"{call.describe()}: the group was closed by another thread")
        offers = self._compared(call, seen) if part.expected else seen
        addresses = dict(
            zip(
                [rank for rank, _ in part.wanted],
                (at for at, _ in link.accept(offers, part.wanted, captured)),
                strict=True,
            )
        )
        raw = self.device.raw(stream)
        link.follow(raw)
        if staged is not None:
            link.copy(raw, [(to, at, size) for (to, _), (at, size) in zip(staged, part.offered, strict=True)])
        link.arrive(raw, part.worker)
        part.body(stream, addresses, [at for at, _ in (part.offered if staged is None else staged)])
        back = []
        if staged is not None and part.written:
            back = [(at, to, size) for (to, _), (at, size) in zip(staged, part.offered, strict=True)]
        link.depart(raw, part.worker, call, count_of(call), self._timeout(call), back)
        return None if captured else self.device.mark(stream)

    def _compared(self, call: Call, seen: bytes) -> bytes:
        """The offers of an all_to_all, once every rank's blocks were found to have the sizes that their receivers
        expect. Every rank compares all of them, so all raise the same error, and none begins."""
        width, tail = len(seen) // self.size, 8 * self.size
        shown = [seen[i * width : (i + 1) * width] for i in range(self.size)]
        for source in range(self.size):
            for target in range(self.size):
                sent = _core.ShmDevice.offered(shown[source][:-tail], target)
                (expected,) = struct.unpack_from("q", shown[target], width - tail + 8 * source)
                if source != target and sent != expected:
                    self._native.differ(call, count_of(call), source, target, sent, expected)
        return b"".join(one[:-tail] for one in shown)

    # Staging: memory that can be shared, for tensors whose own memory cannot, or must not be read by others.

    def _staged(self, part: Part, captured: bool) -> list[Span] | None:
        return self._stage(part, captured) if part.hidden else None

    def _stage(self, part: Part, captured: bool) -> list[Span]:
        """A place for each offered span. Calls use the same memory one after the other; a graph has its own."""
        link = self._link
        assert link is not None
        needed = sum(rounded(size) for _, size in part.offered)
        base, room = self._staging
        if captured or room < needed:
            room = needed if captured else max(needed, 2 * room, _PROBE_BYTES)
            base = link.allocate(max(room, 1))
            if not captured:
                self._staging = (base, room)
        places = []
        for _, size in part.offered:
            places.append((base, size))
            base += rounded(size)
        return places

    def enqueue_copies(self, stream: Any, copies: list[tuple[int, int, int]]) -> None:
        link = self._link
        assert link is not None
        link.copy(self.device.raw(stream), copies)

    def enqueue_reduction(self, stream: Any, call: Call, ins: list[int], outs: list[int], count: int) -> None:
        dtype, parts = reduced_as(call)
        self.device.reduce(stream, ins, outs, count * parts, (dtype, call.reduce))

    def enqueue_spread(self, stream: Any, source: int, outs: list[int], nbytes: int) -> None:
        unit = next(dtype for dtype in _UNITS if not any(each % dtype.itemsize for each in (source, nbytes, *outs)))
        self.device.reduce(stream, [source], outs, nbytes // unit.itemsize, (unit, Reduce.SUM))

    # The end

    def settle(self) -> None:
        if self._link is not None:
            self._link.drain(self._limit)
            found = self.fault()
            if found is not None and self._health is not None:
                self._health.fail(found)  # a call on the fast path has no handle that reports it

    def close(self) -> None:
        self._end_link()
        super().close()

    def abort(self) -> None:
        self._native.fail()
        self._end_link()
        super().abort()

    def _end_link(self) -> None:
        with self._ending:  # a second thread that ends the group waits for the first
            link, self._link = self._link, None
            self._attach_path()
            if link is not None:
                link.close()
