"""One rank of the tests with two hosts: runs what its first argument says and prints the result as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import torch

import ringway as dist
from ringway.errors import RingwayError
from ringway.job.init import init_distributed


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


def main() -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # show where a hang is, before the timeout
    try:
        facts = {"collectives": collectives, "host_dies": host_dies}[sys.argv[1]]()
    except RingwayError as error:
        facts = {"error": type(error).__name__, "text": str(error), **_attributes(error)}
    print("FACTS " + json.dumps(facts), flush=True)


def _attributes(error: RingwayError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name in ("missing", "arrived", "rank", "host")}


if __name__ == "__main__":
    main()
