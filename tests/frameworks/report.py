"""How the programs of this folder tell scripts/frameworks.py what they computed.

They train the same little model on the same data, so the losses of one program can be compared between backends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 6
CHANGED = os.environ.get("FRAMEWORKS_CHANGED", "")
"""The change that this run makes to the program: empty, `shm` or `hierarchical` (the backend's name), or
`install`."""
BACKEND = CHANGED if CHANGED == "shm" else "gloo"
"""For programs that name their backend."""


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )


def batches(rank: int, steps: int = STEPS) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's data: random, and different on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def report(name: str, losses: Iterable[float], model: torch.nn.Module | None = None) -> None:
    """Writes this rank's losses, a digest of its parameters, and what carries its collectives."""
    parameters = hashlib.sha256()
    for parameter in model.parameters() if model is not None else ():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        parameters.update(local.detach().contiguous().numpy().tobytes())
    written = {
        "losses": [float(loss).hex() for loss in losses],
        "parameters": parameters.hexdigest(),
        "carried_by": type(dist.group.WORLD).__module__.partition(".")[0],
    }
    path = Path(os.environ["FRAMEWORKS_REPORT"], f"{name.replace(' ', '_')}.{dist.get_rank()}.json")
    path.write_text(json.dumps(written))
