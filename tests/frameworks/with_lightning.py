"""Lightning: the Trainer and Fabric, with DDP and ModelParallelStrategy (FSDP2), each also with a compiled model."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from report import BACKEND, STEPS, batches, network, report
from torch.distributed.fsdp import fully_shard

SIZES = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def compile_it(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="aot_eager")


def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


class Module(lightning.LightningModule):
    def __init__(self, sharded: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.network = network()
        self.sharded, self.compiled = sharded, compiled
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.sharded:
            shard(self.network, self.device_mesh)
            if self.compiled:
                self.network = compile_it(self.network)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: object) -> None:
        loss = outputs["loss"]
        self.log("loss", loss, sync_dist=True)  # torch cannot compile it, so not in training_step
        self.losses.append(loss.item())

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(list(batches(self.global_rank)), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def trainer(name: str, strategy: object, compiled: bool = False, sharded: bool = False) -> None:
    module = Module(sharded, compiled)
    run = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=None if sharded else 1.0,  # Lightning does not clip the norm of a split model
        log_every_n_steps=1,
        use_distributed_sampler=False,
        **QUIET,
    )
    run.fit(compile_it(module) if compiled and not sharded else module)
    report(name, [*module.losses, run.callback_metrics["loss"].item()], module)


def fabric(name: str, strategy: object, compiled: bool = False, sharded: bool = False) -> None:
    run = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    model = network()
    if compiled:
        model = compile_it(model)
    if sharded:
        model = run.setup_module(model)
        optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    else:
        model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for inputs, targets in batches(run.global_rank, STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.all_reduce(loss.detach(), reduce_op="mean").item())
    report(name, losses, model)


if __name__ == "__main__":
    for suffix, compiled in (("", False), (" compiled", True)):
        trainer(f"Trainer DDP{suffix}", DDPStrategy(process_group_backend=BACKEND), compiled)
        split = ModelParallelStrategy(**SIZES, process_group_backend=BACKEND)
        trainer(f"Trainer ModelParallel{suffix}", split, compiled, sharded=True)
        fabric(f"Fabric DDP{suffix}", FabricDDP(process_group_backend=BACKEND), compiled)
        split = FabricModelParallel(shard, **SIZES, process_group_backend=BACKEND)
        fabric(f"Fabric ModelParallel{suffix}", split, compiled, sharded=True)
    torch.distributed.destroy_process_group()
