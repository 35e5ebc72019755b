"""`RINGWAY_REPLACE=gloo:shm`: where a program asks torch for gloo, CPU tensors go through shared memory instead.

For programs that hard-code gloo. Off unless the variable is set. All members of a group decide alike: `shm` if they
share a host, `hierarchical` if they are spread evenly over several, and otherwise gloo stays. torch goes on to call
the group gloo. CUDA tensors keep the backend that was asked for. Groups that ringway itself makes are not affected, nor
is the gloo inside its own groups.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

from ringway.backends.base import GroupInfo
from ringway.backends.exchange import exchange
from ringway.backends.select import Choice, Obstacle, RankFacts, for_cpu, obstacle
from ringway.backends.several.hosts import host_identity
from ringway.errors import ConfigError
from ringway.groups.bridge import Bridge
from ringway.groups.factory import torch_spelling
from ringway.groups.world import world
from ringway.launch.attempts import of_this_attempt
from ringway.launch.info import LaunchInfo
from ringway.torch_patches import patch

VARIABLE = "RINGWAY_REPLACE"
ONLY = "gloo:shm"


def checked(text: str, source: str) -> str:
    """The value, if it is one. `source` is where it was given."""
    if text.strip().lower().replace("=", ":") != ONLY:
        raise ConfigError(f"{source} is {text!r}; the only replacement is {ONLY}", source=source)
    return ONLY


def install() -> None:
    """Replaces gloo from now on, if the user asked for it."""
    text = os.environ.get(VARIABLE, "")
    if text.strip() and checked(text, VARIABLE):
        patch("replace", "_new_process_group_helper", c10d_module, by=_replacing)


def _replacing(torchs: Any) -> Any:
    """torch's function that makes every group."""
    signature = inspect.signature(torchs)

    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments["backend"]
        spelling = _spelling(bound.arguments)
        if spelling is None:
            return torchs(*args, **kwargs)
        bound.arguments["backend"] = c10d.Backend(torch_spelling(spelling))
        group, store = torchs(*bound.args, **bound.kwargs)
        if isinstance(group, Bridge):  # the program finds what it asked for
            c10d_module._world.pg_map[group] = (asked, store)
            c10d_module._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(str(asked))))
        return group, store

    return new_process_group_helper


def _spelling(arguments: Mapping[str, Any]) -> str | None:
    """What to make instead of the group that was asked for, as a user of ringway writes it; None leaves it."""
    asked = _by_device(str(arguments["backend"]))
    ranks = arguments["global_ranks_in_group"]
    if ranks and c10d.get_rank() not in ranks:
        return None
    if asked.pop("cpu", None) != "gloo" or set(asked) - {"cuda"}:
        return None
    if arguments.get("backend_options") is not None or arguments.get("enable_reconfigure"):
        return None  # meant for gloo
    if asked.get("cuda") == "nccl" and not (c10d.is_nccl_available() and torch.cuda.is_available()):
        return None  # torch says what is missing
    cpu = _choose(arguments)
    if cpu == "gloo":
        return None
    return ",".join([f"cpu:{cpu}", *(f"{device}:{name}" for device, name in asked.items())]) if asked else cpu


def _by_device(backend: str) -> dict[str, str]:
    """The backend of each device. Without a name, torch takes gloo for the CPU, and nccl for CUDA if there is any, as
    ringway's groups do."""
    if backend == "undefined":
        return {"cpu": "gloo"}
    if ":" in backend:
        return dict(part.split(":", 1) for part in backend.lower().split(","))
    # Only where it is needed: a second gloo connects all ranks with each other.
    return {"cpu": backend, "cuda": backend} if torch.cuda.is_available() else {"cpu": backend}


def _choose(arguments: Mapping[str, Any]) -> str:
    """The backend for CPU tensors. Every member of the group calls this."""
    rank, size, name = arguments["group_rank"], arguments["group_size"], arguments["group_name"]
    timeout: timedelta = arguments.get("timeout") or c10d.default_pg_timeout
    world_group = not arguments["global_ranks_in_group"]
    info = GroupInfo(
        rank=rank,
        size=size,
        ranks=list(arguments["global_ranks_in_group"]) or list(range(size)),
        # What an earlier group of the same name left there is the same: ranks stay on their hosts.
        store=c10d.PrefixStore(f"ringway/replace/{name}", of_this_attempt(arguments["store"])),
        name=name,
        timeout=timeout.total_seconds(),
        process=world.process,
    )
    choice = choose(info)
    if rank == 0 and world_group:
        done = "stays" if choice.backend == "gloo" else f"is replaced by {choice.backend}"
        print(f"ringway: {VARIABLE}={ONLY}: gloo {done} ({choice.reason})", file=sys.stderr, flush=True)
    return choice.backend


def choose(info: GroupInfo) -> Choice:
    """The backend for CPU tensors of a group, from what its members say about themselves: every member calls this, and
    all get the same."""
    lacks = obstacle("shm")
    mine = {"host": host_identity(), "uid": os.geteuid(), "lacks": None if lacks is None else lacks.reason}
    said = [json.loads(value) for value in exchange(info, "backend", json.dumps(mine).encode())]
    home = (said[0]["host"], said[0]["uid"])
    facts = {
        member: RankFacts(
            (one["host"], one["uid"]) == home,
            {} if one["lacks"] is None else {"shm": Obstacle(one["lacks"])},
            host=one["host"],
            uid=one["uid"],
        )
        for member, one in enumerate(said)
    }
    return for_cpu(LaunchInfo(rank=info.rank, size=info.size, source="torch.distributed"), facts)
