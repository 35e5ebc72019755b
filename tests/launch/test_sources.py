"""Every launcher's environment gives the right place, and no environment causes an unexpected exception."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringway.errors import DiscoveryError, RingwayError, UsageError
from ringway.launch.ancestry import Ancestor, ancestors, setter
from ringway.launch.discover import discover, explore
from ringway.launch.info import LaunchInfo

RECORDED = json.loads((Path(__file__).parent / "data" / "environments.json").read_text())
TORCHRUN = RECORDED[0]["environ"]


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_recorded_environment(case: dict) -> None:
    assert case["origin"]
    info = discover(case["environ"])
    found = {name: getattr(info, name) for name in case["expect"] if name != "notes"}
    expected = {name: value for name, value in case["expect"].items() if name != "notes"}
    assert found == expected
    assert list(info.notes) == case["expect"].get("notes", list(info.notes))


CONTRADICTIONS = {
    "rank beyond the size": ({"RANK": "4", "WORLD_SIZE": "4"}, "environment", "rank 4 is not below"),
    "not a number": ({"RANK": "one", "WORLD_SIZE": "4"}, "environment", "RANK='one'"),
    "underscores": ({"RANK": "1_0", "WORLD_SIZE": "40"}, "environment", "RANK='1_0'"),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "4"}, "environment", "RANK='-1'"),
    "rank without size": ({"RANK": "0"}, "environment", "WORLD_SIZE is not set"),
    "size without rank": ({"WORLD_SIZE": "4"}, "no launcher", "RANK is not"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "environment", "MASTER_ADDR is not set"),
    "no port": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        "environment",
        "MASTER_PORT is not set",
    ),
    "port too high": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
        "environment",
        "MASTER_PORT=65536",
    ),
    "size zero": ({"RANK": "0", "WORLD_SIZE": "0"}, "environment", "WORLD_SIZE=0"),
    "half of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI", "OMPI_COMM_WORLD_RANK"),
    "half of PMI": ({"PMI_RANK": "0"}, "PMI (MPICH, Intel MPI)", "PMI_SIZE"),
    "local rank beyond local size": (
        {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "2"},
        "PMI (MPICH, Intel MPI)",
        "local rank 2",
    ),
    "more here than in all": (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "4"},
        "PMI (MPICH, Intel MPI)",
        "4 ranks on this host",
    ),
    "Slurm's tasks do not add up": (
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        "Slurm",
        "6 tasks",
    ),
    "Slurm's node list is broken": (
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[3-1]"},
        "Slurm",
        "backwards",
    ),
    "PMIx without a size": ({"PMIX_RANK": "0"}, "PMIx", "WORLD_SIZE"),
    "SageMaker elsewhere": ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "SageMaker", "SM_CURRENT_HOST=b"),
    "SageMaker's list is not one": ({"SM_HOSTS": "a,b"}, "SageMaker", "SM_HOSTS"),
    "Kubeflow without an address": (
        {"KUBERNETES_SERVICE_HOST": "x", "PET_NNODES": "2", "PET_NODE_RANK": "0"},
        "Kubernetes",
        "PET_MASTER_ADDR is not set",
    ),
    "an indexed Job without an address": (
        {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"},
        "Kubernetes",
        "MASTER_ADDR is not set",
    ),
    "Kubeflow wants torchrun": (
        {"KUBERNETES_SERVICE_HOST": "x", "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8"},
        "Kubernetes",
        "torchrun",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_inconsistent_variables_are_reported_with_their_values(name: str) -> None:
    environ, source, words = CONTRADICTIONS[name]
    with pytest.raises(DiscoveryError, match="seen: ") as caught:
        discover(environ)
    assert words in str(caught.value)
    assert caught.value.source == source
    assert caught.value.seen.items() <= environ.items()
    assert caught.value.seen


def test_values_do_nothing_to_the_terminal_that_shows_them() -> None:
    with pytest.raises(DiscoveryError) as caught:
        discover({"RANK": "\x1b[31m1\udcff", "WORLD_SIZE": "2"})
    assert str(caught.value).isprintable()
    assert r"\x1b[31m1\udcff" in str(caught.value)


def test_outer_launcher_in_trouble_does_not_matter_to_the_inner() -> None:
    found = explore(TORCHRUN | {"PMI_RANK": "9", "PMI_SIZE": "2"})
    assert found.info.source == "torchrun"
    assert [seen.source for seen in found.seen if seen.error] == ["PMI (MPICH, Intel MPI)"]


def _process(pid: int, environ: dict[str, str] | None) -> Ancestor:
    return Ancestor(pid, 1, environ)


SRUN = next(case["environ"] for case in RECORDED if case["name"].startswith("Slurm, 3 nodes"))
MPICH = next(case["environ"] for case in RECORDED if case["name"].startswith("MPICH"))
RUN = next(case["environ"] for case in RECORDED if case["name"] == "ringway run")


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (TORCHRUN, SRUN, "torchrun"),
        (MPICH, SRUN, "PMI (MPICH, Intel MPI)"),
        (MPICH, TORCHRUN, "PMI (MPICH, Intel MPI)"),
        (TORCHRUN, MPICH, "torchrun"),
        (TORCHRUN, RUN, "torchrun"),
        (RUN, TORCHRUN, "ringway run"),
    ],
)
def test_innermost_launcher_wins(inner: dict[str, str], outer: dict[str, str], expected: str) -> None:
    def ancestry() -> Iterator[Ancestor]:
        yield _process(30, outer)  # the inner launcher: has the outer one's variables, but not yet its own
        yield _process(20, None)  # the outer launcher belongs to another user
        yield _process(1, {})

    found = explore(outer | inner, ancestry=ancestry)
    assert found.info.source == expected
    assert len(found.seen) >= 2


def test_launcher_without_a_job_id_is_known_by_its_process() -> None:
    def ancestry() -> Iterator[Ancestor]:
        yield _process(31, MPICH)  # a shell between the launcher and this rank
        yield _process(30, {})

    info = discover(MPICH, ancestry=ancestry)
    assert info.job == "started by process 30.1"


def test_this_process_has_ancestors_and_their_variables() -> None:
    chain = list(ancestors())
    assert chain
    assert chain[0].environ is None or isinstance(chain[0].environ, dict)
    depth, process = setter("RINGWAY_TEST_VARIABLE_THAT_NOBODY_SETS", "1")
    assert depth == 1
    assert process is not None
    assert process.pid == chain[0].pid


class TestArguments:
    def test_win_over_a_launcher(self) -> None:
        found = explore(TORCHRUN, rank=1, size=2, init_method="tcp://10.9.9.9:1234")
        info = found.info
        assert (info.source, info.rank, info.size) == ("arguments", 1, 2)
        assert (info.address, info.port, info.hosted_by_launcher) == ("10.9.9.9", 1234, False)
        assert [seen.source for seen in found.seen][:2] == ["arguments", "torchrun"]

    def test_torchs_habit_of_address_variables_and_rank_arguments(self) -> None:
        info = discover({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, rank=1, size=2)
        assert (info.address, info.port, info.rank, info.size) == ("localhost", 29500, 1, 2)

    def test_rank_and_size_within_the_url(self) -> None:
        info = discover({}, init_method="tcp://h:5?rank=1&world_size=3")
        assert (info.rank, info.size, info.address, info.port) == (1, 3, "h", 5)

    def test_same_as_the_launcher_keeps_what_it_knows(self) -> None:
        info = discover(TORCHRUN, rank=3, size=4)
        assert (info.local_rank, info.hosted_by_launcher, info.job) == (1, True, "torchrun job7")

    @pytest.mark.parametrize(
        "arguments",
        [
            {"rank": 2, "size": 2},
            {"rank": 1},
            {"rank": 0, "size": 2},
            {"init_method": "http://x:1"},
            {"init_method": "tcp://x"},
            {"init_method": "tcp://x:99999999"},
            {"init_method": "tcp://x:1?rank=a"},
        ],
    )
    def test_impossible_arguments_are_refused(self, arguments: dict) -> None:
        with pytest.raises(UsageError):
            discover({}, **arguments)

    def test_env_method_is_no_argument(self) -> None:
        assert discover(TORCHRUN, init_method="env://").source == "torchrun"


NAMES = sorted({name for case in RECORDED for name in case["environ"]} | {"SLURM_NODELIST", "PET_RDZV_ID"})
VALUES = st.one_of(
    st.text(max_size=12),
    st.integers(-2, 70000).map(str),
    st.sampled_from(["0", "1", "2", '["a","b"]', "n[1-2]", "2(x2)", "[", "localhost", "a:1", "auto", "True", "²"]),
)


@settings(max_examples=600)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12))
def test_any_environment_ends_in_a_value_or_our_error(environ: dict[str, str]) -> None:
    try:
        info = discover(environ)
    except RingwayError:
        return
    assert isinstance(info, LaunchInfo)
    assert 0 <= info.rank < info.size
    assert info.port is None or 0 < info.port < 65536
    assert info.local_size is None or 1 <= info.local_size <= info.size


@settings(max_examples=200)
@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.integers(-2, 5),
    st.integers(-2, 5),
    st.one_of(st.none(), st.text(max_size=20), st.text(max_size=8).map(lambda tail: "tcp://" + tail)),
)
def test_any_arguments_end_in_a_value_or_our_error(
    environ: dict[str, str], rank: int, size: int, init_method: str | None
) -> None:
    try:
        info = discover(environ, rank=rank, size=size, init_method=init_method)
    except RingwayError:
        return
    assert 0 <= info.rank < info.size
