"""`ringway run`: several ranks of one program on this host, or on several (`hosts.py`).

The store lives in the launcher, so any rank may die. Only the ranks can use it (`store_server.py`). They write to pipes
(`output.py`), and nothing of a run outlives it: neither files nor processes (`guard.py`).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from ringway.descriptors import shortage_named
from ringway.errors import RingwayError, UsageError
from ringway.launch import hosts, ports
from ringway.launch.binding import Binding
from ringway.launch.cpus import usable_cpus
from ringway.launch.guard import MARK
from ringway.launch.identity import TOKEN, job_key
from ringway.launch.info import LaunchInfo
from ringway.launch.invitation import Invitation
from ringway.launch.live import Progress, Standing
from ringway.launch.output import Output
from ringway.launch.processes import pid_namespace
from ringway.launch.rank_processes import RankProcesses, Signals
from ringway.launch.rendezvous import LastingStore
from ringway.launch.run_store import RunStore
from ringway.launch.secret import SECRET, SECRET_FILE, PrivateSecret, given_key
from ringway.launch.sources import LOOPBACK
from ringway.launch.store_server import PrivateSocket, StoreServer
from ringway.launch.witness import VARIABLE as WITNESS

ON_DEATH = ("stop", "keep")
_POLL = 0.05
_STORE_SECONDS = 30.0
_WITNESS_SECONDS = 2.0  # a look at a witness that is gone holds up the launcher for as long
_LONGEST_PAUSE = 30.0  # before a rank is started again


@dataclass(frozen=True)
class Elastic:
    """A run whose ranks are started again when they fail, each at most `restarts` times. It ends if fewer than `fewest`
    are left."""

    fewest: int = 1
    restarts: int = 3
    look: Callable[[Store], Standing | None] | None = None
    """Reads who is in the job from its store."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code, and one line that says what happened."""

    code: int
    summary: str
    interrupted: bool = False
    """Whether a signal to the launcher ended the run, rather than a rank's own failure."""


@dataclass(frozen=True)
class Listen:
    """A run that launchers on other hosts join, at this HOST or HOST:PORT. Its ranks are on so many hosts."""

    place: str
    hosts: int


def run(
    command: Sequence[str],
    ranks: int,
    *,
    on_death: str = "stop",
    grace: int = 30,
    elastic: Elastic | None = None,
    listen: Listen | None = None,
    bindings: Sequence[Binding] | None = None,
    ended: Callable[[int, str], None] | None = None,
) -> Outcome:
    """Start `ranks` copies of a command and wait for them to end.

    With `on_death="stop"`, the first rank that fails ends the others, which get `grace` seconds to exit; with "keep",
    they continue without it. With `elastic`, it is started again. `bindings` say on which CPUs each rank of this host
    runs. `ended` is called with each rank of this host that ends while others may go on, and how it ended. Processes
    that ranks started and left behind end with the run, or with the launcher, even if that is killed.
    """
    fewest = None if elastic is None else elastic.fewest
    with shortage_named(f"a run of {ranks} ranks"):
        if listen is not None:
            with hosts.hosted(listen.place, ranks, listen.hosts, fewest) as (variables, address, launchers):
                _say(f"on each other host: ringway run --join {address} -n {ranks} ...")
                local = LocalRanks(ranks, ranks * listen.hosts, bindings=bindings)
                store = launchers.store if elastic is None else _store_of_the_job(variables, launchers.store)
                return _run(command, local, variables, on_death, grace, elastic, launchers, store)
        local = LocalRanks(ranks, ranks, bindings=bindings)
        with store_of_a_run() as variables:
            if elastic is None:
                return _run(command, local, variables, on_death, grace, ended=ended)
            environment = {**variables, "RINGWAY_MIN_RANKS": str(elastic.fewest)}
            with Invitation({**environment, **_chosen(os.environ)}, ranks):
                _say(f"more ranks can join with: ringway run --join {os.getpid()} -n 1 ...")
                store = _store_of_the_job(variables, _client(variables))
                return _run(command, local, environment, on_death, grace, elastic, store=store)


