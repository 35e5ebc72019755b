"""`ringway run` on several hosts: one launcher has the store, and those of the other hosts join it.

The launchers learn about each other through the store: how many ranks the job has, which host is which, that a rank has
failed somewhere, and that a host is done.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from torch.distributed import DistError

from ringway.errors import UsageError
from ringway.launch import ports
from ringway.launch.identity import TOKEN, job_key
from ringway.launch.run_store import RunStore, address_of, name_of_run
from ringway.launch.secret import REMEDY, given_key
from ringway.launch.store_server import StoreServer
from ringway.launch.witness import VARIABLE as WITNESS
from ringway.launch.witness import is_local, public
from ringway.store import Deadline

_FACTS = "ringway/run"
_JOINED = "ringway/run/joined"
_DONE = "ringway/run/done"
_FAILED = "ringway/run/failed"
_LOOK_SECONDS = 0.5
_PAUSE = 0.05
_STORE_SECONDS = 30.0


@dataclass(frozen=True)
class Facts:
    """What the launchers of a run have in common."""

    ranks: int
    """On each host."""
    hosts: int
    port: int
    """For programs of plain torch: their rank 0 opens a store there."""
    fewest: int | None
    """Of an elastic run: any number of hosts may join."""
    witness: str = ""
    """The URL of the witness, without a password: the network sees it."""
    names_witness: bool = False
    """Whether each host names the witness itself: its URL has a password, or means another server elsewhere."""


class Launchers:
    """The launchers of a run, as one of them sees the others."""

    def __init__(self, store: RunStore, facts: Facts, number: int) -> None:
        self.store = store
        self.facts = facts
        self.number = number
        """This host's. The one with the store is 0."""
        self._next_look = 0.0

    def fail(self, what: str) -> None:
        """A rank of this host has failed."""
        with suppress(DistError):  # the others learn it from the store's end
            self.store.compare_set(_FAILED, "", f"host {self.number} ({socket.gethostname()}): {what}")

    def failure(self) -> str | None:
        """Why the ranks of this host must end: what failed on another."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _LOOK_SECONDS
        try:
            return self.store.get(_FAILED).decode(errors="replace") if self.store.check([_FAILED]) else None
        except DistError:
            return "the launcher with the job's store is gone, or out of reach"

    def leave(self, grace: float, finished: bool) -> None:
        """The ranks of this host have ended. The host of the store waits for the others, whose ranks still use it: for
        those that have joined, or for all hosts of the run if its ranks have `finished`."""
        fewest = self.facts.hosts if finished and self.facts.fewest is None else 1
        with suppress(DistError):
            self.store.add(_DONE, 1)
            if self.number == 0:
                Deadline(grace).poll(lambda: self._all_are_done(fewest) or None, _PAUSE)

    def _all_are_done(self, fewest: int) -> bool:
        return self.store.add(_DONE, 0) >= max(fewest, self.store.add(_JOINED, 0))


@contextmanager
def hosted(place: str, ranks: int, hosts: int, fewest: int | None) -> Iterator[tuple[dict[str, str], str, Launchers]]:
    """A store that launchers on other hosts reach at `place`: HOST, or HOST:PORT. Yields the environment variables of
    its ranks, the address for the others, and the launchers."""
    key = given_key()
    if key.open:
        raise UsageError(f"--listen lets other hosts join, so the job needs a secret: {REMEDY} on each of them")
    host, port = (place, 0) if ":" not in place or _is_ipv6(place) else address_of(place) or (place, 0)
    name = secrets.token_hex(16)
    try:
        listener = ports.listen(host, port)
    except OSError as error:
        raise UsageError(f"--listen {place}: {error.strerror or error}") from None
    port = listener.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with ports.reserve() as reserved:
        run_key = job_key(key, name, os.environ.get("RINGWAY_JOB_TOKEN", ""))
        server = StoreServer(listener, name, run_key)
        try:
            store = RunStore(address, run_key, _STORE_SECONDS)
            witness = os.environ.get(WITNESS, "")
            named = witness != public(witness) or (bool(witness) and is_local(witness) and not ports.is_loopback(host))
            facts = Facts(ranks, hosts, reserved.getsockname()[1], fewest, public(witness), named)
            store.set(_FACTS, json.dumps(asdict(facts)))
            store.add(_JOINED, 1)
            yield _variables(name, address, facts), address, Launchers(store, facts, 0)
        finally:
            server.close()


def joined(place: str, ranks: int) -> tuple[dict[str, str], Launchers]:
    """Join the run whose store is at `place`, HOST:PORT. Returns the environment variables of its ranks, and the
    launchers."""
    key, token = given_key(), os.environ.get(TOKEN, "")
    if key.open:
        raise UsageError(f"--join {place}: the run has a secret, and this host does not have it: {REMEDY}")
    try:
        name = name_of_run(place)
        store = RunStore(place, job_key(key, name, token), _STORE_SECONDS)
        said = json.loads(store.get(_FACTS))
    except (OSError, DistError) as error:
        here = f"here '{token}'" if token else "not set here"
        raise UsageError(
            f"--join {place}: no 'ringway run --listen' answers there that has the secret of this host, and the same "
            f"{TOKEN} ({here}). Set both as where the run was started: {error}"
        ) from None
    facts = Facts(**said)
    witness = _witness_of(place, facts)
    if facts.fewest is None and facts.ranks != ranks:
        raise UsageError(f"--join {place}: the run has {facts.ranks} ranks on each host, and -n is {ranks}")
    number = store.add(_JOINED, 1) - 1
    if facts.fewest is None and number >= facts.hosts:
        store.add(_JOINED, -1)
        raise UsageError(f"--join {place}: the run has {facts.hosts} hosts, and all of them are there")
    return {**_variables(name, place, facts), WITNESS: witness}, Launchers(store, facts, number)


def _witness_of(place: str, facts: Facts) -> str:
    """The URL of the run's witness, from the run or from this host. Ranks with another one would be a second job."""
    ours = os.environ.get(WITNESS, "")
    if not ours and facts.names_witness:
        raise UsageError(
            f"--join {place}: the run has a witness, and its URL is not handed over: it has a password, or means "
            f"another server on each host. Set {WITNESS} here too"
        )
    is_other = public(ours) != facts.witness and not (facts.names_witness and is_local(facts.witness))
    if ours and is_other:
        there = f"'{facts.witness}' there" if facts.witness else "not set there"
        raise UsageError(
            f"--join {place}: {WITNESS} is '{public(ours)}' here, and {there}. Unset it here, or set it to the same "
            "URL on all hosts"
        )
    return ours or facts.witness


def _is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True


def _variables(name: str, place: str, facts: Facts) -> dict[str, str]:
    address = address_of(place)
    assert address is not None
    variables = {
        "RINGWAY_RUN_ID": name,
        "RINGWAY_RUN_STORE": place,
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(facts.port),
    }
    return variables if facts.fewest is None else {**variables, "RINGWAY_MIN_RANKS": str(facts.fewest)}
