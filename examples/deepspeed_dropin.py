"""A deepspeed.comm program in which only the import has changed. It does not need deepspeed.

python examples/deepspeed_dropin.py
ringway run -n 2 examples/deepspeed_dropin.py
mpiexec -n 2 python examples/deepspeed_dropin.py
"""

import os

import torch

import ringway.compat.deepspeed as dist  # was: from deepspeed import comm as dist

CONFIG = {
    "train_batch_size": 8,
    "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"], "verbose": False},
}


def main() -> None:
    dist.init_distributed(config=CONFIG, verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["RANK"]) == rank  # deepspeed sets torch's variables, and programs rely on it

    tensor = torch.full((1 << 16,), rank + 1.0)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)  # not logged: prof_ops has only broadcast
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, prof=True, log_name="gradients")  # logged: prof=True
    dist.broadcast(tensor, src=0)

    everyone = torch.empty(size * 4)
    dist.all_gather_into_tensor(everyone, torch.full((4,), float(rank)))
    work = dist.all_reduce(everyone, async_op=True)
    work.wait()

    stats = dist.log_summary(return_dict=True)
    if rank == 0:
        print(f"sum {tensor[0].item():.0f}, logged {sorted(stats['summary'])} on {size} ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
