"""The roll call: every rank proves to every other that it belongs to the job, before anything else happens.

1. Each rank signs in with its host, process, user, version and a fresh nonce, tagged with the job's key. A sign-in
   that does not prove the key is a stranger's: it is named and passed over, and the rank whose place it took signs in
   next to it.
2. The first rank to see all sign-ins, or the first whose deadline expires, writes the single outcome that all read.
3. Each rank confirms the sign-ins that it saw, all of them together. A replayed sign-in has no confirmation, because
   its nonce is old. From what was confirmed comes the key of everything else that the ranks put into the store.

A job without a secret goes through the same steps with a key that proves nothing.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from torch._C._distributed_c10d import PrefixStore, Store

from ringway.errors import RendezvousError, Tampered
from ringway.keys import TAG_BYTES, Key
from ringway.launch.info import LaunchInfo
from ringway.launch.run_store import RunStore
from ringway.launch.secret import REMEDY
from ringway.store import Deadline, KeyedStore, absent, beneath_prefixes, read
from ringway.version import VERSION

FAREWELL = 5.0
"""Seconds that rank 0 waits, after a failed roll call, for the others to read which ranks were missing."""

_LONGEST_PAUSE = 0.25
_STRANGERS = 64  # sign-ins without proof as one rank, at which the roll call fails
_NAMED = 16  # of them, those that a rank names: a stranger can write any number
_LONGEST_SIGN_IN = 1024
_turns: Counter[str] = Counter()
"""How often this process has started on a store: a program may start, end and start again on one that outlives it."""


@dataclass
class Place:
    """Where the store was found, for messages. `if_twice` says what else may help a rank that arrived twice."""

    address: str
    port: int | None = None
    host: str = ""
    if_twice: str = ""

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        return address + (f":{self.port}" if self.port else "") + (f" ({self.host})" if self.host else "")


@dataclass(frozen=True)
class SignIn:
    """What a rank says about itself. All of it is hearsay until the tag proves it."""

    host: str
    pid: str
    uid: str
    user: str
    version: str
    nonce: str

    @classmethod
    def own(cls) -> SignIn:
        uid, user = os.geteuid(), ""
        with suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
        return cls(socket.gethostname(), str(os.getpid()), str(uid), user, VERSION, secrets.token_hex(16))

    def pack(self) -> bytes:
        return "\n".join((self.host, self.pid, self.uid, self.user, self.version, self.nonce)).encode()

    @classmethod
    def unpack(cls, text: bytes) -> SignIn | None:
        parts = text[:_LONGEST_SIGN_IN].decode(errors="replace").split("\n")
        if len(parts) != 6:
            return None
        return cls(*(printable(part, 64) for part in parts))

    @property
    def process(self) -> str:
        return f"{self.host}, pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.process}, user {self.user or self.uid} (uid {self.uid})"


def roll_call(
    store: Store,
    info: LaunchInfo,
    deadline: Deadline,
    place: Place,
    key: Key,
    opened: str,
    attend: Callable[[], object] | None = None,
) -> Store:
    """The job's own part of the store, once all ranks have proved themselves.

    `key` is the job's, and `opened` the nonce of the process that opened the store. `place` says for messages
    where it is. `attend` is called now and then until all are here.
    """
    _turns[opened] += 1
    turn = _turns[opened]
    key = key.derive("round", opened, str(info.attempt), str(turn), str(info.size))
    door = PrefixStore(f"ringway/attempt {info.attempt}/round {turn}", store)
    return _Roll(door, info, deadline, place, key, attend).call()


class _Roll:
    """One rank's part in one roll call."""

    def __init__(
        self,
        door: Store,
        info: LaunchInfo,
        deadline: Deadline,
        place: Place,
        key: Key,
        attend: Callable[[], object] | None,
    ) -> None:
        self._door = door
        self._attend = attend
        trusted = key.open or isinstance(beneath_prefixes(door), RunStore)
        self._here = door if trusted else KeyedStore(door, key)
        self._info = info
        self._deadline = deadline
        self._place = place
        self._key = key
        self._me = SignIn.own()
        self._slots = dict.fromkeys(range(info.size), 0)
        self._seen: dict[int, SignIn] = {}
        self._strangers: list[str] = []
        self._signed: tuple[str, bytes] = "", b""
        """Where this rank signed in, and with what."""

    def call(self) -> Store:
        self._sign_in()
        outcome = self._deadline.poll(self._outcome, _LONGEST_PAUSE)
        if outcome is None:
            outcome = self._agree("gave up")
        if outcome != b"all here":
            raise self._incomplete()
        if not Deadline(FAREWELL).poll(lambda: self._all_here() or None):  # another rank saw them all
            gone = [rank for rank in range(self._info.size) if rank not in self._seen]
            raise self._failed(f"the sign-in of {_ranges(gone)} at {self._place} was replaced by a stranger", gone)
        self._require_one_version()
        self._confirm()
        job, key = PrefixStore("job", self._door), self._key.derive("job", self._transcript)
        private = beneath_prefixes(self._door)
        if isinstance(private, RunStore):
            private.key = key
            return job
        return job if key.open else KeyedStore(job, key)

    # Signing in

    def _sign_in(self) -> None:
        rank, text = self._info.rank, self._me.pack()
        mine = self._key.tag("sign in", str(rank), text) + text
        for slot in range(_STRANGERS):
            there = bytes(self._door.compare_set(_slot(rank, slot), "", mine))  # type: ignore[arg-type]
            if there == mine:
                self._signed = _slot(rank, slot), mine
                return
            first = self._proved(rank, there)
            if first is not None:
                raise RendezvousError(
                    f"rank {rank} has arrived twice at {self._place}: first from {first.process}, now from "
                    f"{self._me.process}{self._place.if_twice}",
                    arrived={rank: first.process},
                )
            self._name(rank, there)
        raise self._crowded_out(rank)

    def _crowded_out(self, rank: int) -> Tampered:
        return Tampered(
            f"{_STRANGERS} sign-ins as rank {rank} at {self._place} do not prove the job's secret: a stranger keeps "
            "the rank out. Keep strangers away from the store's port, or start the job with ringway run"
            + self._about_strangers(),
            what=f"rank {rank}",
        )

    def _proved(self, rank: int, signed: bytes) -> SignIn | None:
        tag, text = signed[:TAG_BYTES], signed[TAG_BYTES:]
        return SignIn.unpack(text) if self._key.proves(tag, "sign in", str(rank), text) else None

    def _name(self, rank: int, signed: bytes) -> None:
        who = SignIn.unpack(signed[TAG_BYTES:])
        line = f"{who or 'a process'} signed in as rank {rank} without the job's secret and was not admitted"
        self._note(line, f". If it belongs to the job: {REMEDY}" if self._info.rank in (0, rank) else None)

    def _note(self, line: str, printed_with: str | None = "") -> None:
        """Keeps what a stranger did, for errors. Prints it unless `printed_with`, which follows it, is None."""
        if len(self._strangers) >= _NAMED:
            return
        self._strangers.append(line)
        if printed_with is not None:
            print(f"ringway: rank {self._info.rank}: {line}{printed_with}", file=sys.stderr, flush=True)

    # Seeing all

    def _outcome(self) -> bytes | None:
        if self._attend is not None:
            self._attend()
        if self._all_here():
            return self._agree("all here")
        where, mine = self._signed
        if read(self._door, where) != mine:
            self._note(f"a stranger deleted or replaced the sign-in of rank {self._info.rank}, which signs in again")
            self._sign_in()
        return read(self._here, "outcome")

    def _agree(self, outcome: str) -> bytes:
        return bytes(self._here.compare_set("outcome", "", outcome))

    def _all_here(self) -> bool:
        """Reads the sign-ins that are there. Whether all ranks have proved themselves."""
        while len(self._seen) < self._info.size:
            waited_for = [rank for rank in range(self._info.size) if rank not in self._seen]
            keys = [_slot(rank, self._slots[rank]) for rank in waited_for]
            if not self._door.check(keys):
                return False
            found = {rank: read(self._door, key) for rank, key in zip(waited_for, keys, strict=True)}
            there = {rank: text for rank, text in found.items() if text}
            if len(there) < len(found):  # a stranger deleted or emptied a value: the rank will sign in over it
                return False
            self._read(there)
        return True

    def _read(self, signed: dict[int, bytes]) -> None:
        for rank, text in signed.items():
            proved = self._proved(rank, text)
            if proved is not None:
                self._seen[rank] = proved
            else:
                self._name(rank, text)
                self._slots[rank] += 1
                if self._slots[rank] == _STRANGERS:
                    raise self._crowded_out(rank)

    @cached_property
    def _transcript(self) -> bytes:
        return self._key.tag("transcript", *(self._seen[rank].pack() for rank in range(self._info.size)))

    def _confirm(self) -> None:
        """All ranks saw the same sign-ins, and made their own just now."""
        keys = [f"confirmed by {rank}" for rank in range(self._info.size)]
        mine = self._key.tag("confirmed", self._transcript)
        self._here.set(keys[self._info.rank], mine)  # type: ignore[arg-type]
        silent = absent(self._here, keys, Deadline(max(FAREWELL, self._deadline.left())))
        if silent:
            raise self._failed(f"{_ranges(silent)} signed in, but did not confirm the roll call", silent)
        differ = [rank for rank, key in enumerate(keys) if read(self._here, key) != mine]
        if differ:
            raise Tampered(
                f"{_ranges(differ)} saw other sign-ins at {self._place} than rank {self._info.rank}: a stranger "
                "replayed old ones, or replaced them" + self._about_strangers(),
                what="sign-ins",
            )

    def _require_one_version(self) -> None:
        by_version: dict[str, list[int]] = {}
        for rank in range(self._info.size):
            by_version.setdefault(self._seen[rank].version, []).append(rank)
        if len(by_version) > 1:
            said = "; ".join(
                f"{version} on {_ranges(ranks)} ({self._seen[ranks[0]].host})" for version, ranks in by_version.items()
            )
            raise RendezvousError(f"the ranks have different versions of ringway: {said}. Install one on all hosts")

    # Failing

    def _incomplete(self) -> RendezvousError:
        self._read(self._present())
        arrived = {rank: self._seen[rank].process for rank in sorted(self._seen)}
        self._leave(len(arrived))
        missing = sorted(set(range(self._info.size)) - set(arrived))
        return self._failed(
            f"{len(arrived)} of {self._info.size} ranks met at {self._place} within {self._deadline.seconds:g} s. "
            f"Missing: {_ranges(missing)}. Arrived: "
            + "; ".join(f"{_ranges(ranks)} from {host}" for host, ranks in self._by_host().items()),
            missing,
        )

    def _failed(self, text: str, missing: list[int]) -> RendezvousError:
        arrived = {rank: self._seen[rank].process for rank in sorted(self._seen)}
        return RendezvousError(text + self._about_strangers(), arrived=arrived, missing=missing)

    def _about_strangers(self) -> str:
        return "".join(f". {line[0].upper()}{line[1:]}" for line in self._strangers[:4])

    def _present(self) -> dict[int, bytes]:
        found = ((rank, read(self._door, _slot(rank, slot))) for rank, slot in self._slots.items())
        return {rank: text for rank, text in found if text and rank not in self._seen}

    def _leave(self, arrived: int) -> None:
        """The store's host leaves last, so that all ranks that arrived can read which did not."""
        if self._info.rank != 0 or self._info.hosted_by_launcher:
            self._here.add("read the outcome", 1)
            return
        Deadline(FAREWELL).poll(lambda: True if self._here.add("read the outcome", 0) >= arrived - 1 else None)

    def _by_host(self) -> dict[str, list[int]]:
        hosts: dict[str, list[int]] = {}
        for rank in sorted(self._seen):
            hosts.setdefault(self._seen[rank].host, []).append(rank)
        return hosts


def printable(text: str, longest: int) -> str:
    """What a stranger may have written, without control characters, for messages."""
    return "".join(c for c in text if c.isprintable())[:longest]


def _slot(rank: int, slot: int) -> str:
    return f"rank {rank}" + (f" #{slot}" if slot else "")


def _ranges(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return ("ranks " if len(ranks) > 1 else "rank ") + text
