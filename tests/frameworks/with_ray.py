"""Ray: actors that form a group, also by their placement group, and the TorchTrainer. This process starts the
ranks; torchrun is not used. With the address of a cluster, it runs the TorchTrainer only, on two nodes of two CPUs."""

from __future__ import annotations

import os
import socket
import sys
import time

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from report import BACKEND, CHANGED, batches, network, report

import ringway


def train(name: str, model: torch.nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in batches(rank):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report(name, losses, model)


@ray.remote(num_cpus=1)
class Rank:
    def train(self, rank: int, port: int) -> None:
        torch.distributed.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        train("actors", torch.nn.parallel.DistributedDataParallel(network()), rank)
        torch.distributed.destroy_process_group()

    def train_discovered(self, rank: int, port: int) -> None:
        """With a change, Ray's placement group tells the rank, the size and the address."""
        if CHANGED:
            ringway.init_distributed(BACKEND, verbose=False)
        else:
            place = f"tcp://127.0.0.1:{port}"
            torch.distributed.init_process_group(BACKEND, init_method=place, rank=rank, world_size=2)
        assert torch.distributed.get_rank() == rank
        model = torch.nn.parallel.DistributedDataParallel(network())
        train("actors in a placement group", model, rank)
        torch.distributed.destroy_process_group()


def worker(name: str) -> None:
    train(name, prepare_model(network()), ray.train.get_context().get_world_rank())


def trainer(name: str, backend: str, ranks: int) -> None:
    TorchTrainer(
        worker,
        train_loop_config=name,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=os.environ["FRAMEWORKS_REPORT"]),
    ).fit()


def on_two_nodes(address: str) -> None:
    ray.init(address=address)
    deadline = time.monotonic() + 120
    while ray.cluster_resources().get("CPU", 0) < 4:
        assert time.monotonic() < deadline, "the second node did not join"
        time.sleep(0.2)
    trainer("TorchTrainer", "hierarchical" if CHANGED else "gloo", 4)
    ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_this_host() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    ranks = [Rank.remote() for _ in range(2)]
    port = free_port()
    ray.get([rank.train.remote(index, port) for index, rank in enumerate(ranks)])
    for rank in ranks:
        ray.kill(rank)
    bundles, port = placement_group([{"CPU": 1}] * 2), free_port()
    ray.get(bundles.ready())
    # Bundle 1 first: the rank is the bundle's number, not the order in which actors start.
    ranks = {
        index: Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, index)).remote()
        for index in (1, 0)
    }
    ray.get([rank.train_discovered.remote(index, port) for index, rank in ranks.items()])
    for rank in ranks.values():
        ray.kill(rank)
    ray.util.remove_placement_group(bundles)
    trainer("TorchTrainer", BACKEND, 2)
    ray.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        on_two_nodes(sys.argv[1])
    else:
        on_this_host()