def join(
    command: Sequence[str],
    ranks: int,
    where: str,
    *,
    on_death: str = "stop",
    grace: int = 30,
    bindings: Sequence[Binding] | None = None,
) -> Outcome:
    """Start `ranks` copies of a command for the run of another launcher: by its pid, if that is an elastic run of this
    user on this host, or by the HOST:PORT at which it listens."""
    if where.isascii() and where.isdigit():
        variables, size = Invitation.of(int(where))
        theirs = _chosen(variables)
        for name, ours in _chosen(os.environ).items():
            if ours not in ("", theirs[name]):
                raise UsageError(
                    f"--join {where}: {name} is not the same here and where the run was started. Unset it here: the "
                    "ranks get it from the run"
                )
        return _run(command, LocalRanks(ranks, size, later=True, bindings=bindings), variables, "keep", grace)
    variables, launchers = hosts.joined(where, ranks)
    facts, number = launchers.facts, launchers.number
    if facts.fewest is not None:
        local = LocalRanks(ranks, facts.ranks * facts.hosts, later=True, bindings=bindings)
        return _run(command, local, variables, "keep", grace, launchers=launchers)
    local = LocalRanks(ranks, ranks * facts.hosts, first=ranks * number, host=number, bindings=bindings)
    return _run(command, local, variables, on_death, grace, launchers=launchers)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that one launcher starts, and their place in the job."""

    ranks: int
    size: int
    first: int = 0
    host: int = 0
    later: bool = False
    """They join a job that exists: any rank below `size` will do."""
    bindings: Sequence[Binding] | None = None

    def environment(self, number: int) -> dict[str, str]:
        rank = min(number, self.size - 1) if self.later else self.first + number
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(self.size if self.later else self.ranks),
            "GROUP_RANK": str(self.host),
            "MASTER_ADDR": LOOPBACK,
            "PYTHONUNBUFFERED": "1",
        }
        if "OMP_NUM_THREADS" not in os.environ:
            threads = usable_cpus() // self.ranks if self.bindings is None else self.bindings[number].threads
            environment["OMP_NUM_THREADS"] = str(max(1, threads))
        return environment


@contextmanager
def store_of_a_run() -> Iterator[dict[str, str]]:
    """A store for the ranks of one run, and the environment variables with which they find it."""
    run_id = secrets.token_hex(16)
    with PrivateSecret() as secret, PrivateSocket() as socket, ports.reserve() as reserved:
        key = job_key(secret.key, run_id, os.environ.get("RINGWAY_JOB_TOKEN", ""))
        store = StoreServer(socket.listener, run_id, key)
        try:
            yield {
                "RINGWAY_RUN_ID": run_id,
                "RINGWAY_RUN_STORE": socket.path,
                SECRET_FILE: secret.path,
                SECRET: "",  # each run has a secret of its own
                # For programs of plain torch: their rank 0 opens a store of its own there.
                "MASTER_PORT": str(reserved.getsockname()[1]),
            }
        finally:
            store.close()


def _chosen(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's variables that say which job it is, and where its ranks meet."""
    return {name: environ.get(name, "") for name in (WITNESS, TOKEN)}


def _store_of_the_job(variables: Mapping[str, str], ours: RunStore) -> Store | None:
    """Where the ranks of an elastic job sign up: at the witness, if there is one. None if it cannot be reached: the
    ranks report that."""
    witness, token = os.environ.get(WITNESS, ""), os.environ.get(TOKEN, "")
    if not witness:
        return ours
    info = LaunchInfo(rank=0, size=1, source="ringway run", job=variables["RINGWAY_RUN_ID"], hosted_by_launcher=True)
    key = given_key({**os.environ, **variables})
    try:
        return LastingStore(info, _WITNESS_SECONDS, token=token, witness=witness, key=key).store
    except RingwayError as error:
        _say(f"the launcher cannot see which ranks are in the job: {error}")
        return None


def _client(variables: Mapping[str, str]) -> RunStore:
    """The launcher's own connection to the store of its run."""
    key = job_key(given_key(variables), variables["RINGWAY_RUN_ID"], os.environ.get("RINGWAY_JOB_TOKEN", ""))
    return RunStore(variables["RINGWAY_RUN_STORE"], key, _STORE_SECONDS)


