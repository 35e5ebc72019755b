"""The ranks of this process's job: where each answers, and what stands in the job's store."""

from __future__ import annotations

import secrets
import weakref

import torch.distributed as c10d

from ringway.groups.call_path import Issuer
from ringway.observe.stall.peers import Address


class Job:
    """The ranks of this process's job: where each answers. Addresses are read ahead, because the store may be gone
    when they are needed."""

    def __init__(self, founder: Issuer, size: int, store: c10d.Store) -> None:
        self.rank = founder.ranks[founder.rank]
        self.size = size
        self._founder = weakref.ref(founder)
        # A clone, because the program's thread may be inside a wait on its own, and because the store of the host is
        # to end with its groups. Made now: when the host is gone, it would be looked for until the job's timeout.
        self.store: c10d.Store = store.clone()  # type: ignore[attr-defined]
        self.name = self.store.compare_set("ringway/job", "", secrets.token_hex(8)).decode()
        """The same on every rank of the job, and on no other's."""
        self.addresses: dict[int, Address] = {}
        self.store_gone = False

    @property
    def lives(self) -> bool:
        """Whether its first group has not been destroyed: then later groups are of the same job."""
        founder = self._founder()
        return founder is not None and not founder.closed

    def publish(self, address: Address) -> None:
        self.addresses[self.rank] = address
        self.store.set(f"ringway/watch/{self.rank}", address.pack())

    def read(self, key: str) -> str | None:
        """What stands in the store; None where nothing does, or where the store is gone."""
        if self.store_gone:
            return None
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except Exception:  # torch's stores raise RuntimeError, one written in Python what it likes
            self.store_gone = True
            return None

    def write(self, key: str, text: str, *, unless_there: bool = False) -> None:
        """Into the store, if that is still there."""
        if self.store_gone:
            return
        try:
            if unless_there:
                self.store.compare_set(key, "", text)
            else:
                self.store.set(key, text)
        except Exception:  # torch's stores raise RuntimeError, one written in Python what it likes
            self.store_gone = True

    def learn(self) -> bool:
        """Reads the addresses that are there by now. Whether all are known."""
        for rank in range(self.size):
            if rank not in self.addresses:
                text = self.read(f"ringway/watch/{rank}")
                if text is None:
                    return False
                self.addresses[rank] = Address.unpack(text)
        return True
