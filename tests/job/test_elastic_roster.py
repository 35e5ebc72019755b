"""The roster of an elastic job: ranks that die while a generation forms, jobs that have ended, and signs of life."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch.distributed as c10d

from ringway.errors import PeerLost
from ringway.job.elastic.pulse import Pulse
from ringway.job.elastic.roster import Arrival, Generation, Member, Roster, standing
from ringway.launch.processes import ProcessName
from ringway.store import Deadline, read

GONE = 4194305
"""A process id that no process has: Linux stops at 2^22."""


def _roster(store: c10d.Store, **options: bool | int) -> Roster:
    return Roster(store, 1, 1, 0.2, 30.0, **options)  # type: ignore[arg-type]


def _formed(roster: Roster) -> tuple[Member, Generation]:
    member = roster.enroll(0)
    generation = roster.next(Arrival(member, 0, whole=True, veteran=False), ())
    assert generation is not None
    return member, generation


@pytest.mark.parametrize("lasting", [False, True])
def test_a_rank_that_comes_when_all_have_left_is_done_unless_the_store_lasts(lasting: bool) -> None:
    """A rank that `ringway run` starts again must not repeat the job. At a witness, the job may be queued again."""
    store = c10d.HashStore()
    old, new = _roster(store, lasting=lasting), _roster(store, lasting=lasting)
    old.leave(_formed(old)[0])
    found = new.next(Arrival(new.enroll(0), 0, whole=True, veteran=False), ())
    assert (found and found.number) == (2 if lasting else None)


def test_the_second_job_of_a_program_is_not_the_first() -> None:
    store = c10d.HashStore()
    first = _roster(store)
    _formed(first)
    first.finish()
    assert standing(store).finished  # type: ignore[union-attr]
    _, generation = _formed(_roster(store, job=1))
    assert generation.number == 1
    assert not standing(store).finished  # type: ignore[union-attr]


def test_hosts_learn_of_a_rank_that_signed_up_and_died_elsewhere() -> None:
    """Only its own host sees that it is gone."""
    store = c10d.HashStore()
    here, there = _roster(store), _roster(store)
    member, _ = _formed(here)
    dead = replace(there.enroll(1), process=replace(ProcessName.own(), pid=GONE))
    store.append("ringway/elastic/2/arrivals", json.dumps(asdict(Arrival(dead, 0, True, False))) + "\n")
    assert here.next(Arrival(member, 1, whole=True, veteran=True), ()) is not None
    assert f"{dead.number} died".encode() in (read(store, "ringway/elastic/departures") or b"")


def test_a_generation_that_a_member_gave_up_is_given_up_by_the_others() -> None:
    store = c10d.HashStore()
    roster = _roster(store)
    member, generation = _formed(roster)
    watch = roster.watch(generation)
    watch()
    newcomer = Arrival(_roster(store).enroll(1), 0, whole=True, veteran=False)
    store.append("ringway/elastic/2/arrivals", json.dumps(asdict(newcomer)) + "\n")
    roster.watch(generation)()  # one that only waits to be let in
    store.append("ringway/elastic/2/arrivals", json.dumps(asdict(Arrival(member, 0, True, True))) + "\n")
    with pytest.raises(PeerLost, match="gave up generation 1"):
        roster.watch(generation)()


def test_a_rank_that_an_error_called_dead_has_time_to_sign_up() -> None:
    """On another host one rank dies, and the other gives up its connections, which looks like its death from here."""
    store = c10d.HashStore()
    rosters = [Roster(store, 3, 1, 30.0, 30.0) for _ in range(3)]
    elsewhere = replace(ProcessName.own(), namespace="another host")
    members = [rosters[0].enroll(0)]
    members += [replace(roster.enroll(rank), process=elsewhere) for rank, roster in enumerate(rosters[1:], 1)]
    for member in members[1:]:
        store.append("ringway/elastic/1/arrivals", json.dumps(asdict(Arrival(member, 0, True, False))) + "\n")
    assert len(rosters[0].next(Arrival(members[0], 0, True, False), ()).members) == 3  # type: ignore[union-attr]
    store.append("ringway/elastic/departures", f"{members[2].number} died\n")
    line = json.dumps(asdict(Arrival(members[1], 1, True, True))) + "\n"
    late = threading.Timer(0.1, lambda: store.append("ringway/elastic/2/arrivals", line))
    late.start()
    second = rosters[0].next(Arrival(members[0], 1, True, True), {members[1].number})
    late.join()
    assert second is not None
    assert [member.number for member in second.members] == [members[0].number, members[1].number]
    # It died after all: nobody waits for `grace`.
    began = time.monotonic()
    third = rosters[0].next(Arrival(members[0], 2, True, True), {members[1].number})
    assert third is not None
    assert [member.number for member in third.members] == [members[0].number]
    assert time.monotonic() - began < 15.0


class _Forgetful(Roster):
    """A roster whose store fails at the first report."""

    failures = 1

    def lose(self, member: Member) -> None:
        if self.failures:
            self.failures -= 1
            raise c10d.DistNetworkError("a hiccup")
        super().lose(member)


def test_a_silent_rank_is_reported_again_if_the_store_failed() -> None:
    store = c10d.HashStore()
    roster = _Forgetful(store, 1, 1, 0.2, 30.0)
    member, generation = _formed(roster)
    far = replace(member, number=7, process=ProcessName("elsewhere", 1, "another namespace"))
    lost = threading.Event()

    def silent(who: Member | None) -> None:
        if who is not None:
            roster.lose(who)
            lost.set()

    pulse = Pulse(roster, member, None, 0.2, silent)  # type: ignore[arg-type]
    try:
        pulse.follow(replace(generation, arrivals=(Arrival(far, 0, True, True),)))
        assert Deadline(60).poll(lambda: lost.is_set() or None)
    finally:
        pulse.stop()
    assert roster.failures == 0
