"""deepspeed.comm.pg_utils: groups of an optional dimension, for which None means that the dimension is not used."""

from __future__ import annotations

from typing import Any

from ringway.api import groups


def is_parallel(group: Any) -> bool:
    """Whether `group` has more than one rank. None is no group here, not the world."""
    return group is not None and groups.get_world_size(group) > 1
