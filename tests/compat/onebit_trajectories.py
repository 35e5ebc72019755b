"""Trains with DeepSpeed's 1-bit optimizers, the same way for DeepSpeed's classes and for ringway's.

In an environment that has DeepSpeed (`make deepspeed-tests` does it):

    torchrun --nproc-per-node 2 tests/compat/onebit_trajectories.py         compare the two, bit by bit
    torchrun --nproc-per-node 2 tests/compat/onebit_trajectories.py record  and write the record
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ringway.compat import compressed, deepspeed, install

RECORD = Path(__file__).parent / "data" / "onebit_trajectories.json"
"""Rank 0's parameters with DeepSpeed 0.19.6 and 2 ranks."""
STEPS = 14
KEPT = slice(1, None, 4)
"""The steps in the record."""
SHAPES = ((37,), (5, 7), (2, 16))
"""Two that are padded, one that is not."""
MASKED = 1
ARGUMENTS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {
        "var_freeze_step": 6,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
    "OnebitLamb": {"freeze_step": 4, "max_coeff": 0.3, "factor_max": 2.0},
}
MODULES = {"OnebitAdam": "adam", "ZeroOneAdam": "zoadam", "OnebitLamb": "lamb"}


def _values(shape: tuple[int, ...], seed: float) -> Tensor:
    """The same on every machine, except for the last bits."""
    places = torch.arange(math.prod(shape), dtype=torch.float64) + 1
    return (torch.sin(places * (seed + 1.7)) + 0.3 * torch.cos(places * places)).float().view(shape)


def train(optimizer: type, arguments: dict[str, Any], rank: int, ranks: int) -> list[list[Tensor]]:
    """The parameters after each step. The engine averages gradients while the optimizer wants it to."""
    engine = SimpleNamespace(mpu=None, local_rank=rank, enable_backward_allreduce=True)
    parameters = [nn.Parameter(_values(shape, 0.1 * place)) for place, shape in enumerate(SHAPES)]
    mask = (torch.arange(math.prod(SHAPES[MASKED])) % 3 > 0).float().view(SHAPES[MASKED])
    groups = [
        {"params": [parameter], **({"exp_avg_mask": mask} if place == MASKED else {})}
        for place, parameter in enumerate(parameters)
    ]
    chosen = optimizer(groups, engine, lr=1e-2, weight_decay=0.01, **arguments)
    followed = []
    for step in range(STEPS):
        for place, parameter in enumerate(parameters):
            everybody = [_values(SHAPES[place], step + 0.37 * place + 2.9 * other) for other in range(ranks)]
            averaged = torch.stack(everybody).mean(0)
            parameter.grad = averaged if engine.enable_backward_allreduce else everybody[rank]
        chosen.step()
        followed.append([parameter.detach().clone() for parameter in parameters])
    return followed


def main() -> None:
    install()
    sys.modules["deepspeed.runtime.comm.nccl"] = compressed
    deepspeed.init_distributed("gloo", verbose=False)
    rank, ranks = deepspeed.get_rank(), deepspeed.get_world_size()
    compressed.NcclBackend.__init__.__kwdefaults__["kernels"] = "reference"  # whose bits are DeepSpeed's
    record = {}
    for name, arguments in ARGUMENTS.items():
        theirs = getattr(importlib.import_module(f"deepspeed.runtime.fp16.onebit.{MODULES[name]}"), name)
        assert "ringway" not in theirs.__module__
        constructors = [inspect.signature(each).parameters.values() for each in (theirs, getattr(deepspeed, name))]
        assert len({tuple((each.name, each.default) for each in parameters) for parameters in constructors}) == 1, name
        expected = train(theirs, arguments, rank, ranks)
        found = train(getattr(deepspeed, name), arguments, rank, ranks)
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert all(map(torch.equal, one, other)), f"{name}: step {step + 1} of {ranks} ranks differs"
        record[name] = [[[float(f"{v:.9g}") for v in values.flatten()] for values in after] for after in expected]
        if rank == 0:
            print(f"{name}: {STEPS} steps on {ranks} ranks are DeepSpeed's, bit by bit")
    if sys.argv[1:] == ["record"] and rank == 0:
        kept = {name: steps[KEPT] for name, steps in record.items()}
        RECORD.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    deepspeed.destroy_process_group()


if __name__ == "__main__":
    main()
