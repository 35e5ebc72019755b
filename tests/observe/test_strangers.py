"""What strangers on the host cannot do to a rank: hold it up, show up as one, or have it write into other files."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import ringway._core as _core
from ringway.call import ALL_REDUCE
from ringway.errors import RingwayError
from ringway.observe import flight, top
from ringway.observe.files import append_whole, replace_whole
from ringway.observe.stall.peers import request
from ringway.store import Deadline

TOKEN = "t" * 32
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process or of a file")


@contextmanager
def _responder() -> Iterator[_core.Responder]:
    responder = _core.Responder(_core.Recorder(64), "127.0.0.1", TOKEN, "{}")
    try:
        yield responder
    finally:
        responder.close()


def _drip(port: int, over: threading.Event) -> None:
    """Sends a byte from time to time, as if the request were about to come."""
    with socket.create_connection(("127.0.0.1", port), 10) as stranger, suppress(OSError):
        while not over.wait(1.0):
            stranger.send(b"x")


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        return "calls" in request(connection, TOKEN, "C", "", Deadline(30))


@pytest.mark.timeout(60)
def test_a_slow_stranger_holds_up_neither_ranks_nor_the_exit() -> None:
    over = threading.Event()
    with _responder() as responder:
        strangers = [threading.Thread(target=_drip, args=(responder.port, over), daemon=True) for _ in range(20)]
        for stranger in strangers:
            stranger.start()
        time.sleep(0.2)
        start = time.monotonic()
        assert _answers(responder.port)
        responder.close()
        took = time.monotonic() - start
    over.set()
    assert took < 20  # one after the other, they would take 2 s each


@pytest.mark.timeout(60)
def test_without_descriptors_the_responder_waits_instead_of_spinning() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _responder() as responder, socket.socket() as client:
        used = len(os.listdir("/proc/self/fd")) - 1
        taken = [os.dup(0) for _ in range(max(map(int, os.listdir("/proc/self/fd"))) - used)]  # no gaps below the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken, default=used) + 1, before[1]))
        try:
            taken.extend(_all_that_is_left())
            client.settimeout(30)
            client.connect(("127.0.0.1", responder.port))
            cpu = time.process_time()
            time.sleep(1)
            cpu = time.process_time() - cpu
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in taken:
                os.close(fd)
        assert cpu < 0.4
        assert "calls" in request(client, TOKEN, "C", "", Deadline(30))  # it is served as soon as there is room


def _all_that_is_left() -> Iterator[int]:
    with suppress(OSError):
        while True:
            yield os.dup(0)


def _fake_rank(user: int, told: int) -> None:
    """Listens as a rank does, and answers one request."""
    os.setresuid(user, user, user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0ringway/{os.getpid()}")
        listener.listen()
        os.write(told, b".")
        connection, _ = listener.accept()
        facts = b'{"rank": 0, "size": 1, "host": "h", "job": "fake"}'
        tail = b'"pid": %d, "now": 1, "total": 0, "calls": [], "leaving": ""}' % os.getpid()
        with suppress(OSError):
            connection.recv(1000)  # a connection that is closed with unread data loses the answer
            connection.sendall(b'{"facts": ' + facts + b", " + tail)


def _shown(user: int) -> bool:
    """Whether `ringway top` shows a fake rank of this user."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _fake_rank(user, told)
        finally:
            os._exit(0)
    try:
        os.read(ready, 1)
        assert child in top.pids()
        return top.ask_pid(child) is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@as_root
@pytest.mark.timeout(60)
def test_top_does_not_show_a_rank_of_another_user() -> None:
    assert _shown(os.getuid())  # the answer is one that top takes
    assert not _shown(NOBODY)


# Files


def _two_jobs(path: str) -> None:
    group = _core.GroupRecord(_core.Recorder(1 << 14, path), "first")
    _core.Recorder(16, path)  # its file is smaller: if it were the same file, the first job would write past its end
    for _ in range(10_000):
        group.end(group.begin(ALL_REDUCE.code, 64, 0, 0, -1, 0), True)


def test_a_second_job_with_the_same_recorder_file_leaves_the_first_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ringway"
    child = os.fork()  # a crash must not end the tests
    if child == 0:
        _two_jobs(str(path))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(flight.read_file(f"{path}.previous")) == 10_000
    assert flight.read_file(path) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rank0.ringway", "rank0.ringway.previous"]


def test_a_directory_is_not_replaced_by_a_recorder_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Is a directory"):
        _core.Recorder(64, str(tmp_path))
    assert tmp_path.is_dir()


@pytest.mark.timeout(30)
def test_a_recorder_file_without_a_next_call_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    _core.Recorder(64, str(path))
    with path.open("r+b") as file:
        file.seek(struct.calcsize("8sIIQQqqq"))
        file.write(bytes(8))
    with pytest.raises(RingwayError, match="not a recorder's file"):
        flight.read_file(path)


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim, report = tmp_path / "victim", tmp_path / "report"
    victim.write_text("precious")
    (tmp_path / f"report.{os.getpid()}.part").symlink_to(victim)
    replace_whole(report, [b"text"])
    report.unlink()
    report.symlink_to(victim)
    replace_whole(report, [b"text"])
    assert report.read_text() == "text"
    dump = tmp_path / "dump"
    Path(f"{dump}.part").symlink_to(victim)
    with _responder() as responder:
        responder.dump_at(signal.SIGUSR1, str(dump))
        os.kill(os.getpid(), signal.SIGUSR1)
        end = time.monotonic() + 30
        while not dump.exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert dump.exists()
    assert victim.read_text() == "precious"


@as_root
def test_text_is_appended_through_links_of_this_user_only(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    link.symlink_to(victim)
    append_whole(str(link), b"own")
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(OSError, match="symbolic links"):
        append_whole(str(link), b"planted")
    assert victim.read_text() == "own"


def test_nobody_can_shrink_a_call_board() -> None:
    fd = _core.create_call_board(2, 2, TOKEN)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
