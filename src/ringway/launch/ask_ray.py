"""Asks Ray for this process's place, if it is a Ray actor or task in a placement group.

Ray gives its workers no rank. But it knows the bundle of the placement group in which each of them runs, so with one
bundle for each rank, the number of the bundle is the rank.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from ringway.errors import DiscoveryError
from ringway.launch.info import LOOPBACK, LaunchInfo

BY_RAY = "Ray"
"""The source of a place that Ray told."""
REMEDY = (
    "give each actor a bundle of one placement group, with placement_group_bundle_index=RANK, "
    "or pass rank=, world_size= and init_method="
)
_BUNDLE = re.compile(r"_group_(\d+)_([0-9a-f]+)$")


def ask_ray(modules: Mapping[str, Any] = sys.modules) -> LaunchInfo | None:
    """The place that Ray knows. None if this process is not in a placement group, or if the program has not imported
    Ray, whose workers always do."""
    ray = modules.get("ray")
    if ray is None or not getattr(ray, "is_initialized", bool)():
        return None
    context = ray.get_runtime_context()
    group = context.get_placement_group_id()
    if group is None:
        return None
    bundles = {int(m[1]) for name in context.worker.core_worker.resource_ids() if (m := _BUNDLE.search(name))}
    if len(bundles) != 1:
        raise DiscoveryError(
            f"Ray: this process is in a placement group, but not in one bundle of it: {REMEDY}",
            source=BY_RAY,
            seen={"placement_group_id": group},
        )
    (rank,) = bundles
    nodes: dict[int, str] = ray.util.placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]
    size, here = len(nodes), nodes[rank]
    hosts = list(dict.fromkeys(nodes[bundle] for bundle in range(size)))
    beside = [bundle for bundle in range(size) if nodes[bundle] == here]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return LaunchInfo(
        rank=rank,
        size=size,
        source=BY_RAY,
        local_rank=beside.index(rank),
        local_size=len(beside),
        node_rank=hosts.index(here),
        address=LOOPBACK if len(hosts) == 1 else addresses[nodes[0]],
        job=f"ray {context.get_job_id()} {group}",
    )
