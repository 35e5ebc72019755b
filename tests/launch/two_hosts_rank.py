"""What the ranks of test_two_hosts.py run, each on its host."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import ringway as dist
from ringway.errors import RingwayError
from ringway.job.init import init_distributed
from ringway.testing import RankContext
from slow_link import enter

_CLONE_NEWUTS = 0x04000000


def collectives() -> dict[str, Any]:
    init_distributed(verbose=True)
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    hosts = dist.allgather_object(socket.gethostname())
    facts = {"sum": tensor[0].item(), "hosts": hosts, "backend": dist.get_backend(), "rank": dist.get_rank()}
    dist.barrier()
    dist.destroy_process_group()
    return facts


def host_dies() -> dict[str, Any]:
    """Rank 0, which hosts the store, is killed while the other rank waits for it in a collective."""
    init_distributed()
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    dist.all_reduce(torch.ones(10))
    return {"waited": time.monotonic() - began}


def run(
    context: RankContext, namespaces: Sequence[str], environments: Sequence[Mapping[str, str]], what: str
) -> dict[str, Any]:
    """Facts, or the error that was raised, of a rank on a host of its own name."""
    enter(namespaces[context.rank])
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "cannot get a host name of its own")
    socket.sethostname("host" + "ab"[context.rank])
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the fork server's, which names the loopback
    os.environ.update(environments[context.rank])
    try:
        return {"collectives": collectives, "host_dies": host_dies}[what]()
    except RingwayError as error:
        return {"error": type(error).__name__, "text": str(error), **_attributes(error)}


def _attributes(error: RingwayError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name in ("missing", "arrived", "rank", "host")}
