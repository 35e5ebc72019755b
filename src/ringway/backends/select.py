"""Which backend the job uses, and why.

An explicit choice wins, or fails with what to install. Otherwise, for the CPU: `shm` if all ranks proved to be on one
host. On several hosts: `mpi` if an MPI launcher started them and every rank has mpi4py, `hierarchical` if the hosts
have equally many ranks, at least two, and `gloo` otherwise. CUDA tensors go to shm if the CPU's do and ranks share a
GPU, and to nccl otherwise, if every rank has it. Each rank puts what it can do, where it is and which policy it loaded
into the store. So all ranks decide alike, and an obstacle on one rank is an error on all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import Store

from ringway.backends import registry
from ringway.backends.mpi import REMEDY
from ringway.backends.several.hosts import HostGrid, host_identity
from ringway.backends.several.policy import Policy
from ringway.descriptors import shortage_named
from ringway.errors import BackendUnavailable, ConfigError, RendezvousError, UsageError
from ringway.launch.ask_mpi import BY_MPI4PY, mpi_failure
from ringway.launch.gpus import gpu_of_rank
from ringway.launch.info import LaunchInfo
from ringway.launch.locality import meeting_point, shares_host
from ringway.store import Deadline, absent, read

MPI_LAUNCHERS = (BY_MPI4PY, "Open MPI", "PMI (MPICH, Intel MPI)", "PMIx", "AzureML", "SageMaker")
CONSIDERED = ("shm", "mpi", "ccl", "gloo", "nccl", "ucc")


@dataclass(frozen=True)
class Obstacle:
    """Why a backend cannot be used here, and what would help."""

    reason: str
    remedy: str | None = None


@dataclass(frozen=True)
class Choice:
    """The backend as the user would write it, and the reason in words."""

    backend: str
    reason: str


@dataclass(frozen=True)
class RankFacts:
    """What one rank reports to the others: whether it shares rank 0's host (proven), its host (by its own account), the
    backends it lacks, the backend it was configured to use, the digest of its policy or the error in it, its user's
    number, and its GPU."""

    with_rank_0: bool
    obstacles: Mapping[str, Obstacle] = field(default_factory=dict)
    wanted: str | None = None
    host: str = ""
    policy: str | None = None
    policy_error: str | None = None
    uid: int = field(default_factory=os.geteuid)
    gpu: str | None = None


def _no_mpi() -> Obstacle | None:
    if find_spec("mpi4py") is None:
        return Obstacle("mpi4py is not installed", "Install it with: pip install 'ringway[mpi]'")
    failure = None if "mpi4py.MPI" in sys.modules else mpi_failure(tuple(sys.path))
    return None if failure is None else Obstacle(failure, REMEDY)


def _no_nccl() -> Obstacle | None:
    if not c10d.is_nccl_available():
        return Obstacle("this build of torch has no NCCL", "Install a CUDA build of torch")
    if not torch.cuda.is_available():
        return Obstacle("no CUDA device is visible")
    return None


def _no_ucc() -> Obstacle | None:
    if c10d.is_ucc_available():
        return None
    return Obstacle("this build of torch has no UCC", "Use a build of torch with USE_UCC=1")


def _no_gloo() -> Obstacle | None:
    return None if c10d.is_gloo_available() else Obstacle("this build of torch has no gloo")


def _no_torch_mpi() -> Obstacle | None:
    if c10d.is_mpi_available():
        return None
    return Obstacle("this build of torch has no MPI", "Use 'mpi', which needs mpi4py only")


def _missing_module(name: str) -> Callable[[], Obstacle | None]:
    """A backend of ringway's own says what it lacks, in a function `obstacle`."""

    def ask() -> Obstacle | None:
        if find_spec(f"ringway.backends.{name}") is None:
            return Obstacle("this build of ringway does not have it")
        find = getattr(import_module(f"ringway.backends.{name}.backend"), "obstacle", None)
        reason = find() if find is not None else None
        return None if reason is None else Obstacle(str(reason))

    return ask


_PROBES: dict[str, Callable[[], Obstacle | None]] = {
    "shm": _missing_module("shm"),
    "mpi": _no_mpi,
    "hierarchical_mpi": _no_mpi,
    "ccl": _missing_module("ccl"),
    "gloo": _no_gloo,
    "nccl": _no_nccl,
    "ucc": _no_ucc,
    "torch:mpi": _no_torch_mpi,
}


def obstacle(name: str) -> Obstacle | None:
    """What keeps this process from using a backend, if anything. Third-party backends are not checked."""
    probe = _PROBES.get(name)
    return probe() if probe else None


