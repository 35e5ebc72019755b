"""`ringway bench`: how fast each backend is here, by op and size. Results are checked before they are timed."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringway.errors import UsageError
from ringway.launch.cpus import usable_cpus

if TYPE_CHECKING:
    from ringway.bench.results import Findings, Formats
    from ringway.bench.schedule import Schedule
    from ringway.launch import run as launcher

_BRIEF_SECONDS = 80.0
_MOST_DEATHS = 3
_POLL = 0.2
_RANK = """import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback, also while it imports torch
from ringway.bench.ranks import main
main()
"""


def bench(
    ranks: Annotated[
        int | None,
        typer.Option(
            *("-n", "--ranks"),
            min=1,
            help="Start this many ranks here. Omit under a launcher.",
            show_default="one for each CPU, from 2 to 8",
        ),
    ] = None,
    backends: Annotated[
        str, typer.Option(help="Backends to compare, separated by commas; by default, all that work here.")
    ] = "",
    ops: Annotated[str, typer.Option(help="Ops, separated by commas; 'pairs' is every pair of ranks.")] = "",
    sizes: Annotated[
        str, typer.Option(help="Sizes: 8,64K,4M or a range, 8:256M:x4.", show_default="the telling ones")
    ] = "",
    dtypes: Annotated[str, typer.Option(help="Types, separated by commas.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda: where the tensors are.")] = "cpu",
    codecs: Annotated[
        str, typer.Option("--codec", "--codecs", help="Compressed all_reduce too, with these codecs: int8,onebit.")
    ] = "",
    modes: Annotated[
        str, typer.Option(help="sync, async, overlap (all_reduce under a computation), separated by commas.")
    ] = "sync",
    rounds: Annotated[int, typer.Option(min=3, help="Samples per candidate; slow ones get fewer.")] = 21,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Begin nothing later than this.", show_default="90 without --ops or --sizes"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the table or the JSON to a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write CSV to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with curves to this file.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A file of --json: say what changed since, beyond the noise.")
    ] = None,
) -> None:
    """Measure collectives on this job's backends, in alternation, with medians and their intervals.

    Without arguments, it measures what fits two minutes, and says in plain words what it found. It starts ranks on
    this host, or runs as a whole job: mpiexec -n 8 ringway bench, or under Slurm or torchrun. Ctrl-C keeps what was
    measured.

    On a new machine: ringway bench --html page.html. After a change: ringway bench --json -o new.json --compare
    old.json. For large messages: ringway bench --ops all_reduce --sizes 1M:1G:x4.
    """
    from ringway.backends import registry
    from ringway.bench import schedule as schedules
    from ringway.bench.results import Findings, Formats, show
    from ringway.compress import get_codec

    brief = not ops and not sizes
    if brief and (dtypes, modes, codecs) == ("float32", "sync", ""):
        items = schedules.brief_items([*_brief_ops()])
    else:
        items = schedules.make_items(
            _split(ops) or [*_brief_ops()],
            schedules.parse_sizes(sizes) if sizes else schedules.BRIEF_SIZES if brief else schedules.BRIEF_SIZES[:3],
            _split(dtypes),
            _split(modes),  # type: ignore[arg-type]  # make_items checks them
            _split(codecs),
        )
    schedule = schedules.Schedule(
        items,
        tuple(_split(backends)),
        _checked_device(device),
        rounds,
        seconds if seconds is not None else _BRIEF_SECONDS if brief else None,
    )
    formats = Formats(output, as_json, csv, html, compare)
    for name in schedule.backends:
        registry.parse(name)  # raises if there is none of that name
    for name in _split(codecs):
        get_codec(name)  # likewise
    findings = Findings()
    if codecs and not any(item.codecs for item in items):
        least = schedules.in_units(schedules.LEAST_COMPRESSED)
        findings.notes.append(
            f"not measured: {codecs}: codecs compress a synchronous all_reduce of floats, of {least} or more"
        )
    if ranks is None and not _is_launched():
        ranks = min(max(usable_cpus(), 2), 8)
        print(f"ringway bench: {ranks} ranks on this host (-n chooses)", file=sys.stderr, flush=True)
    if ranks is None:
        _bench_here(schedule, formats, findings)
        return
    findings.notes += formats.check()
    code = _bench_apart(schedule, ranks, findings)
    written = show(findings, formats)
    raise typer.Exit(code or (0 if written and findings.rows else 1))


def _brief_ops() -> Iterator[str]:
    """Every op, the most used first, and the pairs."""
    from ringway.bench.cases import CASES
    from ringway.bench.schedule import PAIRS

    first = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "send")
    yield from first
    yield from (op for op in CASES if op not in first)
    yield PAIRS


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _checked_device(device: str) -> str:
    import torch

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here")
    return device


def _is_launched() -> bool:
    """Whether a launcher started this process."""
    from ringway.launch.discover import explore
    from ringway.launch.sources import NO_LAUNCHER

    found = explore()
    return found.info.source != NO_LAUNCHER or found.mpi_launcher is not None


def _bench_apart(schedule: Schedule, ranks: int, findings: Findings) -> int:
    """Measures in ranks of its own. If one dies, that is reported, and new ranks go on after the item it died in."""
    began = time.monotonic()
    whole = schedule.seconds
    for deaths in range(_MOST_DEATHS + 1):
        outcome, begun = _run_ranks(schedule, ranks, findings)
        if outcome.code == 0:
            return 1 if deaths else 0
        print(f"ringway bench: {outcome.summary}", file=sys.stderr, flush=True)
        if outcome.interrupted:
            findings.notes.append("interrupted: this is what was measured until then")
            return outcome.code
        if begun is None:
            return outcome.code
        findings.notes.append(f"{schedule.items[begun]} failed: {outcome.summary}")
        left = None if whole is None else max(0.0, whole - (time.monotonic() - began))
        schedule = replace(schedule, items=schedule.items[begun + 1 :], seconds=left)
        if not schedule.items:
            return 1
        if deaths < _MOST_DEATHS:
            print("ringway bench: new ranks go on with the rest", file=sys.stderr, flush=True)
    findings.notes.append(f"ranks died {_MOST_DEATHS + 1} times: the rest was not measured")
    return 1


def _run_ranks(schedule: Schedule, ranks: int, findings: Findings) -> tuple[launcher.Outcome, int | None]:
    """How the ranks ended, and the number of the last item that they began."""
    from ringway.bench.schedule import EVENTS, SCHEDULE
    from ringway.launch import run as launcher

    findings.begun = None
    with tempfile.TemporaryDirectory(prefix="ringway-bench-") as folder:
        Path(folder, SCHEDULE).write_text(schedule.to_json())
        with _following(Path(folder, EVENTS), schedule, findings):
            outcome = launcher.run([sys.executable, "-c", _RANK, folder], ranks)
    return outcome, findings.begun


@contextmanager
def _following(events: Path, schedule: Schedule, findings: Findings) -> Iterator[None]:
    """Takes in what the ranks tell, and shows how far they are."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    ended = threading.Event()
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting ranks", total=len(schedule.items))

        def follow() -> None:
            place = 0
            while True:
                last = ended.wait(_POLL)
                place = _take_new(events, place, findings)
                if findings.begun is not None:
                    progress.update(task, completed=findings.begun, description=str(schedule.items[findings.begun]))
                if last:
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _take_new(events: Path, place: int, findings: Findings) -> int:
    """Reads whole lines from `place` on, and returns where the next one begins."""
    if not events.exists():
        return place
    with events.open("rb") as file:
        file.seek(place)
        for line in file:
            if not line.endswith(b"\n"):
                break
            place += len(line)
            findings.take(json.loads(line))
    return place


def _bench_here(schedule: Schedule, formats: Formats, findings: Findings) -> None:
    """Measures as one rank of a job that a launcher started."""
    import ringway
    from ringway.bench.results import show
    from ringway.bench.session import run_schedule

    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    first = ringway.get_rank() == 0
    if first:
        findings.notes += formats.check()  # the other hosts may not have these folders

    def tell(event: dict[str, Any]) -> None:
        findings.take(event)
        if "begun" in event:
            print(f"ringway bench: {event['begun']}", file=sys.stderr, flush=True)

    try:
        run_schedule(schedule, tell)
    except BaseException as error:
        if findings.rows:
            findings.notes.append(f"ended early: {error or type(error).__name__}")
            show(findings, formats)
        raise
    shown = not first or (show(findings, formats) and bool(findings.rows))
    ringway.barrier()
    ringway.destroy_process_group()
    if not shown:
        raise typer.Exit(1)
