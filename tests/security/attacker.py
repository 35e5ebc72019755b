"""Another user of the host who attacks a job of `ringway run`, and the job.

    python attacker.py ATTEMPTS    in a network namespace of its own, as root

The attacker is a real process of another user. It starts before the job and knows where everything is: every port and
socket, the run's store and secret, the format of every message. The job sums, sends objects and makes groups until the
attacker has made all its attempts, and checks every result. One line of JSON says what came of it.
"""

from __future__ import annotations

import array
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

NOBODY = 65534
RANKS = 2
CHALLENGE = 16  # bytes that a responder sends to everyone who connects


class Attacker:
    """Each attempt returns what it got out of the job: nothing, if the job is safe."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._heard: list[bytes] = []
        self._kinds: dict[str, Callable[[], bytes]] = {
            "connection": self._connection,
            "truncated handshake": self._truncated,
            "fuzzed handshake": self._fuzzed,
            "replayed handshake": self._replayed,
            "sign-in at a meeting point": self._sign_in,
            "the run's store": self._store,
            "the run's secret": self._secret,
            "a rank's memory": self._memory,
        }

    def attack(self, attempts: int) -> dict[str, object]:
        made: Counter[str] = Counter()
        got: list[str] = []
        deadline = time.monotonic() + 600
        while (count := sum(made.values())) < attempts and time.monotonic() < deadline:
            if count == attempts // 4:  # a quarter comes early, the rest once the ranks compute
                while len(self._said("running")) < RANKS and time.monotonic() < deadline:
                    time.sleep(0.01)
            kind = self._random.choice(list(self._kinds))
            taken = b""
            with suppress(OSError):
                taken = self._kinds[kind]()
            if taken:
                got.append(f"{kind}: {taken[:80]!r}")
            made[kind] += 1
            time.sleep(0.0005)
        return {"attempts": made, "got": got[:10]}

    # Where things are

    def _ports(self) -> list[tuple[str, int]]:
        found = []
        for table, host in (("/proc/net/tcp", "127.0.0.1"), ("/proc/net/tcp6", "::1")):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == "0A":
                    found.append((host, int(columns[1].rpartition(":")[2], 16)))
        return found

    def _names(self, pattern: str) -> list[str]:
        return re.findall(rf"@({pattern}\S*)$", Path("/proc/net/unix").read_text(), re.MULTILINE)

    def _said(self, name: str) -> list[str]:
        """What the job's own processes have written down for the attacker."""
        return [path.read_text() for path in self._folder.glob(f"{name}*")]

    def _open(self) -> socket.socket:
        names, ports = self._names("ringway"), self._ports()
        place = self._random.choice([*names, *ports]) if names or ports else ("127.0.0.1", 1)
        link = (
            socket.socket(socket.AF_UNIX)
            if isinstance(place, str)
            else socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        )
        link.settimeout(0.02)
        link.connect("\0" + place if isinstance(place, str) else place)
        return link

    def _greeting(self, link: socket.socket) -> tuple[bytes, bytes]:
        """A responder's challenge, which anyone may have, and what else the other side says unasked."""
        with suppress(TimeoutError):
            said = link.recv(4096)
            return (said, b"") if len(said) == CHALLENGE else (b"", said)
        return b"", b""

    def _exchange(self, noise: bytes) -> bytes:
        with self._open() as link:
            _, taken = self._greeting(link)
            link.sendall(noise)
            link.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                taken += link.recv(4096)
            return taken

    # Attempts

    def _connection(self) -> bytes:
        with self._open() as link:
            return self._greeting(link)[1]

    def _request(self) -> bytes:
        """A well-formed question to a responder, with a tag that proves nothing."""
        return self._random.randbytes(32 + CHALLENGE) + self._random.choice((b"S", b"C")) + b"group"

    def _truncated(self) -> bytes:
        request = self._request()
        return self._exchange(request[: self._random.randrange(len(request))])

    def _fuzzed(self) -> bytes:
        noise = self._random.choice((self._request(), bytes(32 + CHALLENGE) + b"S", self._random.randbytes(300)))
        damaged = bytearray(noise)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return self._exchange(bytes(damaged))

    def _replayed(self) -> bytes:
        """What was sent before, to another place."""
        self._heard.append(self._random.choice((self._request(), struct.pack("<QI", 1, 2), b"\0" * 8)))
        return self._exchange(self._random.choice(self._heard[-50:]))

    def _sign_in(self) -> bytes:
        """As a rank that comes to share memory, with a descriptor of its own."""
        names = self._names("ringway-shm") or self._names("ringway-")
        if not names:
            return b""
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as link:
                link.settimeout(0.05)
                link.connect("\0" + self._random.choice(names))
                hello = json.dumps({"token": "0" * 64, "rank": 1, "pid": os.getpid(), "cpus": [0]}).encode()
                link.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
                return link.recv(4096)
        return b""

    def _store(self) -> bytes:
        for path in self._said("store"):
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(0.05)
                link.connect(path)
                return b"connected"
        return b""

    def _secret(self) -> bytes:
        for path in self._said("secret"):
            return Path(path).read_bytes()
        return b""

    def _memory(self) -> bytes:
        for pid in self._said("pid"):
            part = self._random.choice(("environ", "mem", "maps", "fd"))
            if part == "fd":
                return str(os.listdir(f"/proc/{pid}/fd")).encode()
            with open(f"/proc/{pid}/{part}", "rb") as file:
                return file.read(100)
        return b""


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _fork_attacker(folder: Path, attempts: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become_nobody()
            report = Attacker(folder, attempts).attack(attempts)
            (folder / "attacker" / "report").write_text(json.dumps(report))
            code = 0
        finally:
            os._exit(code)
    return pid


def main(attempts: int) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "attacker").mkdir(mode=0o777)
        (folder / "attacker").chmod(0o777)
        attacker = _fork_attacker(folder, attempts)
        from ringway.launch.run import run

        output = StringIO()
        try:
            command = [sys.executable, __file__, "rank", str(folder)]
            with redirect_stdout(output), redirect_stderr(output):
                ended = run(command, RANKS)
        finally:
            with suppress(ProcessLookupError):
                os.kill(attacker, signal.SIGKILL)
            os.waitpid(attacker, 0)
        report = folder / "attacker" / "report"
        found = json.loads(report.read_text()) if report.exists() else {}
        print(json.dumps({"code": ended.code, "summary": ended.summary, "output": output.getvalue(), **found}))


def rank(folder: Path) -> None:
    """A rank of the job. It tells the attacker all that a rank could leak, except the secret itself."""
    me = os.environ["RANK"]
    for what, value in (
        ("store", os.environ["RINGWAY_RUN_STORE"]),
        ("secret", os.environ["RINGWAY_JOB_SECRET_FILE"]),
        ("pid", str(os.getpid())),
    ):
        (folder / f"{what}{me}").write_text(value)
    import torch

    import ringway as dist

    dist.init_distributed(timeout=60, verbose=False)
    assert dist.get_backend() == "shm", dist.get_backend()
    rounds = 0
    while True:
        if rounds == 1:
            (folder / f"running{me}").touch()
        tensor = torch.full((1000,), float(rounds))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(RANKS * rounds)] * 1000
        assert dist.allgather_object(("round", rounds, int(me)))[0] == ("round", rounds, 0)
        if rounds % 50 == 0:
            group = dist.new_group()
            dist.barrier(group)
            dist.destroy_process_group(group)
        ended = (folder / "attacker" / "report").exists()
        if dist.broadcast_object(ended):
            break
        rounds += 1
        time.sleep(0.005)
    dist.destroy_process_group()
    print(f"made {rounds} rounds", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]))