def obstacles(names: tuple[str, ...] = CONSIDERED) -> dict[str, Obstacle]:
    found = ((name, obstacle(name)) for name in names)
    return {name: what for name, what in found if what is not None}


def select(
    explicit: str | None,
    said_by: str,
    info: LaunchInfo,
    store: Store,
    timeout: float,
    policy: Policy | ConfigError | None = None,
) -> Choice:
    """The job's backend. Every rank calls it, with the store that all have reached and the outcome of `consult`."""
    names = tuple(registry.parse(explicit).values()) if explicit else _candidates(info)
    wrong = str(policy) if isinstance(policy, ConfigError) else None
    digest = policy.digest if isinstance(policy, Policy) else None
    # If the launcher gives no local rank, the rank will do: which GPU it is matters only if all ranks are on one host.
    gpu = None if explicit else gpu_of_rank(info.rank if info.local_rank is None else info.local_rank)
    mine = RankFacts(True, obstacles(names), explicit, host_identity(), digest, wrong, gpu=gpu)
    try:
        facts = _tell_each_other(mine, info, store, timeout)
    except c10d.DistError as error:
        host = "the launcher" if info.hosted_by_launcher else "rank 0"
        raise RendezvousError(
            f"rank {info.rank}: the job's store went away while the ranks chose a backend: its host, {host}, died",
            missing=[] if info.hosted_by_launcher else [0],
        ) from error
    return decide(explicit, said_by, info, facts)


def _candidates(info: LaunchInfo) -> tuple[str, ...]:
    """The backends that may be chosen. Whether mpi is one is costly to find out, so only where it could be chosen."""
    return tuple(name for name in CONSIDERED if name != "mpi" or info.source in MPI_LAUNCHERS)


def decide(explicit: str | None, said_by: str, info: LaunchInfo, facts: Mapping[int, RankFacts]) -> Choice:
    """The choice, from what all ranks said. A pure function, so the same on all ranks."""
    _agreed(facts)
    lacking = _lacking(facts)
    if explicit:
        for name in registry.parse(explicit).values():
            _require(name, lacking, _elsewhere(facts), info.size)
        return Choice(explicit, f"chosen by {said_by}")
    cpu = for_cpu(info, facts)
    sharing = _ranks_on_one_gpu(facts)
    if cpu.backend == "shm" and sharing:
        numbers = ", ".join(map(str, sharing[:8]))
        return Choice("cpu:shm,cuda:shm", f"{cpu.reason}; ranks {numbers} share a GPU")
    if "nccl" not in lacking:
        return Choice(f"cpu:{cpu.backend},cuda:nccl", f"{cpu.reason}; every rank has CUDA and NCCL")
    return cpu


def _ranks_on_one_gpu(facts: Mapping[int, RankFacts]) -> list[int]:
    """The ranks of the first GPU that several have, if every rank has one."""
    on_gpu: dict[str, list[int]] = {}
    for rank, said in facts.items():
        if said.gpu is None:
            return []
        on_gpu.setdefault(said.gpu, []).append(rank)
    return next((ranks for ranks in on_gpu.values() if len(ranks) > 1), [])


def _lacking(facts: Mapping[int, RankFacts]) -> dict[str, tuple[int, Obstacle]]:
    """The backends that some rank cannot use: the first such rank, and why."""
    lacking: dict[str, tuple[int, Obstacle]] = {}
    for rank, said in facts.items():
        for name, what in said.obstacles.items():
            lacking.setdefault(name, (rank, what))
    return lacking


def _elsewhere(facts: Mapping[int, RankFacts]) -> list[int]:
    return [rank for rank, said in facts.items() if not said.with_rank_0]


def _agreed(facts: Mapping[int, RankFacts]) -> None:
    """Ranks on different backends would wait for each other until the timeout: their settings differ."""
    for rank, said in facts.items():
        if said.policy_error is not None:
            raise ConfigError(f"rank {rank}: {said.policy_error}", key="policy")
        if said.policy != facts[0].policy:
            ours, theirs = ("a policy" if digest else "none" for digest in (facts[0].policy, said.policy))
            loaded = "another policy than rank 0" if ours == theirs else f"{theirs}, and rank 0 {ours}"
            raise ConfigError(f"rank {rank} loaded {loaded}; all ranks must decide alike", key="policy")
    first = facts[0].wanted
    for rank, said in facts.items():
        if said.wanted != first:
            ours, theirs = (f"backend '{name}'" if name else "no backend" for name in (first, said.wanted))
            raise UsageError(f"rank 0 is configured to use {ours}, rank {rank} {theirs}; configure all ranks alike")


