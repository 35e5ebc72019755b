"""vLLM on CPUs: with RINGWAY_VLLM=1, its parallel ranks communicate through ringway.

vLLM calls the plugin `ringway_autoload:vllm_plugin` in each of its processes, and that calls `install`.
"""

from __future__ import annotations

import sys
from typing import Any

COMMUNICATOR = f"{__name__}.communicator.RingwayCommunicator"


def install() -> None:
    """Make vLLM's CPU platform use ringway's communicator. Calling it again changes nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        print(
            f"ringway: RINGWAY_VLLM=1 has no effect: it is for CPUs, and vLLM runs on {current_platform.device_name}",
            file=sys.stderr,
            flush=True,
        )
        return

    def get_device_communicator_cls(cls: Any) -> str:
        return COMMUNICATOR

    type(current_platform).get_device_communicator_cls = classmethod(get_device_communicator_cls)


__all__ = ["install"]
