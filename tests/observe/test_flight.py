"""What the recorder leaves behind: dumps, a file that outlives its process, and torch's layout."""

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

from ringway import _core
from ringway.errors import RingwayError
from ringway.observe import flight
from ringway.observe.files import write_whole
from ringway.testing import RankContext, RankPool


def write_and_die(context: RankContext, path: str) -> None:
    recorder = _core.Recorder(64, path)
    lane = _core.Lane(recorder, "data parallel", 8)
    label = recorder.intern("loss")
    for number in range(100):
        token = lane.begin(1, number, 0, 0, -1, label)
        if number < 99:
            lane.end(token, True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_file_of_a_killed_process_tells_its_last_calls(pool: RankPool, tmp_path: Path) -> None:
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
def test_a_file_that_is_not_a_recorders_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RingwayError, match="not a recorder's file"):
        flight.read_file(path)
    with pytest.raises(RingwayError, match="cannot open"):
        flight.read_file(tmp_path / "absent")


def test_a_recorder_without_room_for_its_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="recorder's file"):
        _core.Recorder(64, str(tmp_path / "no" / "such" / "directory"))


def dumped_while_stuck(context: RankContext, path: str) -> Any:
    dist = context.start("gloo")
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    flight.dump_on_signal("SIGUSR2", path)
    dist.all_reduce(torch.ones(4), log_name='a "quoted" label')
    target = path.format(rank=context.rank, pid=os.getpid())
    if context.rank == 1:
        # One multiplication of huge numbers: C code that keeps the GIL, and that no signal ends.
        factor = 3**700_000
        sender = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -USR2 {os.getpid()}"])
        time.sleep(0.05)
        began = time.time()
        while time.time() - began < 0.1:
            pass
        factor * (factor + 1) * factor
        stuck_until = time.time()
        modified = os.stat(target).st_mtime
        sender.wait()
        early = began < modified < stuck_until
    else:
        os.kill(os.getpid(), signal.SIGUSR2)
        while not os.path.exists(target):
            time.sleep(0.05)
        early = True
    story = json.loads(Path(target).read_text())
    dist.barrier()
    return [call[7] for call in story["calls"]], heard, early


def test_a_signal_dumps_the_calls_even_from_a_process_that_is_stuck(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(dumped_while_stuck, str(tmp_path / "calls-{rank}.json"), world_size=2, timeout=60)
    for labels, heard, early in results:
        assert 'a "quoted" label' in labels
        assert heard == [signal.SIGUSR2]  # the handler that was there before
        assert early
    pool.replace()  # the handler stays with the process


def in_torchs_layout(context: RankContext, prefix: str) -> Any:
    dist = context.start("gloo")
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    if context.rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    written = flight.save_flight_record(prefix)
    dist.barrier()
    return written


def test_torchs_analyzer_reads_our_record(pool: RankPool, tmp_path: Path, capsys: Any) -> None:
    from torch.distributed.flight_recorder import fr_trace

    assert pool.run(in_torchs_layout, f"{tmp_path}/fr_", world_size=2) == [True, True]
    entries = pickle.loads((tmp_path / "fr_0").read_bytes())["entries"]
    assert entries[-1]["profiling_name"].startswith("gloo:send 0->1")
    fr_trace.main([str(tmp_path), "--prefix", "fr_"])


def seen_by_torch(context: RankContext) -> Any:
    c10d.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
    c10d.all_reduce(torch.ones(6))
    calls = flight.torch_calls()
    c10d.destroy_process_group()
    return [(call.op, call.nbytes, call.state) for call in calls]


def test_torchs_own_recorder_is_read(pool: RankPool) -> None:
    pool.replace()
    for calls in pool.run(
        seen_by_torch, world_size=2, environment={"TORCH_FR_BUFFER_SIZE": "64", "TORCH_NCCL_TRACE_BUFFER_SIZE": "64"}
    ):
        assert all(op == "all_reduce" and nbytes == 24 for op, nbytes, _ in calls)


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
    # A disk that fills up in the middle: what was there before stays, and nothing half is left.
    path = tmp_path / "file"
    path.write_bytes(b"before")
    [(written, said)] = pool.run(out_of_room, str(path), world_size=1)
    assert not written
    assert "could not write" in said[0]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
