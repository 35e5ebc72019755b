"""Looks for what would break or slow down a job, on this host and between hosts. `ringway doctor` shows it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistError

from ringway.doctor.finding import LEVELS, Finding, Level, worst
from ringway.doctor.gpus import Card, ask_driver, gpus
from ringway.doctor.hosts import compare_hosts
from ringway.doctor.leftovers import leftovers
from ringway.doctor.limits import limits
from ringway.doctor.mpi import mpi
from ringway.doctor.network import network
from ringway.doctor.place import NotUnderstood, own_place
from ringway.doctor.ranks import sharing
from ringway.doctor.software import software
from ringway.errors import DiscoveryError, RendezvousError, RingwayError
from ringway.launch.discover import discover
from ringway.launch.info import LaunchInfo
from ringway.launch.rendezvous import rendezvous

__all__ = ["LEVELS", "Finding", "Level", "examine", "worst"]


def examine(seconds: float = 60.0) -> list[Finding] | None:
    """Everything that was found. In a job, every rank calls this, and rank 0 gets the findings of all hosts; the others
    get None. `seconds` limits the wait for the other ranks."""
    cards = ask_driver()
    try:
        info = discover(asks_mpi=True)
    except DiscoveryError as failed:
        unclear = Finding("error", "launcher", str(failed), "ringway env shows the variables")
        return [*_this_rank(None, cards), *sharing([own_place(0, cards)]), unclear]
    own = _this_rank(info, cards)
    alone = [*own, *sharing([own_place(info.rank, cards)])]
    if info.size == 1:
        return alone
    try:
        store = rendezvous(info, seconds)
    except RendezvousError as failed:
        return [*alone, Finding("error", "rendezvous", str(failed), "See the lines about the store and the interfaces")]
    try:
        return compare_hosts(store, info, own, cards, seconds)
    except NotUnderstood as failed:
        return [*alone, Finding("error", "other ranks", str(failed), "Install the same ringway everywhere")]
    except (DistError, RingwayError, OSError) as failed:  # the store is gone, or a rank did not answer in time
        says = f"the other ranks did not answer within {seconds:g} s ({str(failed).partition(chr(10))[0]})"
        return [*alone, Finding("error", "other ranks", says, "Look at their output; --timeout waits longer")]


def _this_rank(info: LaunchInfo | None, cards: Sequence[Card]) -> list[Finding]:
    return [*software(), *limits(info), *network(info), *mpi(info), *gpus(cards), *leftovers()]
