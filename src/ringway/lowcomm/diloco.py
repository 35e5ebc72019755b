"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (2501.18512).

Every site trains alone with its inner optimizer. Every `every` steps the sites average how far they have moved, in
compressed form and with error feedback, and an outer optimizer takes the average as a gradient of the anchor, the
parameters that the sites last agreed on:

    delta = anchor - parameters                      on each site
    anchor <- outer optimizer(anchor, mean of delta)   the same bits on every site
    parameters <- anchor

Parameters in bfloat16 or float16 hold a rounded anchor, and delta is how far they have moved from that. The anchor
itself stays in fp32, so updates that are too small for the parameters add up in it. What is rounded off a mix is kept.

With several fragments, the parts of the model do this in turn, so the link carries one fragment at a time. With a delay
of tau steps the exchange runs in the background: it starts at step t, and is applied at step t + tau. By then the
parameters have moved on, so they become a mix of themselves and the new anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ringway.compress.codecs.codec import Codec, get_codec
from ringway.compress.collectives import compressed_all_reduce, plain_all_reduce
from ringway.compress.feedback import ErrorFeedback
from ringway.compress.windows import compressed_bytes, ring_bytes
from ringway.errors import NotFinite, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.split import refuse_split_parameters
from ringway.groups.world import world
from ringway.lowcomm.fragment import Exchange, Fragment, local_part, split_evenly
from ringway.lowcomm.report import Report

FORMAT = 1
OuterOptimizer = Callable[[list[Tensor]], Optimizer]