def _run(
    command: Sequence[str],
    local: LocalRanks,
    variables: dict[str, str],
    on_death: str,
    grace: int,
    elastic: Elastic | None = None,
    launchers: hosts.Launchers | None = None,
    store: Store | None = None,
    ended: Callable[[int, str], None] | None = None,
) -> Outcome:
    started = time.monotonic()
    progress = Progress(store, None if elastic is None else elastic.look)
    output = Output(local.size > 1 or local.later or elastic is not None, progress.line.aside)
    with Signals() as signals:
        mark = secrets.token_hex(16)
        processes = RankProcesses(mark, output, local.first, local.bindings)
        environments = [{**local.environment(number), **variables, MARK: mark} for number in range(local.ranks)]
        elsewhere = _Elsewhere(launchers, ends_us=on_death == "stop" and elastic is None)
        finished = False
        try:
            for environment in environments:
                if signals.ending is not None:
                    break
                processes.start(command, environment)
            if elastic is None:
                failed, stopped = _supervise(processes, signals, on_death, elsewhere, ended)
            else:
                failed, stopped = _supervise_elastic(
                    processes, signals, elastic, command, environments, progress, store
                )
            ended_by = signals.ending
            if failed or ended_by is not None:
                elsewhere.fail(_outcome(processes, failed, [], started).summary if failed else "it was interrupted")
            finished = not failed and not stopped and ended_by is None
            processes.end(ended_by or signal.SIGTERM, grace, signals)
        finally:
            processes.close()
            elsewhere.leave(grace, finished)
            known = signals.count
            output.close(lambda: signals.count > known)
            progress.line.close()
    if ended_by is not None:
        return Outcome(128 + ended_by, f"ended by {_signal_name(ended_by)} after {_seconds(started)}", interrupted=True)
    if elsewhere.failure is not None:
        return Outcome(1, f"stopped after {_seconds(started)}: {elsewhere.failure}")
    return _outcome(processes, failed, stopped, started)


class _Elsewhere:
    """What happens on the other hosts of a run, if it has any."""

    def __init__(self, launchers: hosts.Launchers | None, *, ends_us: bool) -> None:
        self._launchers = launchers
        self._ends_us = ends_us
        self.failure: str | None = None
        """What failed on another host, and ends the ranks of this one."""

    def has_failed(self) -> bool:
        if self._launchers is not None and self._ends_us:
            self.failure = self.failure or self._launchers.failure()
        return self.failure is not None

    def fail(self, what: str) -> None:
        if self._launchers is not None and self._ends_us:
            self._launchers.fail(what)

    def leave(self, grace: float, finished: bool) -> None:
        if self._launchers is not None:
            self._launchers.leave(grace, finished)


def _supervise(
    processes: RankProcesses,
    signals: Signals,
    on_death: str,
    elsewhere: _Elsewhere,
    ended: Callable[[int, str], None] | None,
) -> tuple[list[int], list[int]]:
    """Wait until all ranks have ended, or until the others must end. Returns the ranks that failed, in their order,
    and those that still run."""
    failed: list[int] = []
    running = list(range(len(processes)))
    while running and signals.ending is None and not (failed and on_death == "stop") and not elsewhere.has_failed():
        time.sleep(_POLL)
        signals.pass_on(processes.send)
        codes = {rank: processes.code(rank) for rank in running}
        failed += [rank for rank, code in codes.items() if code]
        running = [rank for rank, code in codes.items() if code is None]
        for rank, code in codes.items():
            if code is not None and ended is not None:
                ended(rank, _how(code))
    return failed, running


