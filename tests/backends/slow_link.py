"""Two hosts joined by a slow link, on one machine: network namespaces, a veth pair, and `tc tbf`.

Needs root and iproute2. Shared memory does not cross the namespaces as far as ringway is concerned, and every
byte between them is counted by the kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


def obstacle() -> str | None:
    """What keeps this process from making hosts, if anything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing; install iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=60, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def needed() -> None:
    """Skips a test where no hosts can be made; in CI, where they can, it fails instead."""
    reason = obstacle()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"two hosts cannot be made: {reason}")
        pytest.skip(reason)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    interface: str

    def sent_bytes(self) -> int:
        """What this host has put on the link since it was made."""
        shown = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", self.interface))
        return int(shown[0]["stats64"]["tx"]["bytes"])


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[tuple[Host, Host]]:
    """Two hosts; each side of the link sends at `rate` at most."""
    tag, net = f"{os.getpid() % 0xFFFFF:x}", f"10.{100 + os.getpid() % 100}.7"
    hosts = tuple(Host(f"rh{tag}{i}", f"{net}.{i + 1}", f"rl{tag}{i}") for i in range(2))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            inside = ("ip", "-n", host.namespace)
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*inside, "link", "set", host.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, *shape)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, timeout=60, check=False)


def run_ranks(hosts: Sequence[Host], each: int, program: Path, *arguments: str, timeout: float = 240) -> list[str]:
    """Runs `each` ranks of a Python program on every host, and returns what each printed."""
    ranks = []
    for number in range(each * len(hosts)):
        host = hosts[number // each]
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": str(each * len(hosts)),
            "LOCAL_RANK": str(number % each),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = ["ip", "netns", "exec", host.namespace, sys.executable, str(program), *arguments]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        printed = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (_, error)) in enumerate(zip(ranks, printed, strict=True)):
        if rank.returncode:
            raise AssertionError(f"rank {number} ended with {rank.returncode}:\n{error}")
    return [out for out, _ in printed]
