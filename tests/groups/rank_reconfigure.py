"""What ranks do with groups whose members are replaced, on any backend and device."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d

import ringway as dist
from ringway.errors import PeerLost, UsageError
from ringway.testing import RankContext
from ringway.testing.rank import leave


class Member:
    """A rank with a group that can be reconfigured, and the program's own way to exchange handles."""

    def __init__(self, context: RankContext, backend: str, device: str) -> None:
        leave(dist)
        self._context = context
        self._device = device
        self._turn = 0
        dist.init_process_group(
            backend,
            store=c10d.PrefixStore("group", context.store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=60),
            enable_reconfigure=True,
        )

    def handles(self) -> list[str]:
        self._turn += 1
        keys = [f"handle/{self._turn}/{rank}" for rank in range(self._context.world_size)]
        self._context.store.set(keys[self._context.rank], dist._get_reconfigure_handle())
        return [self._context.store.get(key).decode() for key in keys]

    def meet(self, name: str) -> None:
        keys = [f"{name}/{rank}" for rank in range(self._context.world_size)]
        self._context.store.set(keys[self._context.rank], "")
        self._context.store.wait(keys)

    def summed(self) -> tuple[int, int, float]:
        """This rank, the size, and the sum of all ranks plus one."""
        tensor = torch.full((3,), dist.get_rank() + 1.0, device=self._device)
        dist.all_reduce(tensor)
        dist.settled()  # a CUDA collective that was aborted has left garbage
        assert dist.communicator().size == dist.get_world_size() == c10d.get_world_size()
        return dist.get_rank(), dist.get_world_size(), tensor[0].item()


def changes(context: RankContext, backend: str, device: str = "cpu") -> list[tuple[int, int, float]]:
    """All three; without rank 1; each alone; all again, in another order; after an abort."""
    member = Member(context, backend, device)
    assert dist._supports_reconfigure()
    group = c10d.group.WORLD
    with pytest.raises(UsageError, match="has no members yet"):
        dist.all_reduce(torch.ones(1, device=device))
    handles, seen = member.handles(), []
    dist._reconfigure(1, handles).wait()
    seen.append(member.summed())
    member.meet("all")
    if context.rank != 1:
        dist._reconfigure(2, [handles[0], handles[2]]).wait()
        seen.append(member.summed())
    dist._reconfigure(10 + context.rank, {handles[context.rank]}).wait()
    seen.append(member.summed())
    member.meet("alone")
    dist._reconfigure(3, handles[::-1]).wait()
    seen.append(member.summed())
    other = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert dist.communicator(other).size == 2
    assert c10d.group.WORLD is group
    group.abort()
    member.meet("aborted")
    dist._reconfigure(4, handles).wait()
    seen.append(member.summed())
    with pytest.raises(UsageError, match="already used"):
        dist._reconfigure(4, handles)
    with pytest.raises(UsageError, match="do not contain this process's own"):
        dist._reconfigure(5, [handle for handle in handles if handle != dist._get_reconfigure_handle()])
    with pytest.raises(UsageError, match="is not a handle"):
        dist._reconfigure(5, ["[" * 10_000, handles[context.rank]])
    with pytest.raises(UsageError, match="twice"):
        dist._reconfigure(5, handles + handles)
    member.meet("end")
    dist.destroy_process_group()
    return seen


CHANGES = (
    [(0, 3, 6.0), (0, 2, 3.0), (0, 1, 1.0), (2, 3, 6.0), (0, 3, 6.0)],
    [(1, 3, 6.0), (0, 1, 1.0), (1, 3, 6.0), (1, 3, 6.0)],
    [(2, 3, 6.0), (1, 2, 3.0), (0, 1, 1.0), (0, 3, 6.0), (2, 3, 6.0)],
)
"""What `changes` returns on the three ranks."""


def survivors(context: RankContext, backend: str, device: str = "cpu") -> tuple[str, tuple[int, int, float]]:
    """Rank 1 dies in a call. The first list of the survivors still has it, the second has not."""
    member = Member(context, backend, device)
    handles = member.handles()
    dist._reconfigure(1, handles).wait()
    member.summed()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        member.summed()
    with pytest.raises(PeerLost, match="ended while the group formed") as lost:
        dist._reconfigure(2, handles)
    with pytest.raises((UsageError, PeerLost), match=r"call it again with a new uuid|rank 1"):
        member.summed()
    dist._reconfigure(3, [handles[0], handles[2]]).wait()
    return str(lost.value.rank), member.summed()
