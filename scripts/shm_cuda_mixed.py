"""Imported by the ranks of scripts/shm_cuda_proof.py: small calls on CUDA tensors go to shm, the others to the group's
own backend."""

from ringway.backends.several import policy
from ringway.groups.world import world

UP_TO = 1 << 20
world.policy = policy.load(
    {
        "world_size": 2,
        "rules": [
            {"op": op, "up_to": UP_TO, "backend": "shm", "device": "cuda"}
            for op in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
        ],
    }
)
