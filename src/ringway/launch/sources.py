"""Launchers, one function each: from an environment to this process's place, or None if the launcher was not used.

The functions are pure: they read only the mapping they are given. A launcher whose variables are inconsistent raises a
`DiscoveryError`. `SOURCES` lists launchers by precedence, for those that are equally close. docs/launchers.md lists
which variables a launcher sets, and where that is documented.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringway.errors import DiscoveryError
from ringway.launch.ask_ray import REMEDY
from ringway.launch.info import LOOPBACK, LaunchInfo, Variables
from ringway.launch.nodelist import expand_hosts, tasks_per_node

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """A launcher: its name, a variable that only it sets, and its reader."""

    name: str
    mark: str
    read: Callable[[Environ], LaunchInfo | None]


def _given_address(found: Variables) -> tuple[str | None, int | None]:
    """The store's address according to the user or the launcher."""
    return found.text("MASTER_ADDR"), found.port("MASTER_PORT")


def _place(found: Variables, *, size: int, local_size: int | None, first_host: str | None, **place: Any) -> LaunchInfo:
    """The place with the given address, or else with this host's if all ranks are on it, or else with `first_host`."""
    address, port = _given_address(found)
    address = address or (LOOPBACK if local_size == size else first_host)
    return found.info(size=size, local_size=local_size, address=address, port=port, **place)


def from_ringway_run(environ: Environ) -> LaunchInfo | None:
    """`ringway run`: torchrun's variables, plus the id of the run and the socket of its store."""
    found = Variables(environ, "ringway run")
    run = found.text("RINGWAY_RUN_ID")
    if run is None:
        return None
    info = _read_torch_variables(found, job=run, hosted_by_launcher=True)
    return replace(info, socket=found.text("RINGWAY_RUN_STORE"))


def from_torchrun(environ: Environ) -> LaunchInfo | None:
    found = Variables(environ, "torchrun")
    run = found.text("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    count = found.number("TORCHELASTIC_RESTART_COUNT") or 0
    agent_store = found.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    info = _read_torch_variables(found, job=f"torchrun {run}", hosted_by_launcher=agent_store)
    return replace(info, attempt=count if info.on_one_host else 0)  # agents on several hosts count separately


def from_environment(environ: Environ) -> LaunchInfo | None:
    """RANK and WORLD_SIZE set by hand, or by a launcher that follows torch's convention."""
    found = Variables(environ, "environment")
    if found.text("RANK") is None:
        return None
    notes = []
    if "AZUREML_RUN_ID" in environ or "AZUREML_EXPERIMENT_ID" in environ:
        notes.append("inside AzureML")
    if "KUBERNETES_SERVICE_HOST" in environ:
        notes.append("inside Kubernetes")
    return _read_torch_variables(found, job="", hosted_by_launcher=False, notes=tuple(notes))


def _read_torch_variables(
    found: Variables, *, job: str, hosted_by_launcher: bool, notes: tuple[str, ...] = ()
) -> LaunchInfo:
    rank = found.needed(found.number("RANK"), "RANK")
    size = found.needed(found.number("WORLD_SIZE", least=1), "WORLD_SIZE")
    local_rank = found.number("LOCAL_RANK")
    local_size = found.number("LOCAL_WORLD_SIZE", least=1)
    node_rank = found.number("GROUP_RANK", "NODE_RANK")
    address, port = _given_address(found)
    info = found.info(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        address=address,
        port=port,
        job=job,
        hosted_by_launcher=hosted_by_launcher,
        notes=notes,
    )
    if size > 1:
        _require(found, "MASTER_ADDR", address, size)
        _require(found, "MASTER_PORT", port, size)
    return info


def _require(found: Variables, name: str, value: object, size: int) -> None:
    if value is None:
        raise found.error(f"{name} is not set, so {size} ranks cannot meet")


def _read_open_mpi(found: Variables, first_host: str | None = None) -> LaunchInfo | None:
    rank = found.number("OMPI_COMM_WORLD_RANK")
    size = found.number("OMPI_COMM_WORLD_SIZE", least=1)
    if rank is None and size is None:
        return None
    return _place(
        found,
        size=found.needed(size, "OMPI_COMM_WORLD_SIZE"),
        rank=found.needed(rank, "OMPI_COMM_WORLD_RANK"),
        local_rank=found.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=found.number("OMPI_COMM_WORLD_LOCAL_SIZE", least=1),
        first_host=first_host,
        job=found.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or "",
    )


def from_azureml(environ: Environ) -> LaunchInfo | None:
    """AzureML's MPI jobs: Open MPI, with the first node's address in one of AzureML's own variables."""
    found = Variables(environ, "AzureML")
    if found.text("AZUREML_RUN_ID", "AZUREML_EXPERIMENT_ID") is None:
        return None
    node = found.text("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE") or ""
    host, colon, port = node.rpartition(":")
    if colon and not (port.isascii() and port.isdigit()):
        raise found.error(f"'{node}' is not an address with a port")
    # The port in this variable belongs to another service of the node, so do not use it.
    return _read_open_mpi(found, (host if colon else node) or None)


def from_sagemaker(environ: Environ) -> LaunchInfo | None:
    """SageMaker: Open MPI plus a host list, or one process per host."""
    found = Variables(environ, "SageMaker")
    listed = found.text("SM_HOSTS")
    if listed is None:
        return None
    try:
        hosts = json.loads(listed)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) and h for h in hosts):
        raise found.error("SM_HOSTS is not a list of host names")
    by_mpi = _read_open_mpi(found, hosts[0])
    if by_mpi is not None:
        return by_mpi
    current = found.text("SM_CURRENT_HOST")
    if current not in hosts:
        raise found.error(f"SM_CURRENT_HOST={current} is not in SM_HOSTS")
    address, port = _given_address(found)
    return found.info(
        rank=hosts.index(current),
        size=len(hosts),
        local_rank=0,
        local_size=1,
        node_rank=hosts.index(current),
        address=address or hosts[0],
        port=port,
        job=found.text("TRAINING_JOB_NAME") or "",
        notes=("one process per host",),
    )


