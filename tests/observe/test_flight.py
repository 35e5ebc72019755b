"""Exports of the recorder: dumps, a file that outlives its process, and torch's layout."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway
import ringway._core as _core
from ringway.config import resolve
from ringway.errors import ConfigError, RingwayError, UsageError
from ringway.groups.world import world
from ringway.observe import flight
from ringway.observe.files import write_whole
from ringway.observe.stall.watch import StallWatch
from ringway.observe.start import prepare
from ringway.testing import RankContext, RankPool


def write_and_die(context: RankContext, path: str) -> None:
    recorder = _core.Recorder(64, path)
    record = _core.GroupRecord(recorder, "data parallel", 8)
    label = recorder.intern("loss")
    for number in range(100):
        token = record.begin(1, number, 0, 0, -1, label)
        if number < 99:
            record.end(token, True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_recorder_file_of_a_killed_process_has_its_last_calls(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "rank0.ringway"
    [outcome] = pool.try_run(write_and_die, str(path), world_size=1)
    assert outcome.kind == "died"
    calls = flight.read_file(path)
    assert [call.sequence for call in calls] == list(range(36, 100))
    assert {call.state for call in calls[:-1]} == {"completed"}
    last = calls[-1]
    assert (last.state, last.op, last.group, last.label, last.size, last.nbytes) == (
        "issued",
        "all_reduce",
        "data parallel",
        "loss",
        8,
        99,
    )
    assert last.site is not None
    assert last.site[0] == __file__
    assert last.site[2] == "write_and_die"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"ringwayR" + b"\xff" * 5000])
def test_a_file_that_is_not_a_recorder_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RingwayError, match="not a recorder's file"):
        flight.read_file(path)
    with pytest.raises(RingwayError, match="cannot open"):
        flight.read_file(tmp_path / "absent")


def test_a_recorder_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="recorder's file"):
        _core.Recorder(64, str(tmp_path / "no" / "such" / "directory"))


@pytest.mark.parametrize(
    "said",
    [{"dump_signal": name} for name in ("SIGNOPE", "SIGKILL", "SIGSTOP", "SIGSEGV")] + [{"recorder_size": 10**15}],
)
def test_an_invalid_recorder_size_is_a_configuration_error(said: dict[str, Any]) -> None:
    [key] = said
    with pytest.raises(ConfigError, match=f"{key} is .* in config argument") as caught:
        prepare(resolve({"ringway": said}, {}), 0)
    assert (caught.value.key, caught.value.source) == (key, "config argument")


def test_a_job_starts_without_its_recorder_file_and_warns(tmp_path: Path) -> None:
    before = world.recorder
    with pytest.warns(UserWarning, match="stays in memory"):
        prepare(resolve({"ringway": {"recorder_file": str(tmp_path / "no" / "{rank}")}}, {}), 0)
    assert world.recorder is before


def test_invalid_arguments_are_refused() -> None:
    for count in (-1, 1.5, True):
        with pytest.raises(UsageError, match="number of calls"):
            ringway.recent_calls(count)
    for seconds in (-1, 0, float("nan"), "x", True):
        with pytest.raises(UsageError, match="seconds above 0"):
            ringway.stall_after(seconds)


def dumped_while_stuck(context: RankContext, path: str) -> Any:
    dist = context.start("gloo")
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    flight.dump_on_signal("SIGUSR2", path)
    dist.all_reduce(torch.ones(4), log_name='a "quoted" label')
    target = path.format(rank=context.rank, pid=os.getpid())
    if context.rank == 1:
        # One multiplication of huge numbers: C code that holds the GIL and that no signal interrupts.
        factor = 3**700_000
        early = False
        for _ in range(20):  # the signal may come before it, or after
            Path(target).unlink(missing_ok=True)
            sender = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -USR2 {os.getpid()}"])
            began = time.time()
            factor * (factor + 1) * factor
            stuck_until = time.time()
            sender.wait()
            # The kernel's clock for files ticks every few milliseconds.
            if os.path.exists(target) and began < os.stat(target).st_mtime < stuck_until - 0.02:
                early = True
                break
    else:
        os.kill(os.getpid(), signal.SIGUSR2)
        early = True
    while not (heard and os.path.exists(target)):
        time.sleep(0.05)
    story = json.loads(Path(target).read_text())
    dist.barrier()
    return [call[7] for call in story["calls"]], heard, early


def test_a_signal_dumps_the_calls_even_from_a_process_that_is_stuck(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(dumped_while_stuck, str(tmp_path / "calls-{rank}.json"), world_size=2, timeout=200)
    for labels, heard, early in results:
        assert 'a "quoted" label' in labels
        assert set(heard) == {signal.SIGUSR2}  # the handler that was there before
        assert early
    pool.replace()  # the handler stays with the process


def dumped_in_a_native_wait(context: RankContext, path: str) -> Any:
    dist = context.start("shm")
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    flight.dump_on_signal(signal.SIGUSR2, path)
    context.store.set(f"pid{context.rank}", str(os.getpid()))
    dist.barrier()
    if context.rank == 0:
        dist.all_reduce(torch.ones(4), log_name="waiting")
        return heard
    target = Path(path.replace("{rank}", "0"))
    while not any(row.label == "waiting" for row in peer_calls()):
        time.sleep(0.02)
    os.kill(int(context.store.get("pid0")), signal.SIGUSR2)
    while not target.exists():
        time.sleep(0.02)
    last = json.loads(target.read_text())["calls"][-1]
    dist.all_reduce(torch.ones(4))
    return last


def peer_calls() -> list[Any]:
    answers = world.listener(StallWatch).ask(ringway.communicator().name, stacks=False)
    return [row for answer in answers.values() for row in answer.calls]


def test_a_signal_dumps_the_calls_of_a_rank_that_waits_in_native_code(pool: RankPool, tmp_path: Path) -> None:
    pool.replace()  # ranks that have not asked another rank yet
    heard, last = pool.run(dumped_in_a_native_wait, str(tmp_path / "calls-{rank}.json"), world_size=2, timeout=100)
    assert heard == [signal.SIGUSR2]  # after the wait, when Python runs its signal handlers
    assert (last[7], last[11]) == ("waiting", 0)  # its label, and that it was still in flight
    pool.replace()


def in_torchs_layout(context: RankContext, prefix: str, uneven: bool) -> Any:
    dist = context.start("gloo")
    dist.all_reduce(torch.ones(4, dtype=torch.bfloat16))
    dist.barrier()
    if context.rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    if not uneven:
        return flight.save_flight_record(prefix)
    # Rank 1 writes its record before the last call, rank 0 while it waits in that call.
    if context.rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        written = flight.save_flight_record(prefix)
        context.store.set("written", "1")
    else:
        written = flight.save_flight_record(prefix)
        context.store.wait(["written"])
        work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    return written


@pytest.mark.parametrize("uneven", [False, True])
def test_torchs_analyzer_reads_our_record(
    pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, uneven: bool
) -> None:
    from torch.distributed.flight_recorder import fr_trace

    assert pool.run(in_torchs_layout, f"{tmp_path}/fr_", uneven, world_size=2) == [True, True]
    entries = pickle.loads((tmp_path / "fr_0").read_bytes())["entries"]
    assert [entry["profiling_name"] for entry in entries[:3]] == [
        "gloo:all_reduce",
        "gloo:all_reduce_barrier",
        "gloo:send 0->1",
    ]
    assert entries[0]["input_dtypes"] == ["BFloat16"]
    if torch.__version__ < "2.13":
        pytest.skip("the analyzer of this torch reads records of nccl only")
    with caplog.at_level("INFO"):
        fr_trace.main([str(tmp_path), "--prefix", "fr_"])
    assert ("Not all ranks" in caplog.text) == uneven, caplog.text


def seen_by_torch(context: RankContext) -> Any:
    c10d.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
    c10d.all_reduce(torch.ones(6))
    c10d.all_gather([torch.empty(3, 2, dtype=torch.bfloat16) for _ in range(2)], torch.ones(3, 2, dtype=torch.bfloat16))
    c10d.barrier()
    deadline = time.monotonic() + 60
    while (calls := flight.torch_calls())[0].state != "completed" and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's thread writes the end of a call after it has woken up the caller
    theirs = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    c10d.destroy_process_group()
    dist = context.start("gloo")
    dist.all_reduce(torch.ones(6))
    return theirs, calls, flight.flight_record()


def test_torchs_own_recorder_is_read_and_ours_has_its_layout(pool: RankPool) -> None:
    pool.replace()
    for theirs, calls, ours in pool.run(seen_by_torch, world_size=2, environment={"TORCH_FR_BUFFER_SIZE": "64"}):
        assert [(call.op, call.nbytes, call.dtype, call.size) for call in calls] == [
            ("all_reduce", 24, torch.float32, 2),
            ("all_gather", 24, torch.bfloat16, 2),  # the gathered whole
            ("barrier", 0, None, 2),
        ]
        assert [call.sequence for call in calls] == [0, 1, 2]
        assert calls[0].state == "completed"
        assert {call.place.rpartition(":")[0] for call in calls} == {__file__}
        # The record has the same keys as torch's, with values of the same types.
        assert set(theirs) <= set(ours)
        assert set(next(iter(theirs["pg_status"].values()))) <= set(next(iter(ours["pg_status"].values())))
        entry = ours["entries"][0]
        for key, value in theirs["entries"][0].items():
            assert key in entry
            if value is not None and entry[key] is not None:
                assert type(entry[key]) is type(value), key
        assert theirs["version"] == ours["version"]
    pool.replace()


def out_of_room(context: RankContext, path: str) -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = write_whole(path, [b"x" * 600, b"x" * 600])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return written, [str(warning.message) for warning in caught]


def test_a_file_that_cannot_be_written_is_a_warning(pool: RankPool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="could not write"):
        assert not write_whole(tmp_path / "no" / "file", [b"x"])
    # The disk fills up during the write: the old file stays, and no partial file is left.
    path = tmp_path / "file"
    path.write_bytes(b"before")
    [(written, said)] = pool.run(out_of_room, str(path), world_size=1)
    assert not written
    assert "could not write" in said[0]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
