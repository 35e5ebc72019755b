"""The limits of a host and of its containers."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from findings import called, needs_root

from ringway.doctor.limits import limits
from ringway.doctor.place import own_place
from ringway.doctor.ranks import sharing


def test_a_full_dev_shm(tmp_path: Path) -> None:
    needs_root()
    folder = tmp_path / "dev/shm"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True, timeout=60)
    try:
        with pytest.raises(OSError, match="No space left"):
            (folder / "full").write_bytes(bytes(2 << 20))
        finding = called(limits(None, tmp_path), "/dev/shm")
    finally:
        subprocess.run(["umount", folder], check=True, timeout=60)
    assert finding.level == "error"
    assert "--shm-size" in finding.advice


def _container(root: Path, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 104857600 kB\nSwapFree: 0 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup/job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_memory_cgroup(tmp_path: Path) -> None:
    files = {"memory.max": str(500 << 20), "memory.current": str(400 << 20), "memory.swap.max": "0"}
    finding = called(limits(None, _container(tmp_path, files)), "memory")
    assert finding.level == "error"
    assert "memory.max" in finding.says
    assert "--memory" in finding.advice


def test_a_cpu_quota(tmp_path: Path) -> None:
    finding = called(limits(None, _container(tmp_path, {"cpu.max": "50000 100000"})), "CPU quota")
    assert finding.level == "warning"
    assert "0.5 CPUs" in finding.says


@contextmanager
def _in_a_cgroup(controller: str, *limits_by_version: tuple[str, str]) -> Iterator[None]:
    """Moves this process to a new cgroup that has one limit: its file and value, of version 1 and of version 2."""
    needs_root()
    entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = {name: path for _, names, path in entries for name in names.split(",")}  # version 2 has no name
    if controller in own:
        (name, value), _ = limits_by_version
        parent = home = Path(f"/sys/fs/cgroup/{controller}{own[controller]}")
    else:
        _, (name, value) = limits_by_version
        parent = Path("/sys/fs/cgroup")  # below, a cgroup with processes has none with limits
        home = Path(f"{parent}{own['']}")
    folder = parent / f"ringway-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as failed:
        pytest.skip(f"no cgroup can be made: {failed}")
    try:
        if not (folder / name).exists():
            pytest.skip(f"the cgroups in {parent} have no {name}")
        (folder / name).write_text(value)
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def test_a_real_memory_cgroup() -> None:
    with _in_a_cgroup("memory", ("memory.limit_in_bytes", "200M"), ("memory.max", "200M")):
        finding = called(limits(None), "memory")
    assert finding.level == "error", finding
    assert f"ringway-test-{os.getpid()}" in finding.says, finding
    assert str(200 << 20) in finding.says, finding


def test_a_real_cpu_quota() -> None:
    with _in_a_cgroup("cpu", ("cpu.cfs_quota_us", "50000"), ("cpu.max", "50000 100000")):
        finding = called(limits(None), "CPU quota")
        place = own_place(0, [])
    assert finding.level == "warning", finding
    assert "0.5 CPUs" in finding.says, finding
    alone = called(sharing([place]), "CPUs")
    assert alone.level == "ok", "a single rank takes turns with nobody"
    assert "0.5 by the quota" in alone.says, alone
    assert called(sharing([place, replace(place, rank=1)]), "CPUs").level == "warning"


def test_little_memory_that_may_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    little = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (little, hard))
    try:
        assert called(limits(None, tmp_path), "locked memory").level == "ok", "only RDMA needs it"
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
        finding = called(limits(None, tmp_path), "locked memory")
        assert finding.level == "warning", finding
        assert "mlx5_0" in finding.says, finding
        assert "ulimit -l unlimited" in finding.advice, finding
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    # Not every process may raise its limit.
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert called(limits(None, tmp_path), "locked memory").level == "ok"
