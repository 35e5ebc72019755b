"""Signal handlers that make calls on the group whose call they interrupt: a checkpoint agreed on at SIGUSR1, say."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
from ringway.backends.torch.gloo import GlooFastPath
from ringway.call import BARRIER, Call
from ringway.errors import CommTimeout, PeerLost, RingwayError, UsageError
from ringway.groups.call_path import CallPath
from ringway.groups.listener import Listener
from ringway.groups.world import world
from ringway.testing import RankContext, RankPool

LARGE = 300_000
"""Elements that take several steps through shared memory."""


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 97 + dist.get_rank()


def _all_reduce(count: int) -> torch.Tensor:
    tensor = _numbers(count)
    dist.all_reduce(tensor)
    return tensor


def _gather_askew(count: int) -> torch.Tensor:
    """The input overlaps blocks of the output, so the engine copies it."""
    whole = torch.zeros(2 * count + 1)
    share = whole[count // 2 : count // 2 + count]
    share.copy_(_numbers(count))
    dist.all_gather_into_tensor(whole[: 2 * count], share)
    return whole[: 2 * count].clone()


def _reduce_scatter_askew(count: int) -> torch.Tensor:
    whole = _numbers(2 * count)
    share = whole[count // 2 : count // 2 + count]
    dist.reduce_scatter_tensor(share, whole)
    return share.clone()


def _all_to_all_in_place(count: int) -> torch.Tensor:
    whole = _numbers(2 * count)
    dist.all_to_all_single(whole, whole)
    return whole


def _broadcast(count: int) -> torch.Tensor:
    tensor = _numbers(count)
    dist.broadcast(tensor, 1)
    return tensor


def _queued(count: int) -> torch.Tensor:
    """The call waits behind an asynchronous one."""
    first, second = _numbers(count), _numbers(3)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    return first


def _exchange(count: int) -> torch.Tensor:
    tensor = _numbers(count)
    if dist.get_rank() == 0:
        dist.recv(tensor, 1)
        dist.send(tensor, 1)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    return tensor


def _receive(count: int) -> torch.Tensor:
    tensor = _numbers(count)
    if dist.get_rank() == 0:
        dist.recv(tensor, 1)
    else:
        dist.send(tensor, 0)
    return tensor


INTERRUPTED: list[Callable[[int], torch.Tensor]] = [
    _all_reduce, _gather_askew, _reduce_scatter_askew, _all_to_all_in_place, _broadcast, _queued, _receive,
]  # fmt: skip


def _agree() -> torch.Tensor:
    return _all_reduce(5)


def _agree_later() -> torch.Tensor:
    tensor = _numbers(7)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    return tensor


def _agree_on_much() -> torch.Tensor:
    return _gather_askew(LARGE)


def _agree_by_messages() -> torch.Tensor:
    return _exchange(9)


AGREEMENTS = [_agree, _agree_later, _agree_on_much, _agree_by_messages]


def _interrupt_after(calls: int) -> threading.Thread:
    """Sends SIGUSR1 to the main thread once it waits in the last of so many calls."""
    last, main = world.recorder.total + calls, threading.main_thread().ident or 0

    def interrupt() -> None:
        while world.recorder.total < last:  # the main thread has released the GIL inside that call
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def _handled(context: RankContext, what: int, count: int, agreement: int) -> str | None:
    """Rank 0 handles a signal inside a call for which rank 1 is late. Rank 1 makes the same calls in order."""
    key = f"{what} {count} {agreement}"
    call, agree = INTERRUPTED[what], AGREEMENTS[agreement]
    agreed: list[torch.Tensor] = []
    if context.rank == 1:
        context.store.wait([key])  # set inside the handler
        got = call(count)
        agreed.append(agree())
    else:

        def handle(*_: Any) -> None:
            context.store.set(key, "")
            agreed.append(agree())

        signal.signal(signal.SIGUSR1, handle)
        thread = _interrupt_after(2 if call is _queued else 1)
        got = call(count)
        thread.join()
    right = torch.equal(got, call(count)) and torch.equal(agreed[0], agree())
    return None if right else f"{call.__name__} of {count}, {agree.__name__}"


def _all_handled(context: RankContext) -> list[str | None]:
    context.start("shm", timeout=timedelta(seconds=60))
    dist.barrier()
    cases = itertools.product(range(len(INTERRUPTED)), (6, LARGE), range(len(AGREEMENTS)))
    return [_handled(context, *case) for case in cases]


def test_a_handler_may_call_while_it_interrupts_a_call(pool: RankPool) -> None:
    for wrong in pool.run(_all_handled, world_size=2, timeout=100):
        assert set(wrong) == {None}, wrong


def _handled_without_peer(context: RankContext, how: str) -> str:
    """Rank 1 makes neither the interrupted call nor the handler's."""
    context.start("shm")
    dist.barrier()
    if context.rank == 1:
        context.store.wait(["waits"])
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        context.store.wait(["told"])
        return ""
    c10d.distributed_c10d._set_pg_timeout(timedelta(seconds=60 if how == "killed" else 1), None)

    def handle(*_: Any) -> None:
        context.store.set("waits", "")
        dist.all_reduce(torch.ones(3))

    signal.signal(signal.SIGUSR1, handle)
    thread = _interrupt_after(1)
    began = time.monotonic()
    with pytest.raises((CommTimeout, PeerLost)) as caught:
        dist.barrier()
    assert time.monotonic() - began < 30
    thread.join()
    with pytest.raises(type(caught.value)):
        dist.barrier()
    context.store.set("told", "")
    return type(caught.value).__name__


