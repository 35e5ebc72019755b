"""DiLoCo of all sites in one process, in float64 and numpy, written from the papers' formulas."""

from __future__ import annotations

import numpy as np

from simulation import SimulatedRanks


class SimulatedSites:
    """Inner SGD, outer SGD with Nesterov momentum (arXiv 2311.08105), in fragments with a delay (2501.18512)."""

    def __init__(
        self, sites: int, start: np.ndarray, parts: list[np.ndarray], codec: str | None, block: int | None, *,
        lr: float, every: int, fragments: int = 1, delay: int = 0, mix: float | None = None,
    ) -> None:  # fmt: skip
        self.x = np.repeat(start[None], sites, axis=0)
        self.anchor, self.momentum = start.copy(), np.zeros_like(start)
        self.parts, self.lr, self.every, self.delay = parts, lr, every, delay
        self.mix = (0.5 if delay else 0.0) if mix is None else mix
        self.codec = None
        if codec is not None:
            name = codec.partition(":")[0]
            self.codec = [SimulatedRanks(sites, part.size, name, block) for part in parts]
        self.pending: dict[int, tuple[int, np.ndarray]] = {}
        self.t = self.exchanges = 0

    def step(self, gradients: np.ndarray) -> None:
        self.x = self.x - self.lr * gradients
        self.t += 1
        for p, part in enumerate(self.parts):
            if self.t % self.every == p * self.every // len(self.parts):
                delta = self.anchor[part] - self.x[:, part]
                mean = delta.mean(axis=0) if self.codec is None else self.codec[p].step(delta)
                self.pending[p] = self.t + self.delay, mean
                self.exchanges += 1
            if p in self.pending and self.pending[p][0] == self.t:
                mean = self.pending.pop(p)[1]
                self.momentum[part] = 0.9 * self.momentum[part] + mean
                self.anchor[part] -= 0.7 * (mean + 0.9 * self.momentum[part])
                self.x[:, part] = self.mix * self.x[:, part] + (1 - self.mix) * self.anchor[part]
