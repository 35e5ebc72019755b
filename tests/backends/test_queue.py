"""The queue of calls that block: their order, their callbacks, their end."""

from __future__ import annotations

import threading
import time

import pytest

from ringway.backends.queue import CallQueue, Deadlines
from ringway.call import BARRIER, Call
from ringway.errors import CollectiveMismatch, CommTimeout, RingwayError
from ringway.work import DONE


def _call(async_op: bool = True, timeout: float | None = None) -> Call:
    return Call(BARRIER, async_op=async_op, timeout=timeout, group="test")


def test_a_synchronous_call_with_nothing_before_it_runs_here() -> None:
    queue = CallQueue("test", 30)
    where: list[threading.Thread] = []
    handle = queue.submit(_call(async_op=False), lambda: where.append(threading.current_thread()))
    assert handle is DONE
    assert where == [threading.current_thread()]
    queue.stop(RingwayError("over"))


def test_calls_run_in_the_order_of_issue() -> None:
    queue = CallQueue("test", 30)
    seen: list[int] = []
    gate = threading.Event()
    handles = [queue.submit(_call(), gate.wait)]
    handles += [queue.submit(_call(), lambda number=number: seen.append(number)) for number in range(20)]
    late = queue.submit(_call(async_op=False), lambda: seen.append(20))
    assert late is not DONE
    assert seen == []
    gate.set()
    late.wait()
    assert seen == list(range(21))
    assert all(handle.done() for handle in handles)
    queue.stop(RingwayError("over"))


def test_what_a_callback_issues_runs_before_the_next_in_the_queue() -> None:
    queue = CallQueue("test", 30)
    seen: list[str] = []
    gate = threading.Event()

    def again(error: BaseException | None) -> None:
        queue.submit(_call(), lambda: seen.append("from the callback")).wait()

    first = queue.submit(_call(), gate.wait)
    first.when_done(again)
    last = queue.submit(_call(), lambda: seen.append("queued"))
    gate.set()
    last.wait()
    assert seen == ["from the callback", "queued"]
    queue.stop(RingwayError("over"))


def test_a_callback_may_wait_for_what_is_behind_it() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    first = queue.submit(_call(), gate.wait)
    second = queue.submit(_call(), lambda: None)
    first.when_done(lambda error: second.wait())
    gate.set()
    first.wait(30)
    assert second.done()
    queue.stop(RingwayError("over"))


def test_errors_reach_whoever_waits() -> None:
    queue = CallQueue("test", 30)

    def fail() -> None:
        raise RingwayError("no")

    told: list[BaseException | None] = []
    handle = queue.submit(_call(), fail)
    handle.when_done(told.append)
    with pytest.raises(RingwayError, match="no"):
        handle.wait()
    assert [str(error) for error in told] == ["no"]
    queue.submit(_call(), lambda: None).wait()
    queue.stop(RingwayError("over"))


def test_a_wait_may_end_before_the_call() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    handle = queue.submit(_call(), gate.wait)
    with pytest.raises(CommTimeout, match="is not done after"):
        handle.wait(0.05)
    assert not handle.done()
    gate.set()
    handle.wait()
    queue.stop(RingwayError("over"))


def test_a_wait_that_cannot_succeed_ends() -> None:
    """The library never returns; that ranks called different things shows elsewhere."""
    queue = CallQueue("test", 300, Deadlines())
    gate = threading.Event()
    parted: list[BaseException] = []

    def check() -> None:
        if parted:
            raise parted[0]

    call = _call()
    call.check = check
    handle = queue.submit(call, gate.wait)
    threading.Timer(0.05, lambda: parted.append(CollectiveMismatch("ranks called different things"))).start()
    with pytest.raises(CollectiveMismatch):
        handle.wait()
    gate.set()
    queue.stop(RingwayError("over"))


def test_what_cannot_be_interrupted_is_given_up_at_its_deadline() -> None:
    """Also where nobody waits: a callback is told."""
    queue = CallQueue("test", 30, Deadlines())
    gate = threading.Event()
    told: list[BaseException | None] = []
    began = time.monotonic()
    handle = queue.submit(_call(timeout=0.3), gate.wait)
    handle.when_done(told.append)
    with pytest.raises(CommTimeout, match="timed out"):
        queue.submit(_call(), lambda: None).wait()
    assert 0.3 <= time.monotonic() - began < 25
    assert isinstance(told[0], CommTimeout)
    assert queue.failed
    with pytest.raises(CommTimeout):
        queue.submit(_call(), lambda: None)
    gate.set()


def test_stopping_ends_what_is_queued() -> None:
    queue = CallQueue("test", 30)
    gate = threading.Event()
    handles = [queue.submit(_call(), gate.wait), queue.submit(_call(), lambda: None)]
    queue.stop(RingwayError("the group was destroyed"))
    for handle in handles:
        with pytest.raises(RingwayError, match="destroyed"):
            handle.wait()
    gate.set()
