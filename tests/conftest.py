"""Fixtures and markers of the whole suite."""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# These tests are about CPU tensors. A GPU that torch sees changes its defaults: FSDP2 moves shards to it, and ringway
# chooses nccl in addition to shm. scripts/nccl_proof.py tests what needs a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import HealthCheck, settings

from ringway.testing import RankPool

# A slow machine must not fail a test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell that starts a command with & outside a terminal makes it ignore SIGINT, and so do all its children. The tests
# of Ctrl-C would then wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
TIMING = (
    "backends/test_call_order.py",
    "backends/test_device_watch.py",
    "backends/test_mixed.py",
    "backends/test_nccl_fast_path.py",
    "backends/test_nccl_faults.py",
    "backends/test_queue.py",
    "backends/test_shm_cuda.py",
    "backends/test_shm_ends.py",
    "backends/test_shm_faults.py",
    "backends/test_shm_kills.py",
    "backends/test_shm_signals.py",
    "compare/test_across_hosts.py",
    "compare/test_mismatch.py",
    "groups/test_teardown.py",
    "job/test_elastic.py",
    "job/test_elastic_hosts.py",
    "job/test_elastic_observed.py",
    "job/test_elastic_restarts.py",
    "launch/test_hosts.py",
    "launch/test_live.py",
    "launch/test_rendezvous.py",
    "launch/test_run.py",
    "launch/test_two_hosts.py",
    "launch/test_witness.py",
    "lowcomm/test_elastic_rounds.py",
    "notebook/test_notebook.py",
    "observe/test_dead_ranks_groups.py",
    "observe/test_destroyed_at_once.py",
    "observe/test_end.py",
    "observe/test_logger.py",
    "observe/test_stall.py",
    "observe/test_straggler.py",
    "security/test_attack.py",
    "security/test_network.py",
    "security/test_responder.py",
    "security/test_roll_call.py",
    "test_work.py",
    "testing/test_pool.py",
)
"""Tests that wait for a timeout, for a peer's death or for a late rank."""

for _file in TIMING:
    if not (TESTS / _file).is_file():
        raise FileNotFoundError(f"TIMING in tests/conftest.py lists {_file}, which does not exist in tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if item.path.relative_to(TESTS).as_posix() in TIMING:
            item.add_marker(pytest.mark.timing)
        if FREE_THREADED and "compile" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="torch.compile of torch 2.13 crashes on a free-threaded Python"))


PRELOAD = (
    "pytest",
    "hypothesis",
    "torch._dynamo",  # DDP, FakeTensorMode and DTensor import it: two seconds for each rank that has to
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "ringway.compress",
    "ringway.parallel",
    "ringway.testing.conformance",
)
"""What ranks use. The fork server imports it once for all of them."""


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks shared by all tests: up to eight, started when a test first needs them."""
    with RankPool(8, preload=PRELOAD) as ranks:
        yield ranks
