"""The place of a Ray actor, from what Ray's runtime context says. tests/frameworks/with_ray.py runs real actors."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringway.errors import DiscoveryError
from ringway.launch.ask_ray import ask_ray
from ringway.launch.discover import discover

GROUP = "6f2b"


def _ray(resources: list[str], nodes: dict[int, str], group: str | None = GROUP) -> Any:
    """What ask_ray reads of the module `ray`."""
    context = SimpleNamespace(
        get_placement_group_id=lambda: group,
        get_job_id=lambda: "01000000",
        worker=SimpleNamespace(
            core_worker=SimpleNamespace(resource_ids=lambda: {name: [(0, 1.0)] for name in resources})
        ),
    )
    return SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        nodes=lambda: [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{ord(name)}"} for name in "ab"],
        util=SimpleNamespace(
            get_current_placement_group=lambda: GROUP,
            placement_group_table=lambda of: {"bundles_to_node_id": nodes},
        ),
    )


def test_the_bundle_is_the_rank_and_bundle_0_is_on_the_hosting_node(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = [f"CPU_group_{GROUP}", f"CPU_group_2_{GROUP}", f"bundle_group_2_{GROUP}", f"bundle_group_{GROUP}"]
    monkeypatch.setitem(sys.modules, "ray", _ray(resources, {2: "a", 0: "b", 1: "a"}))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = discover()
    assert (found.rank, found.size, found.source) == (2, 3, "Ray")
    assert (found.local_rank, found.local_size, found.node_rank) == (1, 2, 1)
    assert found.address == f"10.0.0.{ord('b')}"
    assert GROUP in found.job
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert discover().source == "environment"  # a launcher's variables win


def test_no_placement_group_and_no_bundle() -> None:
    assert ask_ray({}) is None
    assert ask_ray({"ray": SimpleNamespace(is_initialized=lambda: False)}) is None
    assert ask_ray({"ray": _ray([], {}, group=None)}) is None
    with pytest.raises(DiscoveryError, match="placement_group_bundle_index=RANK"):
        ask_ray({"ray": _ray([f"CPU_group_{GROUP}"], {0: "a", 1: "a"})})
