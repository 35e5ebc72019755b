"""One rank of `ringway bench`: runs the plan in a folder, and appends what happens to a file there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ringway
from ringway.bench.plan import Plan
from ringway.bench.session import run_plan

PLAN, EVENTS = "plan.json", "events.jsonl"


def main(folder: Path) -> None:
    plan = Plan.from_json((folder / PLAN).read_text())
    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    with (folder / EVENTS).open("a") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        run_plan(plan, tell)
    ringway.barrier()
    ringway.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
