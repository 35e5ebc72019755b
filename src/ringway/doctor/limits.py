"""What the kernel and the container allow a job on this host: memory, CPU time, descriptors, locked pages."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import ringway._core as _core
from ringway.doctor.finding import Finding, Findings, error, in_bytes, ok, warning
from ringway.launch.cpus import cpu_quota, numa_nodes
from ringway.launch.info import LaunchInfo

_LITTLE_MEMORY, _TOO_LITTLE_MEMORY = 2 << 30, 256 << 20
_LITTLE_SHM, _TOO_LITTLE_SHM = 1 << 30, 16 << 20
_DESCRIPTORS = 1024


def limits(info: LaunchInfo | None, root: Path = Path("/")) -> Findings:
    """`root` replaces the root of the file system, for tests."""
    yield _memory(root)
    yield from _cpu_quota(root)
    yield _shared_memory(root)
    yield _descriptors(info)
    yield _locked_memory(root)
    yield _numa(root)
    yield _huge_pages(root)


def _memory(root: Path) -> Finding:
    left, limited_by = _core.memory_left(str(root) if root != Path("/") else "")
    says = f"{in_bytes(left)} left ({limited_by})"
    if left >= _LITTLE_MEMORY:
        return ok("memory", says)
    advice = "Give the container more memory (docker: --memory), or end what uses it"
    if left < _TOO_LITTLE_MEMORY:
        return error("memory", f"{says}: the kernel will kill ranks without a message", advice)
    return warning("memory", says, advice)


def _cpu_quota(root: Path) -> Findings:
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    if quota is not None and quota < allowed:
        yield warning(
            "CPU quota",
            f"the container may use {quota:g} CPUs of the {allowed} that its processes see",
            "Raise the quota (docker: --cpus), or start no more ranks and threads than the quota allows",
        )


def _shared_memory(root: Path) -> Finding:
    path = root / "dev/shm"
    try:
        space = os.statvfs(path)
    except OSError:
        return warning("/dev/shm", "it does not exist", "Mount a tmpfs there: NCCL and DataLoader workers need it")
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    says = f"{in_bytes(free)} free of {in_bytes(total)}"
    advice = "Raise its size (docker: --shm-size=8g). ringway's shm backend does not use it"
    if free < _TOO_LITTLE_SHM:
        return error("/dev/shm", f"{says}: NCCL and DataLoader workers will fail", f"Delete leftovers there. {advice}")
    if free < _LITTLE_SHM:
        return warning("/dev/shm", f"{says}: NCCL and DataLoader workers may need more", advice)
    return ok("/dev/shm", says)


def _descriptors(info: LaunchInfo | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = info.size if info is not None else 1
    wanted = max(_DESCRIPTORS, 4 * ranks)
    says = f"open files: at most {_limit(soft)} in a process"
    if soft != resource.RLIM_INFINITY and soft < wanted:
        return warning(
            "descriptors", f"{says}: few for {ranks} ranks", f"ulimit -n {wanted} (hard limit: {_limit(hard)})"
        )
    return ok("descriptors", says)


def _locked_memory(root: Path) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    bounded = soft != resource.RLIM_INFINITY
    says = f"{in_bytes(soft) if bounded else 'any amount'} of memory may be locked"
    if bounded and adapters:
        advice = "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        return warning("locked memory", f"{says}: RDMA over {', '.join(adapters)} needs more", advice)
    return ok("locked memory", says)


def _numa(root: Path) -> Finding:
    nodes = numa_nodes(root)
    return ok("NUMA", f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}")


def _huge_pages(root: Path) -> Finding:
    def chosen(name: str) -> str:
        try:
            text = (root / "sys/kernel/mm/transparent_hugepage" / name).read_text()
        except OSError:
            return "unknown"
        return text.partition("[")[2].partition("]")[0] or "unknown"

    return ok("huge pages", f"transparent: {chosen('enabled')}, in shared memory: {chosen('shmem_enabled')}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
