"""Draws the charts of the README from measurements (make figures).

    python scripts/figures.py       docs/figures/*.json -> docs/figures/*.svg

    python benchmarks/collectives.py --ops all_reduce --json docs/figures/collectives.json
    sudo python benchmarks/slow_link.py --json docs/figures/slow_link.json

measure. The charts follow the reader's light or dark colors, and need no font but the reader's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import proofs

FOLDER = proofs.ROOT / "docs" / "figures"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 150, 56, 62
NAMES = {
    "ringway": "ringway shm",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "deepspeed": "DeepSpeed's shm op",
    "ccl": "oneCCL",
    "gloo": "gloo",
}
"""The peers of collectives.py, in the order of their colors."""
STYLE = """
svg { background: var(--back); font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif;
  --back: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d6dae0; --c0: #0b62c4; --c1: #c2410c; --c2: #15803d;
  --c3: #9333ea; --c4: #be123c; --c5: #6b7280 }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --ink: #e6e9ee; --soft: #9aa4b1; --line: #30363d;
  --c0: #6cb0ff; --c1: #ff9a5c; --c2: #5fd38a; --c3: #c79bff; --c4: #ff7d97; --c5: #9ca3af } }
text { fill: var(--soft) } .title { fill: var(--ink); font-size: 16px; font-weight: 600 } .grid { stroke: var(--line) }
"""


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    given = "".join(f" {name.rstrip('_').replace('_', '-')}='{value}'" for name, value in attributes.items())
    return f"<text x='{x:.1f}' y='{y:.1f}'{given}>{escape(words)}</text>"


def picture(title: str, note: str, parts: list[str]) -> str:
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"role='img' aria-label='{escape(title, quote=True)}'>",
        f"<style>{STYLE}</style>",
        text(16, 26, title, class_="title"),
        text(16, HEIGHT - 12, note),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def in_time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def in_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"


def belongs_to(facts: dict[str, str]) -> str:
    return f"{facts['machine']}, torch {facts['torch']}, ringway {facts['ringway']}, {facts['measured']}"


def curves(measured: dict[str, Any]) -> str:
    """all_reduce between the ranks of one host: time by size, both logarithmic."""
    rows = sorted((row for row in measured["rows"] if row["op"] == "all_reduce"), key=lambda row: row["bytes"])
    sizes = [row["bytes"] for row in rows]
    peers = [peer for peer in NAMES if any(peer in row["seconds"] for row in rows)]
    times = [row["seconds"][peer] for row in rows for peer in peers if peer in row["seconds"]]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(size: int) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (right - LEFT) * math.log2(size / sizes[0]) / span

    def y(seconds: float) -> float:
        return bottom - (bottom - TOP) * (math.log10(seconds) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{right}' y1='{at:.1f}' y2='{at:.1f}'/>")
        parts.append(text(LEFT - 8, at + 4, in_time(10.0**power), text_anchor="end"))
    last = -math.inf
    for size in sizes:
        if x(size) - last > 55:
            last = x(size)
            parts.append(text(last, bottom + 20, in_bytes(size), text_anchor="middle"))
    ends = []
    for peer in peers:
        color = f"var(--c{list(NAMES).index(peer)})"
        points = [(x(row["bytes"]), y(row["seconds"][peer])) for row in rows if peer in row["seconds"]]
        width = 3 if peer == "ringway" else 1.8
        line = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
        parts.append(f"<polyline fill='none' style='stroke:{color}' stroke-width='{width}' points='{line}'/>")
        parts += [f"<circle cx='{across:.1f}' cy='{up:.1f}' r='2.6' style='fill:{color}'/>" for across, up in points]
        ends.append((points[-1][1], NAMES[peer], color))
    lowest = -math.inf  # the names stand next to the ends of their lines, and apart
    for up, name, color in sorted(ends):
        lowest = max(up + 4, lowest + 17)
        parts.append(text(right + 10, lowest, name, style=f"fill:{color}"))
    ranks = rows[0]["ranks"]
    return picture(f"all_reduce between {ranks} ranks of one host, fp32", belongs_to(measured["facts"]), parts)


def bars(measured: dict[str, Any]) -> str:
    """A compressed all_reduce over a slow link: time by codec."""
    results = {name: found for name, found in measured["results"].items() if isinstance(found, dict)}
    longest = max(found["seconds"] for found in results.values())
    left, right = 150, WIDTH - 190
    step = (HEIGHT - TOP - BOTTOM) / len(results)
    parts = []
    for place, (name, found) in enumerate(sorted(results.items(), key=lambda entry: -entry[1]["seconds"])):
        seconds, sent = found["seconds"], found["sent"]
        top, long = TOP + place * step, (right - left) * seconds / longest
        words = f"{in_time(seconds)}, {sent / 1e6:.3g} MB sent"
        label = "gloo, plain" if name == "plain" else name
        color = "var(--c5)" if name == "plain" else "var(--c0)"
        parts += [
            text(left - 10, top + step / 2 + 4, label, text_anchor="end"),
            f"<rect x='{left}' y='{top + step * 0.15:.1f}' width='{max(long, 2):.1f}' height='{step * 0.7:.1f}' rx='2' "
            f"style='fill:{color}'/>",
            text(left + long + 8, top + step / 2 + 4, words),
        ]
    rate = re.sub(r"^(\d+)gbit$", r"\1 Gbit/s", measured["rate"])
    title = f"all_reduce of {measured['megabytes']:.0f} MB of fp32 over {rate}, 2 ranks"
    return picture(title, belongs_to(measured["facts"]), parts)


FIGURES = {"collectives": curves, "slow_link": bars}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the measurements are and the charts go")
    folder = parser.parse_args().folder
    for name, draw in FIGURES.items():
        chart = folder / f"{name}.svg"
        chart.write_text(draw(json.loads((folder / f"{name}.json").read_text())))
        print(f"wrote {chart}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
