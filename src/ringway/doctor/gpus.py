"""GPUs: whether torch can use them, and how they are joined."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from ringway.doctor.finding import Finding, Findings, error, ok, warning

Card: TypeAlias = Mapping[str, str]
"""What the driver says about a GPU of this host, by the names in `_QUERY`."""

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
_USERS = {
    "Exclusive_Process": "at most one process",
    "Exclusive_Thread": "at most one thread",
    "Prohibited": "no process",
}
"""Who may use a GPU in each compute mode other than Default."""
_ACROSS_SOCKETS = "SYS"
"""`nvidia-smi topo`: over PCIe and the link between NUMA nodes. The other ways over PCIe stay within a node."""


def ask_driver() -> list[Card]:
    """All GPUs of this host, also those that this process may not use. None if there is no NVIDIA driver."""
    said = _nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    rows = csv.reader(said.splitlines(), skipinitialspace=True)
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that torch can use in this process."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"


def gpus(cards: Sequence[Card], environ: Mapping[str, str] = os.environ) -> Findings:
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
    yield ok("GPUs", f"{count}: {', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl_version()}")
    yield from _cards(cards)
    if len(cards) > 1:
        yield from _links(_nvidia_smi("topo", "-m"))
    if count > 1:
        yield _peer_access(count)


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; empty if it is absent, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cards(cards: Sequence[Card]) -> Findings:
    for card in cards:
        name, errors = f"GPU {card['index']}", card["ecc.errors.uncorrected.volatile.total"]
        mode = card["compute_mode"]
        if mode in _USERS:
            says = f"its compute mode is {mode}: {_USERS[mode]} may use it"
            yield warning(name, says, "nvidia-smi -c DEFAULT, if ranks use or share it")
        if card["mig.mode.current"] == "Enabled":
            yield warning(
                name, "it is divided by MIG: NCCL cannot join its slices", "Use one slice a job, or disable MIG"
            )
        if errors.isdigit() and int(errors):  # cards without ECC say [N/A]
            says = f"{errors} uncorrected memory errors since the last reset"
            yield error(name, says, "Reset or replace it: results may be wrong")


def _links(topology: str) -> Findings:
    """How the GPUs of this host are joined, by the matrix that `nvidia-smi topo -m` prints. Shown, not judged."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)  # its header is underlined
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+(?!GPU)", line)]
    ways: dict[str, list[str]] = {}
    for one, row in enumerate(rows):
        for other, way in enumerate(row[1 : one + 1]):
            if re.fullmatch(r"NV\d+", way):
                kind = "NVLink"
            else:
                kind = "PCIe across sockets" if way == _ACROSS_SOCKETS else "PCIe"
            ways.setdefault(kind, []).append(f"{other}-{one}")
    pairs = len(rows) * (len(rows) - 1) // 2
    if len(ways) == 1:
        yield ok("GPU links", f"{next(iter(ways))} between all {len(rows)}")
    elif ways:
        listed = (f"{kind} between {len(joined)} of {pairs} pairs ({_some(joined)})" for kind, joined in ways.items())
        yield ok("GPU links", "; ".join(sorted(listed)))


def _peer_access(count: int) -> Finding:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    without = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if without:
        listed = f"{len(without)} of {len(pairs)} pairs ({_some(without)})"
        says = f"no direct access between {listed}: data goes through the host"
        return warning("peer access", says, "nvidia-smi topo -p2p r shows why; ACS or IOMMU settings often do it")
    return ok("peer access", f"direct access between all {count}")


def _some(pairs: list[str]) -> str:
    return ", ".join(pairs[:8]) + (", ..." if len(pairs) > 8 else "")
