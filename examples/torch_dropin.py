"""A torch.distributed program in which only the import has changed.

It runs under any launcher, or none, and learns the same weights on any number of ranks:

    python examples/torch_dropin.py
    ringway run -n 2 examples/torch_dropin.py
    torchrun --nproc-per-node 2 examples/torch_dropin.py
    mpiexec -n 2 python examples/torch_dropin.py
    srun -n 2 python examples/torch_dropin.py
"""

import torch

import ringway as dist  # was: import torch.distributed as dist

STEPS = 20
SAMPLES = 24


def main() -> None:
    dist.init_distributed(verbose=False)  # was: dist.init_process_group("gloo"), which still works
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, dtype=torch.float64)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    mine = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)

    weights = torch.zeros(3, dtype=torch.float64)
    dist.broadcast(weights, src=0)
    for _ in range(STEPS):
        error = inputs[mine] @ weights - targets[mine]
        gradient = inputs[mine].T @ error
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
        weights -= 0.5 * gradient / SAMPLES

    shares: list[int | None] = [None] * size
    dist.all_gather_object(shares, len(error))
    dist.barrier()
    if rank == 0:
        learned = ", ".join(f"{weight:.6f}" for weight in weights)
        print(f"weights {learned} from {sum(share or 0 for share in shares)} samples on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
