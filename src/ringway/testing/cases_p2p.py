"""Conformance: messages between two ranks."""

from __future__ import annotations

import torch

from ringway.call import DTYPES
from ringway.testing.conformance import case
from ringway.testing.probe import LARGE, SIZES, Probe
from ringway.testing.reference import any_bits


def _to(probe: Probe, rank: int, number: int) -> dict[str, int]:
    return probe.root(rank + probe.size * (number % 2), "dst")


def _from(probe: Probe, rank: int, number: int) -> dict[str, int]:
    return probe.root(rank + probe.size * (number % 2), "src")


@case(min_size=2)
def send_and_recv_of_every_dtype(probe: Probe) -> None:
    """A message goes around: each rank but the first receives before it sends."""
    for number, dtype in enumerate(DTYPES):
        for count in SIZES:
            probe.at(dtype=dtype, count=count)
            message = any_bits(count, dtype, number)
            received = torch.zeros(count, dtype=dtype)
            if probe.rank == 0:
                probe.dist.send(message, group=probe.group, **_to(probe, probe.next, number))
            source = probe.dist.recv(received, group=probe.group, **_from(probe, probe.previous, number))
            probe.same_bits(received, message)
            probe.equal(source, probe.ranks[probe.previous], "the source that recv returned")
            if probe.rank != 0:
                probe.dist.send(received, group=probe.group, **_to(probe, probe.next, number))


@case(min_size=2)
def both_send_first(probe: Probe) -> None:
    """isend does not block, so a ring of ranks that all send before they receive does not block either."""
    for count in (0, 1, 1031, LARGE):
        probe.at(count=count)
        message = any_bits(count, torch.uint8, probe.rank)
        work = probe.dist.isend(message, group=probe.group, group_dst=probe.next)
        received = torch.zeros(count, dtype=torch.uint8)
        probe.dist.recv(received, group=probe.group, group_src=probe.previous)
        work.wait()
        probe.same_bits(received, any_bits(count, torch.uint8, probe.previous))


@case(min_size=2)
def receives_posted_before_sends(probe: Probe) -> None:
    received = torch.zeros(1031)
    work = probe.dist.irecv(received, group=probe.group, group_src=probe.previous)
    probe.dist.send(any_bits(1031, torch.float32, probe.rank), group=probe.group, group_dst=probe.next)
    work.wait()
    probe.same_bits(received, any_bits(1031, torch.float32, probe.previous))


@case(min_size=2)
def tags_are_kept_apart(probe: Probe) -> None:
    """Messages are received by tag, in a different order than they were sent."""
    tags = (7, 0, 3)
    works = [
        probe.dist.isend(any_bits(9, torch.int32, tag), group=probe.group, tag=tag, group_dst=probe.next)
        for tag in tags
    ]
    for tag in reversed(tags):
        probe.at(tag=tag)
        received = torch.zeros(9, dtype=torch.int32)
        probe.dist.recv(received, group=probe.group, tag=tag, group_src=probe.previous)
        probe.same_bits(received, any_bits(9, torch.int32, tag))
    for work in works:
        work.wait()


@case(min_size=2)
def messages_of_one_tag_keep_their_order(probe: Probe) -> None:
    works = [
        probe.dist.isend(torch.tensor([float(number)]), group=probe.group, group_dst=probe.next) for number in range(50)
    ]
    for number in range(50):
        received = torch.zeros(1)
        probe.dist.recv(received, group=probe.group, group_src=probe.previous)
        probe.same(received, torch.tensor([float(number)]), f"message {number}")
    for work in works:
        work.wait()


@case(min_size=2)
def recv_from_any_source(probe: Probe) -> None:
    if probe.rank == 0:
        seen: dict[int, float] = {}
        for _ in range(probe.size - 1):
            received = torch.zeros(3)
            source = probe.dist.recv(received, group=probe.group)
            seen[source] = float(received[0])
        probe.equal(seen, {probe.ranks[rank]: float(rank) for rank in range(1, probe.size)}, "who sent what")
    else:
        probe.dist.send(torch.full((3,), float(probe.rank)), group=probe.group, group_dst=0)


