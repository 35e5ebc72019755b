"""The job this process belongs to: the addresses of its ranks, and access to its store."""

from __future__ import annotations

import secrets
import weakref
from dataclasses import replace

import torch.distributed as c10d

from ringway.errors import Tampered
from ringway.groups.listener import Group
from ringway.observe.stall.peers import Address
from ringway.store import KeyedStore, beneath_prefixes, key_of, read


class Job:
    """The addresses of the job's ranks. They are read ahead of time: the store may be gone when they are needed."""

    def __init__(self, founder: Group, size: int, store: c10d.Store, mark: str = "") -> None:
        self.rank = founder.ranks[founder.rank]
        self.size = size
        self._founder = weakref.ref(founder)
        # A clone, because the program's thread may be waiting on its own, and because the store's host must be free to
        # end it with its groups. Made now: once the host is gone, connecting would block until the job's timeout.
        self.store: c10d.Store = store.clone()  # type: ignore[attr-defined]
        self._part = f"ringway/job {mark}/" if mark else ""  # an earlier job may have left its own in the same store
        self.name = self.store.compare_set(f"{self._part}ringway/job", "", secrets.token_hex(8)).decode()
        """The same on every rank of the job, and different from every other job's."""
        self._key = key_of(store)
        self.addresses: dict[int, Address] = {}
        self.store_gone = False

    @property
    def lives(self) -> bool:
        """Whether its first group still exists: later groups then belong to the same job."""
        founder = self._founder()
        return founder is not None and not founder.closed

    def publish(self, address: Address) -> None:
        self.addresses[self.rank] = address
        hidden = replace(address, token=self._key.hide(_label(self.rank), address.token))
        self.store.set(f"{self._part}ringway/watch/{self.rank}", hidden.pack())

    def read(self, key: str) -> str | None:
        """The value in the store; None if there is none or the store is gone."""
        if self.store_gone:
            return None
        try:
            value = read(self.store, self._part + key)
            return None if value is None else value.decode()
        except Tampered:  # the caller reports it
            raise
        except Exception:  # torch's stores raise RuntimeError; a store written in Python may raise anything
            self.store_gone = True
            return None

    def write(self, key: str, text: str, *, unless_there: bool = False) -> None:
        """Writes to the store, if it is still there."""
        if self.store_gone:
            return
        try:
            if unless_there:
                self.store.compare_set(self._part + key, "", text)
            else:
                self.store.set(self._part + key, text)
        except Tampered:
            raise
        except Exception:  # torch's stores raise RuntimeError; a store written in Python may raise anything
            self.store_gone = True

    def tampering(self) -> Tampered | None:
        """What a stranger did to the store, if this rank or another noticed. Asks the store only now and then."""
        store = beneath_prefixes(self.store)
        if self.store_gone or not isinstance(store, KeyedStore):
            return None
        try:
            store.look_around()
        except Tampered as error:
            return error
        except Exception:  # as in `read`
            self.store_gone = True
        return None

    def learn(self) -> bool:
        """Reads the addresses published so far. Returns whether all are known."""
        wanted = [rank for rank in range(self.size) if rank not in self.addresses]
        for rank, text in zip(wanted, self._all_of([f"ringway/watch/{rank}" for rank in wanted]), strict=False):
            self._keep(rank, text)
        for rank in wanted:
            if rank not in self.addresses:
                one = self.read(f"ringway/watch/{rank}")
                if one is None:
                    return False
                self._keep(rank, one)
        return True

    def _all_of(self, keys: list[str]) -> list[str]:
        """The values in one request, instead of one from each rank about each other; none if a value is missing."""
        if not keys or self.store_gone:
            return []
        named = [self._part + key for key in keys]
        try:
            return [bytes(value).decode() for value in self.store.multi_get(named)] if self.store.check(named) else []
        except Tampered:
            raise
        except Exception:  # as in `read`
            self.store_gone = True
            return []

    def _keep(self, rank: int, text: str) -> None:
        hidden = Address.unpack(text)
        token = self._key.reveal(_label(rank), hidden.token)
        self.addresses[rank] = replace(hidden, token=token)


def _label(rank: int) -> str:
    return f"responder of rank {rank}"
