"""Every function of torch that ringway replaces, and the switch that turns it off.

A patch is installed by the module that needs it, through `patch` here. `RINGWAY_NO_PATCH` names the ones to leave out,
separated by commas, or is `all`. It is read when ringway is imported, so it is a variable and not a setting.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ringway.errors import nearest

PATCHES: Mapping[str, str] = MappingProxyType(
    {
        "batch_isend_irecv": "torch.distributed.batch_isend_irecv starts messages together on ringway's groups "
        "(torch before 2.15)",
        "builtin_comm_hook": "DDP's built-in hook FP16_COMPRESS works on ringway's groups",
        "monitored_barrier": "torch.distributed.monitored_barrier takes ringway's groups, on every backend",
        "new_group": "the members of a group that ringway.new_group makes with use_local_synchronization agree on its "
        "name",
        "replace": "groups that torch makes on gloo are on shm, if RINGWAY_REPLACE=gloo:shm asks for it",
        "clip_grad_norm": "torch's clip_grad_norm_ warns about split parameters",
        "grad_scaler": "torch's GradScaler warns about split parameters",
        "ddp_split": "DistributedDataParallel refuses a group over which the model is split",
    }
)
"""What each patch changes, by the name of its switch."""

VARIABLE = "RINGWAY_NO_PATCH"


@functools.cache
def _left_out() -> frozenset[str]:
    named = frozenset(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())
    if "all" in named:
        return frozenset(PATCHES)
    for name in sorted(named - set(PATCHES)):
        warnings.warn(f"{VARIABLE}: ringway has no patch '{name}'{nearest(name, PATCHES)}", stacklevel=2)
    return named


def enabled(name: str) -> bool:
    """Whether the user wants this patch."""
    assert name in PATCHES, name
    return name not in _left_out()


def patch(name: str, attribute: str, *owners: Any, by: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces `attribute` of all owners by what `by` makes of the first one's. Does nothing if the user switched the
    patch off, or if this version of torch has no such attribute."""
    original = getattr(owners[0], attribute, None)
    if original is None or not enabled(name):
        return
    replacement = functools.wraps(original)(by(original))
    for owner in owners:
        setattr(owner, attribute, replacement)
