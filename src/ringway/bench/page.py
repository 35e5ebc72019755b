"""Results as one HTML page: curves by op, ratios, the matrix of pairs, the machine. It needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ringway.bench.reading import reading
from ringway.bench.table import Row, in_bytes, in_ratio, in_time, rounded

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 300, 62, 34, 12, 32
_STYLE = """
:root { --back: #fff; --text: #1b1f24; --faint: #d6dae0; --soft: #57606a; --warm: 214, 60, 20;
  --c0: #0b62c4; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #be123c; --c5: #0e7490; --c6: #a16207;
  --c7: #4b5563 }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --text: #e6e9ee; --faint: #343b45; --soft: #9aa4b1;
  --c0: #6cb0ff; --c1: #ff9a5c; --c2: #5fd38a; --c3: #c79bff; --c4: #ff7d97; --c5: #4fd0e6; --c6: #e2c15b;
  --c7: #b6bfca } }
* { box-sizing: border-box }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1140px; padding: 20px }
h1 { font-size: 24px } h2 { font-size: 18px; margin: 28px 0 6px }
.charts { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600 }
svg { height: auto; width: 100% } svg text { fill: var(--soft); font-size: 11px } svg .grid { stroke: var(--faint) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid var(--faint); padding: 3px 10px; text-align: right; white-space: nowrap }
td.name, th.name { text-align: left } .soft { color: var(--soft) }
.key { display: inline-block; margin-right: 14px } .key i { border-radius: 2px; display: inline-block; height: 10px;
  margin-right: 5px; width: 10px }
@media (max-width: 560px) { svg text { font-size: 16px } } /* the picture shrinks, and its text with it */
"""


def page(table: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """A whole page. Everything that comes from the results is escaped."""
    curves = [row for row in table if row.mode != "pair"]
    colors = {name: f"var(--c{place % 8})" for place, name in enumerate(dict.fromkeys(row.candidate for row in curves))}
    ops = dict.fromkeys((row.op, row.dtype) for row in curves if row.nbytes)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>ringway bench</title><style>{_STYLE}</style></head><body><h1>ringway bench</h1>",
        f"<p class='soft'>{escape(', '.join(_fact(name, value) for name, value in facts.items()))}</p>",
        "<h2>Reading</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in reading(table)),
        "</ul><h2>Time by size</h2><p>",
        *(f"<span class='key'><i style='background:{c}'></i>{escape(name)}</span>" for name, c in colors.items()),
        "</p><div class='charts'>",
        *(_chart([row for row in curves if (row.op, row.dtype) == op], colors) for op in ops),
        "</div>",
        *_matrices([row for row in table if row.mode == "pair"]),
        "<h2>All results</h2><div class='wide'><table>",
        *_table_rows(curves),
        "</table></div></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _fact(name: str, value: Any) -> str:
    return f"{name} {' '.join(value) if isinstance(value, (list, tuple)) else value}"


def _chart(rows: Sequence[Row], colors: Mapping[str, str]) -> str:
    sizes = sorted({row.nbytes for row in rows if row.nbytes})
    times = [bound for row in rows for bound in (row.seconds.low, row.seconds.high)]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(nbytes: int) -> float:
        share = (math.log2(nbytes) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(seconds) - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    marks = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        marks.append(f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}'/>")
        marks.append(f"<text x='{_LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>{in_time(10.0**power)}</text>")
    step = math.ceil(len(sizes) / 6)
    for size in sizes[::step]:
        marks.append(f"<text x='{x(size):.1f}' y='{_HEIGHT - 12}' text-anchor='middle'>{in_bytes(size)}</text>")
    for name in dict.fromkeys(row.candidate for row in rows):
        own = sorted((row for row in rows if row.candidate == name and row.nbytes), key=lambda row: row.nbytes)
        points = " ".join(f"{x(row.nbytes):.1f},{y(row.seconds.median):.1f}" for row in own)
        color = colors[name]
        marks.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>")
        for row in own:
            told = f"{name}, {in_bytes(row.nbytes)}: {in_time(row.seconds.median)} ({in_time(row.seconds.low)} to "
            told += f"{in_time(row.seconds.high)}), {rounded(row.bus_bandwidth / 1e9)} GB/s"
            center = f"cx='{x(row.nbytes):.1f}' cy='{y(row.seconds.median):.1f}'"
            marks.append(f"<circle {center} r='4' fill='{color}'><title>{escape(told)}</title></circle>")
    title = f"{rows[0].op}, {rows[0].dtype}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(marks)}</svg></figure>"
    )


def _matrices(pairs: Sequence[Row]) -> Iterator[str]:
    """Messages between all pairs of ranks, as heat maps."""
    for name, nbytes in dict.fromkeys((row.candidate, row.nbytes) for row in pairs):
        own = [row for row in pairs if (row.candidate, row.nbytes) == (name, nbytes)]
        times = {tuple(map(int, row.op.split("-"))): row.seconds.median for row in own}
        size = 1 + max(second for _, second in times)
        low, high = math.log(min(times.values())), math.log(max(times.values()))
        yield f"<h2>Pairs of ranks on {escape(name)}, {in_bytes(nbytes)}, one way</h2>"
        yield "<div class='wide'><table><tr><th></th>"
        yield "".join(f"<th>{rank}</th>" for rank in range(size)) + "</tr>"
        for one in range(size):
            cells = []
            for other in range(size):
                seconds = times.get((min(one, other), max(one, other)))
                if seconds is None:
                    cells.append("<td></td>")
                    continue
                heat = (math.log(seconds) - low) / (high - low) if high - low > 0.1 else 0.0
                cells.append(f"<td style='background:rgba(var(--warm),{0.7 * heat:.2f})'>{in_time(seconds)}</td>")
            yield f"<tr><th>{one}</th>{''.join(cells)}</tr>"
        yield "</table></div>"


def _table_rows(table: Sequence[Row]) -> Iterator[str]:
    yield "<tr><th class='name'>op</th><th>size</th><th>dtype</th><th class='name'>candidate</th><th>time</th>"
    yield "<th>95 % interval</th><th>bus GB/s</th><th>against first</th></tr>"
    for row in table:
        seconds = row.seconds
        yield (
            f"<tr><td class='name'>{escape(row.op)}</td><td>{in_bytes(row.nbytes)}</td><td>{escape(row.dtype)}</td>"
            f"<td class='name'>{escape(row.candidate)}</td><td>{in_time(seconds.median)}</td>"
            f"<td>{in_time(seconds.low)} to {in_time(seconds.high)}</td><td>{rounded(row.bus_bandwidth / 1e9)}</td>"
            f"<td>{'' if row.ratio is None else in_ratio(row.ratio)}</td></tr>"
        )
