"""SparseLoCo (arXiv 2508.15706): DiLoCo that sends the largest 1 to 3 % of its update, in 2 bits each.

    e <- beta * e + delta                        on each site, delta = anchor - parameters
    sent = the largest entries of e in each chunk, rounded
    e <- e - sent
    anchor <- anchor - lr * mean of sent         the same bits on every site

The decaying e is the residual of the compressed exchange, and acts as the outer momentum, so the outer optimizer has
none. Every site sends its entries to all others and averages theirs: a second selection, of the average, would lose
what only one site has sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ringway.compress.codecs.codec import Codec
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.windows import compressed_bytes
from ringway.errors import UsageError
from ringway.lowcomm.diloco import DiLoCo


class SparseLoCo(DiLoCo):
    """`DiLoCo` with a sparse exchange. `lr` is the outer learning rate, and `decay` what is left of a site's unsent
    update at the next outer step. The other arguments are those of `DiLoCo`."""

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        codec: str | Codec = "topk:0.01:2",
        lr: float = 1.0,
        decay: float = 0.95,
        group: c10d.ProcessGroup | None = None,
        site: c10d.ProcessGroup | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
        residual_dtype: torch.dtype = torch.float32,
        broadcast: bool = True,
    ) -> None:
        if not (lr > 0 and 0 <= decay <= 1):
            raise UsageError(f"SparseLoCo: lr={lr} is not above 0, or decay={decay} is not in [0, 1]")
        if isinstance(codec, str) and codec.partition(":")[0] == "auto":
            raise UsageError("SparseLoCo: codec='auto' would send everything; pass a codec, as in 'topk:0.01:2'")
        self.decay = decay
        super().__init__(
            model,
            inner_optimizer,
            lambda anchors: torch.optim.SGD(anchors, lr=lr),
            every=every,
            codec=codec,
            group=group,
            site=site,
            fragments=fragments,
            delay=delay,
            mix=mix,
            residual_dtype=residual_dtype,
            broadcast=broadcast,
        )

    def _exchange(self, delta: Tensor, number: int) -> Any:
        slot = self.feedback[number]
        slot.settle()
        if slot.worker is not None:
            with torch.inference_mode():
                slot.worker.mul_(self.decay)
        assert isinstance(self.codec, Codec)
        return compressed_all_reduce(delta, slot, self.codec, async_op=self.delay > 0, servers=False)

    def _bytes_of(self, numel: int) -> int:
        assert isinstance(self.codec, Codec)
        return compressed_bytes(self.codec, numel, self._communicator.size, servers=False)
