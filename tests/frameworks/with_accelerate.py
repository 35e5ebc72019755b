"""accelerate: DDP with gradient accumulation, and with a compiled model."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from report import CHANGED, batches, network, report

if CHANGED == "shm":
    torch.distributed.init_process_group("shm")  # accelerate keeps a group that exists


def train(name: str, accelerator: Accelerator, model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for inputs, targets in batches(accelerator.process_index):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    report(name, losses, model)
    accelerator.free_memory()


if __name__ == "__main__":
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    train("DDP with accumulation", Accelerator(cpu=True, gradient_accumulation_plugin=plugin), network())
    train("DDP compiled", Accelerator(cpu=True), torch.compile(network(), backend="aot_eager"))
    Accelerator().end_training()
