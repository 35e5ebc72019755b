"""What figures depend on: the machine, the versions, the backends, the day."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ringway.version import VERSION

_DECISIVE = ("architecture", "cpu", "cores", "memory", "torch")
"""Runs that differ in one of these tell nothing about a change of code."""


def machine(backends: Sequence[str] = ()) -> dict[str, Any]:
    """The facts, without anything that identifies the machine."""
    facts = {
        "architecture": platform.machine(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ringway": VERSION,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    return {**facts, "backends": list(backends)} if backends else facts


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What makes the figures of two runs incomparable. Older files have fewer facts."""
    return [
        f"{name} was {old[name]} and is {new[name]}"
        for name in _DECISIVE
        if name in old and name in new and old[name] != new[name]
    ]


def _processor() -> str:
    """The model. Some ARM cores have numbers instead of one."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