@case(min_size=2)
def recv_from_any_source_by_tag(probe: Probe) -> None:
    if probe.rank == 0:
        for rank in range(probe.size - 1, 0, -1):
            received = torch.zeros(3)
            source = probe.dist.recv(received, group=probe.group, tag=rank)
            probe.equal((source, float(received[0])), (probe.ranks[rank], float(rank)), f"tag {rank}")
    else:
        message = torch.full((3,), float(probe.rank))
        probe.dist.send(message, group=probe.group, group_dst=0, tag=probe.rank)


@case(min_size=2)
def batch_of_sends_and_receives(probe: Probe) -> None:
    """Every rank exchanges with both neighbours, twice, in one batch."""
    dist = probe.dist
    for kind in ("rank in the world", "rank in the group"):
        probe.at(peers=kind)
        operations, received = [], {}
        for number in range(2):
            for neighbour, tag in ((probe.next, number), (probe.previous, number + 10)):
                peer = {"peer": probe.ranks[neighbour]} if kind == "rank in the world" else {"group_peer": neighbour}
                message = any_bits(65, torch.float32, probe.rank, tag)
                operations.append(dist.P2POp(dist.isend, message, group=probe.group, tag=tag, **peer))
                # The neighbour's message in this direction carries the other direction's tag.
                answer_tag = number + 10 if tag == number else number
                into = received[neighbour, answer_tag] = torch.zeros(65)
                operations.append(dist.P2POp(dist.irecv, into, group=probe.group, tag=answer_tag, **peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for (source, tag), tensor in received.items():
            probe.same_bits(tensor, any_bits(65, torch.float32, source, tag), f"from {source} with tag {tag}")


@case(min_size=2)
def strided_messages(probe: Probe) -> None:
    values = [any_bits((6, 5), torch.int32, rank) for rank in range(probe.size)]
    message = torch.zeros(5, 6, dtype=torch.int32).t()
    message.copy_(values[probe.rank])
    frame = torch.zeros(6, 10, dtype=torch.int32)
    work = probe.dist.isend(message, group=probe.group, group_dst=probe.next)
    probe.dist.recv(frame[:, ::2], group=probe.group, group_src=probe.previous)
    work.wait()
    probe.same_bits(frame[:, ::2], values[probe.previous])
    probe.holds(not frame[:, 1::2].any(), "recv wrote between the elements of a strided tensor")

    frame = torch.zeros(6, 10, dtype=torch.int32)
    receipt = probe.dist.irecv(frame[:, ::2], group=probe.group, group_src=probe.previous)
    probe.dist.isend(message, group=probe.group, group_dst=probe.next).wait()
    receipt.wait()
    probe.same_bits(frame[:, ::2], values[probe.previous], "what irecv received")


@case(min_size=2)
def messages_and_collectives_do_not_mix(probe: Probe) -> None:
    """A message in flight neither blocks nor disturbs the group's collectives."""
    received = torch.zeros(100_003)
    receipt = probe.dist.irecv(received, group=probe.group, group_src=probe.previous)
    probe.still_works()
    message = torch.full((100_003,), float(probe.rank))
    shipment = probe.dist.isend(message, group=probe.group, group_dst=probe.next)
    probe.still_works()
    receipt.wait()
    shipment.wait()
    probe.same(received, torch.full((100_003,), float(probe.previous)))


@case(min_size=2)
def every_pair_at_once(probe: Probe) -> None:
    received = {peer: torch.zeros(257) for peer in range(probe.size) if peer != probe.rank}
    works = [probe.dist.irecv(tensor, group=probe.group, group_src=peer) for peer, tensor in received.items()]
    works += [
        probe.dist.isend(any_bits(257, torch.float32, probe.rank, peer), group=probe.group, group_dst=peer)
        for peer in received
    ]
    for work in works:
        work.wait()
    for peer, tensor in received.items():
        probe.same_bits(tensor, any_bits(257, torch.float32, peer, probe.rank), f"from {peer}")