def from_open_mpi(environ: Environ) -> LaunchInfo | None:
    return _read_open_mpi(Variables(environ, "Open MPI"))


def from_pmi(environ: Environ) -> LaunchInfo | None:
    """MPICH's Hydra, Intel MPI, and other launchers that use PMI 1 or 2."""
    found = Variables(environ, "PMI (MPICH, Intel MPI)")
    rank, size = found.number("PMI_RANK"), found.number("PMI_SIZE", least=1)
    if rank is None and size is None:
        return None
    return _place(
        found,
        size=found.needed(size, "PMI_SIZE"),
        rank=found.needed(rank, "PMI_RANK"),
        local_rank=found.number("MPI_LOCALRANKID"),
        local_size=found.number("MPI_LOCALNRANKS", least=1),
        first_host=None,
    )


def from_slurm(environ: Environ) -> LaunchInfo | None:
    """`srun`. A batch script that starts Python itself is inside an allocation, but not inside a step."""
    found = Variables(environ, "Slurm")
    step = found.text("SLURM_STEP_ID", "SLURM_STEPID")
    rank = found.number("SLURM_PROCID")
    if step is None or rank is None:
        return None
    size = found.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    size = found.needed(size, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = found.number("SLURM_LOCALID")
    node = found.number("SLURM_NODEID")
    hosts = _slurm_hosts(found)
    local_size = _slurm_local_size(found, node, size, hosts)
    job = ".".join(filter(None, (found.text("SLURM_JOB_ID", "SLURM_JOBID"), step)))
    restarts = found.text("SLURM_RESTART_COUNT")
    return _place(
        found,
        size=size,
        rank=rank,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node,
        first_host=hosts[0] if hosts else None,
        job=f"slurm {job}" + (f" #{restarts}" if restarts else ""),
    )


def _slurm_hosts(found: Variables) -> list[str]:
    text = found.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        return expand_hosts(text) if text else []
    except ValueError as error:
        raise found.error(str(error)) from None


def _slurm_local_size(found: Variables, node: int | None, size: int, hosts: list[str]) -> int | None:
    text = found.text("SLURM_STEP_TASKS_PER_NODE")
    try:
        counts = tasks_per_node(text) if text else []
    except ValueError as error:
        raise found.error(str(error)) from None
    if not counts or node is None:
        return size if len(hosts) == 1 else None
    if node >= len(counts):
        raise found.error(f"node {node} is not among the {len(counts)} nodes of the step")
    if sum(counts) != size:
        raise found.error(f"{sum(counts)} tasks on all nodes, but {size} in total")
    return counts[node]


def from_pmix(environ: Environ) -> LaunchInfo | None:
    """PMIx alone gives the rank and the job's name; the size must come from elsewhere."""
    found = Variables(environ, "PMIx")
    rank = found.number("PMIX_RANK")
    if rank is None:
        return None
    size = found.number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    if size is None:
        raise found.error("PMIx gives the rank but not the number of ranks; set WORLD_SIZE")
    return _place(
        found,
        size=size,
        rank=rank,
        local_rank=found.number("LOCAL_RANK", "SLURM_LOCALID"),
        local_size=found.number("LOCAL_WORLD_SIZE", least=1),
        first_host=None,
        job=found.text("PMIX_NAMESPACE") or "",
    )


def from_kubernetes(environ: Environ) -> LaunchInfo | None:
    """Kubeflow's trainer (variables intended for torchrun), or an indexed Job with WORLD_SIZE set."""
    found = Variables(environ, "Kubernetes")
    if found.text("KUBERNETES_SERVICE_HOST") is None:
        return None
    if found.text("PET_NNODES") is not None:
        return _read_kubeflow(found)
    size = found.number("WORLD_SIZE", least=1)
    rank = found.number("JOB_COMPLETION_INDEX")
    if rank is None or size is None:
        return None
    address, port = _given_address(found)
    if size > 1:
        _require(found, "MASTER_ADDR", address, size)
    return found.info(
        rank=rank, size=size, local_rank=0, node_rank=rank, address=address, port=port, notes=("indexed Job",)
    )


def _read_kubeflow(found: Variables) -> LaunchInfo:
    nodes = found.needed(found.number("PET_NNODES", least=1), "PET_NNODES")
    rank = found.needed(found.number("PET_NODE_RANK"), "PET_NODE_RANK")
    per_node = found.text("PET_NPROC_PER_NODE") or "1"
    if per_node != "1":
        raise found.error(f"{per_node} processes per node were requested, which torchrun has to start")
    address = found.text("PET_MASTER_ADDR", "MASTER_ADDR")
    if nodes > 1:
        _require(found, "PET_MASTER_ADDR", address, nodes)
    return found.info(
        rank=rank,
        size=nodes,
        local_rank=0,
        local_size=1,
        node_rank=rank,
        address=address,
        port=found.port("PET_MASTER_PORT", "MASTER_PORT"),
        job=found.text("PET_RDZV_ID") or "",
        notes=("Kubeflow, one process per node",),
    )


NO_LAUNCHER = "no launcher"
"""The source of a process that nothing has launched."""


def alone(environ: Environ) -> LaunchInfo:
    """No launcher: a world of one. Incomplete variables raise an error instead of being ignored."""
    found = Variables(environ, NO_LAUNCHER)
    size = found.number("WORLD_SIZE")
    if size is not None and size != 1:
        raise found.error(f"WORLD_SIZE={size} is set but RANK is not: which of the {size} ranks is this process?")
    return found.info(rank=0, size=1, address=LOOPBACK, notes=_signs_of_peers(environ))


def _signs_of_peers(environ: Environ) -> tuple[str, ...]:
    """What suggests that this process is not alone, in words. None of it says which rank this process is."""
    halves = [f"{name}={environ[name]}" for name in _HALVES if environ.get(name, "").strip()]
    signs = [f"{', '.join(halves)} {'is' if len(halves) == 1 else 'are'} set without RANK"] if halves else []
    ray, mpi = sys.modules.get("ray"), sys.modules.get("mpi4py.MPI")
    if environ.get("RAY_JOB_ID") or (ray is not None and getattr(ray, "is_initialized", bool)()):
        signs.append(f"it runs in a Ray job, and Ray tells its workers no rank: {REMEDY}")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        signs.append(f"MPI has {mpi.COMM_WORLD.Get_size()} ranks")
    return tuple(signs)


_HALVES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that launchers set together with RANK."""


SOURCES = (
    Source("ringway run", "RINGWAY_RUN_ID", from_ringway_run),
    Source("torchrun", "TORCHELASTIC_RUN_ID", from_torchrun),
    Source("environment", "RANK", from_environment),
    Source("AzureML", "OMPI_COMM_WORLD_RANK", from_azureml),
    Source("SageMaker", "SM_HOSTS", from_sagemaker),
    Source("Open MPI", "OMPI_COMM_WORLD_RANK", from_open_mpi),
    Source("PMI (MPICH, Intel MPI)", "PMI_RANK", from_pmi),
    Source("Slurm", "SLURM_PROCID", from_slurm),
    Source("PMIx", "PMIX_RANK", from_pmix),
    Source("Kubernetes", "JOB_COMPLETION_INDEX", from_kubernetes),
)

__all__ = ["LOOPBACK", "NO_LAUNCHER", "SOURCES", "DiscoveryError", "Source", "alone"]
