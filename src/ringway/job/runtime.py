"""Everything a training program needs in one call: configuration, logging, backend, hooks on the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ringway.api import groups
from ringway.api.start import configures_logger
from ringway.config import Config, resolve
from ringway.errors import UsageError
from ringway.job.deepspeed_config import GradientSettings, make_optimizer, read_gradient_settings
from ringway.job.init import init_distributed
from ringway.observe.log.logger import configure

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ringway.parallel import DataParallel, ModelParallel
    from ringway.parallel.styles import Style


def initialize(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    *,
    plan: Mapping[str, str | Style] | None = None,
    model_parallel_size: int | None = None,
    bucket_mb: float | None = None,
    codec: Any = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    verbose: bool = True,
) -> Runtime:
    """Join the job and, if `model` is given, make it parallel.

    `config` is a dictionary or a file; `RINGWAY_*` variables override it. It sets the backend, the timeout and what the
    comms logger logs; `backend` and `timeout` override it. With a `plan` the model's layers are split over
    `model_parallel_size` consecutive ranks (default: all ranks). Gradients are averaged over the other dimension, in
    buckets of `bucket_mb` MiB (25), compressed by `codec`. These four override the configuration's `ringway.parallel`.
    An existing process group is used unchanged.

    `config` may be a whole DeepSpeed configuration. What it says about gradients that travel is done: its
    `communication_data_type`, `gradient_predivide_factor`, `prescale_gradients`, `sparse_gradients`, and an `optimizer`
    of the 1-bit family, which averages instead of hooks and is `Runtime.optimizer`. Blocks that were found and not
    acted on are named in one line.

    Returns the one object to close, at the end or with `with`.
    """
    if plan is not None and model is None:
        raise UsageError("plan= splits a model: pass model= too")
    settings = resolve(config)
    given = {"plan": plan, "model_parallel_size": model_parallel_size, "bucket_mb": bucket_mb, "codec": codec}
    chosen = {"bucket_mb": 25, **(settings.parallel or {}), **{k: v for k, v in given.items() if v is not None}}
    if chosen.get("model_parallel_size") not in (None, 1) and chosen.get("plan") is None:
        raise UsageError(
            f"model_parallel_size={chosen['model_parallel_size']} needs a plan that says which layers are split"
        )
    gradients = read_gradient_settings(settings.others, model is not None)
    started = not c10d.is_initialized()
    init_distributed(dist_backend=backend, verbose=verbose, timeout=timeout, config=config)
    try:
        if not started and configures_logger(settings):
            configure(settings)  # init_distributed has done so if it joined the job
        if verbose and gradients.unused and groups.get_rank() == 0:
            names = ", ".join(gradients.unused)
            print(f"ringway: found in the configuration and not acted on: {names}", file=sys.stderr, flush=True)
        runtime = Runtime(settings, started)
        if model is not None:
            runtime.register(model, gradients=gradients, **chosen)
    except BaseException:
        if started:
            groups.destroy_process_group()
        raise
    return runtime


class Runtime:
    """A running job, and the hooks on its model.

    If there is a model, `mesh` has the dimensions "data" and "model", `data_group` and `model_group` are this rank's
    groups in it, and `data_parallel` and `model_parallel` are the registered hooks. With a 1-bit optimizer in the
    configuration, `optimizer` is it, and `data_parallel` is None.
    """

    def __init__(self, config: Config, started: bool) -> None:
        self.config = config
        self.mesh: DeviceMesh | None = None
        self.data_parallel: DataParallel | None = None
        self.model_parallel: ModelParallel | None = None
        self.optimizer: Optimizer | None = None
        self._started = started
        self._model: nn.Module | None = None

    def register(
        self,
        model: nn.Module,
        plan: Mapping[str, str | Style] | None = None,
        model_parallel_size: int | None = None,
        bucket_mb: float = 25,
        codec: Any = None,
        gradients: GradientSettings | None = None,
    ) -> None:
        """Puts the hooks on a model: first splits its layers, then averages gradients over the other dimension."""
        from ringway.parallel import register_data_parallel_hooks, register_model_parallel_hooks
        from ringway.parallel.agreement import agreed, broadcast, describe, member
        from ringway.parallel.data import described
        from ringway.parallel.model import planned

        ranks = groups.get_world_size()
        gradients = GradientSettings() if gradients is None else gradients
        hooks = gradients.hook_arguments()

        def prepare() -> tuple[list[str], int]:
            size = (1 if plan is None else ranks) if model_parallel_size is None else model_parallel_size
            if size < 1 or ranks % size:
                raise UsageError(f"model_parallel_size={size} does not divide the job's {ranks} ranks")
            lines = describe(model) if plan is None else planned(model, plan)[0]
            settings = [f"model_parallel_size={size}", *described(bucket_mb, codec, **hooks)]
            return [*settings, f"optimizer={gradients.optimizer} {gradients.optimizer_arguments}", *lines], size

        # Agree over the whole job: if one group alone found a difference, the other groups would keep waiting.
        columns = agreed(member(None, "initialize"), prepare, "initialize")
        device = next((p.device.type for p in model.parameters()), "cpu")
        self.mesh = groups.init_device_mesh(device, (ranks // columns, columns), mesh_dim_names=("data", "model"))
        self._model = model
        if plan is not None:
            self.model_parallel = register_model_parallel_hooks(model, plan, self.model_group)
        if gradients.optimizer is None:
            self.data_parallel = register_data_parallel_hooks(model, self.data_group, bucket_mb, codec, **hooks)
            return
        self.optimizer = make_optimizer(gradients, model, self.data_group, codec)
        broadcast(member(self.data_group, "initialize"), [*model.parameters(), *model.buffers()])

    @property
    def data_group(self) -> c10d.ProcessGroup | None:
        """The ranks over which gradients are averaged. Without a model it is None, the default group."""
        return None if self.mesh is None else self.mesh.get_group("data")

    @property
    def model_group(self) -> c10d.ProcessGroup | None:
        """The ranks over which layers are split. Without a plan it has one rank."""
        return None if self.mesh is None else self.mesh.get_group("model")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context do not average gradients; the next one outside averages the sum."""
        with self.data_parallel.no_sync() if self.data_parallel is not None else nullcontext():
            yield

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with split parameters reassembled. Every rank must call it."""
        if self._model is None:
            raise UsageError("initialize() was called without a model, so there is no state; pass model=")
        if self.model_parallel is not None:
            return self.model_parallel.full_state_dict()
        return dict(self._model.state_dict())

    def close(self) -> None:
        """Removes the data-parallel hooks, and leaves the job if `initialize` joined it. May be called again.

        Sends nothing, so a rank that failed can close too. Layers stay split: call `model_parallel.remove()` before to
        reassemble them, or save `full_state_dict()`.
        """
        if self.data_parallel is not None:
            self.data_parallel.remove()
        if self._started:
            self._started = False
            groups.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
