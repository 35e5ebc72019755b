"""Parallel training: hooks for data and model parallelism, and the autograd functions they are made of."""

from ringway.parallel.data import DataParallel, register_data_parallel_hooks

__all__ = ["DataParallel", "register_data_parallel_hooks"]
