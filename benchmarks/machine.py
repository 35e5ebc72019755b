"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from ringway.version import VERSION


def machine() -> dict[str, str]:
    return {
        "machine": f"{os.cpu_count()} {platform.machine()} cores ({_processor()})",
        "torch": version("torch"),
        "ringway": VERSION,
        "measured": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }


def _processor() -> str:
    """The processor's name. ARM cores have a number instead, for which lscpu knows the name."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"
