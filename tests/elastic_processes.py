"""Processes of elastic jobs that are killed, leave and join at given moments."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from elastic_model import SECONDS, Sum, contents_of, optimizer_of, values_of
from ringway.errors import PeerLost, RendezvousError
from ringway.groups.world import world
from ringway.job.elastic import state as elastic_state
from ringway.job.elastic.job import Attempt, Change, ElasticJob
from ringway.keys import Key
from ringway.launch.run import store_of_a_run
from ringway.launch.run_store import RunStore
from ringway.testing.forkserver import die_with_parent

MOMENTS = ("start", "backward", "before commit", "commit", "after commit", "after step", "change", "copy", "leave")
SPLIT = "split"
"""The process is cut off from the others and from the store, stops, and joins again once it reaches them."""


@dataclass(frozen=True)
class Fate:
    """What one process does: it joins at a step, and ends at a moment of a later step, or never."""

    joins: int = 0
    ends: int | None = None
    moment: str = ""


class Process:
    """One process of an elastic job. It trains until its fate, and writes its steps and its end to `output`."""

    def __init__(self, fate: Fate, steps: int, progress: mmap.mmap, output: int, grace: float) -> None:
        self._fate = fate
        self._grace = grace
        self._steps = steps
        self._progress = progress
        self._output = output
        self._step = -1
        self._left = False
        self._is_cut_off = False

    def model(self) -> nn.Module:
        return Sum()

    def loss(self, model: nn.Module, step: int, job: ElasticJob) -> Tensor:
        loss: Tensor = model(values_of(step, job.rank))
        return loss

    def contents(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """What must be the same in every process that is left."""
        assert isinstance(model, Sum)
        return contents_of(model, optimizer)

    def _end(self, moment: str) -> None:
        fate = self._fate
        if fate.moment == moment and fate.ends is not None and self._step >= fate.ends:
            os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, kind: str, content: object) -> None:
        os.write(self._output, (json.dumps([kind, content]) + "\n").encode())

    def run(self) -> None:
        try:
            self._train()
        except RendezvousError as error:
            if not self._is_cut_off or "the job's store is out of reach" not in str(error):
                raise
            self._is_cut_off, self._fate = False, Fate()
            self._train()

    def _cut_off(self) -> None:
        """The network is cut: no request reaches the store, and the connections to the other ranks break."""
        self._is_cut_off = True
        ask = RunStore._ask

        def cut(store: RunStore, *arguments: Any, **options: Any) -> list[bytes]:
            if self._is_cut_off:
                raise c10d.DistNetworkError("the network is cut")
            return ask(store, *arguments, **options)

        RunStore._ask = cut  # type: ignore[method-assign]
        fault = PeerLost("the network is cut", rank=None)
        world.communicator(None).health.end(fault)
        raise fault

    def _train(self) -> None:
        self._wait_for_its_step()
        model = self.model()
        next(model.parameters()).register_hook(lambda _: self._end("backward"))
        optimizer = optimizer_of(model)
        copied = elastic_state._send_piece
        elastic_state._send_piece = lambda *arguments: (copied(*arguments), self._end("copy"))[0]  # type: ignore[assignment]
        with ElasticJob(grace=self._grace) as job:
            job.data_parallel(model)
            job.on_change(self._changed)
            state = {"model": model, "optimizer": optimizer}
            for attempt in job.steps(state, until=self._steps):
                if self._fate.moment == "leave" and attempt.step == self._fate.ends:
                    self._left = True
                    break
                self._attempt(job, attempt, model, optimizer)
        if state["step"] == self._steps and not self._left:  # else it came too late
            self._say("end", self.contents(model, optimizer))

    def _wait_for_its_step(self) -> None:
        while struct.unpack_from("q", self._progress)[0] < self._fate.joins:
            time.sleep(0.001)

    def _made(self, step: int, job: ElasticJob) -> None:
        self._say("step", [step, job.generation, job.size])
        if step + 1 > struct.unpack_from("q", self._progress)[0]:
            struct.pack_into("q", self._progress, 0, step + 1)

    def _changed(self, change: Change) -> None:
        self._end("change")

    def _attempt(self, job: ElasticJob, attempt: Attempt, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._step = attempt.step
        done = False
        with attempt:
            self._end("start")
            if self._fate.moment == SPLIT and attempt.step == self._fate.ends:
                self._cut_off()
            self.loss(model, attempt.step, job).backward()
            self._end("before commit")
            if self._fate.moment == "commit" and self._fate.ends == attempt.step:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))  # ends the process
            attempt.commit()
            self._end("after commit")
            optimizer.step()
            self._end("after step")
            done = True
        if done:
            self._made(attempt.step, job)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the ranks of each step that counted, what each process had that came to the end, and how many
    were killed."""

    sizes: list[int]
    ends: list[list[float]]
    killed: int


def run_job(fates: list[Fate], steps: int, kind: type[Process] = Process) -> Outcome:
    """Runs a job with one process for each fate. Fails unless every step was made, and all that are left agree."""
    progress = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    Key(b"").hash_key()  # so OpenSSL knows the algorithm: to find it, a child takes a lock that the store may hold now
    size = sum(fate.joins == 0 for fate in fates)
    # A process that was cut off lives on, so the others wait for it unless an error names it.
    grace = 5.0 if any(fate.moment == SPLIT for fate in fates) else 30.0
    with store_of_a_run() as variables, open(reader, "rb", buffering=0) as lines:
        shared = {**variables, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        children = [
            _fork(kind(fate, steps, progress, writer, grace), shared | {"RANK": str(min(rank, size - 1))})
            for rank, fate in enumerate(fates)
        ]
        os.close(writer)
        said = _read_all(lines.fileno())
        statuses = [os.waitpid(child, 0)[1] for child in children]
    told = [json.loads(line) for line in said.decode().splitlines()]
    codes = [os.waitstatus_to_exitcode(status) for status in statuses]
    assert all(code in (0, -signal.SIGKILL, -signal.SIGALRM) for code in codes), codes
    assert all(fate.moment or code == 0 for fate, code in zip(fates, codes, strict=True)), codes
    committed: dict[int, tuple[int, int]] = {}
    for step, generation, ranks in (content for word, content in told if word == "step"):
        committed[step] = max(committed.get(step, (0, 0)), (generation, ranks))
    assert sorted(committed) == list(range(steps))
    ends = [content for word, content in told if word == "end"]
    assert ends
    assert all(end == ends[0] for end in ends), "the survivors differ"
    return Outcome([committed[step][1] for step in range(steps)], ends, sum(code != 0 for code in codes))


def _fork(process: Process, variables: dict[str, str]) -> int:
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
        os.environ.update(variables)
        process.run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _read_all(fd: int) -> bytes:
    said, deadline = b"", time.monotonic() + SECONDS
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            return said
        said += part
    raise TimeoutError("a process still runs")
