"""Handles and works by themselves: their state after a wait, a limited wait and a failure."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

import ringway as dist
from ringway.errors import CommTimeout, RingwayError, UsageError
from ringway.testing import RankContext, RankPool
from ringway.work import DONE, Completion, Finishing, Handle, PendingHandle, Together, Work, WorkHandle, seconds


class Scripted(Handle):
    """A handle that fails and only supports waiting, like gloo's messages."""

    notifies = False

    def __init__(self, error: RingwayError) -> None:
        self._error = error
        self._ended = False

    def wait(self, timeout: float | None = None) -> None:
        self._ended = True
        raise self._error

    def done(self) -> bool:
        return self._ended

    def when_done(self, completion: Completion) -> None:
        completion(self._error)


def test_a_failure_before_the_last_step_ends_the_work() -> None:
    failure = RingwayError("nothing came")
    finished: list[int] = []
    settled: list[BaseException | None] = []

    def on_end(error: BaseException | None) -> BaseException | None:
        settled.append(error)
        return error

    work = Work(Finishing(Scripted(failure), lambda: finished.append(1)), (), on_end)
    for _ in range(2):
        with pytest.raises(RingwayError, match="nothing came"):
            work.wait()
    assert settled == [failure], "called once, although there were two waits"
    assert finished == []
    assert work.exception() is failure


def test_a_callback_that_raises_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[BaseException | None] = []
    work = Work(Scripted(RingwayError("nothing came")), (), lambda error: error)
    work.on_complete(lambda error: reported.append(1 / 0))  # type: ignore[func-returns-value]
    work.on_complete(reported.append)
    assert [str(error) for error in reported] == ["nothing came"]
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_future_keeps_its_work_until_the_end() -> None:
    """DDP holds only the future. A group that fails ends its pending works, so it must still find this one."""

    class Endless(PendingHandle):
        def wait(self, timeout: float | None = None) -> None:
            raise AssertionError("this handle must not be waited for")

    handle = Endless()
    work = Work(handle, (), lambda error: error)
    future, pending = work.get_future(), weakref.ref(work)
    del work
    gc.collect()
    found = pending()
    assert found is not None
    found.fail(RingwayError("the group failed"))
    with pytest.raises(RuntimeError, match="the group failed"):
        future.wait()


class OnDevice(Handle):
    """A handle whose wait only orders a stream. The test decides when the device has finished."""

    notifies = False
    on_device = True
    ended = False

    def wait(self, timeout: float | None = None) -> None:
        pass

    def done(self) -> bool:
        return self.ended

    def when_done(self, completion: Completion) -> None:
        raise AssertionError("a query must not start the device watch")

    def outcome(self) -> BaseException | None:
        return RingwayError("the device says no")


def test_works_on_a_device_that_count_as_one_end_with_the_device() -> None:
    handles = [OnDevice(), OnDevice()]
    works = [Work(handle, (), lambda error: error) for handle in handles]
    together = Work(Together([WorkHandle(work) for work in works]), (), lambda error: error)
    assert together.wait(), "only the stream has waited"
    assert not together.is_completed()
    handles[0].ended = True
    assert not together.is_completed()
    handles[1].ended = True
    assert together.is_completed(), "at the first look"
    assert str(together.exception()) == "the device says no"


def test_a_timeout_is_a_timedelta_or_a_number() -> None:
    assert seconds(2) == 2.0
    assert seconds(0) is None
    with pytest.raises(UsageError, match="'soon' is neither"):
        seconds("soon")  # type: ignore[arg-type]


def _short_waits(context: RankContext, backend: str) -> list[float]:
    """Rank 1 is late. Rank 0's limited wait ends in time, and it can wait for the same work again."""
    context.start(backend)
    waited = []
    for turn, shape in enumerate(((4,), (4, 4))):
        tensor = torch.ones(shape)
        tensor = tensor.t() if tensor.dim() == 2 else tensor
        if context.rank == 1:
            context.store.wait([f"waited {turn}"])
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if context.rank == 0:
            began = time.monotonic()
            with pytest.raises(CommTimeout, match=r"0\.05 s of waiting"):
                work.wait(0.05)
            waited.append(time.monotonic() - began)
            context.store.set(f"waited {turn}", "")
        work.wait()
        assert tensor.eq(2).all()
        dist.barrier()
    return waited


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_wait_with_a_limit_ends_in_time_and_can_be_repeated(pool: RankPool, backend: str) -> None:
    waited, _ = pool.run(_short_waits, backend, world_size=2)
    assert len(waited) == 2
    assert min(waited) >= 0.05


def test_a_finished_last_step_leaves_nothing_to_the_garbage_collector() -> None:
    class Step:
        def __call__(self) -> None: ...

    step = Step()
    handle = Finishing(DONE, step)
    handle.wait()
    gone = weakref.ref(handle), weakref.ref(step)
    gc.disable()
    try:
        del step
        assert gone[1]() is None, "a handle that is kept must not keep the buffers of a step that has run"
        del handle
        assert gone[0]() is None, "a reference cycle keeps the call's tensors and its group"
    finally:
        gc.enable()
