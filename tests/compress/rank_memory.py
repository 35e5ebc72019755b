"""How much memory a compressed all-reduce holds, measured by torch's allocations. Runs on every rank of the pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ringway.compress import ErrorFeedback, collectives, compressed_all_reduce
from ringway.compress.all_reduce import Split
from ringway.testing import RankContext


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


class Live(TorchDispatchMode):
    """Counts the storages that operations created and that are still alive."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return made


def extra_bytes(context: RankContext, specs: list[str], numel: int, split: int) -> dict[str, float]:
    """The maximum bytes per element that a call holds, beyond the tensor and its residuals, if a codec with one byte
    per element uses at least `split` windows."""
    context.start("shm")
    collectives.CPU_SPLIT = Split(split, collectives.CPU_SPLIT.elements)  # the test replaces these ranks
    found = {}
    for spec in specs:
        feedback = ErrorFeedback()
        tensor = torch.randn(numel)
        compressed_all_reduce(tensor, feedback["x"], spec)
        feedback.workspace.clear()
        slot = feedback["x"]
        assert slot.worker is not None
        assert slot.server is not None
        with Live([tensor, slot.worker, slot.server]) as live:
            for _ in range(2):
                compressed_all_reduce(tensor, slot, spec)
        found[spec] = live.peak / numel
    return found
