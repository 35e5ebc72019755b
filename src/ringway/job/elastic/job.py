"""`ElasticJob`: training that goes on when ranks die, and takes in ranks that come later."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn

from ringway.api.groups import destroy_process_group, settled
from ringway.api.start import Limit, limit_of, say, start_world
from ringway.backends.nccl.group import Aborts
from ringway.call import ReduceOp
from ringway.config import resolve
from ringway.errors import CommTimeout, PeerLost, RendezvousError, RingwayError, UsageError
from ringway.groups.factory import require_changeable
from ringway.groups.world import world
from ringway.job.elastic.ddp import ElasticDdp
from ringway.job.elastic.pulse import Pulse, Server
from ringway.job.elastic.roster import Arrival, Generation, Member, Roster
from ringway.job.elastic.state import State
from ringway.launch.discover import discover
from ringway.launch.rendezvous import LastingStore
from ringway.launch.witness import VARIABLE as WITNESS
from ringway.launch.witness import DataLost
from ringway.observe.report.figures import group_name
from ringway.parallel.data import DataParallel, register_data_parallel_hooks
from ringway.store import unwrapped
from ringway.threads import start

_FORM_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_FAULTS = (PeerLost, CommTimeout)


@dataclass(frozen=True)
class Change:
    """A new generation of ranks. `joined` and `left` compare it with the one before."""

    generation: int
    rank: int
    size: int
    step: int
    joined: tuple[Member, ...]
    left: tuple[Member, ...]


class StepRejected(RingwayError):
    """A rank voted against the step in `commit`. The attempt ends on every rank, and the step is repeated."""


class JobsBehind:
    """How many elastic jobs this process has behind it, in each start of a program."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def of(self, start: str) -> int:
        return self._counts.get(start, 0)

    def add(self, start: str) -> None:
        self._counts[start] = self.of(start) + 1


def _fewest_ranks(given: int | None) -> int:
    named = os.environ.get("RINGWAY_MIN_RANKS", "1")
    if given is None and not (named.isascii() and named.isdigit()):
        raise UsageError(f"RINGWAY_MIN_RANKS is '{named}'; it is a number of ranks from 1 on")
    fewest = int(named) if given is None else given
    if not isinstance(fewest, int) or isinstance(fewest, bool) or fewest < 1:
        raise UsageError(f"min_ranks={fewest!r} must be a number of ranks from 1 on")
    return fewest


