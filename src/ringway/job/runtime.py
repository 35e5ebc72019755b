"""Everything a training program needs, in one call: configuration, logging, backend, hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ringway.api import groups
from ringway.config import SETTINGS, Config, resolve
from ringway.errors import UsageError
from ringway.job.init import init_distributed
from ringway.observe.log.logger import configure

if TYPE_CHECKING:
    from torch import nn

    from ringway.parallel import DataParallel, ModelParallel
    from ringway.parallel.styles import Style


def initialize(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    *,
    plan: Mapping[str, str | Style] | None = None,
    model_parallel_size: int | None = None,
    bucket_mb: float = 25,
    codec: Any = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    verbose: bool = True,
) -> Runtime:
    """Join the job, and make `model` a parallel one where it is given.

    `config` is a dictionary or a file, with `RINGWAY_*` variables over it: it says the backend, the timeout and
    what the comms logger logs. `backend` and `timeout` win over it. With a `plan` the model's layers are split
    over `model_parallel_size` ranks that follow each other (all ranks, if not given); gradients are averaged over
    the rest, in buckets of `bucket_mb` MiB, compressed by `codec`. A process group that exists is used as it is.

    Returns the one object to close, at the end or by `with`.
    """
    if plan is not None and model is None:
        raise UsageError("plan= splits a model: pass model= too")
    if model_parallel_size not in (None, 1) and plan is None:
        raise UsageError(f"model_parallel_size={model_parallel_size} needs a plan that says which layers are split")
    settings = resolve(config)
    started = not c10d.is_initialized()
    init_distributed(dist_backend=backend, verbose=verbose, timeout=timeout, config=config)
    try:
        if not started and any(
            settings.source(key) != "default" for key in SETTINGS if key.startswith("comms_logger.")
        ):
            configure(settings)  # where the job was joined here, that has been done
        runtime = Runtime(settings, started)
        if model is not None:
            runtime.register(model, plan, model_parallel_size, bucket_mb, codec)
    except BaseException:
        if started:
            groups.destroy_process_group()
        raise
    return runtime


def _says_what_to_log(settings: Config) -> bool:
    return any(settings.source(key) != "default" for key in SETTINGS if key.startswith("comms_logger."))


class Runtime:
    """A job that was joined, and the hooks on its model.

    `mesh` has the dimensions "data" and "model" where there is a model; `data_group` and `model_group` are this
    rank's groups in it. `data_parallel` and `model_parallel` are the hooks, where registered.
    """

    def __init__(self, config: Config, started: bool) -> None:
        self.config = config
        self.mesh: DeviceMesh | None = None
        self.data_parallel: DataParallel | None = None
        self.model_parallel: ModelParallel | None = None
        self._started = started
        self._model: nn.Module | None = None

    def register(
        self,
        model: nn.Module,
        plan: Mapping[str, str | Style] | None,
        model_parallel_size: int | None,
        bucket_mb: float,
        codec: Any,
    ) -> None:
        """Puts the hooks on a model: layers split first, gradients averaged over what remains."""
        from ringway.parallel import register_data_parallel_hooks, register_model_parallel_hooks
        from ringway.parallel.agreement import agreed, describe, member
        from ringway.parallel.data import described
        from ringway.parallel.model import planned

        ranks = groups.get_world_size()

        def prepare() -> tuple[list[str], int]:
            size = (1 if plan is None else ranks) if model_parallel_size is None else model_parallel_size
            if size < 1 or ranks % size:
                raise UsageError(f"model_parallel_size={size} does not divide the job's {ranks} ranks")
            lines = describe(model) if plan is None else planned(model, plan)[0]
            return [f"model_parallel_size={size}", *described(bucket_mb, codec), *lines], size

        # Over the whole job: a group that finds a difference within itself would leave the other groups waiting.
        columns = agreed(member(None, "initialize"), prepare, "initialize")
        device = next((p.device.type for p in model.parameters()), "cpu")
        self.mesh = groups.init_device_mesh(device, (ranks // columns, columns), mesh_dim_names=("data", "model"))
        self._model = model
        if plan is not None:
            self.model_parallel = register_model_parallel_hooks(model, plan, self.model_group)
        self.data_parallel = register_data_parallel_hooks(model, self.data_group, bucket_mb, codec)

    @property
    def data_group(self) -> c10d.ProcessGroup | None:
        """The ranks over which gradients are averaged; None, the world, without a model."""
        return None if self.mesh is None else self.mesh.get_group("data")

    @property
    def model_group(self) -> c10d.ProcessGroup | None:
        """The ranks over which layers are split; one rank alone without a plan."""
        return None if self.mesh is None else self.mesh.get_group("model")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here keeps gradients to itself; the next one outside averages the sum."""
        with self.data_parallel.no_sync() if self.data_parallel is not None else nullcontext():
            yield

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with split parameters put together. All ranks call it together."""
        if self._model is None:
            raise UsageError("initialize() was given no model, so there is no state")
        if self.model_parallel is not None:
            return self.model_parallel.full_state_dict()
        return dict(self._model.state_dict())

    def close(self) -> None:
        """Takes the data-parallel hooks off, and leaves the job if `initialize` joined it. May be called again.

        Nothing is sent, so that a rank that failed can close. Layers stay split; put them together before with
        `model_parallel.remove()`, or save `full_state_dict()`.
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