def _supervise_elastic(
    processes: RankProcesses,
    signals: Signals,
    elastic: Elastic,
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
    progress: Progress,
    store: Store | None,
) -> tuple[list[int], list[int]]:
    """Start ranks that fail again, until all have ended or too few are left. Once the job is over, or the last rank
    that runs has ended well, no rank is started again. Returns the ranks that failed for good, and those that still
    run.

    A job that is over failed if a rank that was in it to the end fails. Otherwise it failed if a rank does, and none
    ends well after it.
    """
    restarts = [0] * len(processes)
    due: dict[int, float] = {}
    failed: list[int] = []
    running, left = list(range(len(processes))), 0
    members: Collection[int] | None = None

    def again(rank: int, line: str) -> None:
        if restarts[rank] == elastic.restarts:
            failed.append(rank)
            progress.say(line)
            return
        pause = min(2.0 ** restarts[rank], _LONGEST_PAUSE)
        due[rank] = time.monotonic() + pause
        restarts[rank] += 1
        progress.say(f"{line}; it starts again in {pause:g} s (restart {restarts[rank]} of {elastic.restarts})")

    while (running or due) and signals.ending is None:
        time.sleep(_POLL)
        signals.pass_on(processes.send)
        ended = {rank: code for rank in running if (code := processes.code(rank)) is not None}
        is_due = any(moment <= time.monotonic() for moment in due.values())
        if members is None and (ended or is_due):
            members = _members_at_the_end(elastic, store)
            if members is not None:
                failed.clear()
                members = {processes.pid(rank) for rank in running} & set(members)
        for rank, code in sorted(ended.items(), key=lambda each: each[1] == 0):  # those that ended well come last
            running.remove(rank)
            line = f"{processes.name(rank)} {_how(code)}; {len(running)} of {len(processes)} run"
            if members is not None and code:
                failed += [rank] if not members or processes.pid(rank) in members else []
                progress.say(line)
            elif code:
                again(rank, line)
            else:
                left += 1
                if members is None:
                    failed.clear()
        if members is not None or (not running and 0 in ended.values()):
            due.clear()
        elif len(running) + len(due) + left < elastic.fewest:
            progress.say(f"{len(running)} ranks are left, and the job needs {elastic.fewest}: it ends")
            known = [*failed, *due]
            ended_before = [rank for rank in range(len(processes)) if rank not in [*known, *running]]
            # A rank that ended well may have cleared the others that failed.
            return [*known, *(rank for rank in ended_before if processes.code(rank))], running
        for rank in [rank for rank, moment in due.items() if moment <= time.monotonic()]:
            del due[rank]
            try:
                processes.start_again(rank, command, environments[rank])
                running.append(rank)
            except (OSError, UsageError) as error:  # there may be memory and processes again later
                again(rank, f"{processes.name(rank)} could not be started: {error}")
        progress.update(
            {str(rank): processes.pid(rank) for rank in sorted(running)},
            [_out(rank, due) for rank in range(len(processes)) if rank not in running],
        )
    return [*failed, *due], running


def _members_at_the_end(elastic: Elastic, store: Store | None) -> Collection[int] | None:
    """The process ids of the ranks on this host that were in the job when it ended; None while it goes on. A command
    that wraps the program has another process id than the rank."""
    if store is None or elastic.look is None:
        return None
    try:
        standing = elastic.look(store)
    except (DistError, RingwayError):  # the ranks report it
        return None
    if standing is None or not standing.finished:
        return None
    here = pid_namespace()
    return {member.pid for member in standing.members if member.namespace == here}


def _out(rank: int, due: Mapping[int, float]) -> str:
    return f"{rank} (again in {max(due[rank] - time.monotonic(), 0):.0f} s)" if rank in due else str(rank)


def _outcome(processes: RankProcesses, failed: list[int], stopped: list[int], started: float) -> Outcome:
    ranks = len(processes)
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if stopped and not failed:
        return Outcome(1, f"too few ranks were left after {_seconds(started)}; stopped: {processes.names(stopped)}")
    if not failed:
        return Outcome(0, f"{many} finished in {_seconds(started)}")
    first = failed[0]
    code = processes.code(first) or 0
    line = f"{processes.name(first)} {_how(code)} after {_seconds(started)}"
    if failed[1:]:
        line += f"; then failed: {processes.names(failed[1:])}"
    if stopped:
        line += f"; stopped: {processes.names(stopped)}"
    finished = [rank for rank in range(ranks) if rank not in failed and rank not in stopped]
    if finished:
        line += f"; finished: {processes.names(finished)}"
    return Outcome(128 - code if code < 0 else code, line)


def _how(code: int) -> str:
    if code == 0:
        return "finished"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {number}"


def _say(line: str) -> None:
    print(f"ringway run: {line}", file=sys.stderr, flush=True)


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
