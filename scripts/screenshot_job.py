"""The job that scripts/screenshots.py shows: `ringway run -n 4 screenshot_job.py TRACE UNTIL`.

Rank 2 is late in every fifth step. After the steps, all ranks but rank 3 wait for it in an all_reduce, until the file
UNTIL exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import ringway as dist

STEPS = 40


def main(trace: Path, until: Path) -> None:
    dist.init_distributed(verbose=False)
    rank = dist.get_rank()
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dist.trace(str(trace)):
        for step in range(STEPS):
            if rank == 2 and step % 5 == 0:
                time.sleep(0.2)
            loss = model(torch.randn(32, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach(), log_name="loss")
    dist.barrier()
    if rank == 3:
        until.with_suffix(".now").touch()
        while not until.exists():
            time.sleep(0.1)
    dist.all_reduce(torch.zeros(1 << 20), log_name="validation")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
