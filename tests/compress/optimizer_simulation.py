"""0/1 Adam and 1-bit LAMB of all ranks in one process, in float64 and numpy, written from the papers' formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulation import SimulatedRanks


class Adam01:
    """0/1 Adam (arXiv 2202.06009, algorithm 1), with Adam's bias correction on request, and decoupled weight decay.

    At a step that averages gradients the momentum is averaged too, so the paper's second exchange of that step adds
    nothing but an encoding error, and is left out.
    """

    def __init__(self, ranks: int, start: np.ndarray, codec: str, block: int | None, **policy: Any) -> None:
        self.x = np.repeat(start[None], ranks, axis=0)
        self.anchor, self.m, self.u = self.x.copy(), np.zeros_like(self.x), np.zeros_like(self.x)
        self.v, self.rates = np.zeros_like(start), 0.0
        self.policy, self.t, self.updates = policy, 0, 0
        self.exchange = SimulatedRanks(ranks, start.size, codec, block)
        self.rounds: list[str] = []

    def variance_step(self) -> bool:
        kappa, step = self.policy["var_update_scaler"], self.t
        return bool(step <= self.policy["var_freeze_step"] and step % 2 ** (self.updates // kappa) == 0)

    def synchronizes(self) -> bool:
        frozen = self.t - 1 - self.policy["var_freeze_step"]
        if frozen < 0:
            return True
        interval = min(self.policy["local_step_clipper"], 2 ** (frozen // self.policy["local_step_scaler"]))
        return self.t % interval == 0

    def step(self, gradients: np.ndarray, lr: float) -> None:
        beta1, beta2 = self.policy["betas"]
        self.t += 1
        rate = lr / (1 - beta1**self.t) if self.policy["bias_correction"] else lr
        decay = 1 - lr * self.policy["weight_decay"]
        frozen = self.t > self.policy["var_freeze_step"]
        if not frozen and (self.variance_step() or lr == 0):
            mean = gradients.mean(axis=0)
            self.m = beta1 * self.m + (1 - beta1) * mean
            if self.variance_step():
                self.v = beta2 * self.v + (1 - beta2) * mean**2
                self.updates += 1
            self.x = decay * self.x - rate * self.m / self.denominator()
            self.anchor = self.x.copy()
            self.rounds.append("plain")
            return
        self.m = beta1 * self.m + (1 - beta1) * gradients
        self.m[:, self.v == 0] = 0 if frozen and not self.synchronizes() else self.m[:, self.v == 0]
        self.u = decay * self.u + rate * self.m
        self.rates = decay * self.rates + rate
        self.anchor = decay * self.anchor
        if self.synchronizes() and self.rates:
            mean = self.exchange.step(self.u) * (self.v != 0)
            self.m = np.repeat(mean[None] / self.rates, len(self.m), axis=0)
            self.x = self.anchor - mean / self.denominator()
            self.anchor, self.u, self.rates = self.x.copy(), np.zeros_like(self.u), 0.0
            self.rounds.append("compressed")
        else:
            self.x = self.anchor - self.u / self.denominator()
            self.rounds.append("local")

    def denominator(self) -> np.ndarray:
        correction = 1 - self.policy["betas"][1] ** self.updates if self.policy["bias_correction"] else 1.0
        if self.policy["eps_inside_sqrt"]:
            return np.sqrt(self.v / correction + self.policy["eps"])
        return np.sqrt(self.v / correction) + self.policy["eps"]


class Lamb:
    """1-bit LAMB (arXiv 2104.06069, algorithm 1) of several parameters that travel as one tensor."""

    def __init__(self, ranks: int, starts: list[np.ndarray], codec: str, block: int | None, **policy: Any) -> None:
        self.x, self.policy, self.t = [start.copy() for start in starts], policy, 0
        self.m, self.v, self.w = ([np.zeros_like(start) for start in starts] for _ in range(3))
        self.average, self.factor = [0.0] * len(starts), [1.0] * len(starts)
        self.exchange = SimulatedRanks(ranks, sum(start.size for start in starts), codec, block)
        self.scales: list[float] = []

    def step(self, gradients: list[np.ndarray], lr: float) -> None:
        """`gradients` are those of each parameter, [ranks, numel]."""
        beta1, beta2 = self.policy["betas"]
        freeze = self.policy["freeze_step"]
        self.t += 1
        if self.t <= freeze:
            for i, gradient in enumerate(gradients):
                mean = gradient.mean(axis=0)
                self.m[i] = beta1 * self.m[i] + (1 - beta1) * mean
                self.v[i] = beta2 * self.v[i] + (1 - beta2) * mean**2
                update, _ = self.update(i)
                ratio = np.linalg.norm(self.x[i]) / np.linalg.norm(update)
                coefficient = float(np.clip(ratio, self.policy["min_coeff"], self.policy["max_coeff"]))
                beta3 = self.policy["coeff_beta"]
                self.average[i] = beta3 * self.average[i] + (1 - beta3) * coefficient
                self.x[i] = self.x[i] - lr * coefficient * update
            return
        if not self.scales:
            sizes = [float(np.sqrt(np.mean(m**2))) for m in self.m]
            self.scales = [float(np.mean(sizes)) / size for size in sizes]
            self.w = [v.copy() for v in self.v]
        before = [m.copy() for m in self.m]
        local = [beta1 * m + (1 - beta1) * gradient for m, gradient in zip(self.m, gradients, strict=True)]
        joined = np.concatenate([scale * m for scale, m in zip(self.scales, local, strict=True)], axis=1)
        parts = np.split(self.exchange.step(joined), np.cumsum([m.size for m in self.m])[:-1])
        for i, part in enumerate(parts):
            self.m[i] = part / self.scales[i]
            gradient = (self.m[i] - beta1 * before[i]) / (1 - beta1)
            self.w[i] = beta2 * self.w[i] + (1 - beta2) * gradient**2
            update, momentum = self.update(i)
            factor = float(np.max(self.denominator(self.v[i], freeze) / self.denominator(self.w[i], self.t)))
            if self.policy["weight_decay"]:
                share = min(1.0, float(np.linalg.norm(momentum) / np.linalg.norm(update)))
                factor = factor * share + 1 - share
            factor = float(np.clip(factor, self.policy["factor_min"], self.policy["factor_max"]))
            threshold = self.policy["factor_threshold"]
            factor = float(np.clip(factor, self.factor[i] * (1 - threshold), self.factor[i] * (1 + threshold)))
            self.factor[i] = factor
            self.x[i] = self.x[i] - lr * self.average[i] * factor * update

    def update(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        momentum = self.m[i] / self.denominator(self.v[i], min(self.t, self.policy["freeze_step"]))
        if self.policy["bias_correction"]:
            momentum = momentum / (1 - self.policy["betas"][0] ** self.t)
        return momentum + self.policy["weight_decay"] * self.x[i], momentum

    def denominator(self, variance: np.ndarray, count: int) -> np.ndarray:
        correction = 1 - self.policy["betas"][1] ** count if self.policy["bias_correction"] else 1.0
        return np.sqrt(variance / correction) + self.policy["eps"]