@pytest.mark.parametrize(("how", "error"), [("killed", "PeerLost"), ("late", "CommTimeout")])
def test_a_handlers_call_hears_of_timeouts_and_dead_peers(pool: RankPool, how: str, error: str) -> None:
    ended = pool.try_run(_handled_without_peer, how, world_size=2, timeout=60)
    pool.replace()
    assert ended[0].value == error, ended[0]


# Before the interrupted call has started


class _Signals(Listener):
    """Sends a signal between the number of a call and its start."""

    sees_calls = True

    def issued(self, call: Call) -> None:
        signal.raise_signal(signal.SIGUSR1)


def _listening() -> Callable[[], None]:
    listener = _Signals()
    world.listen(listener)
    return lambda: world.unlisten(listener)


def _inside_the_backend() -> Callable[[], None]:
    """The signal comes when the backend has the call, and has not passed it on."""
    backend = next(iter(world.communicator(None).devices.made()))
    kind = type(backend)
    before = kind._start  # type: ignore[attr-defined]

    def start(self: Any, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return before(self, *arguments)

    kind._start = start  # type: ignore[attr-defined]
    return lambda: setattr(kind, "_start", before)


def _inside_gloos_fast_path() -> Callable[[], None]:
    before = GlooFastPath._start

    def start(self: Any, token: int, tensor: torch.Tensor) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return before(self, token, tensor)

    GlooFastPath._start = start  # type: ignore[method-assign]
    return lambda: setattr(GlooFastPath, "_start", before)


def _refused_before_the_start(context: RankContext, backend: str) -> int:
    """Rank 0's handler makes calls too early and catches the refusals. Both ranks' calls stay in order."""
    context.start(backend, timeout=timedelta(seconds=30))
    dist.barrier()
    refusals: list[str] = []

    def handle(*_: Any) -> None:
        for call in (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2), async_op=True)):
            try:
                call()
            except UsageError as error:
                refusals.append(str(error))

    if context.rank == 0:
        signal.signal(signal.SIGUSR1, handle)
    ways = [_listening, _inside_gloos_fast_path if backend == "gloo" else _inside_the_backend]
    for way in ways:
        undo = way() if context.rank == 0 else lambda: None
        sync, later = _numbers(5), _numbers(6)
        dist.all_reduce(sync)
        if backend == "shm" or way is _listening:
            work = dist.all_reduce(later, op=dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            work.wait()
            assert later.tolist() == [i + 1.0 for i in range(6)]
        undo()
        assert sync.tolist() == [2.0 * i + 1 for i in range(5)]
    after = _all_reduce(4)  # nothing is left of the refused calls
    assert after.tolist() == [2.0 * i + 1 for i in range(4)]
    assert all("a signal handler called all_reduce of the group" in text for text in refusals), refusals
    return len(refusals)


@pytest.mark.parametrize(("backend", "refused"), [("shm", 6), ("gloo", 6)])
def test_a_handlers_call_is_refused_before_the_interrupted_call_has_started(
    pool: RankPool, backend: str, refused: int
) -> None:
    assert pool.run(_refused_before_the_start, backend, world_size=2, timeout=60) == [refused, 0]


def _too_early(*_: Any) -> None:
    dist.all_reduce(torch.ones(2))


def _refuse(*_: Any) -> None:
    raise LookupError("the handler's own error")


RAISES: list[tuple[Callable[..., Any], type[BaseException]]] = [
    (_too_early, UsageError),
    (_refuse, LookupError),
    (signal.default_int_handler, KeyboardInterrupt),
]


def _raised_before_the_start(context: RankContext, backend: str) -> tuple[list[list[float]], int]:
    """Rank 0's handlers keep calls from starting. It makes each call again. Rank 1 makes it once."""
    context.start(backend, timeout=timedelta(seconds=30))
    dist.barrier()
    calls: list[tuple[Callable[[], Callable[[], None]], bool]] = [(_listening, False), (_inside_the_backend, True)]
    if backend == "gloo":
        calls.append((_inside_gloos_fast_path, False))
    sums = []
    for (way, async_op), (handler, error) in itertools.product(calls, RAISES):
        if context.rank == 0:
            signal.signal(signal.SIGUSR1, handler)
            undo = way()
            with pytest.raises(error):
                dist.all_reduce(_numbers(4), async_op=async_op)
            undo()
        sums.append(_all_reduce(4).tolist())
    return sums, world.communicator(None).record.collectives


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_call_that_a_handler_keeps_from_starting_leaves_no_trace(pool: RankPool, backend: str) -> None:
    """The next call has its number, as if the signal had come before the call."""
    (sums, number), other = pool.run(_raised_before_the_start, backend, world_size=2, timeout=60)
    assert (sums, number) == other
    assert sums == [[2.0 * i + 1 for i in range(4)]] * len(sums)


def _raised_in_a_recorded_block(context: RankContext) -> int:
    """A block that counts as a call: rank 0's handler raises between its number and its body."""
    context.start("gloo", timeout=timedelta(seconds=30))
    before = CallPath._begin

    def begin(self: Any, call: Call) -> int:
        token = before(self, call)
        signal.raise_signal(signal.SIGUSR1)
        return token

    if context.rank == 0:
        signal.signal(signal.SIGUSR1, _refuse)
        CallPath._begin = begin  # type: ignore[method-assign]
        with pytest.raises(LookupError), world.communicator(None).calls.recorded(BARRIER, "block"):
            pass
        CallPath._begin = before  # type: ignore[method-assign]
    with world.communicator(None).calls.recorded(BARRIER, "block"):
        dist.all_reduce(torch.ones(2), group=None)
    return world.communicator(None).record.collectives


def test_a_recorded_block_that_a_handler_keeps_from_starting_leaves_no_trace(pool: RankPool) -> None:
    first, second = pool.run(_raised_in_a_recorded_block, world_size=2, timeout=60)
    assert first == second


def _raised_after_the_start(context: RankContext) -> list[list[float]]:
    """gloo has the call when rank 0's handler raises, so rank 0 goes on with the next one."""
    context.start("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    before = GlooFastPath._start

    def start(self: Any, token: int, tensor: torch.Tensor) -> Any:
        allreduce = self._allreduce

        def interrupted(*arguments: Any) -> Any:
            work = allreduce(*arguments)
            signal.raise_signal(signal.SIGUSR1)
            return work

        self._allreduce = interrupted
        try:
            return before(self, token, tensor)
        finally:
            self._allreduce = allreduce

    first = _numbers(4)
    if context.rank == 0:
        signal.signal(signal.SIGUSR1, _refuse)
        GlooFastPath._start = start  # type: ignore[method-assign]
        with pytest.raises(LookupError):
            dist.all_reduce(first)
        GlooFastPath._start = before  # type: ignore[method-assign]
    else:
        dist.all_reduce(first)
    return [_all_reduce(4).tolist(), first.tolist()]


def test_a_call_that_has_started_keeps_its_number(pool: RankPool) -> None:
    expected = [2.0 * i + 1 for i in range(4)]
    assert pool.run(_raised_after_the_start, world_size=2, timeout=60) == [[expected, expected]] * 2


def _raised_between_two_parts(context: RankContext) -> tuple[str, str]:
    """gloo sends this call as two, one for each dtype. Rank 0's handler raises when the first is sent."""
    context.start("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    kind: Any = type(next(iter(world.communicator(None).devices.made())))
    before, starts = kind._start, itertools.count()

    def start(self: Any, *arguments: Any) -> Any:
        if next(starts) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return before(self, *arguments)

    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    if context.rank == 0:
        signal.signal(signal.SIGUSR1, _refuse)
        kind._start = start
        with pytest.raises(LookupError):
            dist.all_reduce_coalesced(tensors)
        kind._start = before
        context.store.wait(["told"])
    else:
        began = time.monotonic()
        with pytest.raises(PeerLost, match="rank 0 was interrupted by LookupError in the middle of a call"):
            dist.all_reduce_coalesced(tensors)
        assert time.monotonic() - began < 25  # not at the timeout
        context.store.set("told", "")
    with pytest.raises(RingwayError) as again:
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return str(again.value), repr(again.value.__cause__)


@pytest.mark.timeout(60)
def test_an_error_between_two_parts_of_a_call_ends_the_group(pool: RankPool) -> None:
    """The other rank waits for the second part, and would take this rank's next call for it."""
    (said, cause), _ = pool.run(_raised_between_two_parts, world_size=2, timeout=50)
    assert "was interrupted by LookupError in the middle of a call of the group" in said
    assert cause == 'LookupError("the handler\'s own error")'
