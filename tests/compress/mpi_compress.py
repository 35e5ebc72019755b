"""What the compression tests run on ranks started by mpiexec: `python mpi_compress.py FOLDER`.

The same checks as on the pool's ranks, over mpi. Each rank writes FOLDER/RANK.json once all checks have passed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import rank_compress
import torch

import ringway as dist


@dataclass
class Launched:
    """What the checks need from the pool's context: this rank, and a job that has been started."""

    rank: int
    world_size: int

    def start(self, backend: str) -> Any:
        assert dist.get_backend() == backend
        return dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_distributed("mpi", timeout=timedelta(seconds=60), verbose=False)
    context: Any = Launched(dist.get_rank(), dist.get_world_size())
    specs = ("onebit:64", "onebit:tensor", "int8:64", "int4:64", "fp8:64")
    apart = rank_compress.against_simulation(context, "mpi", [(spec, 4099, "native") for spec in specs])
    rank_compress.shapes_and_dtypes(context, "mpi")
    rank_compress.asynchronously(context, "mpi")
    rank_compress.not_finite(context, "mpi")
    seen = rank_compress.two_collectives(context, "mpi")
    Path(sys.argv[1], f"{context.rank}.json").write_text(json.dumps({"apart": apart, "seen": seen}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