class ElasticJob:
    """A job whose ranks come and go.

        with ringway.ElasticJob(min_ranks=2) as job:
            job.data_parallel(model)
            state = {"model": model, "optimizer": optimizer}
            for attempt in job.steps(state, until=1000):
                with attempt:
                    loss(model, batch(attempt.step, job.rank, job.size)).backward()
                    attempt.commit()
                    optimizer.step()

    If a rank dies, the block ends on the others. They form a group without it, and repeat the step. A rank that starts
    later waits until the others finish a step, and gets the state from them.

    `min_ranks` (from `ringway run --min`, or 1): with fewer, the job waits for others to join, for at most `patience`
    seconds. `grace`: how long a rank that lives but does not react is waited for. `backend`, `timeout` and `config`
    mean what they mean in `init_distributed`. `witness` (or RINGWAY_WITNESS) is the URL of a Redis server that keeps
    the job's store, as in redis://host:6379/0: then the job survives the loss of any of its hosts.
    """

    def __init__(
        self,
        min_ranks: int | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        grace: float = 30.0,
        patience: float = 600.0,
        witness: str | None = None,
    ) -> None:
        for name, seconds in (("grace", grace), ("patience", patience)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
                raise UsageError(f"{name}={seconds!r} must be a number of seconds above 0")
        self._fewest = _fewest_ranks(min_ranks)
        self._backend = backend
        self._settings = resolve(config)
        self._limit = limit_of(timeout, self._settings)
        self._grace = grace
        self._patience = patience
        self._witness = witness or os.environ.get(WITNESS) or None
        self._callbacks: list[Callable[[Change], None]] = []
        self._models: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._hooks: list[DataParallel] = []
        self._ddps: list[ElasticDdp] = []
        self._roster: Roster | None = None
        self._pulse: Pulse | None = None
        self._generation: Generation | None = None
        self._state: State | None = None
        self._whole = True
        self._veteran = False
        self._someone_waits = False
        self._saw_newcomers = False
        self._until: int | None = None
        self._left = threading.Event()

    # Public

    def __enter__(self) -> ElasticJob:
        if c10d.is_initialized():
            raise UsageError("torch.distributed is initialized already; ElasticJob makes the job's groups itself")
        if self._roster is not None:
            raise UsageError("this ElasticJob has ended; make a new one")
        named = self._backend or world.next_backend or self._settings.backend
        if named is not None:
            require_changeable(named)
        self._info = discover()
        token = os.environ.get("RINGWAY_JOB_TOKEN", "")
        self._store = LastingStore(
            self._info,
            self._limit.seconds,
            token=token,
            require_secret=self._settings.require_secret,
            witness=self._witness,
        )
        # A program may have one job after the other. Those that this process has behind it are not the current one.
        self._number = world.process.part(JobsBehind).of(self._store.opened)
        self._roster = Roster(
            self._store.store,
            self._info.size,
            self._fewest,
            self._grace,
            self._patience,
            job=self._number,
            lasting=self._witness is not None,
        )
        self._member = self._roster.enroll(self._info.rank)
        server = unwrapped(self._store.store)
        if getattr(server, "port", None) is not None:  # other hosts may reach it
            server = Server(server.host, server.port)
            self._pulse = Pulse(self._roster, self._member, server, self._grace, self._is_silent)
        start("ringway-newcomers", self._look_at_the_store)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._roster is not None
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        if not failed:
            world.process.part(JobsBehind).add(self._store.opened)
        self._left.set()
        if self._pulse is not None:
            self._pulse.stop()
        with suppress(c10d.DistError):  # a store that is gone needs no farewell
            self._roster.leave(self._member, failed=failed)
        self._end_group()

    @property
    def rank(self) -> int:
        """This rank in the current generation."""
        rank = self._current().rank_of(self._member)
        assert rank is not None
        return rank

    @property
    def size(self) -> int:
        """The number of ranks in the current generation."""
        return len(self._current().arrivals)

    @property
    def generation(self) -> int:
        """The number of the current generation. It grows by at least one with each change."""
        return self._current().number

    def on_change(self, callback: Callable[[Change], None]) -> Callable[[Change], None]:
        """Call `callback` whenever a new generation has formed and has its state, before its first step. Groups of the
        generation before no longer exist then: make new ones here, and wrap models in DDP again. Usable as a
        decorator."""
        self._callbacks.append(callback)
        return callback

    def data_parallel(self, model: nn.Module, **options: Any) -> None:
        """Average the model's gradients over all ranks, as `register_data_parallel_hooks` does with these options. The
        hooks follow every change."""
        self._models[id(model)] = (model, options)
        if self._generation is not None:
            self._hooks.append(register_data_parallel_hooks(model, **options))

    def ddp(self, model: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
        """The model in a DistributedDataParallel with these options. It follows every change, and so do the
        communication hooks registered on it. It is usable once `steps` has begun."""
        made = ElasticDdp(model, options)
        self._ddps.append(made)
        if self._generation is not None:
            made.connect(set())
        return made.wrapper

    def steps(self, state: MutableMapping[str, Any], until: int | None = None) -> Iterator[Attempt]:
        """Attempts at one step after another, beginning with `state["step"]` (0 if there is none), until that reaches
        `until`.

        `state` names what all ranks have in common: modules, optimizers, anything with a `state_dict`, and plain
        values. A rank that joins, or that missed a step, copies it from a rank that has it.
        """
        if self._roster is None or self._left.is_set():
            raise UsageError("use the job in a with statement: with ringway.ElasticJob() as job: ...")
        if self._state is not None:
            raise UsageError("steps() was called before; a job has one loop")
        self._state = State(state)
        self._until = until
        going_on = self._regroup(None)
        while going_on:
            if until is not None and self._state.step >= until:
                fault = self._end_together()
                if fault is None:
                    return
            else:
                attempt = Attempt(self, self._state)
                yield attempt
                fault = attempt._require_end()
            if fault is not None or self._someone_waits:
                going_on = self._regroup(fault)

    def _end_together(self) -> BaseException | None:
        """Every rank has made the last step, or has learned that a fault kept a rank from it."""
        assert self._roster is not None
        try:
            world.communicator(None).barrier()
        except _FAULTS as fault:
            return fault
        with suppress(RendezvousError):  # the rank that hosts the store may have ended: the job is done
            self._roster.finish()
        return None

    # Generations

    def _current(self) -> Generation:
        if self._generation is None:
            raise UsageError(
                "this rank is in no generation: the ranks meet when steps() begins, and a rank that comes after the "
                "last step meets nobody"
            )
        return self._generation

    def _regroup(self, fault: BaseException | None) -> bool:
        """Form the next generation, and another one if a member dies before it is formed. Give every member the state.
        False if the job is done: another rank made its last step."""
        assert self._roster is not None
        assert self._state is not None
        before, failed = self._generation, None
        while True:
            accused = self._accused_by(fault)
            arrival = Arrival(self._member, self._state.step, self._whole, self._veteran)
            if before is None and self._pulse is not None and (current := self._roster.current()) is not None:
                self._pulse.follow(current)  # its members may be on hosts that are gone
            # It signs up first: until then, its closed connections look like its death to other hosts.
            try:
                generation = self._roster.next(arrival, accused, signed_up=self._end_group)
            except BaseException:
                self._end_group()
                raise
            if generation is None:
                if before is None:
                    say("the job had ended when this rank came: there is nothing left to do")
                elif self._until is None or self._state.step < self._until or not self._whole:
                    raise RendezvousError(
                        f"the other ranks made the last step without this one, whose state is that of step "
                        f"{self._state.step}: the process stood still, or was cut off. Do not use its state"
                    )
                return False
            self._generation, self._someone_waits, self._saw_newcomers = generation, False, False
            if self._pulse is not None:
                self._pulse.follow(generation)
            try:
                self._form(generation)
                self._share_state(generation)
                self._announce(self._change_from(before))
                return True
            except Exception as error:
                fault = error if isinstance(error, RendezvousError) else _fault_behind(error)
                if fault is None or (isinstance(error, RendezvousError) and generation.members == failed):
                    raise  # the same members failed to form a group before, so they would again
                failed = generation.members

    def _announce(self, change: Change) -> None:
        for model, options in self._models.values():
            self._hooks.append(register_data_parallel_hooks(model, **options))
        assert self._state is not None
        for ddp in self._ddps:
            ddp.connect(self._state.tensors())
        for callback in self._callbacks:
            callback(change)
        self._state.require_whole()

    def _form(self, generation: Generation) -> None:
        assert self._roster is not None
        part = f"{self._number}.{generation.number}" if self._number else f"{generation.number}"
        store = self._store.part(part, generation.pack(), self._roster.watch(generation))
        # Under an MPI launcher, ringway would choose mpi, whose processes cannot change.
        source = f"ElasticJob, started by {self._info.source}"
        info = replace(self._info, rank=self.rank, size=self.size, local_size=None, source=source)
        while_forming = Limit(min(_FORM_SECONDS, self._limit.seconds), self._limit.source)
        # The recorder and traces go on across generations, and tell them apart by the group's name.
        name = group_name(generation.number)
        start_world(info, store, self._settings, self._backend, while_forming, verbose=False, named=name)
        world.communicator(None).set_timeout(self._limit.seconds)
        store.watch = None

    def _share_state(self, generation: Generation) -> None:
        assert self._state is not None
        sources = generation.sources()
        if not sources:
            raise RingwayError(
                "the state is lost: every rank that has it was interrupted between commit() and the end of its step. "
                "Start again from a checkpoint, and keep communication out of that part"
            )
        if len(sources) < self.size:
            self._state.copy_from(sources)
        self._whole = self._veteran = True

    def _accused_by(self, fault: BaseException | None) -> set[int]:
        """The numbers of the members that a fault says are gone."""
        if self._generation is None or not isinstance(fault, PeerLost) or fault.rank is None:
            return set()
        members = self._generation.members
        return {members[fault.rank].number} if fault.rank < len(members) else set()

    def _is_silent(self, member: Member | None) -> None:
        """Runs on a thread: a member of another host, or the store (None), has given no sign for `grace` seconds."""
        generation = self._generation
        error: BaseException = CommTimeout(f"the job's store has not answered for {self._grace:g} s")
        if member is not None and self._roster is not None:
            self._roster.lose(member)
            rank = None if generation is None else generation.rank_of(member)
            text = f"rank {rank} ({member}) has given no sign of life for {self._grace:g} s"
            error = PeerLost(text, rank=rank, host=member.process.host, pid=member.process.pid)
        self._interrupt(error)

    def _interrupt(self, error: BaseException) -> None:
        """Runs on a thread: ends the group's calls with an error."""
        with world.process.part(Aborts).together():
            for group in world.communicators():
                if group.fault is None:
                    group.health.end(error)

    def _change_from(self, before: Generation | None) -> Change:
        now, then = self._current().members, before.members if before is not None else ()
        assert self._state is not None
        return Change(
            self.generation,
            self.rank,
            self.size,
            self._state.step,
            joined=tuple(member for member in now if member not in then),
            left=tuple(member for member in then if member not in now),
        )

    def _end_group(self) -> None:
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()
        destroy_process_group()

    def _look_at_the_store(self) -> None:
        """Runs on a thread: keeps the store, and looks for newcomers. Rank 0 of each generation looks, and its vote in
        `commit` tells the others."""
        while not self._left.wait(_LOOK_SECONDS):
            generation = self._generation
            try:
                self._store.keep()
                if generation is None or generation.rank_of(self._member) != 0 or self._roster is None:
                    continue
                if self._roster.someone_waits_after(generation) and generation is self._generation:
                    self._saw_newcomers = True
            except DataLost as error:  # a second job may begin now: the next change reports it, so it must come
                self._interrupt(CommTimeout(str(error)))
            except c10d.DistError:  # the next change reports it
                pass


class Attempt:
    """One attempt at a step, a context manager. Its block ends early, without an error, if a rank is lost or a vote
    fails; the step is then attempted again."""

    def __init__(self, job: ElasticJob, state: State) -> None:
        self.step = state.step
        """The number of the step, from 0 on. It is the same in every attempt at the step."""
        self.committed = False
        self._job = job
        self._state = state
        self._fault: BaseException | None = None
        self._ended = False

    def commit(self, ok: bool = True) -> None:
        """Vote for the step. All ranks call this after the gradients are complete, and before `optimizer.step()`. It
        returns once every rank has voted for the step; if a rank votes against it, the block ends on all of them."""
        if self.committed:
            raise UsageError("commit() was called twice in one step")
        settled()
        votes = torch.tensor([int(ok), 0 if self._job._saw_newcomers else 1])
        world.communicator(None).all_reduce(votes, ReduceOp.MIN)
        agreed, nobody_waits = votes.tolist()
        self._job._someone_waits = not nobody_waits
        if not agreed:
            raise StepRejected(f"a rank voted against step {self.step}")
        self.committed = True

    def __enter__(self) -> Attempt:
        self._state.prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._ended = True
        if error is None:
            if not self.committed:
                raise UsageError("the block ended without commit(); call it before optimizer.step()")
            self._state.advance()
            return False
        self._fault = _fault_behind(error)
        if self._fault is None and not isinstance(error, StepRejected):
            return False
        if self.committed:  # the state may be half changed
            self._job._whole = False
        else:
            self._state.undo()
        return True

    def _require_end(self) -> BaseException | None:
        """The fault that ended the block, if one did."""
        if not self._ended:
            raise UsageError("an attempt was not used: write 'with attempt:' in the loop over job.steps()")
        return self._fault


def _fault_behind(error: BaseException) -> BaseException | None:
    """The loss or the timeout that `error` comes from. Errors that pass through autograd or DDP are wrapped, so the
    groups are asked as well."""
    if isinstance(error, _FAULTS):
        return error
    if not isinstance(error, Exception):  # such as KeyboardInterrupt
        return None
    return next((group.fault for group in world.communicators() if isinstance(group.fault, _FAULTS)), None)
