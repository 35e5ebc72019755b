"""A backend made of several: its limits and its end are those of all its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from ringway.backends.base import Backend, GroupInfo
from ringway.backends.several.call_order import CallOrder
from ringway.errors import RingwayError


class BackendOfParts(Backend):
    """Several backends that serve one group, by name, and the order of the calls among them."""

    def __init__(self, info: GroupInfo) -> None:
        super().__init__(info)
        self._backends: dict[str, Backend] = {}
        self._order = CallOrder(info.name, info.timeout)

    @property
    def abandoned(self) -> bool:
        return any(backend.abandoned for backend in self._backends.values())

    @abandoned.setter
    def abandoned(self, given_up: bool) -> None:
        for backend in self._backends.values():
            backend.abandoned = given_up

    def set_timeout(self, seconds: float) -> None:
        for backend in self._backends.values():
            backend.set_timeout(seconds)

    def failed(self, error: BaseException) -> None:
        for backend in self._backends.values():
            backend.failed(error)

    def settle(self) -> None:
        for backend in self._backends.values():
            backend.settle()

    def close(self) -> None:
        self._end((backend.close for backend in self._backends.values()), "destroyed")

    def abort(self) -> None:
        self._end((backend.abort for backend in self._backends.values()), "aborted")

    def _end(self, ends: Iterable[Callable[[], None]], how: str) -> None:
        """Every part ends, whatever one of them raises. The queues end first, so that nothing new reaches the parts."""
        with ExitStack() as all_of_them:
            for end in ends:
                all_of_them.callback(end)
            self._stop(RingwayError(f"the group {self.group.name} was {how}"))

    def _stop(self, error: BaseException) -> None:
        self._order.stop(error)
