"""GPUs: whether torch can use them, how many ranks share one, and how they reach each other."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from ringway.doctor.finding import Finding, Findings, error, ok, warning
from ringway.launch.info import LaunchInfo

_SECONDS = 20.0
_QUERY = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)


def gpus(info: LaunchInfo | None, environ: Mapping[str, str] = os.environ) -> Findings:
    cards = _ask_driver()
    if not torch.cuda.is_available():
        if not cards:
            yield ok("GPUs", "none")
        elif torch.version.cuda is None:
            yield warning("GPUs", f"{len(cards)}, and this torch is built without CUDA", "Install torch with CUDA")
        elif environ.get("CUDA_VISIBLE_DEVICES") == "":
            yield warning("GPUs", "CUDA_VISIBLE_DEVICES is empty, which hides all", "Unset it")
        else:
            driver = cards[0]["driver_version"]
            says = f"{len(cards)} with driver {driver}, and torch for CUDA {torch.version.cuda} cannot use them"
            yield error("GPUs", says, "Update the driver, or install a torch for an older CUDA")
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_properties(index).name for index in range(count)})
    yield ok("GPUs", f"{count}: {', '.join(names)}; CUDA {torch.version.cuda}, NCCL {_nccl_version()}")
    yield from _cards(cards)
    yield from _sharing(info, count, environ)
    if count > 1:
        yield _peer_access(count)


def _ask_driver() -> list[dict[str, str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True) if done.returncode == 0 else ()
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def _nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"


def _cards(cards: list[dict[str, str]]) -> Findings:
    for card in cards:
        name = f"GPU {card['index']}"
        if card["compute_mode"] not in ("Default", "[N/A]"):
            says = f"its compute mode is {card['compute_mode']}: at most one process may use it"
            yield warning(name, says, "nvidia-smi -c DEFAULT, if ranks share it")
        if card["mig.mode.current"] == "Enabled":
            yield warning(
                name, "it is divided by MIG: NCCL cannot join its slices", "Use one slice a job, or disable MIG"
            )
        if card["ecc.errors.uncorrected.volatile.total"] not in ("0", "[N/A]"):
            says = f"{card['ecc.errors.uncorrected.volatile.total']} uncorrected memory errors since the last reset"
            yield error(name, says, "Reset or replace it: results may be wrong")


def _sharing(info: LaunchInfo | None, count: int, environ: Mapping[str, str]) -> Findings:
    ranks = info.local_size if info is not None else None
    mps = _mps_runs(environ)
    if ranks is not None and ranks > count:
        says = f"{ranks} ranks share {count}"
        if mps:
            yield ok("GPU sharing", f"{says}, through MPS")
        else:
            advice = "Start nvidia-cuda-mps-control -d before the job, so that their kernels run at the same time"
            yield warning("GPU sharing", f"{says}, and their kernels take turns", advice)
    elif mps:
        yield ok("GPU sharing", "MPS runs")


def _mps_runs(environ: Mapping[str, str]) -> bool:
    return Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _peer_access(count: int) -> Finding:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        listed = ", ".join(f"{one}-{other}" for one, other in without[:8])
        says = f"no direct access between {len(without)} of {len(pairs)} pairs ({listed}): data goes through the host"
        return warning("GPU links", says, "nvidia-smi topo -p2p r shows why; ACS or IOMMU settings often do it")
    return ok("GPU links", f"direct access between all {count}")