def _require(name: str, lacking: Mapping[str, tuple[int, Obstacle]], elsewhere: list[int], size: int) -> None:
    if name in lacking:
        rank, what = lacking[name]
        where = f" (rank {rank})" if size > 1 else ""
        raise BackendUnavailable(name, what.reason + where, remedy=what.remedy)
    registration = registry.own(name)
    if elsewhere and registration is not None and registration.one_host:
        raise BackendUnavailable(
            name,
            f"it needs all ranks on one host, and rank{'s' if len(elsewhere) > 1 else ''} "
            f"{', '.join(map(str, elsewhere[:8]))} {'are' if len(elsewhere) > 1 else 'is'} not on rank 0's",
            remedy="Use gloo, or mpi under an MPI launcher",
        )


def for_cpu(info: LaunchInfo, facts: Mapping[int, RankFacts]) -> Choice:
    """The backend for CPU tensors, from what all ranks said."""
    return Choice(*_for_cpu(info, facts, _elsewhere(facts), _lacking(facts)))


def _for_cpu(
    info: LaunchInfo,
    facts: Mapping[int, RankFacts],
    elsewhere: list[int],
    lacking: Mapping[str, tuple[int, Obstacle]],
) -> tuple[str, str]:
    if not elsewhere:
        here = "a world of one" if info.size == 1 else f"all {info.size} ranks proved to be on one host"
        if "shm" not in lacking:
            return "shm", here
        return "gloo", f"{here}, but shm: {lacking['shm'][1].reason}"
    apart = f"{len(elsewhere)} of {info.size} ranks are on other hosts than rank 0"
    strangers = [rank for rank in elsewhere if facts[rank].host == facts[0].host and facts[rank].uid != facts[0].uid]
    if strangers:
        rank = strangers[0]
        return "gloo", (
            f"rank {rank} runs as uid {facts[rank].uid} and rank 0 as uid {facts[0].uid}, on the same host: shared "
            "memory needs one user"
        )
    if info.source in MPI_LAUNCHERS and "mpi" not in lacking and registry.own("mpi") is not None:
        return "mpi", f"{apart}, started by {info.source}, and every rank has mpi4py"
    grid = _even_grid(facts)
    if grid is not None and "shm" not in lacking:
        hosts = len(grid.hosts)
        return "hierarchical", f"{hosts} hosts with {grid.width} ranks each: shared memory inside, gloo between them"
    return "gloo", apart


def _even_grid(facts: Mapping[int, RankFacts]) -> HostGrid | None:
    """The hosts, if they have equally many ranks, at least two, and what ranks say about themselves does not contradict
    what was proven."""
    hosts = [facts[rank].host for rank in sorted(facts)]
    if "" in hosts or any(said.with_rank_0 != (said.host == hosts[0]) for said in facts.values()):
        return None
    try:
        return HostGrid.of(hosts, 0)
    except BackendUnavailable:
        return None


def _tell_each_other(mine: RankFacts, info: LaunchInfo, store: Store, timeout: float) -> dict[int, RankFacts]:
    if info.size == 1:
        return {0: mine}
    deadline = Deadline(timeout)
    with shortage_named("the choice of a backend"), ExitStack() as open_until_all_told:
        if info.rank == 0:
            store.set("facts/meet", open_until_all_told.enter_context(meeting_point()))
        name = _said(store, "facts/meet", 0, deadline).decode()
        mine = replace(mine, with_rank_0=info.rank == 0 or shares_host(name))
        store.set(f"facts/{info.rank}", json.dumps(asdict(mine)))
        keys = [f"facts/{rank}" for rank in range(info.size)]
        for rank in absent(store, keys, deadline):
            raise _silent(rank)
        found = {rank: _parsed(bytes(text)) for rank, text in enumerate(store.multi_get(keys))}
        store.add("facts/read", 1)
        if info.rank == 0:  # it may host the store and be about to raise an error, so it stays until all have read
            deadline.poll(lambda: store.add("facts/read", 0) >= info.size or None)
        return found


def _parsed(text: bytes) -> RankFacts:
    said = json.loads(text)
    said["obstacles"] = {name: Obstacle(**what) for name, what in said["obstacles"].items()}
    return RankFacts(**said)


def _said(store: Store, key: str, rank: int, deadline: Deadline) -> bytes:
    value = deadline.poll(lambda: read(store, key))
    if value is None:
        raise _silent(rank)
    return value


def _silent(rank: int) -> RendezvousError:
    return RendezvousError(f"rank {rank} arrived but did not say what it can do", missing=[rank])
