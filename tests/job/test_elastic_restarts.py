"""Elastic jobs whose ranks torchrun restarts: one store, in torchrun's agent, serves all attempts."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway
from elastic_model import SECONDS, Sum, contents_of, optimizer_of, simulated, values_of
from ringway.job.elastic.job import ElasticJob
from ringway.launch import processes
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

RANKS, STEPS = 2, 5


def _rank_of_torchrun(context: RankContext, port: int, attempt: int, several_hosts: bool) -> dict[str, Any]:
    """In the first attempt, both ranks are killed in step 2: by a fault, and by torchrun."""
    leave(ringway)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK="0" if several_hosts else str(context.rank),
        LOCAL_WORLD_SIZE="1" if several_hosts else str(RANKS),
        GROUP_RANK=str(context.rank if several_hosts else 0),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=f"restarts {port}",
        # Agents on several hosts count only the failures of their own ranks.
        TORCHELASTIC_RESTART_COUNT=str(attempt if context.rank == 1 or not several_hosts else 0),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if several_hosts:
        os.environ["RINGWAY_JOB_SECRET"] = "5" * 64
        own = processes.pid_namespace()
        processes.pid_namespace = lambda: f"{own} {context.rank}"  # neither sees the other's processes
    model, sizes = Sum(), []
    optimizer = optimizer_of(model)
    # If the ranks of the first attempt were waited for, this one would not end in time.
    with ElasticJob(grace=10 * SECONDS) as job:
        agent = c10d.TCPStore("127.0.0.1", port, is_master=False)
        agent.set(f"secret {attempt}", job._store._key.token("test"))
        job.data_parallel(model)
        for attempt_at_step in job.steps({"model": model, "optimizer": optimizer}, until=STEPS):
            with attempt_at_step:
                if attempt == 0 and attempt_at_step.step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(values_of(attempt_at_step.step, job.rank)).backward()
                attempt_at_step.commit()
                optimizer.step()
                sizes.append(job.size)
        return {"sizes": sizes, "contents": contents_of(model, optimizer)}


@pytest.mark.parametrize("several_hosts", [False, True])
def test_a_restarted_job_starts_again(pool: RankPool, several_hosts: bool) -> None:
    agent = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool.replace()
    for attempt in range(2):
        ended = pool.try_run(
            _rank_of_torchrun, agent.port, attempt, several_hosts, world_size=RANKS, timeout=SECONDS, grace=60
        )
        pool.replace()
        if attempt == 0:
            assert not any(outcome.ok for outcome in ended)
    assert all(outcome.ok for outcome in ended), "\n".join(map(str, ended))
    # On one host, all ranks were restarted, and share a new secret. Across hosts, the user gave one.
    assert (agent.get("secret 0") == agent.get("secret 1")) == several_hosts
    for outcome in ended:
        assert outcome.value["sizes"] == [RANKS] * STEPS
        torch.testing.assert_close(torch.tensor(outcome.value["contents"]), torch.tensor(simulated([RANKS] * STEPS)))
