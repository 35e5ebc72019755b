"""Who is in the job: members, and the generations that they form.

A member is one process. A generation is a fixed set of members, in rank order. When a member dies, or a new one waits,
the members sign up for the next generation in the job's store. Once every member of the current one has signed up, left
or died, anyone who has signed up may close the next one: a single compare-and-set, which one of them wins. So there is
never more than one next generation, and a process that cannot reach the store is in none: it stops.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from ringway.api.start import say
from ringway.errors import PeerLost, RendezvousError
from ringway.launch.live import Standing
from ringway.launch.processes import ProcessName
from ringway.launch.witness import DataLost
from ringway.store import Deadline, read
from ringway.version import VERSION

_PREFIX = "ringway/elastic"
_GENERATION = "generation"
_FINISHED = "finished"
_DEPARTURES = "departures"
_LEFT, _FAILED, _DIED, _SILENT = "left", "failed", "died", "silent"
_PAUSE = 0.005
_WATCH_SECONDS = 0.05
_LATE_STARTERS = 30.0
"""Seconds that the first generation waits for the rest, once the fewest ranks are there."""
_ACCUSED_SECONDS = 0.5
"""Seconds that a rank has to sign up after an error said that it died. A rank that gives up a generation closes its
connections, which looks like its death from other hosts."""


@dataclass(frozen=True)
class Member:
    """One process of the job. Its number is never given to another. The nonce tells it from processes of another start
    of the job."""

    number: int
    started_as: int
    """Its rank, as the launcher gave it: the first generation's ranks are in this order."""
    process: ProcessName
    version: str = VERSION
    nonce: str = ""

    def is_same_as(self, other: Member) -> bool:
        return (self.number, self.nonce) == (other.number, other.nonce)

    def __str__(self) -> str:
        return str(self.process)


@dataclass(frozen=True)
class Arrival:
    """A member that has signed up for a generation, and the state that it brings.

    `step` counts the steps that it has applied. The state is not `whole` if a fault interrupted a step after its
    commit. A `veteran` was in the generation before, so its state is the job's.
    """

    member: Member
    step: int
    whole: bool
    veteran: bool


@dataclass(frozen=True)
class Generation:
    """The members that form a group together. The rank of each is its place in `arrivals`."""

    number: int
    arrivals: tuple[Arrival, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(arrival.member for arrival in self.arrivals)

    def rank_of(self, member: Member) -> int | None:
        return next((rank for rank, other in enumerate(self.members) if other.is_same_as(member)), None)

    def sources(self) -> list[int]:
        """The ranks whose state the others copy. Of newcomers, only the first is one: they may differ. None if veterans
        are here, but none of them is whole: a newcomer's state is not the job's."""
        veterans = [arrival for arrival in self.arrivals if arrival.veteran]
        whole = [arrival for arrival in veterans if arrival.whole]
        if veterans and not whole:
            return []
        if not whole:
            newest = max((arrival.step for arrival in self.arrivals if arrival.whole), default=None)
            ranks = [rank for rank, a in enumerate(self.arrivals) if a.whole and a.step == newest]
            return ranks[:1]
        newest = max(arrival.step for arrival in whole)
        return [rank for rank, a in enumerate(self.arrivals) if a.whole and a.veteran and a.step == newest]

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: bytes) -> Generation:
        with _readable():
            facts = json.loads(text)
            return Generation(int(facts["number"]), tuple(_arrival(each) for each in facts["arrivals"]))


def _arrival(facts: dict[str, Any]) -> Arrival:
    member, process = facts["member"], facts["member"]["process"]
    name = ProcessName(str(process["host"]), int(process["pid"]), str(process["namespace"]))
    who = Member(int(member["number"]), int(member["started_as"]), name, str(member["version"]), str(member["nonce"]))
    return Arrival(who, int(facts["step"]), bool(facts["whole"]), bool(facts["veteran"]))


