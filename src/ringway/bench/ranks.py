"""One rank of `ringway bench`: runs the schedule in a folder, and appends what happens to a file there."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ringway
from ringway.bench.schedule import EVENTS, SCHEDULE, Schedule
from ringway.bench.session import run_schedule


def main() -> None:
    folder = Path(sys.argv[1])
    schedule = Schedule.from_json((folder / SCHEDULE).read_text())
    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    with (folder / EVENTS).open("a") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        run_schedule(schedule, tell, time.monotonic() - _age())
    ringway.barrier()
    ringway.destroy_process_group()


def _age() -> float:
    """Seconds since this process began: importing torch takes a good part of a short run."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
