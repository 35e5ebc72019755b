"""The recorder: a fixed ring that is always on, and safe to read while it is written."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import ringway as dist
import ringway._core as _core
from ringway.call import ALL_REDUCE, BARRIER, SEND, Call
from ringway.testing import RankContext, RankPool
from ringway.work import CompletionCell


def _here(record: _core.GroupRecord) -> int:
    return record.begin(ALL_REDUCE.code, 64, 0, 0, -1, 0)


def test_the_ring_keeps_the_latest() -> None:
    recorder = _core.Recorder(16)
    record = _core.GroupRecord(recorder, "g")
    first = _here(record)
    for _ in range(40):
        record.end(_here(record), True)
    assert recorder.total == 41
    kept = recorder.recent(1000)
    assert [row[0] for row in kept] == list(range(25, 41))
    record.end(first, True)  # the ring has wrapped around: other calls stay untouched
    assert recorder.find(first) is None
    assert all(row[11] == 1 for row in recorder.recent(16))


def test_the_call_site_is_the_users_line() -> None:
    recorder = _core.Recorder(16)
    record = _core.GroupRecord(recorder, "g")
    _here(record)
    file, line, function = recorder.recent(1)[0][8]
    assert (Path(file).name, function) == ("test_recorder.py", "_here")
    assert "record.begin" in Path(file).read_text().splitlines()[line - 1]


def test_messages_are_counted_separately() -> None:
    record = _core.GroupRecord(_core.Recorder(16), "g")
    _here(record)
    record.begin(SEND.code, 4, 0, 0, 1, 0)
    record.begin(SEND.code, 4, 0, 0, 1, 0)
    assert (record.collectives, record.messages, record.completed) == (1, 2, 0)


def test_a_starting_call_concerns_its_thread_and_no_callback() -> None:
    """A signal handler's call is refused while a call of its thread and group starts. Nobody else's is."""
    recorder = _core.Recorder(16)
    record, other = _core.GroupRecord(recorder, "g", 2), _core.GroupRecord(recorder, "other", 2)
    tensor = torch.ones(2)
    seen = []

    def send() -> None:
        seen.append(record.is_starting)
        record.begin_call(Call(SEND, inputs=(tensor,), peer=1), 0)
        seen.append(record.is_starting)
        record.started(0)

    def call_back(_: object) -> None:
        seen.append(record.is_starting)
        record.begin_call(Call(ALL_REDUCE, (tensor,), (tensor,)), 0)
        record.started(0)

    token = record.begin_call(Call(ALL_REDUCE, (tensor,), (tensor,)), 0)
    assert (record.is_starting, other.is_starting) == (True, False)
    refused = Call(ALL_REDUCE, (tensor,), (tensor,))
    assert record.begin_call(refused, 0) == 0
    assert (refused.sequence, record.collectives) == (-1, 1)
    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert seen == [False, True]
    assert record.is_starting
    cell = CompletionCell()
    cell.when_done(call_back)
    cell.finish(None)
    assert seen == [False, True, False]
    assert record.is_starting
    assert record.completed == 0
    record.started(token)
    assert not record.is_starting
    assert record.completed == 1


def test_reading_while_threads_write() -> None:
    recorder = _core.Recorder(64)
    stop = threading.Event()

    def write(number: int) -> None:
        record = _core.GroupRecord(recorder, f"group {number}")
        while not stop.is_set():
            record.end(record.begin(ALL_REDUCE.code, number, number, 0, -1, 0), True)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            for row in recorder.recent(64):
                assert row[6] == f"group {row[2]}", "a record is one call's, never two halves"
                assert row[2] == row[3]
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def _status(context: RankContext, backend: str) -> None:
    context.start(backend)
    dist.all_reduce(torch.ones(4), log_name="step loss")
    last = dist.recent_calls(1)[0]
    assert (last.op, last.nbytes, last.dtype, last.label) == ("all_reduce", 16, torch.float32, "step loss")
    assert last.reduce == "SUM"
    assert last.state == "completed"
    assert last.duration is not None
    assert last.duration > 0
    assert last.site is not None
    assert last.site[2] == "_status"
    dist.monitored_barrier()
    assert (dist.recent_calls(1)[0].op, dist.recent_calls(1)[0].label) == ("barrier", "monitored_barrier")
    dist.broadcast(torch.ones(2), src=1)
    assert dist.recent_calls(1)[0].peer == 1
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), src=1)
        under_way = dist.status()["under_way"]
        assert [call["op"] for call in under_way] == ["recv"]
        dist.barrier()
        assert work is not None
        work.wait()
        assert dist.status()["under_way"] == []
    else:
        dist.barrier()
        dist.send(torch.ones(1), dst=0)
    group = dist.status()["groups"][0]
    assert group["backend"] == backend
    assert group["ranks"] == [0, 1]
    assert group["fault"] is None


def test_status_and_recent_calls(pool: RankPool) -> None:
    for backend in ("gloo", "shm"):
        pool.run(_status, backend, world_size=2)


def test_a_call_that_has_not_started_gives_its_number_back() -> None:
    group = _core.GroupRecord(_core.Recorder(64), "group")
    call = Call(BARRIER)
    assert group.take_back() is None  # nothing is starting
    group.begin_call(call, 0)
    assert group.take_back() is True
    assert (group.collectives, group.completed) == (0, 1), "its record has ended"
    group.started(0)
    group.begin_call(call, 0)
    assert _core.pass_on(lambda: group.collectives) == 1
    assert group.take_back() is None  # it may have been sent
    group.started(0)
    group.begin_call(call, 0)
    group.begin(ALL_REDUCE.code, 64, 0, 0, -1, 0)  # as another thread does
    assert group.take_back() is False
    assert group.collectives == 3
    group.started(0)
