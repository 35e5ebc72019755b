"""gloo, as a backend of ringway's own."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch.distributed import DistStoreError

import ringway._core as _core
from ringway.backends.base import GroupInfo, Health
from ringway.backends.torch.backend import C10dBackend, options_for
from ringway.backends.torch.handles import WAIT_SLICE, wait_in_slices
from ringway.call import ALL_REDUCE, BARRIER, Call, Reduce, dtype_bits
from ringway.errors import BackendUnavailable
from ringway.launch.ports import address_towards
from ringway.references import never_destroy
from ringway.store import KeyedStore, WatchedStore, beneath_prefixes, key_of, unwrapped
from ringway.threads import start
from ringway.work import Finishing, Handle

_LOOK = 0.05  # seconds between two looks at the store while gloo connects


class GlooFastPath(_core.FastPath):
    """Sums small tensors through gloo without ringway's general path."""

    def __init__(
        self, group: Any, info: GroupInfo, record: _core.GroupRecord, health: Health, dtypes: Iterable[torch.dtype]
    ) -> None:
        super().__init__(record, info.rank, info.size, _core.CPU, 0, dtype_bits(dtypes), 1 << ALL_REDUCE.code)
        self._allreduce = group.allreduce
        self._record = record
        self._health = health
        self._name = info.name
        self._options = options_for(c10d.AllreduceOptions, Call(BARRIER), reduceOp=c10d.ReduceOp.SUM)

    def run(self, op: int, outputs: Any, inputs: Any, peer: int, async_op: bool, tag: int, reduce: int) -> bool:
        if self._record.is_starting:  # the general path says why the call is refused
            return False
        try:
            token = self.begin(op, outputs, inputs, peer)
            if token == 0:
                return False
            work = self._start(token, outputs)
        except BaseException as error:
            self._health.interrupted_by(error)
            raise
        finally:
            self._record.started(0)
        done = False
        try:
            try:
                work.wait(WAIT_SLICE)
            except Exception:
                call = Call(ALL_REDUCE, (outputs,), (outputs,), group=self._name, check=self._health.check)
                wait_in_slices(work, call, time.monotonic())
            done = True
        finally:
            self._record.end(token, done)
        return True

    def _start(self, token: int, tensor: torch.Tensor) -> Any:
        try:
            return _core.pass_on(self._allreduce, [tensor], self._options)
        except BaseException:
            self._record.end(token, False)
            raise


class GlooBackend(C10dBackend):
    """gloo. It takes only some dtypes, has no list all_to_all, and its reduce_scatter is one allreduce per rank."""

    name = "gloo"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    messages_have_futures = False

    _MOVED = frozenset({torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64})
    _REDUCED = _MOVED | {torch.bfloat16}

    def __init__(self, info: GroupInfo, group: Any = None) -> None:
        if group is None:
            group = self.torch_group = make_gloo(info)
        super().__init__(info, group)

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        return dtype in self._REDUCED and reduce not in (Reduce.AVG, Reduce.PREMUL_SUM)

    def can_move(self, dtype: torch.dtype) -> bool:
        return dtype in self._MOVED

    def send(self, call: Call) -> Handle:
        tensor = call.inputs[0]
        return super().send(replace(call, inputs=(tensor.cpu(),)) if tensor.is_cuda else call)

    def recv(self, call: Call) -> Handle:
        """gloo's messages use host memory only."""
        tensor = call.outputs[0]
        if not tensor.is_cuda:
            return super().recv(call)
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        handle = super().recv(replace(call, outputs=(landing,)))
        return Finishing(handle, lambda: _discard(tensor.copy_(landing)))

    def fast_paths(self, record: _core.GroupRecord, health: Health) -> Sequence[_core.FastPath]:
        return (GlooFastPath(self._group, self.group, record, health, self._REDUCED),)

    def set_timeout(self, seconds: float) -> None:
        if isinstance(self._group, Gloo):
            _TorchsGloo._set_default_timeout(
                self._group, timedelta(seconds=seconds)
            )  # not our override, which reports back

    def close(self) -> None:
        # The last reference joins gloo's threads, which must happen while the interpreter lives. The join lasts until
        # their current calls time out, so a group whose calls were given up is never destroyed.
        if self.abandoned and self._group is not None:
            never_destroy(self._group)
        self._group = self.torch_group = None


