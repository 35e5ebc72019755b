"""DistributedDataParallel with gradients compressed to one bit, and a report of what that saved.

    ringway run -n 2 examples/train_ddp_compressed.py
    ringway run -n 2 examples/train_ddp_compressed.py --codec auto

Shared memory has no wire to save: there `--codec auto` says so and leaves the gradients uncompressed.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

import ringway as dist
from ringway.compress import ddp_hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="onebit", help="onebit, int8, int4, fp8 or auto")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_distributed()
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 1),
    ]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    hook = ddp_hook(options.codec, warmup_steps=5)  # the first 5 steps are averaged uncompressed
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)

    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        inputs = torch.randn(64, 64)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(hook.feedback.report)
    hook.feedback.close()  # ends the thread of the asynchronous calls
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