@contextmanager
def _readable() -> Iterator[None]:
    """In a job without a secret, anyone who reaches the store may have written what is read."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RendezvousError(
            "the job's store lists its ranks in an unknown format: another version of ringway wrote it, or a stranger"
        ) from None


class Roster:
    """This process's view of the members and generations in the job's store.

    A program may have one job after the other; `job` counts them. If the store is `lasting`, as a witness is, a job
    that all ranks have left may be started again.
    """

    def __init__(
        self,
        store: Store,
        expected: int,
        fewest: int,
        grace: float,
        patience: float,
        *,
        job: int = 0,
        lasting: bool = False,
    ) -> None:
        self._store = PrefixStore(_prefix(job), store)
        self._lasting = lasting
        self._expected = expected
        self._fewest = fewest
        self._grace = grace
        self._patience = patience

    def enroll(self, started_as: int) -> Member:
        """A new member: this process."""
        with _reaching_the_store():
            number = self._store.add("members", 1)
        return Member(number, started_as, ProcessName.own(), nonce=secrets.token_hex(16))

    def finish(self) -> None:
        """The job is done: a process that comes later has nothing to do."""
        with _reaching_the_store():
            self._store.set(_FINISHED, "")

    def leave(self, member: Member, failed: bool = False) -> None:
        """The member leaves for good. The others need not wait for it."""
        _note_departure(self._store, member, _FAILED if failed else _LEFT)

    def current(self) -> Generation | None:
        """The generation that was closed last."""
        with _reaching_the_store():
            return self._current()

    def beat(self, member: Member) -> None:
        """A sign that the member lives."""
        self._store.add(f"beat/{member.number}", 1)

    def beats_of(self, member: Member) -> int:
        """How many signs the member has given."""
        return int(read(self._store, f"beat/{member.number}") or 0)

    def lose(self, member: Member) -> None:
        """The member gave no sign of life for too long. The others go on without it."""
        _note_departure(self._store, member, _SILENT)

    def someone_waits_after(self, generation: Generation) -> bool:
        """Whether a process has signed up for the next generation."""
        return read(self._store, f"{generation.number + 1}/arrivals") is not None

    def watch(self, generation: Generation) -> Callable[[], None]:
        """Raises `PeerLost` if a member of the generation is gone. Cheap enough to be called often."""
        return _Watch(self._store, generation)

    def next(
        self, me: Arrival, accused: Collection[int], signed_up: Callable[[], None] = lambda: None
    ) -> Generation | None:
        """Sign up, and return the next generation with this member in it; None if the job is done. `accused` are
        members that an error called dead. `signed_up` is called before the wait for the others."""
        current = self.current()
        if current is None and me.veteran:
            raise RendezvousError(
                "the job's store has lost the job's data: it lists no ranks, and this rank was one of them. It "
                "cannot know whether the others go on without it, so it stops. Start the job again"
            )
        _require_one_version(me.member, current)
        while True:
            number = 1 if current is None else current.number + 1
            with _reaching_the_store():
                self._require_not_lost(me.member)
                self._sign_up(number, me)
            signed_up()
            with _reaching_the_store():
                current = self._await(number, current, me.member, accused)
            if current is None or current.rank_of(me.member) is not None:
                break
        _require_one_version(me.member, current)
        return current

    def _require_not_lost(self, me: Member) -> None:
        if _departures(self._store).get(me.number) == _SILENT:
            raise RendezvousError(
                "the other ranks had no sign of this rank for too long (its host was cut off, or the process stood "
                "still) and went on without it, so it stops. Join the job again as a new rank"
            )

    def _current(self) -> Generation | None:
        text = read(self._store, _GENERATION)
        return None if text is None else Generation.unpack(text)

    def _sign_up(self, number: int, me: Arrival) -> None:
        _append(self._store, f"{number}/arrivals", json.dumps(asdict(me)))

    def _await(
        self, number: int, current: Generation | None, me: Member, accused: Collection[int]
    ) -> Generation | None:
        """Wait until generation `number` is closed, by this process or another. None if the job is done instead.

        Members that are late are left out `grace` seconds after the first member has signed up. While only newcomers
        have, the members may be in a long step: newcomers wait for them as long as they live.
        """
        newcomer = current is not None and current.rank_of(me) is None
        # A newcomer's error was about members of another generation.
        round_ = _Round(self._store, number, current, () if newcomer else accused)
        deadline, grace = Deadline(self._patience), Deadline(self._grace if current else _LATE_STARTERS)
        told = False
        ended_early = not self._lasting  # what all_left means: maybe they left before this process came

        def look() -> list[Generation] | None:
            nonlocal told, deadline, grace, ended_early
            closed = self._current()
            if closed is not None and closed.number >= number:
                return [closed]
            here = round_.here()
            enough = len(here) >= self._fewest
            if current is None:
                complete = len(here) >= self._expected or (enough and grace.left() == 0)
            else:
                complete = round_.all_accounted_for()
                ended_early = ended_early or not complete
                if not complete and not any(current.rank_of(arrival.member) is not None for arrival in here):
                    if deadline.left() < 0.5 * self._patience:
                        say("waiting for the ranks of the job to end their step")
                        deadline = Deadline(self._patience)
                    grace = Deadline(self._grace)
                complete = complete or grace.left() == 0
            # Read last: a rank that is done says so before it leaves.
            if read(self._store, _FINISHED) is not None or (newcomer and ended_early and round_.all_left()):
                return []
            if complete and enough:
                return [self._close(Generation(number, tuple(here)), current)]
            if complete and not told:
                told = True
                say(f"{len(here)} of at least {self._fewest} ranks are left: waiting for others to join")
            return None

        while (found := deadline.poll(look, _PAUSE)) is None and deadline.left() > 0:
            pass  # the deadline was put off
        if found is None:
            here = round_.here()
            raise RendezvousError(
                f"generation {number} was not formed within {self._patience:g} s: {len(here)} ranks are here, and at "
                f"least {self._fewest} are needed",
                arrived={rank: str(arrival.member) for rank, arrival in enumerate(here)},
            )
        return found[0] if found else None

    def _close(self, next_one: Generation, current: Generation | None) -> Generation:
        before = "" if current is None else current.pack()
        if current is not None:  # who was left out of a generation may have another state than those who went on
            known = [replace(a, veteran=a.veteran and current.rank_of(a.member) is not None) for a in next_one.arrivals]
            next_one = replace(next_one, arrivals=tuple(known))
        return Generation.unpack(bytes(self._store.compare_set(_GENERATION, before, next_one.pack())))


def _require_one_version(me: Member, generation: Generation | None) -> None:
    for rank, member in enumerate(generation.members if generation is not None else ()):
        if member.version != me.version:
            raise RendezvousError(
                f"this process has ringway {me.version}, and rank {rank} ({member}) has {member.version}: install the "
                "same version everywhere"
            )


def _prefix(job: int) -> str:
    return f"{_PREFIX}/job {job}" if job else _PREFIX


def standing(store: Store) -> Standing | None:
    """The current generation of the job at a launcher's store, and who waits to be let in; None before the first. If a
    program has several jobs, it is the last one that has begun."""
    number = 0
    while read(PrefixStore(_prefix(number + 1), store), _GENERATION) is not None:
        number += 1
    part = PrefixStore(_prefix(number), store)
    text = read(part, _GENERATION)
    if text is None:
        return None
    current = Generation.unpack(text)
    round_ = _Round(part, current.number + 1, current, ())
    here = round_.here()
    waiting = [arrival.member.process for arrival in here if current.rank_of(arrival.member) is None]
    finished = read(part, _FINISHED) is not None or round_.all_left()
    return Standing(current.number, [member.process for member in current.members], waiting, finished)


class _Round:
    """The signing up for one generation."""

    def __init__(self, store: Store, number: int, current: Generation | None, accused: Collection[int]) -> None:
        self._store = store
        self._number = number
        self._current = current
        self._accused = set(accused)
        self._trial = Deadline(_ACCUSED_SECONDS)
        self._arrivals: list[Arrival] = []
        self._departures: Mapping[int, str] = {}

    def here(self) -> list[Arrival]:
        """Those who have signed up and live, in rank order: members keep theirs, and newcomers follow."""
        # In this order: a rank signs up before it notes whom it saw die, so who is seen to note is seen to be here.
        self._departures = _departures(self._store)
        self._arrivals += _arrivals_of(self._store, self._number, len(self._arrivals))
        # One that has signed up lives, whatever an error said about it before, unless its process is gone.
        alive = [arrival for arrival in self._arrivals if not self._is_out(arrival.member)]
        return sorted(alive, key=self._order)

    def _order(self, arrival: Arrival) -> tuple[bool, int, int]:
        member = arrival.member
        rank = None if self._current is None else self._current.rank_of(member)
        return (rank is None, member.started_as if rank is None else rank, member.number)

    def all_left(self) -> bool:
        """Whether every member of the current generation has left of its own accord: the job has ended early."""
        assert self._current is not None
        return all(self._departures.get(member.number) == _LEFT for member in self._current.members)

    def all_accounted_for(self) -> bool:
        """Whether every member of the current generation has signed up or is gone, as far as `here` saw."""
        assert self._current is not None
        signed_up = {arrival.member.number for arrival in self._arrivals}
        missing = [member for member in self._current.members if member.number not in signed_up]
        # All of them: other hosts wait for what is seen here.
        out = [self._is_out(member) or self._is_convicted(member) for member in missing]
        return all(out)

    def _is_convicted(self, member: Member) -> bool:
        return member.number in self._accused and self._trial.left() == 0

    def _is_out(self, member: Member) -> bool:
        if member.number in self._departures:
            return True
        if member.process.seems_gone():
            _note_departure(self._store, member, _DIED)  # ranks of other hosts cannot see it
            return True
        return False


class _Watch:
    def __init__(self, store: Store, generation: Generation) -> None:
        self._store = store
        self._generation = generation
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        generation = self._generation
        departures = _departures(self._store)
        for rank, member in enumerate(generation.members):
            if member.number in departures or member.process.seems_gone():
                raise PeerLost(
                    f"rank {rank} ({member}) ended while generation {generation.number} formed",
                    rank=rank,
                    host=member.process.host,
                    pid=member.process.pid,
                )
        # A member that has given up this generation knows why, maybe of a rank that only its own host can see.
        for arrival in _arrivals_of(self._store, generation.number + 1):
            rank_here = generation.rank_of(arrival.member)
            if rank_here is not None:
                raise PeerLost(f"rank {rank_here} gave up generation {generation.number} while it formed", rank=None)
        self._next = time.monotonic() + _WATCH_SECONDS


def _append(store: Store, key: str, line: str) -> None:
    store.append(key, f"{line}\n")  # type: ignore[attr-defined] # torch's stubs lack it


def _arrivals_of(store: Store, number: int, known: int = 0) -> list[Arrival]:
    """Who has signed up for a generation, without the first ones, which are `known`."""
    lines = (read(store, f"{number}/arrivals") or b"").splitlines()
    with _readable():
        return [_arrival(json.loads(line)) for line in lines[known:]]


def _note_departure(store: Store, member: Member, how: str) -> None:
    _append(store, _DEPARTURES, f"{member.number} {how}")


def _departures(store: Store) -> Mapping[int, str]:
    """How members left, by their numbers. One key, because every rank reads it often."""
    with _readable():
        lines = [line.split() for line in (read(store, _DEPARTURES) or b"").decode().splitlines()]
        known = {int(number): how for number, how in lines}
        # A member that was given up may come back, and one that has left does not, whatever others saw of it later.
        known |= {int(number): how for number, how in lines if how == _SILENT}
        return known | {int(number): how for number, how in lines if how in (_LEFT, _FAILED)}


@contextmanager
def _reaching_the_store() -> Iterator[None]:
    """A process that cannot reach the store must stop: the others may go on without it."""
    try:
        yield
    except DataLost as error:
        raise RendezvousError(str(error)) from error
    except DistError as error:
        raise RendezvousError(
            f"the job's store is out of reach ({str(error).splitlines()[0]}). This rank cannot know whether the others "
            "go on without it, so it stops. Start the job again, or join it again once its launcher is reachable. A "
            "witness would survive the loss of the store's host: ElasticJob(witness=...)"
        ) from error
