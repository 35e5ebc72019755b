"""Parallel training: hooks for data and model parallelism, and the autograd functions they are built from."""

from ringway.parallel.cross_entropy import vocabulary_parallel_cross_entropy
from ringway.parallel.data import DataParallel, register_data_parallel_hooks
from ringway.parallel.functions import (
    all_to_all_in_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from ringway.parallel.gradients import GradScaler, clip_grad_norm_
from ringway.parallel.model import ModelParallel, register_model_parallel_hooks
from ringway.parallel.styles import Column, GatherOutput, Row, ScatterOutput, SequenceNorm, Vocabulary

__all__ = [
    "register_data_parallel_hooks",
    "DataParallel",
    "register_model_parallel_hooks",
    "ModelParallel",
    "clip_grad_norm_",
    "GradScaler",
    "Column",
    "Row",
    "Vocabulary",
    "SequenceNorm",
    "ScatterOutput",
    "GatherOutput",
    "vocabulary_parallel_cross_entropy",
    "copy_to_group",
    "reduce_from_group",
    "scatter_to_group",
    "gather_from_group",
    "reduce_scatter_to_group",
    "all_to_all_in_group",
]
