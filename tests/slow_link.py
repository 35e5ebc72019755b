"""Two hosts joined by a slow link, on one machine: network namespaces, a veth pair, and `tc tbf`.

Needs root and iproute2. ringway treats the namespaces as two hosts, without shared memory between them, and the kernel
counts every byte on the link.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringway.testing import RankContext, RankPool

_CLONE_NEWNET = 0x40000000


def obstacle() -> str | None:
    """Why this process cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing; install iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=60, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def needed() -> None:
    """Skips a test if no hosts can be made. In CI, where they can, it fails instead."""
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
        """The bytes that this host has sent over the link so far."""
        shown = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", self.interface))
        return int(shown[0]["stats64"]["tx"]["bytes"])


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[tuple[Host, Host]]:
    """Two hosts. Each side of the link sends at most at `rate`."""
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


def enter(namespace: str) -> None:
    """Move this process to a host."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {file.name}")


def _on_host(
    context: RankContext, namespaces: list[str], environments: list[dict[str, str]], program: str, arguments: list[str]
) -> str:
    """Runs a program on this rank, inside the network namespace of its host, and returns what it printed."""
    enter(namespaces[context.rank])
    os.environ.update(environments[context.rank])
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def run_ranks(
    pool: RankPool, hosts: Sequence[Host], each: int, program: Path, *arguments: str, timeout: float = 240
) -> list[str]:
    """Runs `each` ranks of a Python program on every host, and returns what each printed."""
    placed = [host for host in hosts for _ in range(each)]
    settings = {name: value for name, value in os.environ.items() if name.startswith("RINGWAY_")}
    environments = [
        {
            **settings,
            "RANK": str(number),
            "WORLD_SIZE": str(len(placed)),
            "LOCAL_RANK": str(number % each),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        for number, host in enumerate(placed)
    ]
    namespaces = [host.namespace for host in placed]
    pool.replace()  # ranks that are in no group yet
    try:
        return pool.run(
            _on_host,
            namespaces,
            environments,
            str(program),
            list(arguments),
            world_size=len(placed),
            timeout=timeout,
        )
    finally:
        pool.replace()
