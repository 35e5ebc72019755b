"""Elastic jobs on two hosts: a rank of the other host dies, and the network is cut."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
import torch

import ringway
import slow_link
from elastic_model import SECONDS, Sum, contents_of, optimizer_of, simulated, values_of
from ringway.errors import RendezvousError
from ringway.job.elastic.job import Attempt, ElasticJob
from ringway.launch import processes
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

pytestmark = [pytest.mark.processes, pytest.mark.timing]

EACH = 2
STEPS = 8
SECRET = "0123456789abcdef" * 4


def _train(context: RankContext, hosts: list[slow_link.Host], event: str, grace: float) -> dict[str, Any]:
    """Rank 3 kills itself in step 3, or rank 0 cuts the link then. The store is on the first host, in rank 0."""
    leave(ringway)
    host = hosts[context.rank // EACH]
    slow_link.enter(host.namespace)
    # One process table for both hosts would show deaths that a real host does not see.
    own = processes.pid_namespace()
    processes.pid_namespace = lambda: f"{own} {host.namespace}"
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(EACH),
        LOCAL_RANK=str(context.rank % EACH),
        MASTER_ADDR=hosts[0].address,
        MASTER_PORT="29533",
        GLOO_SOCKET_IFNAME=host.interface,
        RINGWAY_JOB_SECRET=SECRET,
    )
    torch.set_num_threads(1)
    model, sizes, began = Sum(), [], {}
    optimizer = optimizer_of(model)

    def step(attempt: Attempt) -> None:
        with attempt:
            if attempt.step == 3 and job.size == context.world_size:
                if event == "kill" and context.rank == 3:
                    context.store.set("killed", str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                if event == "cut" and context.rank == 0:
                    subprocess.run(
                        ["ip", "-n", host.namespace, "link", "set", host.interface, "down"], check=True, timeout=30
                    )
            model(values_of(attempt.step, job.rank)).backward()
            attempt.commit()
            optimizer.step()
            sizes.append(job.size)

    try:
        with ElasticJob(grace=grace) as job:
            job.data_parallel(model)
            for attempt in job.steps({"model": model, "optimizer": optimizer}, until=STEPS):
                began[attempt.step] = time.monotonic()
                step(attempt)
    except RendezvousError as error:
        return {"error": str(error)}
    killed = float(context.store.get("killed").decode()) if event == "kill" else 0.0
    return {"sizes": sizes, "contents": contents_of(model, optimizer), "pause": began[3] - killed}


@pytest.mark.parametrize(("event", "grace"), [("kill", 30.0), ("cut", 3.0)])
def test_the_other_host_loses_a_rank_or_the_network(pool: RankPool, event: str, grace: float) -> None:
    slow_link.needed()
    with slow_link.two_hosts() as hosts:
        ended = pool.try_run(_train, list(hosts), event, grace, world_size=2 * EACH, timeout=SECONDS + 30, grace=60)
        pool.replace()
    survivors = ended[:3] if event == "kill" else ended[:2]
    assert all(outcome.ok for outcome in survivors), "\n".join(map(str, ended))
    left = len(survivors)
    for outcome in survivors:
        assert outcome.value["sizes"] == [4, 4, 4] + [left] * (STEPS - 3)
        assert outcome.value["contents"] == survivors[0].value["contents"]
        if event == "kill":
            assert outcome.value["pause"] < grace / 2, "the death was noticed by silence only"
    wanted = simulated([4, 4, 4] + [left] * (STEPS - 3))
    torch.testing.assert_close(torch.tensor(survivors[0].value["contents"]), torch.tensor(wanted))
    if event == "cut":
        for outcome in ended[2:]:
            assert outcome.ok, str(outcome)
            assert "the job's store is out of reach" in outcome.value["error"]
