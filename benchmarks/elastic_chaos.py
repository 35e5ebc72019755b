"""What faults cost an elastic job: `benchmarks/elastic.py --chaos` (its options are described there).

Ranks train a small network on the CPU. Every `--every` seconds one of them is killed, or another one joins, in turns.
What counts is the number of completed steps, each weighted by the ranks that made it, for each second of a rank that is
present: a rank that was killed is not there to work, but what the others lose by its death counts. A machine may be
faster in one minute than in the next, so this rate is compared with that of the same job between its events, without
the SETTLING seconds after each. A job that got slower with every event would not show there, so it is also compared
with the slower of two undisturbed jobs, one before and one after. Processes are forked from one that has imported
torch, at the moment they join: a fork is counted, an import is not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import mmap
import os
import platform
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ringway.job.elastic.job import ElasticJob
from ringway.launch.run import store_of_a_run
from ringway.testing.forkserver import die_with_parent

LEAST_KEPT = 0.985
LONGEST_GAP = 10.0
"""Seconds without a completed step that count as a hang."""
SETTLING = 3.0
"""Seconds after an event that do not count as undisturbed."""
WARM_STEPS = 5
PROVES = ("benchmarks/elastic.py", "benchmarks/elastic_chaos.py", "src/ringway/job/elastic")
_LAST_STEP = struct.Struct("q")
_AHEAD = 30


@dataclass
class Run:
    """One job: when each of its steps was completed and by how many ranks, and the events."""

    ranks: int = 0
    """Present at the beginning."""
    steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By number: the time, and the ranks."""
    events: list[tuple[float, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """The digests of the state that the processes had at the end."""
    began: float = 0.0
    seconds: float = 0.0

    def inside(self) -> list[tuple[float, int]]:
        """The steps that were completed in the time that counts."""
        end = self.began + self.seconds
        return sorted(each for each in self.steps.values() if self.began < each[0] <= end)

    def rank_seconds(self, begin: float, end: float) -> float:
        """The time between two moments, weighted by the ranks present."""
        changes = [(moment, -1 if kind == "kill" else 1) for moment, kind in self.events]
        lost_or_won = sum(change * max(end - max(moment, begin), 0.0) for moment, change in changes)
        return self.ranks * (end - begin) + lost_or_won

    def rate(self) -> float:
        """Steps for each second of a rank."""
        made = sum(ranks for _, ranks in self.inside())
        return made / self.rank_seconds(self.began, self.began + self.seconds)

    def rate_between_events(self) -> float:
        """The same, without SETTLING seconds after each event."""
        begins = [self.began, *(moment + SETTLING for moment, _ in self.events)]
        ends = [*(moment for moment, _ in self.events), self.began + self.seconds]
        calm = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        made = sum(ranks for moment, ranks in self.inside() if any(begin < moment <= end for begin, end in calm))
        return made / sum(self.rank_seconds(begin, end) for begin, end in calm)

    def gaps(self) -> list[float]:
        """After each event, how long it took until the step after the next was completed, beyond a usual step."""
        times = [moment for moment, _ in self.inside()]
        between = sorted(after - before for before, after in itertools.pairwise(times))
        usual = between[len(between) // 2]
        lost = []
        for moment, _ in self.events:
            after = [each for each in times if each > moment][:3]
            before = [each for each in times if each <= moment][-1:]
            if len(after) == 3 and before:
                lost.append(after[-1] - before[0] - 3 * usual)
        return lost

    def longest_gap(self) -> float:
        times = [self.began, *(moment for moment, _ in self.inside()), self.began + self.seconds]
        return max(after - before for before, after in itertools.pairwise(times))


def _train(last_step: mmap.mmap, output: int, width: int, batch: int) -> None:
    """One process of the job, until the last step that the parent names."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ElasticJob() as job:
        job.data_parallel(model)
        for attempt in job.steps({"model": model, "optimizer": optimizer}):
            if 0 <= _LAST_STEP.unpack_from(last_step)[0] <= attempt.step:
                break
            with attempt:
                seed = torch.Generator().manual_seed(attempt.step * 1000 + job.rank)
                model(torch.randn(batch, width, generator=seed)).square().mean().backward()
                attempt.commit()
                optimizer.step()
            if attempt.committed and job.rank < 2:  # two, because one may be killed before it says so
                _say(output, "step", [attempt.step, time.monotonic(), job.size])
    digest = hashlib.sha256()
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    _say(output, "end", digest.hexdigest()[:16])


def _say(output: int, kind: str, content: object) -> None:
    os.write(output, (json.dumps([kind, content]) + "\n").encode())  # shorter than PIPE_BUF, so it is not torn


class _Job:
    """The parent's side of one run."""

    def __init__(self, options: argparse.Namespace, variables: dict[str, str]) -> None:
        self._options = options
        ranks = str(options.ranks)
        self._variables = {
            **variables,
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        self._last_step = mmap.mmap(-1, _LAST_STEP.size)
        _LAST_STEP.pack_into(self._last_step, 0, -1)
        self._reader, self._writer = os.pipe()
        self._unread = b""
        self.run = Run(options.ranks)
        self.living: list[int] = []

    def start(self, rank: int) -> None:
        parent, child = os.getpid(), os.fork()
        if child:
            self.living.append(child)
            return
        code = 1
        try:
            die_with_parent(parent)
            os.close(self._reader)
            os.environ.update(self._variables, RANK=str(rank))
            _train(self._last_step, self._writer, self._options.width, self._options.batch)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def kill_one(self, draw: random.Random) -> None:
        victim = self.living.pop(draw.randrange(len(self.living)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)

    def listen(self, seconds: float) -> None:
        """Read what the processes say for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._reader], [], [], left)[0]:
                return
            *lines, self._unread = (self._unread + os.read(self._reader, 1 << 16)).split(b"\n")
            for kind, content in map(json.loads, lines):
                if kind == "end":
                    self.run.ends.append(content)
                else:
                    step, moment, ranks = content
                    self.run.steps.setdefault(step, (moment, ranks))

    def require(self, condition: object, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            if time.monotonic() > until:
                sys.exit(f"after {seconds:g} s: {what}")
            self.listen(0.05)

    def end(self) -> None:
        """All processes stop at the same step, and say what they have."""
        _LAST_STEP.pack_into(self._last_step, 0, max(self.run.steps) + _AHEAD)
        self.require(lambda: len(self.run.ends) >= len(self.living), 120, "not every process came to the end")
        for child in self.living:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                sys.exit(f"a process ended with {status}")
        self.living.clear()

    def close(self) -> None:
        for child in self.living:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def _store_process() -> Iterator[dict[str, str]]:
    """The job's store in a process of its own. This one has no threads, so that it can fork at any time."""
    reader, writer = os.pipe()
    held, release = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(release)
        with store_of_a_run() as variables:
            os.write(writer, json.dumps(variables).encode() + b"\n")
            os.read(held, 1)
        os._exit(0)
    os.close(held)
    with open(reader, "rb") as told:
        variables = json.loads(told.readline())
    os.close(writer)
    try:
        yield variables
    finally:
        os.close(release)
        os.waitpid(child, 0)


def run(options: argparse.Namespace, seconds: float, every: float | None, draw: random.Random) -> Run:
    """One job of `seconds`. With `every`, a rank is killed or joins that often, in turns."""
    with _store_process() as variables:
        job = _Job(options, variables)
        try:
            for rank in range(options.ranks):
                job.start(rank)
            job.require(lambda: len(job.run.steps) >= WARM_STEPS, 120, "the first steps were not made")
            job.run.began, job.run.seconds = time.monotonic(), seconds
            kills = True
            next_event = job.run.began + (every or seconds)
            while next_event < job.run.began + seconds:
                job.listen(next_event - time.monotonic())
                if kills:
                    job.kill_one(draw)
                else:
                    job.start(options.ranks - 1)
                job.run.events.append((time.monotonic(), "kill" if kills else "join"))
                kills = not kills
                next_event += every or seconds
            job.listen(job.run.began + seconds - time.monotonic())
            job.end()
            return job.run
        finally:
            job.close()


def measure(options: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 30)
    calm = [run(options, options.calm, None, random.Random(seed))]
    _report("undisturbed", calm[0])
    stormy = run(options, options.minutes * 60, options.every, random.Random(seed))
    _report("with events", stormy)
    calm.append(run(options, options.calm, None, random.Random(seed)))
    _report("undisturbed", calm[1])
    before, after = calm[0].rate(), calm[1].rate()
    kept, kept_of_slower = stormy.rate() / stormy.rate_between_events(), stormy.rate() / min(before, after)
    hangs = sum(each.longest_gap() > LONGEST_GAP for each in (*calm, stormy))
    equal = len(set(stormy.ends)) == 1
    kinds = [kind for _, kind in stormy.events]
    lost = sorted(stormy.gaps())
    sizes = [ranks for _, ranks in stormy.inside()]
    text = [
        f"{options.ranks} ranks, {kinds.count('kill')} killed and {kinds.count('join')} joined in {options.minutes:g} "
        f"minutes, one event every {options.every:g} s (seed {seed}).",
        "",
        "| run | seconds | steps | steps for each second of a rank | longest time between two steps |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {each.seconds:.0f} | {len(each.inside())} | {each.rate():.3f} | {each.longest_gap():.2f} s |"
            for name, each in (
                ("undisturbed, before", calm[0]),
                ("with events", stormy),
                ("undisturbed, after", calm[1]),
            )
        ),
        "",
        f"Kept: {kept:.2%} of the rate between the events ({SETTLING:g} s after each until the next), and "
        f"{kept_of_slower:.2%} of the slower undisturbed run (limit of both {LEAST_KEPT:.1%}; the two undisturbed runs "
        f"differ by {abs(before - after) / before:.1%}). Ranks present: {min(sizes)} to {max(sizes)}. Hangs: {hangs} "
        f"(more than {LONGEST_GAP:g} s without a step). An event cost {lost[len(lost) // 2] * 1e3:.0f} ms (median), "
        f"at most {lost[-1] * 1e3:.0f} ms. Parameters and optimizer state of the {len(stormy.ends)} ranks at the end: "
        f"{'bit-identical' if equal else 'DIFFERENT'}."
        if lost
        else f"Kept: {kept:.2%}. No event was followed by three steps.",
    ]
    print("\n".join(text), flush=True)
    if options.output is not None:
        _write_page(options.output, text, options.commit)
    return 1 if options.check and (min(kept, kept_of_slower) < LEAST_KEPT or hangs or not equal) else 0


def _report(name: str, each: Run) -> None:
    print(f"{name}: {len(each.inside())} steps in {each.seconds:.0f} s, {each.rate():.3f} for each second of a rank,")
    print(f"    longest time between two steps {each.longest_gap():.2f} s", flush=True)


def _write_page(path: Path, text: list[str], commit: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import proofs

    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}, "
    intro = [f"`python benchmarks/elastic.py {proofs.arguments()}` on {machine}torch {torch.__version__}.", ""]
    proofs.write(path, "An elastic job while ranks are killed and join", PROVES, "\n".join([*intro, *text]), commit)
