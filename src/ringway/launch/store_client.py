"""What ringway's own clients of a store have in common: the store of `ringway run`, and a witness."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

Self = TypeVar("Self", bound="StoreClient")
_NAMED_KEYS = 4


class StoreClient(Store):
    """A store that any number of threads, and forked children, may use."""

    host: str
    """The ranks reach each other through the interface that leads there. For a unix socket, all are on this host."""
    port: int | None
    timeout: timedelta  # torch's property

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    @abstractmethod
    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    @abstractmethod
    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None: ...

    @abstractmethod
    def delete_key(self, key: str) -> bool: ...

    @abstractmethod
    def num_keys(self) -> int: ...

    # Under these names, torch's C++ code calls them.
    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802
        return self.num_keys()

    def has_extended_api(self) -> bool:
        return True

    def clone(self: Self) -> Self:
        return self


def unanswered(who: str, error: Exception) -> DistNetworkError:
    return DistNetworkError(f"{who} does not answer: {error}")


def too_late(keys: Sequence[str], seconds: float) -> DistStoreError:
    return DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys[:_NAMED_KEYS])}")


def not_an_integer(key: str) -> ValueError:
    return ValueError(f"add: the value of {key!r} in the job's store is not an integer")
