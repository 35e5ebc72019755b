"""Conformance of the ccl backend on the real oneCCL, with a report for docs/proofs/ccl.md.

Run by `scripts/ccl_proof.sh`, which makes the library; CCL_ROOT says where it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import oneccl_api
import proofs
import torch

from ringway.backends.ccl import library as ccl_library
from ringway.testing import RankPool
from ringway.testing.conformance import Report, run_setting, settings

RECORDED = proofs.ROOT / "tests" / "backends" / "data" / "oneccl_api.json"
PROVES = (
    "src/ringway/backends/ccl",
    "src/ringway/backends/queue.py",
    "tests/backends/data/oneccl_api.json",
)


def header_differences(folder: Path) -> list[str]:
    """The recorded prototypes and constants that differ from the library's own header."""
    recorded = json.loads(RECORDED.read_text())
    real = {
        "functions": oneccl_api.functions((folder / "ccl.h").read_text()),
        "values": oneccl_api.values((folder / "ccl_types.h").read_text()),
    }
    return [
        f"{name}: recorded {recorded[kind].get(name)}, in the header {real[kind].get(name)}"
        for kind in real
        for name in sorted({*recorded[kind], *real[kind]})
        if recorded[kind].get(name) != real[kind].get(name)
    ]


def training(context: object, steps: int) -> list[float]:
    """DDP on ccl: the losses of a few steps, which must be equal on all ranks."""
    dist = context.start("ccl")  # type: ignore[attr-defined]
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def rate(context: object, count: int, repeats: int) -> float:
    """The median time of one all_reduce of `count` floats, in seconds."""
    dist = context.start("ccl")  # type: ignore[attr-defined]
    tensor = torch.ones(count)
    times = []
    for _ in range(repeats + 3):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return sorted(times[3:])[repeats // 2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=proofs.FOLDER / "ccl.md")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    library = Path(os.environ["CCL_ROOT"], "lib")
    differences = header_differences(library)
    lines = [
        f"oneCCL {ccl_library.version()} (the real library), {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        "",
        "Prototypes and constants recorded for the stand-in: "
        + ("equal to the library's header." if not differences else "DIFFERENT from the library's header:"),
        *(f"- {difference}" for difference in differences),
        "",
        "| where | cases | passed | seconds |",
        "|---|---|---|---|",
    ]
    findings = []
    with RankPool(4) as pool:
        for setting in settings("ccl", (1, 2, 4)):
            report = Report()
            run_setting(pool, setting, ("*",), report)
            broken = {finding.case for _, finding in report.findings}
            findings += report.findings
            spent = sum(report.seconds.values())
            total = len(report.seconds)
            lines.append(f"| {setting} | {total} | {total - len(broken)} | {spent:.1f} |")
            print(lines[-1], flush=True)
        losses = pool.run(training, 5, world_size=4)
        speeds = [(count * 4, max(pool.run(rate, count, 20, world_size=4))) for count in (2, 1 << 16, 1 << 24)]
    alike = all(row == losses[0] for row in losses) and losses[0][-1] < losses[0][0]
    lines += ["", f"DDP on 4 ranks: losses {', '.join(f'{loss:.4f}' for loss in losses[0])}; same on all: {alike}.", ""]
    lines += [f"- all_reduce of {size} bytes on 4 ranks: {1e6 * spent:.0f} µs" for size, spent in speeds]
    if findings:
        lines += ["", "What failed:", "", "```"]
        lines += [f"[{setting}] {finding}"[:2000] for setting, finding in findings[:40]] + ["```"]
    proofs.write(arguments.output, "ccl on the real oneCCL", PROVES, "\n".join(lines), arguments.commit)
    return 1 if findings or differences or not alike else 0


if __name__ == "__main__":
    sys.exit(main())