def nesterov(anchors: list[Tensor]) -> Optimizer:
    """The outer optimizer of the DiLoCo paper: SGD with Nesterov momentum."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(Optimizer):
    """Wraps the optimizer of one site. Call `step` and `zero_grad` on this object instead.

    `every` is the number of inner steps between two outer steps of a fragment. `group` holds one rank of each site (all
    ranks of the job by default), and `site` the ranks inside this one's site if they hold the same parameters, as with
    DDP: each then exchanges a slice. With FSDP2 leave `site` out: each rank exchanges its own shards. `codec` is any of
    ours, or None for fp32. `outer_optimizer` makes an optimizer of flat fp32 tensors, one per fragment; it must work
    element by element, as SGD and Adam do.

    `fragments` and `delay` give Streaming DiLoCo. `mix` is the share of a parameter that stays when a delayed outer
    step is applied. `inner_optimizer` may be a list, for models with two (Muon and AdamW). At the start all sites take
    the parameters of the group's first rank; `broadcast=False` skips that.

    The state holds this rank's anchors, residuals and pending exchanges: save and load every rank's own, together with
    its model. With torch's GradScaler, a rank that found an infinity skips its inner step, and the step counts.
    """

    _step_supports_amp_scaling = True
    """GradScaler then calls `step` also where it found an infinity, so that all ranks count the same steps."""

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        outer_optimizer: OuterOptimizer = nesterov,
        *,
        every: int,
        codec: str | Codec | None = "int8",
        group: c10d.ProcessGroup | None = None,
        site: c10d.ProcessGroup | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
        residual_dtype: torch.dtype = torch.float32,
        broadcast: bool = True,
    ) -> None:
        name = type(self).__name__
        if every < 1 or not 1 <= fragments <= every:
            raise UsageError(f"{name}: every={every} and fragments={fragments}, but 1 <= fragments <= every must hold")
        if not 0 <= delay < every:
            raise UsageError(f"{name}: delay={delay} is not in [0, every={every})")
        if mix is not None and not (0 <= mix < 1 and (delay or not mix)):
            raise UsageError(f"{name}: mix={mix} is not in [0, 1), or there is no delay that it could bridge")
        if isinstance(outer_optimizer, Optimizer) or not callable(outer_optimizer):
            raise UsageError(
                f"{name}: outer_optimizer= takes a function that makes an optimizer of the anchors, as in "
                "lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)"
            )
        self.inner_optimizers = [inner_optimizer] if isinstance(inner_optimizer, Optimizer) else list(inner_optimizer)
        self.every, self.delay = every, delay
        self.mix = mix if mix is not None else (0.5 if delay else 0.0)
        self.codec = get_codec(codec) if isinstance(codec, str) and codec.partition(":")[0] != "auto" else codec
        self.group = group
        self.feedback = ErrorFeedback(group, residual_dtype=residual_dtype)
        self.report = Report()
        self._communicator = world.communicator(group)
        self._site = None if site is None else world.communicator(site)
        self._steps = 0
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _refuse_shards_of(parameters, self._communicator)
        if not parameters:
            raise UsageError(f"{name}: the model has no parameter that requires a gradient")
        with torch.no_grad():
            if broadcast:
                for parameter in parameters:
                    self._communicator.broadcast(local_part(parameter), src=self._communicator.ranks[0])
            self._fragments = [Fragment(run, self._site) for run in split_evenly(parameters, fragments)]
        self.outer_optimizer = outer_optimizer([fragment.anchor for fragment in self._fragments])

    # An optimizer, as torch's schedulers and scalers see it

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.inner_optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        return {parameter: own for optimizer in self.inner_optimizers for parameter, own in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner_optimizers[0].defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(f"{type(self).__name__}: add parameters to the model before it is wrapped")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner_optimizers:
            optimizer.zero_grad(set_to_none)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One inner step, and the outer steps that are due."""
        loss = self.inner_step(closure)
        with torch.no_grad():
            for number, fragment in enumerate(self._fragments):
                offset = number * self.every // len(self._fragments)
                if self._steps % self.every == offset:
                    self._start(fragment, number)
                if fragment.pending is not None and fragment.pending.due <= self._steps:
                    self._finish(fragment)
        return loss

    def inner_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One inner step alone, for `ElasticRounds`."""
        self.report.begin()
        loss = self._step_inside(closure)
        self._steps += 1
        self.report.steps += 1
        self.report.ddp_bytes += sum(
            ring_bytes(fragment.anchor.numel(), self._communicator.size) for fragment in self._fragments
        )
        return loss

    def _step_inside(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and bool(found_inf):
            return loss
        if scale is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1.0 / float(scale))
        for optimizer in self.inner_optimizers:
            optimizer.step()
        return loss

    # Outer steps

    def _start(self, fragment: Fragment, number: int) -> None:
        """Start to average how far the sites have moved."""
        delta = fragment.moved()
        exchange = Exchange(delta, self._steps + self.delay, self.feedback[number])
        with self.report.waiting(None if self.delay else delta.device):
            exchange.begin(lambda: self._exchange(delta, number))
        fragment.pending = exchange
        self.report.exchanges += 1
        self.report.sent_bytes += self._bytes_of(delta.numel())

    def _exchange(self, delta: Tensor, number: int) -> Any:
        """Average `delta` over the sites in place, in the background if outer steps are delayed."""
        slot, later = self.feedback[number], self.delay > 0
        if self.codec is None:
            return plain_all_reduce(delta, slot, self._communicator, raise_not_finite=True, async_op=later)
        return compressed_all_reduce(delta, slot, self.codec, async_op=later)

    def _bytes_of(self, numel: int) -> int:
        """The bytes of one exchange. What "auto" decides is not known here: it counts as its codec."""
        if self.codec is None:
            return ring_bytes(numel, self._communicator.size)
        codec = self.codec if isinstance(self.codec, Codec) else get_codec(self.codec.partition(":")[2] or "onebit")
        return compressed_bytes(codec, numel, self._communicator.size)

    def _finish(self, fragment: Fragment) -> None:
        """Take the outer step, and continue from the new anchor."""
        self._apply(fragment, self._averaged(fragment))

    def _averaged(self, fragment: Fragment) -> Exchange:
        exchange, fragment.pending = fragment.pending, None
        assert exchange is not None
        with self.report.waiting(exchange.result.device):
            self._agree_on(exchange)
        return exchange

    def _apply(self, fragment: Fragment, exchange: Exchange) -> None:
        fragment.anchor.grad = exchange.result
        self.outer_optimizer.step()
        fragment.anchor.grad = None
        fragment.write(self.mix)

    def _agree_on(self, exchange: Exchange) -> None:
        """Wait for the average. If values of one rank of the site were not finite, all its ranks raise: they took part
        in different exchanges."""
        error = exchange.failure()
        if self._site is not None and self._site.size > 1:
            failed = torch.tensor([error is not None], dtype=torch.int32)
            self._site.all_reduce(failed, c10d.ReduceOp.MAX, log_name="lowcomm: outcome")
            if failed.item() and error is None:
                error = NotFinite(
                    f"{type(self).__name__}: another rank of the site exchanged values that are not finite"
                )
        if error is not None:
            exchange.undo()
            raise error

    # Outer steps in two parts, for `ElasticRounds`: only the first communicates

    @property
    def fragments(self) -> int:
        return len(self._fragments)

    def averages(self) -> list[Exchange]:
        """How far the sites have moved on average, by fragment. If this raises, the residuals are what they were."""
        done: list[Exchange] = []
        with torch.no_grad():
            try:
                for number, fragment in enumerate(self._fragments):
                    self._start(fragment, number)
                    done.append(self._averaged(fragment))
            except BaseException:
                for exchange in done:
                    exchange.undo()
                raise
        return done

    def outer_step(self, averages: list[Exchange]) -> None:
        with torch.no_grad():
            for fragment, exchange in zip(self._fragments, averages, strict=True):
                self._apply(fragment, exchange)

    def common_state(self) -> dict[str, Any]:
        """What all sites agree on."""
        return {
            "format": FORMAT,
            "steps": self._steps,
            "outer": self.outer_optimizer.state_dict(),
            "anchors": [fragment.anchor.clone() for fragment in self._fragments],
        }

    def take_common_state(self, state: Mapping[str, Any]) -> None:
        self._require_fit(state)
        self._steps = int(state["steps"])
        self.outer_optimizer.load_state_dict(state["outer"])
        with torch.no_grad():
            for fragment, anchor in zip(self._fragments, state["anchors"], strict=True):
                fragment.anchor.copy_(anchor)

    def share_anchors(self) -> None:
        """All sites take the first one's."""
        for fragment in self._fragments:
            self._communicator.broadcast(fragment.anchor, src=self._communicator.ranks[0])

    def return_to_anchors(self) -> None:
        """Forget how far this site has moved."""
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.write(0.0)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Waits for exchanges in flight; a resumed run applies them when they are due. One that
        failed is not saved: it raises when it is due."""
        pending = {
            number: {"result": fragment.pending.result.clone(), "due": fragment.pending.due}
            for number, fragment in enumerate(self._fragments)
            if fragment.pending is not None and fragment.pending.failure() is None
        }
        return {
            **self.common_state(),
            "inner": [optimizer.state_dict() for optimizer in self.inner_optimizers],
            "pending": pending,
            "lost": {number: fragment.lost for number, fragment in enumerate(self._fragments) if fragment.lost},
            "feedback": self.feedback.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._require_fit(state_dict)
        for optimizer, inner in zip(self.inner_optimizers, state_dict["inner"], strict=True):
            optimizer.load_state_dict(inner)
        self.outer_optimizer.load_state_dict(state_dict["outer"])
        self._steps = int(state_dict["steps"])
        with torch.no_grad():
            for number, (fragment, anchor) in enumerate(zip(self._fragments, state_dict["anchors"], strict=True)):
                fragment.anchor.copy_(anchor)
                lost = state_dict.get("lost", {}).get(number, {})
                fragment.lost = {one: values.to(anchor.device, copy=True) for one, values in lost.items()}
                saved = state_dict["pending"].get(number)
                fragment.pending = None
                if saved is not None:
                    result = saved["result"].to(fragment.anchor.device, copy=True)
                    fragment.pending = Exchange(result, int(saved["due"]))
        self.feedback.load_own_state(state_dict["feedback"])

    def _require_fit(self, state: Mapping[str, Any]) -> None:
        name = type(self).__name__
        if state.get("format") != FORMAT:
            raise UsageError(f"{name}: cannot read a state of format {state.get('format')!r}, only of {FORMAT}")
        found = [anchor.numel() for anchor in state["anchors"]]
        expected = [fragment.anchor.numel() for fragment in self._fragments]
        if found != expected:
            raise UsageError(
                f"{name}: the state has fragments of {found} elements, but this rank has {expected}; the model, the "
                "number of fragments and the number of ranks in the site must be the same"
            )

    def close(self) -> None:
        """Wait for exchanges in flight, and end their thread. Safe to call more than once."""
        self.feedback.close()


def _refuse_shards_of(parameters: Sequence[Tensor], communicator: Communicator) -> None:
    """Raise if ranks that would average a parameter hold different parts of it."""
    refuse_split_parameters(parameters, communicator)
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            ranks = set(parameter.device_mesh.mesh.flatten().tolist())
            if len(ranks & set(communicator.ranks)) > 1:
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} is spread over the ranks {sorted(ranks)}, so it "
                    f"cannot be averaged over the ranks {communicator.ranks}: pass the group that holds one rank of "
                    'each site, as in mesh.get_group("sites")'
                )
