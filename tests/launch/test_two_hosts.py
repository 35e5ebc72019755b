"""Two network namespaces joined by a virtual cable, as two hosts: with names and addresses, and nothing shared.

Needs root, iproute2 and util-linux. If CI is set, their absence is a failure, otherwise a skip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

RANK = Path(__file__).with_name("two_hosts_rank.py")
LIMIT = 240


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing; install {package}"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, timeout=60)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """A namespace with its own address."""

    name: str
    namespace: str
    address: str
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, what: str, environ: dict[str, str]) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        script = 'hostname "$0" && exec "$@"'
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RINGWAY_", "GLOO_", "MASTER_"))}
        rank = subprocess.Popen(
            [*command, script, self.name, sys.executable, str(RANK), what],
            env=kept | {"OMP_NUM_THREADS": "1"} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks.append(rank)
        return rank


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    obstacle = _obstacle()
    if obstacle is not None:
        if os.environ.get("CI"):
            pytest.fail(f"two hosts cannot be made: {obstacle}")
        pytest.skip(obstacle)
    tag = f"{os.getpid() % 100000:x}"
    net = f"10.{77 + os.getpid() % 100}.0"
    made = (Host("hosta", f"rw{tag}a", f"{net}.1"), Host("hostb", f"rw{tag}b", f"{net}.2"))
    cables = [f"rwv{tag}a", f"rwv{tag}b"]
    try:
        for host in made:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(made, cables, strict=True):
            _ip("link", "set", cable, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", cable)
            _ip("-n", host.namespace, "link", "set", cable, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            for rank in host.ranks:
                rank.kill()
                rank.communicate()
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, timeout=60, check=False)


def _slurm(hosts: tuple[Host, Host], rank: int, job: str) -> dict[str, str]:
    """What srun sets for each of two tasks on two nodes. The nodes use addresses: there is no name service here."""
    net = hosts[0].address.rpartition(".")[0]
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": f"{net}.[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
    }


def _facts(rank: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = rank.communicate(timeout=LIMIT)
    lines = [line for line in out.splitlines() if line.startswith("FACTS ")]
    assert lines, f"exit code {rank.returncode}\n{out}\n{err}"
    return json.loads(lines[-1].removeprefix("FACTS ")), err


@pytest.mark.timeout(600)
def test_discovery_rendezvous_and_collectives(hosts: tuple[Host, Host]) -> None:
    ranks = [host.start("collectives", _slurm(hosts, rank, "31")) for rank, host in enumerate(hosts)]
    (first, reported), (second, _) = map(_facts, ranks)
    for facts in (first, second):
        assert facts.get("sum") == 3.0, facts
        assert facts["hosts"] == ["hosta", "hostb"]
        assert facts["backend"] == "gloo"
    assert "2 ranks, by Slurm; backend gloo (1 of 2 ranks are on other hosts than rank 0)" in reported


@pytest.mark.timeout(600)
def test_shared_memory_is_refused_by_name(hosts: tuple[Host, Host]) -> None:
    ranks = [
        host.start("collectives", _slurm(hosts, rank, "32") | {"RINGWAY_BACKEND": "shm"})
        for rank, host in enumerate(hosts)
    ]
    for facts, _ in map(_facts, ranks):
        assert facts.get("error") == "BackendUnavailable", facts
        assert "rank 1 is not on rank 0's" in facts["text"]


@pytest.mark.timeout(600)
def test_a_missing_host_is_named(hosts: tuple[Host, Host]) -> None:
    first = hosts[0].start("collectives", _slurm(hosts, 0, "33") | {"RINGWAY_TIMEOUT": "2"})
    alone = hosts[1].start("collectives", _slurm(hosts, 1, "34") | {"RINGWAY_TIMEOUT": "2"})
    facts, _ = _facts(first)
    assert facts.get("error") == "RendezvousError", facts
    assert facts["missing"] == [1]
    assert "rank 0 from hosta" in facts["text"]
    facts, _ = _facts(alone)
    assert facts.get("error") == "RendezvousError", facts
    assert facts["missing"] == [0]
    assert "its host, rank 0, is missing" in facts["text"]


@pytest.mark.timeout(600)
def test_death_of_the_stores_host_is_an_error_not_a_hang(hosts: tuple[Host, Host]) -> None:
    ranks = [host.start("host_dies", _slurm(hosts, rank, "35")) for rank, host in enumerate(hosts)]
    facts, _ = _facts(ranks[1])
    assert facts.get("error") == "PeerLost", facts
    ranks[0].wait(timeout=60)
    assert ranks[0].returncode == -9
