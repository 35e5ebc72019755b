"""Where asynchronous compressed collectives run.

A compressed all-reduce has several steps, and each needs the data of the one before, so something must run when data
arrives. On the CPU that is a thread with a group of its own: collectives of a group run in the order they are issued,
and calls issued by a thread would interleave with the caller's at different points on different ranks. On a GPU it is
a stream: all steps are enqueued at once, and nothing waits.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.backends.device_watch import DeviceWatch
from ringway.compress.agreement import count_exchange
from ringway.errors import CommTimeout, NotFinite
from ringway.groups.communicator import Communicator
from ringway.groups.world import world
from ringway.work import Completion, Handle, Work


class Background(abc.ABC):
    """Runs jobs one at a time, in the order they were submitted."""

    latest: Handle | None = None
    """The job that was submitted last."""

    @staticmethod
    def on(device: torch.device, communicator: Communicator, group: c10d.ProcessGroup | None) -> Background:
        """The background for tensors on this device. Collective: every rank of the group must call this at the same
        point."""
        if device.type == "cuda":
            return BackgroundStream(communicator, device)
        return BackgroundThread(communicator, group)

    @abc.abstractmethod
    def submit(self, job: Callable[[Communicator], None], result: Sequence[Tensor]) -> Work:
        """Start `job(communicator)` after all earlier jobs."""

    def close(self) -> None:
        """Wait for pending jobs. Safe to call more than once."""
        return


class _FutureHandle(Handle):
    """The handle of a job that runs on the thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> None:
        done, _ = wait([self._future], timeout)
        if not done:
            raise CommTimeout(
                f"compressed all_reduce: not done after waiting {timeout} s; it continues",
                op="compressed_all_reduce",
                waited=timeout,
            )
        self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def when_done(self, completion: Completion) -> None:
        self._future.add_done_callback(lambda future: completion(future.exception()))


def _same(error: BaseException | None) -> BaseException | None:
    return error


class BackgroundThread(Background):
    """One thread and one group, created at the first asynchronous call."""

    def __init__(self, communicator: Communicator, group: c10d.ProcessGroup | None) -> None:
        with world.group_counts.members_only(communicator.ranks):
            own = c10d.new_group(
                ranks=communicator.ranks,
                timeout=timedelta(seconds=communicator.info.timeout),
                backend=c10d.get_backend(group),
                use_local_synchronization=True,
                group_desc="ringway.compress",
            )
        self._callers = communicator
        self._communicator = world.communicator(own)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringway-compress")
        self._threads = torch.get_num_threads()

    def submit(self, job: Callable[[Communicator], None], result: Sequence[Tensor]) -> Work:
        def run() -> None:
            torch.set_num_threads(self._threads)
            if self._communicator.info.timeout != self._callers.info.timeout:
                self._communicator.set_timeout(self._callers.info.timeout)
            try:
                with torch.inference_mode():
                    job(self._communicator)
            except NotFinite:  # reported after everything was exchanged
                raise
            except BaseException:
                # The caller cannot repeat this call before its next one, whose frames must not meet this one's.
                count_exchange(self._communicator)
                raise

        self.latest = handle = _FutureHandle(self._executor.submit(run))
        return Work(handle, result, _same)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class _EventHandle(Handle):
    """The work enqueued on a stream up to an event. `wait` blocks the current stream, not the caller."""

    notifies = False
    on_device = True

    def __init__(self, event: torch.cuda.Event, device: torch.device, watch: DeviceWatch) -> None:
        self._event = event
        self._device = device
        self._watch = watch

    def wait(self, timeout: float | None = None) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()

    def when_done(self, completion: Completion) -> None:
        self._watch.add(self, self, completion, soon=True)


class _StreamWork(Work):
    """A Work whose future carries the stream's event, so its callbacks see finished data."""

    def __init__(self, handle: Handle, result: Sequence[Tensor], future: torch.futures.Future[Any]) -> None:
        super().__init__(handle, result, _same)
        self._on_stream = future

    def get_future(self) -> torch.futures.Future[Any]:
        return self._on_stream


class BackgroundStream(Background):
    """One CUDA stream next to the caller's."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()

    def submit(self, job: Callable[[Communicator], None], result: Sequence[Tensor]) -> Work:
        with self._lock:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            with torch.cuda.stream(self._stream), torch.inference_mode():
                job(self._communicator)
                for tensor in result:
                    tensor.record_stream(self._stream)
                event = torch.cuda.Event()
                event.record(self._stream)
                future.set_result(list(result))
            watch = self._communicator.info.process.part(DeviceWatch)
            self.latest = handle = _EventHandle(event, self._device, watch)
            return _StreamWork(handle, result, future)
