"""`ringway run --bind`: the CPUs and threads that each rank gets on made-up machines, and that it runs there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringway.cli import app
from ringway.launch import run as launcher
from ringway.launch.binding import Binding, bindings
from ringway.launch.run import run
from ringway.testing import RankContext, RankPool


def _machine(root: Path, nodes: dict[int, list[list[int]]], quota: str = "") -> Path:
    """A sysfs with these nodes, each a list of cores, each a list of hardware threads."""
    system = root / "sys/devices/system"
    for node, cores in nodes.items():
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(_written(cpu for core in cores for cpu in core))
        for core in cores:
            for cpu in core:
                (system / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
                (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(_written(core))
    if quota:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/job\n")
        mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        (root / "proc/self/mountinfo").write_text(mounts)
        (root / "sys/fs/cgroup/job").mkdir(parents=True)
        (root / "sys/fs/cgroup/job/cpu.max").write_text(f"{quota}\n")
    return root


def _written(cpus: Iterable[int]) -> str:
    """As the kernel writes a list: runs of numbers joined by a dash."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "\n"


def _smt(first: int, cores: int, sibling: int) -> list[list[int]]:
    """Cores with two hardware threads each; x86 gives the second ones numbers of their own range."""
    return [[cpu, cpu + sibling] for cpu in range(first, first + cores)]


def _places(how: str, ranks: int, root: Path, allowed: Iterable[int] = range(64)) -> tuple[list[list[int]], list[int]]:
    present = {int(path.name[3:]) for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*")}
    found = bindings(how, ranks, present & set(allowed), root)
    assert found is not None
    return [sorted(binding.cpus) for binding in found], [binding.threads for binding in found]


def test_two_sockets_with_hardware_threads(tmp_path: Path) -> None:
    root = _machine(tmp_path, {0: _smt(0, 4, 8), 1: _smt(4, 4, 8)})
    node_0, node_1 = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    assert _places("core", 1, root) == ([sorted(node_0 + node_1)], [8])
    assert _places("core", 2, root) == ([node_0, node_1], [4, 4])
    assert _places("core", 4, root) == ([[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]], [2] * 4)
    assert _places("core", 8, root) == ([[cpu, cpu + 8] for cpu in range(8)], [1] * 8)
    assert _places("numa", 2, root) == ([node_0, node_1], [4, 4])
    assert _places("numa", 4, root) == ([node_0, node_0, node_1, node_1], [2] * 4)
    # No rank spans the two sockets, even if that leaves them different numbers of cores.
    places, threads = _places("core", 3, root)
    assert [set(place) <= set(node_0) or set(place) <= set(node_1) for place in places] == [True] * 3
    assert (sorted(cpu for place in places for cpu in place), threads) == (list(range(16)), [4, 2, 2])


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    """A hardware thread each while there are enough; then ranks share them. None starts more than one thread."""
    root = _machine(tmp_path, {0: _smt(0, 2, 2)})
    assert _places("core", 3, root) == ([[0], [2], [1, 3]], [1] * 3)
    assert _places("core", 4, root) == ([[0], [2], [1], [3]], [1] * 4)
    places, threads = _places("core", 8, root)
    assert sorted(places) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert threads == [1] * 8
    assert _places("numa", 8, root) == ([[0, 1, 2, 3]] * 8, [1] * 8)


def test_only_cpus_that_the_launcher_may_use(tmp_path: Path) -> None:
    """Half a core, few cores of one node and more of the other: ranks go where the cores are."""
    root = _machine(tmp_path, {0: _smt(0, 4, 8), 1: _smt(4, 4, 8)})
    allowed = [3, 4, 5, 6, 12, 13, 14]
    assert _places("core", 4, root, allowed) == ([[3], [4, 12], [5, 13], [6, 14]], [1] * 4)
    assert _places("numa", 2, root, allowed)[0] == [[4, 5, 6, 12, 13, 14]] * 2
    assert _places("core", 2, root, [8, 9]) == ([[8], [9]], [1, 1])


def test_unusual_nodes(tmp_path: Path) -> None:
    """Nodes that are only memory, numbers with gaps, four hardware threads, and fewer ranks than nodes."""
    cores = [[4 * core + thread for thread in range(4)] for core in range(6)]
    root = _machine(tmp_path, {0: cores[:2], 8: cores[2:4], 16: cores[4:], 255: []})
    assert _places("numa", 3, root) == ([list(range(8)), list(range(8, 16)), list(range(16, 24))], [2] * 3)
    assert _places("core", 2, root) == ([list(range(8)), list(range(8, 24))], [2, 4])
    assert _places("core", 6, root) == (cores, [1] * 6)


def test_a_quota_bounds_threads(tmp_path: Path) -> None:
    """A container that may use 4 CPUs of 16 at a time (docker's --cpus 4)."""
    root = _machine(tmp_path, {0: _smt(0, 8, 8)}, quota="400000 100000")
    assert _places("core", 2, root) == ([[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]], [2, 2])
    assert _places("numa", 8, root)[1] == [1] * 8


def test_without_sysfs(tmp_path: Path) -> None:
    found = bindings("core", 2, [2, 3, 5, 7], tmp_path)
    assert found == [Binding(frozenset({2, 3}), 2), Binding(frozenset({5, 7}), 2)]
    assert bindings("none", 2, [0], tmp_path) is None


def _bound(context: RankContext, cpus: list[int]) -> tuple[int, bool]:
    before = os.sched_getaffinity(0)
    places = [Binding(frozenset({cpu}), 7) for cpu in cpus]
    outcome = run(
        ["sh", "-c", 'echo "$RANK $OMP_NUM_THREADS" $(grep Cpus_allowed_list /proc/$$/status)'],
        len(cpus),
        bindings=places,
    )
    return outcome.code, os.sched_getaffinity(0) == before


def test_ranks_run_where_they_are_bound(pool: RankPool) -> None:
    cpus = [max(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))]
    (ended,) = pool.try_run(_bound, cpus, world_size=1, timeout=120, environment={"OMP_NUM_THREADS": None})
    assert ended.ok, ended
    assert ended.value == (0, True), "the launcher itself stays where it was"
    for rank, cpu in enumerate(cpus):
        (line,) = [line for line in ended.output.splitlines() if line.startswith(f"[rank {rank}]")]
        assert line.startswith(f"[rank {rank}] {rank} 7 "), line
        assert line.endswith(f"Cpus_allowed_list: {cpu}"), line


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Binding] | None] = []

    def started(command: list[str], ranks: int, **options: object) -> launcher.Outcome:
        given.append(options["bindings"])  # type: ignore[arg-type]
        return launcher.Outcome(0, "")

    monkeypatch.setattr(launcher, "run", started)
    for options in ([], ["--bind", "none"], ["--bind", "core"], ["--bind", "numa"]):
        assert CliRunner().invoke(app, ["run", "-n", "2", *options, "true"]).exit_code == 0
    assert given == [None, None, bindings("core", 2), bindings("numa", 2)]
    refused = CliRunner().invoke(app, ["run", "-n", "2", "--bind", "socket", "true"])
    assert refused.exit_code != 0
    assert "use core, numa or none" in str(refused.exception) + refused.output
