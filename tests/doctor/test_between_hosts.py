"""Faults between two hosts, which are network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from findings import called

import slow_link
from ringway.doctor import Finding, examine
from ringway.testing import RankContext, RankPool


@pytest.mark.processes
def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """libfaketime shows rank 1, and nobody else, a wall clock that is 3 s ahead."""
    slow_link.needed()
    if shutil.which("faketime") is None:
        pytest.skip("libfaketime is not installed (Debian's package faketime)")
    # libfaketime 0.9.10 breaks the call that time.sleep uses.
    sleep = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    (tmp_path / "sitecustomize.py").write_text(sleep)
    ahead = ["faketime", "-m", "--exclude-monotonic", "-f", "+3s"]
    with slow_link.two_hosts() as hosts, ExitStack() as ends:
        ranks = []
        for rank, host in enumerate(hosts):
            environ = {**os.environ, **_place_of(rank, hosts[0].address)}
            if rank == 1:
                environ["PYTHONPATH"] = str(tmp_path)
            command = [
                *(ahead if rank == 1 else []),
                sys.executable,
                "-m",
                "ringway",
                "doctor",
                "--json",
                "--timeout",
                "100",
            ]
            ranks.append(
                ends.enter_context(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host.namespace, *command],
                        env=environ,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            )
        said = [rank.communicate(timeout=120) for rank in ranks]
    findings = [Finding(**entry) for entry in json.loads(said[0][0])["findings"]]
    clock = called(findings, "clocks")
    assert clock.level == "warning", said
    ahead = re.search(r"([0-9.]+) s ahead", clock.says)  # known to half of the fastest answer's time
    assert ahead is not None, said
    assert abs(float(ahead[1]) - 3) < 1, said


def _place_of(rank: int, address: str) -> dict[str, str]:
    """The variables of a rank, alone on its host, in a job of two."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29511",
        "RINGWAY_JOB_SECRET": "ab" * 32,
    }


def _on_host(context: RankContext, namespaces: list[str], address: str, ahead: float) -> list[Finding] | None:
    slow_link.enter(namespaces[context.rank])
    os.environ.update(_place_of(context.rank, address))
    if context.rank == 1 and ahead:
        true_time = time.time_ns
        time.time_ns = lambda: true_time() + int(ahead * 1e9)
    return examine(100.0)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_between_two_hosts_blocked_ports_and_clocks_are_named(pool: RankPool) -> None:
    slow_link.needed()
    with slow_link.two_hosts() as hosts:
        namespaces = [host.namespace for host in hosts]

        def together(ahead: float = 0.0) -> list[Finding]:
            pool.replace()
            try:
                return pool.run(_on_host, namespaces, hosts[0].address, ahead, world_size=2, timeout=200)[0]
            finally:
                pool.replace()

        findings = together(ahead=30.0)
        assert not [each for each in findings if each.level == "error" and each.subject.startswith("to ")], findings
        clock = called(findings, "clocks")
        assert clock.level == "warning", clock
        ahead = re.search(r"([0-9.]+) s ahead", clock.says)  # known to half of the fastest answer's time
        assert ahead is not None, clock
        assert abs(float(ahead[1]) - 30) < 10, clock
        # Rank 1's host sends nothing to the ports of outgoing connections, the doctor's among them. At first it refuses
        # to; then it sends to itself, where what is for others is dropped without a word.
        ip = ["ip", "-n", namespaces[1]]
        subprocess.run([*ip, "route", "add", "default", "dev", "lo", "table", "77"], check=True, timeout=60)
        for way, reason in ((["prohibit"], "Permission denied"), (["lookup", "77"], "timed out")):
            rule = ["ipproto", "tcp", "dport", "30000-65534", *way]
            subprocess.run([*ip, "rule", "add", *rule], check=True, timeout=60)
            findings = together()
            blocked = [each for each in findings if each.level == "error" and each.subject.startswith("to ")]
            assert [each.says.split()[0] for each in blocked] == [host.address for host in hosts], findings
            assert reason in blocked[1].says, blocked
            assert called(findings, "clocks").level == "ok"
            subprocess.run([*ip, "rule", "delete", *rule], check=True, timeout=60)
