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

import numpy as np
import rank_compress
import torch

import ringway as dist
from ringway.compat.compressed import MpiBackend


@dataclass
class Launched:
    """What the checks need from the pool's context: this rank, and a job that has been started."""

    rank: int
    world_size: int

    def start(self, backend: str) -> Any:
        assert dist.get_backend() == backend
        return dist


def deepspeeds_gathers(rank: int, size: int) -> None:
    """The steps of DeepSpeed's MPI backend, on arrays and on tensors."""
    backend = MpiBackend(cuda_aware=False)
    assert (backend.comm.Get_rank(), backend.comm.Get_size()) == (rank, size)
    signs = [np.full(4, 10 * rank + place, dtype=np.uint8) for place in range(size)]
    scale = np.array(rank + 0.5, dtype=np.float32)
    expected = [[10 * sender + rank] * 4 for sender in range(size)]
    scales = [[sender + 0.5] for sender in range(size)]
    boxes = np.zeros([size, 4], dtype=np.uint8), np.zeros([size, 1], dtype=np.float32)
    backend.gather_cuda(rank, size, backend.comm, signs, boxes[0], scale, boxes[1])
    assert (boxes[0].tolist(), boxes[1].tolist()) == (expected, scales)
    tensors = [torch.from_numpy(chunk) for chunk in signs]
    empty = torch.zeros(size, 4, dtype=torch.uint8), torch.zeros(size, 1)
    _, got_signs, _, got_scales = backend.gather_host(
        rank, size, backend.comm, tensors, empty[0], torch.from_numpy(scale), empty[1]
    )
    assert isinstance(got_signs, torch.Tensor)
    assert (got_signs.tolist(), got_scales.tolist()) == (expected, scales)
    mine = np.full(3, rank, dtype=np.uint8)
    _, got_signs, _, got_scales = backend.allgather_host(backend.comm, mine, boxes[0], scale, boxes[1])
    assert (got_signs.tolist(), got_scales.tolist()) == ([[sender] * 3 for sender in range(size)], scales)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_distributed("mpi", timeout=timedelta(seconds=60), verbose=False)
    context: Any = Launched(dist.get_rank(), dist.get_world_size())
    specs = ("onebit:64", "onebit:tensor", "int8:64", "int4:64", "fp8:64")
    apart = rank_compress.against_simulation(context, "mpi", [(spec, 4099, "native") for spec in specs])
    rank_compress.shapes_and_dtypes(context, "mpi")
    rank_compress.asynchronously(context, "mpi")
    rank_compress.not_finite(context, "mpi")
    deepspeeds_gathers(context.rank, context.world_size)
    seen = rank_compress.two_collectives(context, "mpi")
    Path(sys.argv[1], f"{context.rank}.json").write_text(json.dumps({"apart": apart, "seen": seen}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
