"""Imported by the ranks of scripts/shm_cuda_proof.py: makes every call on CUDA tensors direct that can be."""

from ringway.backends.shm.cuda import ShmCudaBackend

ShmCudaBackend.direct_from = lambda self, op: 0  # type: ignore[method-assign]
