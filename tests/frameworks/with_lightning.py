"""Lightning: the Trainer and Fabric with DDP, Fabric with a compiled model, and ModelParallelStrategy (FSDP2)."""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import DDPStrategy
from report import BACKEND, STEPS, batches, network, report
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(list(batches(self.global_rank)), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def trainer() -> None:
    module = Module()
    strategy = DDPStrategy(process_group_backend=BACKEND)
    run = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        **QUIET,
    )
    run.fit(module)
    report("Trainer DDP", [*module.losses, run.callback_metrics["loss"].item()], module)


def fabric(name: str, strategy: object, compiled: bool = False, sharded: bool = False) -> None:
    run = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    model = network()
    if compiled:
        model = torch.compile(model, backend="aot_eager")
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


def shard(model: torch.nn.Module, mesh: object) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


if __name__ == "__main__":
    trainer()
    fabric("Fabric DDP", FabricDDP(process_group_backend=BACKEND))
    fabric("Fabric DDP compiled", FabricDDP(process_group_backend=BACKEND), compiled=True)
    split = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND)
    fabric("Fabric ModelParallel", split, sharded=True)
    torch.distributed.destroy_process_group()
