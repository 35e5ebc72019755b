"""Scenarios of test_across_hosts.py for ranks on two hosts: `python across_hosts_ranks.py SCENARIO`; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

import ringway as dist
from ringway.errors import CollectiveMismatch, RingwayError

LIMIT = timedelta(seconds=60)


def meet(group: Any, name: str) -> None:
    """A barrier through the store, which works even if a group has failed."""
    dist.monitored_barrier(timeout=LIMIT, log_name=name)


def caught(action: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        action()
    except RingwayError as error:
        facts = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        if isinstance(error, CollectiveMismatch):
            facts |= {"sides": error.sides, "sequence": error.sequence}
        return facts
    return {"kind": "nothing raised"}


def good_calls(group: Any, count: int) -> None:
    tensor = torch.ones(4)
    for _ in range(count):
        dist.all_reduce(tensor, group=group)


def odd_call(group: Any, asynchronous: bool = False) -> None:
    work = dist.all_reduce(torch.ones(8), group=group, async_op=asynchronous)
    if work is not None:
        work.wait()


def usual_call(group: Any, asynchronous: bool = False) -> None:
    work = dist.all_reduce(torch.ones(4), group=group, async_op=asynchronous)
    if work is not None:
        work.wait()


def mismatch(backend: str, odd: tuple[int, ...], late: bool, asynchronous: bool) -> dict[str, Any]:
    """The ranks in `odd` reduce eight elements, the others four."""
    group = dist.new_group(backend=backend, timeout=LIMIT)
    good_calls(group, 3)
    is_odd = dist.get_rank() in odd
    meet(None, "before")
    if is_odd == late:
        time.sleep(0.5)
    facts = caught(lambda: (odd_call if is_odd else usual_call)(group, asynchronous))
    facts["again"] = caught(lambda: usual_call(group))["kind"]
    meet(None, "after")
    return facts


def all_goes_well() -> None:
    """More calls than the store keeps, on ranks that run ahead of each other: no false alarm."""
    group = dist.new_group(timeout=LIMIT)
    tensor = torch.ones(4)
    for number in range(200):
        if dist.get_rank() == number % 4:
            time.sleep(0.001)
        dist.broadcast(tensor, 0, group=group)
    outputs = [torch.empty(1 + dist.get_rank()) for _ in range(4)]
    dist.all_to_all(outputs, [torch.ones(1 + rank) for rank in range(4)], group=group)  # sizes may differ here
    good_calls(group, 70)
    dist.destroy_process_group(group)


def always() -> list[Any]:
    all_goes_well()
    return [
        mismatch("gloo", (2, 3), True, False),
        mismatch("gloo", (2, 3), False, True),
        mismatch("gloo", (3,), True, False),
        mismatch("hierarchical", (0, 1), True, False),
        in_ddp(),
        monitored(),
        in_a_sub_group(),
    ]


def in_ddp() -> dict[str, Any]:
    group = dist.new_group(timeout=LIMIT)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    meet(None, "before")

    def step() -> None:
        if dist.get_rank() < 2:
            time.sleep(0.5)
            odd_call(group)
        else:
            try:
                model(torch.ones(1, 64)).sum().backward()
            except Exception as error:
                raise group_error(error) from None

    facts = caught(step)
    meet(None, "after")
    return facts


def group_error(error: Exception) -> RingwayError:
    """DDP's C++ converts an error from a hook to its own error, whose text contains ringway's."""
    return error if isinstance(error, RingwayError) else RingwayError(str(error))


def monitored() -> dict[str, Any]:
    """Calls that go through the store are compared as well."""
    group = dist.new_group(timeout=LIMIT)
    good_calls(group, 1)
    meet(None, "before")
    if dist.get_rank() < 2:
        time.sleep(0.5)
        action = lambda: dist.monitored_barrier(group, timeout=LIMIT)  # noqa: E731
    else:
        action = lambda: usual_call(group)  # noqa: E731
    facts = caught(action)
    meet(None, "after")
    return facts


def in_a_sub_group() -> dict[str, Any]:
    """One rank of each host, numbered 0 and 1 in the group. Each names itself as the root."""
    group = dist.new_group([1, 3], timeout=LIMIT)
    rank = dist.get_rank()
    meet(None, "before")
    facts = caught(lambda: dist.reduce(torch.ones(4), rank, group=group)) if rank in (1, 3) else {}
    meet(None, "after")
    return facts


def sample() -> list[Any]:
    all_goes_well()
    first = mismatch("gloo", (2, 3), True, False)
    group = dist.new_group(timeout=LIMIT)
    good_calls(group, 40)
    # gloo does not see that: it adds the bits of integers as if they were floats.
    other = dist.get_rank() >= 2
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if other else torch.float32), group=group)
    later = caught(lambda: good_calls(group, 30))
    meet(None, "end")
    return [first, later]


def stall() -> list[Any]:
    neighbours = mismatch("gloo", (3,), True, False)
    group = dist.new_group(timeout=LIMIT)
    good_calls(group, 2)
    dist.communicator(group).set_timeout(6.0)

    def action() -> None:
        if dist.get_rank() >= 2:
            dist.broadcast(torch.ones(4), 0, group=group)
        else:
            usual_call(group)
        usual_call(group)

    verdict = caught(action)
    meet(None, "end")
    return [neighbours, verdict]


def main() -> None:
    dist.init_distributed("gloo", timeout=LIMIT, verbose=False)
    results = {"always": always, "sample": sample, "stall": stall}[sys.argv[1]]()
    meet(None, "done")
    print(json.dumps(results), flush=True)
    store = c10d.distributed_c10d._get_default_store()
    store.set(f"has met {dist.get_rank()}", "")
    if dist.get_rank() == 0:  # it hosts the store
        store.wait([f"has met {rank}" for rank in range(dist.get_world_size())])


if __name__ == "__main__":
    main()
