"""The backends of one group, by device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ringway.backends.base import Backend
from ringway.backends.compose import Routes, routes_of
from ringway.errors import UsageError


class Devices:
    """The backends of one group and how each op runs on them.

    A backend may be given as a function. It is called at the first call with a tensor on its device, which is the same
    call on every rank.
    """

    def __init__(self, group: str, backends: Mapping[str, Backend | Callable[[], Backend]]) -> None:
        self._group = group
        self._backends = dict(backends)
        self.routes: dict[str, Routes] = {}
        self._timeout: float | None = None
        self.default = next(iter(self._backends))
        """The device of calls without tensors."""
        for device, backend in self._backends.items():
            if isinstance(backend, Backend):
                self.routes[device] = routes_of(backend)

    def made(self) -> list[Backend]:
        """The backends that exist so far, each once, the default device's first."""
        return list(dict.fromkeys(backend for backend in self._backends.values() if isinstance(backend, Backend)))

    def coalescing(self, device: torch.device | None) -> Backend | None:
        """The backend for tensors on a device, if it starts the calls of a block together."""
        backend = None if device is None else self._backends.get(device.type)
        return backend if isinstance(backend, Backend) and backend.coalesces else None

    @property
    def first(self) -> Backend:
        """The backend of the default device."""
        return self.of(self.default)

    def of(self, device: str) -> Backend:
        """The backend for tensors on a device."""
        self.routes_on(device)
        backend = self._backends[device]
        assert isinstance(backend, Backend)
        return backend

    @property
    def first_is_made(self) -> bool:
        return isinstance(self._backends[self.default], Backend)

    def routes_on(self, device: str) -> Routes:
        """How each op runs on a device; makes the device's backend if this is its first call."""
        made = self.routes.get(device)
        if made is None:
            backend = self._backends.get(device)
            if backend is None:
                raise UsageError(
                    f"the group {self._group} has no backend for tensors on {device}, only for "
                    f"{', '.join(self._backends)}; move the tensor, or name one, as in 'cpu:gloo,{device}:nccl'"
                )
            if not isinstance(backend, Backend):
                backend = self._backends[device] = backend()
                if self._timeout is not None:
                    backend.set_timeout(self._timeout)
            made = self.routes[device] = routes_of(backend)
        return made

    def origins(self) -> dict[str, dict[str, str]]:
        """Where each op comes from, by device: native, or composed of another op."""
        return {device: dict(made.origins) for device, made in self.routes.items()}

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        for backend in self.made():
            backend.set_timeout(seconds)

    def abandon(self) -> None:
        """Pending calls will never end by themselves: closing must not wait for them."""
        for backend in self.made():
            backend.abandoned = True

    def failed(self, error: BaseException) -> None:
        """The group has failed: ends calls that would otherwise hold up a device."""
        for backend in self.made():
            backend.failed(error)

    def settle(self) -> None:
        """Waits until no call is in flight on a device."""
        for backend in self.made():
            backend.settle()

    def close(self, wait: bool) -> None:
        for backend in self.made():
            if wait:
                backend.close()
            else:
                backend.abort()
        self.routes.clear()
