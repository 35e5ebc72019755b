"""Two network namespaces joined by a virtual cable, as two hosts: with names and addresses, and nothing shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import two_hosts_rank

from ringway.testing import RankPool
from ringway.testing.pool import Outcome
from slow_link import Host, needed, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    needed()
    with two_hosts() as made:
        yield made


def _run(pool: RankPool, hosts: tuple[Host, Host], what: str, *jobs: str, **variables: str) -> list[Outcome]:
    """One rank on each host, in one job or in two, started as by Slurm."""
    pool.replace()  # ranks that are in no group, on no host yet
    environments = [_slurm(hosts, rank, jobs[rank % len(jobs)]) | variables for rank in range(2)]
    namespaces = [host.namespace for host in hosts]
    try:
        return pool.try_run(two_hosts_rank.run, namespaces, environments, what, world_size=2)
    finally:
        pool.replace()


def _slurm(hosts: tuple[Host, Host], rank: int, job: str) -> Mapping[str, str]:
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


def test_discovery_rendezvous_and_collectives(pool: RankPool, hosts: tuple[Host, Host]) -> None:
    ranks = _run(pool, hosts, "collectives", "31")
    for rank in ranks:
        assert rank.ok, rank
        assert rank.value.get("sum") == 3.0, rank.value
        assert rank.value["hosts"] == ["hosta", "hostb"]
        assert rank.value["backend"] == "gloo"
    assert "2 ranks, by Slurm; backend gloo (1 of 2 ranks are on other hosts than rank 0)" in ranks[0].output


def test_shared_memory_is_refused_by_name(pool: RankPool, hosts: tuple[Host, Host]) -> None:
    for rank in _run(pool, hosts, "collectives", "32", RINGWAY_BACKEND="shm"):
        assert rank.ok, rank
        assert rank.value.get("error") == "BackendUnavailable", rank.value
        assert "rank 1 is not on rank 0's" in rank.value["text"]


def test_a_missing_host_is_named(pool: RankPool, hosts: tuple[Host, Host]) -> None:
    for rank, text in zip(
        _run(pool, hosts, "collectives", "33", "34", RINGWAY_TIMEOUT="2"),
        ("rank 0 from hosta", "its host, rank 0, is missing"),
        strict=True,
    ):
        assert rank.ok, rank
        assert rank.value.get("error") == "RendezvousError", rank.value
        assert rank.value["missing"] == [1 - rank.rank]
        assert text in rank.value["text"]


def test_death_of_the_stores_host_is_an_error_not_a_hang(pool: RankPool, hosts: tuple[Host, Host]) -> None:
    dead, alive = _run(pool, hosts, "host_dies", "35")
    assert dead.detail == "killed by SIGKILL"
    assert alive.ok, alive
    assert alive.value.get("error") == "PeerLost", alive.value
