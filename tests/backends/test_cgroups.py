"""Limits of containers: memory is asked for before it is taken, and CPU quotas count."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import ringway._core as _core
from exits import in_child
from ringway.backends.base import GroupInfo
from ringway.backends.process import Process
from ringway.backends.shm.backend import ShmBackend
from ringway.backends.shm.join import _cpus_together, _Member
from ringway.call import ALL_REDUCE, Call
from ringway.errors import RingwayError

MB = 1 << 20


def _tree(root: Path, cgroup: str, mount: str, files: dict[str, str]) -> str:
    """A root of a file system with 1 GB of memory and these cgroups."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup + "\n")
    (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mount + "\n")
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1048576 kB\nSwapFree: 0 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


def test_every_ancestor_limits_memory_and_caches_count_as_free(tmp_path: Path) -> None:
    files = {
        "job/rank/memory.max": "max",
        "job/rank/memory.current": str(90 * MB),
        "job/memory.max": str(100 * MB),
        "job/memory.current": str(95 * MB),
        "job/memory.stat": f"anon 5\ninactive_file {20 * MB}\nactive_file {10 * MB}\nslab_reclaimable {MB}",
        "job/memory.swap.max": "0",
    }
    root = _tree(tmp_path, "0::/job/rank", "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", files)
    left, limited_by = _core.memory_left(root)
    assert left == 36 * MB
    assert "sys/fs/cgroup/job (memory.max is 104857600)" in limited_by
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert _core.memory_left(root) == (1 << 30, "on this machine (MemAvailable)")


def test_a_container_that_sees_its_own_part_of_version_1_finds_its_limit(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(64 * MB),
        "memory/memory.usage_in_bytes": str(60 * MB),
        "memory/memory.stat": f"total_inactive_file {2 * MB}\ntotal_active_file {MB}",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    mounts = [
        f"30 22 0:{index} /docker/1a2b /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}"
        for index, name in enumerate(("memory", "cpu"))
    ]
    root = _tree(tmp_path, "4:memory:/docker/1a2b\n3:cpu,cpuacct:/docker/1a2b\n0::/", "\n".join(mounts), files)
    left, limited_by = _core.memory_left(root)
    assert left == 7 * MB
    assert "memory.limit_in_bytes is 67108864" in limited_by
    quota = _core.cpu_quota(root)
    assert quota is not None
    assert quota[1] == 1.5


def test_the_smallest_cpu_quota_of_all_ancestors_counts(tmp_path: Path) -> None:
    files = {"job/rank/cpu.max": "400000 100000", "job/cpu.max": "200000 100000", "cpu.max": "max 100000"}
    root = _tree(tmp_path, "0::/job/rank", "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", files)
    assert _core.cpu_quota(root) == ((tmp_path / "sys/fs/cgroup/job").stat().st_ino, 2.0)
    for name in ("job/rank", "job"):
        (tmp_path / "sys/fs/cgroup" / name / "cpu.max").write_text("max 100000\n")
    assert _core.cpu_quota(root) is None


def test_ranks_fit_if_their_affinities_and_quotas_let_them_run_together() -> None:
    peer = _core.ShmPeer(os.getpid(), -1)

    def fit(quotas: list[tuple[int, float] | None], cpus: int = 8) -> bool:
        members = [_Member(peer, "", list(range(cpus)), quota) for quota in quotas]
        return _cpus_together(members) >= len(members)

    assert fit([None] * 8)
    assert not fit([None] * 9)
    assert fit([(1, 2.0)] * 2)
    assert not fit([(1, 1.5)] * 2)
    assert fit([(1, 2.0), (1, 2.0), (2, 2.0), (2, 2.0)])  # two containers with a quota of two CPUs each
    assert not fit([(1, 2.0), (1, 2.0), (1, 2.0), (2, 8.0), None])


# A real cgroup


class _Limited:
    """A cgroup for memory. Version 1 or 2, whichever this machine lets us use."""

    def __init__(self, folder: Path, limit: str) -> None:
        self.folder = folder
        self._limit = limit

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self, spare: int) -> None:
        """From now on the processes inside may take `spare` more bytes."""
        used = "memory.usage_in_bytes" if "in_bytes" in self._limit else "memory.current"
        total = int((self.folder / used).read_text()) + spare
        (self.folder / self._limit).write_text(str(total))


@pytest.fixture
def limited() -> Iterator[_Limited]:
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(base) / f"ringway-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                yield _Limited(folder, limit)
                return
        finally:
            folder.rmdir()
    pytest.skip("no cgroup for memory can be made here")


def test_a_group_that_does_not_fit_its_cgroup_is_refused(limited: _Limited) -> None:
    """The kernel would kill the process."""

    def work() -> None:
        limited.enter()
        limited.leave(16 * MB)
        with pytest.raises(MemoryError, match=r"only \d+ bytes are left in the cgroup /sys/fs/cgroup/.*memory\."):
            _core.shm_create_segment(512)
        os.close(_core.shm_create_segment(16))

    assert in_child(work) == 0


def test_a_large_call_that_does_not_fit_its_cgroup_ends_with_the_limit_by_name(limited: _Limited) -> None:
    def work() -> None:
        limited.enter()
        store, process, joined, told = c10d.HashStore(), Process(), threading.Barrier(4, timeout=30), []

        def rank(number: int) -> None:
            info = GroupInfo(rank=number, size=4, ranks=range(4), store=store, name="g", timeout=30, process=process)
            backend, tensor = ShmBackend(info), torch.ones(1 << 18)
            if joined.wait() == 0:
                limited.leave(4 * MB)
            joined.wait()
            try:
                backend.all_reduce(Call(ALL_REDUCE, [tensor], [tensor]))
            except RingwayError as error:
                told.append(str(error))
            backend.close()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 4, told
        for text in told:
            assert "bytes are left in the cgroup" in text, text
            assert "docker's --memory" in text, text

    assert in_child(work) == 0
