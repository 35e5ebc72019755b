"""deepspeed's oneCCL object."""

from __future__ import annotations

from typing import Any

from ringway.api import groups
from ringway.backends.select import obstacle
from ringway.compat.deepspeed.backend import Backend
from ringway.compat.deepspeed.torch import TorchBackend
from ringway.errors import BackendUnavailable


class CCLBackend(TorchBackend):
    """deepspeed's oneCCL object, over ringway's backend `ccl`. Not initialized if that is unavailable."""

    def __init__(
        self,
        name: str = "ccl",
        rank: int = -1,
        world_size: int = -1,
        mpu: Any = None,
        timeout: Any = None,
        init_method: str | None = None,
    ) -> None:
        if obstacle("ccl") is not None:
            Backend.__init__(self, name)
            return
        super().__init__("ccl", timeout, init_method, rank, world_size, name)

    def is_initialized(self) -> bool:
        return self.initialized

    def run_collective(self, name: str, **kwargs: Any) -> Any:
        """Run a collective given by name, with keyword arguments."""
        if not self.initialized:
            what = obstacle("ccl")
            raise BackendUnavailable("ccl", what.reason if what else "it was not initialized")
        return getattr(super(), name)(**kwargs)

    def get_all_ranks_from_group(self, group: Any) -> list[int]:
        return groups.get_all_ranks_from_group(group)