def _discard(_: object) -> None:
    """For a callback that must return nothing."""


_TorchsGloo: Any = c10d.ProcessGroupGloo if c10d.is_gloo_available() else object


class Gloo(_TorchsGloo):  # type: ignore[misc]
    """torch's gloo. It reports when torch changes the group's timeout (`_set_pg_timeout`)."""

    timeout_changed: Callable[[float], None] | None = None
    device: Any = None
    store: Any = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if self.timeout_changed is not None:
            self.timeout_changed(timeout.total_seconds())


def make_gloo(info: GroupInfo, *, loopback: bool = False) -> Any:
    """torch's gloo for the group. With `loopback` it uses the loopback interface and one thread: all ranks share a
    host, and another backend runs their calls."""
    if not c10d.is_gloo_available():
        raise BackendUnavailable("gloo", "this build of torch has none", remedy="Install a torch wheel with gloo")
    timeout = timedelta(seconds=info.timeout)
    alone = loopback or info.size == 1
    device = info.process.part(_Loopback).device() if alone else _gloo_device(info)
    if device is None:
        return _connected(info, timeout)
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    if loopback:  # with one thread, a callback that issues a collective would wait for itself
        options._threads = 1
    group = _connected(info, options)
    group.device = device
    return group


def _connected(info: GroupInfo, options: Any) -> Gloo:
    """gloo waits for its peers in native code, where this process hears nothing: no Ctrl-C, no lost peer, and no
    stranger who changed the store. If the store can tell, a thread waits there, and this one listens."""
    store = beneath_prefixes(info.store)
    if info.size == 1 or not isinstance(store, (KeyedStore, WatchedStore)):
        return Gloo(info.store, info.rank, info.size, options)
    attempt = _Attempt(info)
    start("ringway gloo connects", attempt.connect, options)
    try:
        while not wait([attempt.connected], timeout=_LOOK).done:
            store.check(["ringway/never set"])  # raises what it noticed
    except BaseException:
        attempt.give_up()
        raise
    attempt.connected.result()
    return attempt.group


class _Attempt:
    """Makes a group on a thread of its own, and can be given up."""

    def __init__(self, info: GroupInfo) -> None:
        self.group = Gloo.__new__(Gloo)
        self.connected: Future[None] = Future()
        self._info = info
        self._given_up = False
        # gloo holds only the C++ half of a store
        self.group.store = WatchedStore(info.store, key_of(info.store), self._watch)

    def connect(self, options: Any) -> None:
        try:
            self.group.__init__(self.group.store, self._info.rank, self._info.size, options)  # type: ignore[misc]
            self.group.store.watch = None
            self.connected.set_result(None)
        except BaseException as error:
            self.connected.set_exception(error)

    def _watch(self) -> None:
        if self._given_up:
            raise DistStoreError("the group was given up")

    def give_up(self) -> None:
        """The thread may stay in native code. It ends at its next call of the store, which must come before the
        interpreter's end; nothing that it uses is destroyed."""
        self._given_up = True
        never_destroy(self)
        wait([self.connected], timeout=1.0)


class _Loopback:
    """The loopback device, which all groups of this process share: each device has a thread and four descriptors."""

    def __init__(self) -> None:
        self._device: Callable[[], Any] = lambda: None

    def device(self) -> Any:
        device = self._device()
        if device is None:
            device = c10d.ProcessGroupGloo.create_device(interface="lo", lazy_init=True)
            self._device = weakref.ref(device)
        return device


def _gloo_device(info: GroupInfo) -> Any:
    """The interface that leads to the job's store. None leaves the choice to gloo, which takes GLOO_SOCKET_IFNAME, or
    the address of this host's name: often one that no other host can reach."""
    store = unwrapped(info.store)
    if "GLOO_SOCKET_IFNAME" in os.environ or getattr(store, "port", None) is None:  # a store on this host has none
        return None
    towards = address_towards(store.host)
    return None if towards is None else c10d.ProcessGroupGloo.create_device(hostname=towards)
