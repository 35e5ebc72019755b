"""Elastic jobs, one thing at a time: votes, errors, too few ranks, a lost store, misuse, DDP, copied state."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard

import ringway
import ringway.backends.ccl.backend  # here once, rather than in every process that is forked
import ringway.backends.shm.backend
from elastic_model import SECONDS, Sum, contents_of, optimizer_of, simulated, values_of
from ringway.errors import PeerLost, RendezvousError, UsageError
from ringway.groups.world import world
from ringway.job.elastic.job import Attempt, Change, ElasticJob
from ringway.job.elastic.roster import Arrival, Generation, Member, Roster, standing
from ringway.job.elastic.state import _LARGE, State, _joined, _separated, _Slot
from ringway.launch.processes import ProcessName
from ringway.launch.run import store_of_a_run
from ringway.store import Deadline
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

T = TypeVar("T")


def _enter(context: RankContext) -> None:
    """Makes a rank of the pool look like one that `ringway run` started. The variables of the store are set already."""
    leave(ringway)
    torch.set_num_threads(1)
    size = str(context.world_size)
    os.environ.update(RANK=str(context.rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")


def _in_a_run(pool: RankPool, function: Callable[..., T], world_size: int, *arguments: Any) -> list[T]:
    with store_of_a_run() as variables:
        try:
            return pool.run(function, *arguments, world_size=world_size, timeout=SECONDS, environment={**variables})
        finally:
            pool.replace()


def _votes(context: RankContext) -> tuple[list[int], float, float]:
    """Rank 1 votes once against step 1."""
    _enter(context)
    model, attempts = Sum(), []
    optimizer = optimizer_of(model)
    with ElasticJob() as job:
        job.data_parallel(model)
        for attempt in job.steps({"model": model, "optimizer": optimizer}, until=3):
            with attempt:
                attempts.append(attempt.step)
                model(values_of(attempt.step, 0)).backward()
                attempt.commit(ok=attempts.count(1) != 1 or job.rank != 1)
                optimizer.step()
        assert job.generation == 1
    return attempts, float(model.passes), float(model.one[0])


def test_a_step_that_a_rank_votes_against_is_repeated(pool: RankPool) -> None:
    wanted = sum(simulated([1, 1, 1])[:1])
    for attempts, passes, value in _in_a_run(pool, _votes, 2):
        assert attempts == [0, 1, 1, 2]
        assert passes == 3
        assert value == pytest.approx(wanted)


def _error_of_the_program(context: RankContext) -> list[Any]:
    """Rank 1 makes a mistake in step 1. The other goes on alone, and knows whom it lost."""
    _enter(context)
    model, changes = Sum(), []
    with ElasticJob() as job:
        job.on_change(changes.append)
        job.data_parallel(model)
        for attempt in job.steps({"model": model}, until=3):
            with attempt:
                if attempt.step == 1 and context.rank == 1:
                    raise KeyError("a mistake of the program")
                model(values_of(attempt.step, 0)).backward()
                attempt.commit()
    return [[change.size, change.step, len(change.joined), len(change.left)] for change in changes]


def test_an_error_of_the_program_ends_its_rank_only(pool: RankPool) -> None:
    with store_of_a_run() as variables:
        first, second = pool.try_run(_error_of_the_program, world_size=2, timeout=SECONDS, environment={**variables})
    assert first.value == [[2, 0, 2, 0], [1, 1, 0, 1]]
    assert "a mistake of the program" in str(second)
    pool.replace()


def _too_few(context: RankContext) -> str:
    _enter(context)
    model = Sum()
    try:
        with ElasticJob(min_ranks=2) as job:
            for attempt in job.steps({"model": model}, until=3):
                assert job._roster is not None
                job._roster._patience = 1.0  # not with the first generation: a rank may start late
                if context.rank == 1:
                    break
                with attempt:
                    attempt.commit()
    except RendezvousError as error:
        return str(error)
    return "left"


def test_too_few_ranks_wait_and_then_say_so(pool: RankPool) -> None:
    waited, left = _in_a_run(pool, _too_few, 2)
    assert left == "left"
    assert "1 ranks are here, and at least 2 are needed" in waited


def _store_gone(context: RankContext) -> str:
    leave(ringway)
    with ExitStack() as open_:
        variables = open_.enter_context(store_of_a_run())
        os.environ.update(variables, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        try:
            with ElasticJob() as job:
                for attempt in job.steps({}):
                    with attempt:
                        attempt.commit()
                        open_.close()
                        job._someone_waits = True
        except RendezvousError as error:
            return str(error)
    return "went on"


def test_a_rank_that_cannot_reach_the_store_stops(pool: RankPool) -> None:
    (said,) = pool.run(_store_gone, world_size=1, timeout=SECONDS)
    assert "the job's store is out of reach" in said
    pool.replace()


def _misuse(context: RankContext) -> list[str]:
    leave(ringway)
    said = []

    def refused(mistake: Callable[[], object], kind: type[Exception] = UsageError) -> None:
        try:
            mistake()
        except kind as error:
            said.append(str(error))
            return
        raise AssertionError("accepted")

    refused(lambda: ElasticJob(min_ranks=0))
    refused(lambda: ElasticJob(min_ranks=1.5))  # type: ignore[arg-type]
    refused(lambda: ElasticJob(grace=0))
    refused(lambda: ElasticJob(patience="long"))  # type: ignore[arg-type]
    os.environ["RINGWAY_MIN_RANKS"] = "x"
    refused(ElasticJob)
    del os.environ["RINGWAY_MIN_RANKS"]
    refused(ElasticJob(backend="mpi").__enter__)
    refused(lambda: next(ElasticJob().steps({})))
    with store_of_a_run() as variables:
        os.environ.update(variables, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        with ElasticJob() as job:
            refused(lambda: job.rank)
            refused(lambda: next(job.steps({"step": "one"})))
            loop = job.steps({})
            attempt = next(loop)
            refused(lambda: next(loop))
            refused(lambda: next(job.steps({})))
            refused(ElasticJob().__enter__)
            with attempt:
                attempt.commit()
                refused(attempt.commit)
            refused(lambda: Attempt(job, attempt._state).__exit__(None, None, None))
    return said


def test_misuse_is_refused(pool: RankPool) -> None:
    (said,) = pool.run(_misuse, world_size=1, timeout=SECONDS)
    expected = (
        "min_ranks=0",
        "min_ranks=1.5",
        "grace=0",
        "patience='long'",
        "RINGWAY_MIN_RANKS is 'x'",
        "MPI fixes its processes",
        "in a with statement",
        "in no generation",
        "state['step'] is 'one'",
        "'with attempt:'",
        "a job has one loop",
        "initialized already",
        "called twice",
        "without commit()",
    )
    for text, part in zip(said, expected, strict=True):
        assert part in text
    pool.replace()


def _mismatch(context: RankContext) -> str:
    _enter(context)
    try:
        with ElasticJob() as job:
            for attempt in job.steps({}, until=3):
                with attempt:
                    if context.rank == 0:
                        ringway.all_reduce(torch.ones(3))
                    else:
                        ringway.broadcast(torch.ones(3), 0)
                    attempt.commit()
    except ringway.errors.CollectiveMismatch:
        return "named"
    return "repeated"


def test_different_calls_are_no_reason_to_repeat_a_step(pool: RankPool) -> None:
    assert _in_a_run(pool, _mismatch, 2) == ["named", "named"]


def _wrapped(context: RankContext) -> list[float]:
    """DDP, made again for each generation. Rank 2 dies in backward."""
    _enter(context)
    model = Sum()
    optimizer = optimizer_of(model)
    wrapped: list[nn.parallel.DistributedDataParallel] = []
    with ElasticJob() as job:

        @job.on_change
        def wrap(change: Change) -> None:
            wrapped[:] = [nn.parallel.DistributedDataParallel(model)]

        for attempt in job.steps({"model": model, "optimizer": optimizer}, until=4):
            with attempt:
                loss = wrapped[0](values_of(attempt.step, job.rank))
                if attempt.step == 2 and context.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                attempt.commit()
                optimizer.step()
    return contents_of(model, optimizer)


def test_ddp_is_wrapped_again_in_on_change(pool: RankPool) -> None:
    with store_of_a_run() as variables:
        first, second, third = pool.try_run(_wrapped, world_size=3, timeout=SECONDS, environment={**variables})
    pool.replace()
    assert not third.ok
    assert first.value == second.value
    torch.testing.assert_close(torch.tensor(first.value), torch.tensor(simulated([3, 3, 2, 2])), rtol=1e-12, atol=1e-12)


def _survives(context: RankContext) -> tuple[list[float], int, int]:
    """DDP that the job keeps, with a communication hook. Rank 2 dies in backward."""
    _enter(context)
    model = Sum()
    optimizer = optimizer_of(model)
    hooked, passes = [], []

    def hook(state, bucket):  # torch refuses annotations that are strings
        hooked.append(c10d.get_world_size())
        tensor = bucket.buffer().div_(c10d.get_world_size())
        work = c10d.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with ElasticJob() as job:
        wrapped = job.ddp(model, gradient_as_bucket_view=True)
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        with pytest.raises(UsageError, match="before the ranks have met"):
            wrapped(values_of(0, 0))
        with pytest.raises(UsageError, match="cannot take process_group="):
            job.ddp(model, process_group=1)
        wrapped.eval()
        wrapped.register_forward_hook(lambda *_: passes.append(job.size))
        for attempt in job.steps({"model": model, "optimizer": optimizer}, until=4):
            if attempt.step == 0 and not wrapped._comm_hooks:
                wrapped.register_comm_hook(None, hook)
            with attempt:
                loss = wrapped(values_of(attempt.step, job.rank))
                if attempt.step == 2 and context.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                attempt.commit()
                optimizer.step()
        assert not wrapped.training
        assert passes == [3, 3, 3, 2, 2]  # one step was repeated
    return contents_of(model, optimizer), min(hooked), max(hooked)


def _two_jobs(context: RankContext) -> list[int]:
    """One after the other, as in pretraining and fine-tuning. The first one's end tells nothing about the second."""
    _enter(context)
    made = []
    for last in (3, 2):
        made.append(0)
        with ElasticJob() as job:
            for attempt in job.steps({}, until=last):
                with attempt:
                    attempt.commit()
                    made[-1] += 1
    return made


def test_a_program_may_have_one_job_after_the_other(pool: RankPool) -> None:
    assert _in_a_run(pool, _two_jobs, 2) == [[3, 2], [3, 2]]


def _leaves(context: RankContext, code: int | None) -> bool | None:
    """Whether the launcher takes the job for finished."""
    _enter(context)
    job = ElasticJob()
    with suppress(SystemExit), job:
        for _ in job.steps({}):
            sys.exit(code)
    found = standing(job._store.store)
    return None if found is None else found.finished


@pytest.mark.parametrize(("code", "finished"), [(0, True), (None, True), (3, False)])
def test_sys_exit_with_0_is_no_failure(pool: RankPool, code: int | None, finished: bool) -> None:
    assert _in_a_run(pool, _leaves, 1, code) == [finished]


def test_a_job_whose_last_steps_were_made_needs_no_store() -> None:
    """The rank that hosts it may be the first to end."""

    def out_of_reach(self: Roster) -> None:
        raise RendezvousError("the job's store is out of reach")

    job = ElasticJob()
    job._roster = Roster(c10d.HashStore(), 1, 1, 1.0, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "finish", out_of_reach)
        patch.setattr(world, "communicator", lambda group: SimpleNamespace(barrier=lambda: None))
        assert job._end_together() is None


def test_ddp_of_the_job_survives_a_change(pool: RankPool) -> None:
    with store_of_a_run() as variables:
        first, second, third = pool.try_run(_survives, world_size=3, timeout=SECONDS, environment={**variables})
    pool.replace()
    assert not third.ok
    assert first.ok, first
    assert first.value == second.value
    contents, fewest, most = first.value
    assert (fewest, most) == (2, 3)
    torch.testing.assert_close(torch.tensor(contents), torch.tensor(simulated([3, 3, 2, 2])), rtol=1e-12, atol=1e-12)


def _sharded(context: RankContext) -> str:
    _enter(context)
    model = nn.Linear(4, 4)
    with ElasticJob() as job:
        job.on_change(lambda change: fully_shard(model))
        try:
            next(job.steps({"model": model}))
        except UsageError as error:
            return str(error)
    return "accepted"


def test_a_sharded_model_is_refused(pool: RankPool) -> None:
    for said in _in_a_run(pool, _sharded, 2):
        assert "state['model'] is sharded: weight is a DTensor" in said
        assert "torch.distributed.checkpoint" in said


def _copied(context: RankContext) -> dict[str, Any]:
    """Rank 0's state becomes that of all ranks: nested, empty and large parts, other dtypes, plain values."""
    _enter(context)
    seed = torch.Generator().manual_seed(context.rank)
    state = {
        "table": {"rows": [torch.rand(5, generator=seed), (torch.rand(2, 3, generator=seed).t(), context.rank)]},
        "half": torch.rand(7, generator=seed).bfloat16(),
        "large": torch.rand(5 << 20, generator=seed),
        "nothing": torch.empty(0),
        "seen": {"words": f"of rank {context.rank}"},
    }
    with ElasticJob() as job:
        for attempt in job.steps(state, until=1):
            with attempt:
                attempt.commit()
        words = state.pop("seen")
        return {"rank": job.rank, "words": words, "tensors": state}


def test_every_kind_of_state_is_copied(pool: RankPool) -> None:
    ended = _in_a_run(pool, _copied, 3)
    assert [each["rank"] for each in ended] == [0, 1, 2]
    for other in ended[1:]:
        assert other["words"] == {"words": "of rank 0"}
        torch.testing.assert_close(other["tensors"], ended[0]["tensors"], rtol=0, atol=0)


def test_a_process_with_another_version_is_refused() -> None:
    """It refuses itself, before the others wait for it."""
    store = c10d.HashStore()
    first, second = (Roster(store, 1, 1, 30.0, 30.0) for _ in range(2))
    member = first.enroll(0)
    formed = first.next(Arrival(member, 0, whole=True, veteran=False), ())
    assert formed is not None
    other = replace(second.enroll(0), version="0.0.1")
    with pytest.raises(RendezvousError, match=r"has ringway 0\.0\.1, and rank 0 .* has "):
        second.next(Arrival(other, 0, whole=True, veteran=False), ())
    assert not first.someone_waits_after(formed)


@pytest.mark.parametrize("text", ["", "[]", '{"number": 1}', "[" * 5000, '{"number": 1, "arrivals": [{"member": 3}]}'])
def test_a_list_of_ranks_that_a_stranger_wrote_is_refused(text: str) -> None:
    store = c10d.HashStore()
    roster = Roster(store, 1, 1, 30.0, 30.0)
    member = roster.enroll(0)
    store.set("ringway/elastic/generation", text)
    with pytest.raises(RendezvousError, match="unknown format"):
        roster.next(Arrival(member, 0, whole=True, veteran=False), ())


def test_sources_have_the_newest_whole_state() -> None:
    def arrival(number: int, step: int, whole: bool = True, veteran: bool = True) -> Arrival:
        return Arrival(Member(number, 0, ProcessName("host", 1, "")), step, whole, veteran)

    assert Generation(2, (arrival(1, 4), arrival(2, 5), arrival(3, 5))).sources() == [1, 2]
    assert Generation(2, (arrival(1, 4), arrival(2, 5, whole=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4), arrival(2, 9, veteran=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4, whole=False), arrival(2, 0, veteran=False))).sources() == []
    assert Generation(1, (arrival(1, 0, veteran=False), arrival(2, 0, veteran=False))).sources() == [0]
    assert Generation(2, (arrival(1, 4, whole=False),)).sources() == []


class TwoRosters:
    """A job of one member, which this process has made, and a newcomer to it."""

    def __init__(self, patience: float = 30.0, lasting: bool = False) -> None:
        store = c10d.HashStore()
        self.old, self.new = (Roster(store, 1, 1, 0.2, patience, lasting=lasting) for _ in range(2))
        self.member, self.newcomer = self.old.enroll(0), self.new.enroll(0)
        formed = self.old.next(Arrival(self.member, 0, whole=True, veteran=False), ())
        assert formed is not None
        self.formed = formed

    def come(self, into: list[Generation | None]) -> threading.Thread:
        def sign_up() -> None:
            into.append(self.new.next(Arrival(self.newcomer, 0, whole=True, veteran=False), ()))

        thread = threading.Thread(target=sign_up)
        thread.start()
        return thread


def test_a_newcomer_waits_for_members_that_live() -> None:
    """Longer than the grace and the patience: they may be in a long step. By itself it would be a second job."""
    job = TwoRosters(patience=0.4)
    seen: list[Generation | None] = []
    waiting = job.come(seen)
    assert Deadline(30).poll(lambda: job.old.someone_waits_after(job.formed) or None)
    waiting.join(1.0)
    assert seen == []
    second = job.old.next(Arrival(job.member, 7, whole=True, veteran=True), ())
    waiting.join(30)
    assert seen == [second]
    assert second is not None
    assert second.sources() == [0]


def test_a_newcomer_to_a_job_that_all_leave_has_nothing_to_do() -> None:
    job = TwoRosters()
    seen: list[Generation | None] = []
    waiting = job.come(seen)
    assert Deadline(30).poll(lambda: job.old.someone_waits_after(job.formed) or None)
    waiting.join(0.2)
    job.old.leave(job.member)
    job.old.lose(job.member)  # as a rank that has not seen it leave
    waiting.join(30)
    assert seen == [None]


def test_a_newcomer_to_a_job_that_all_had_left_begins_again() -> None:
    """As a run that is queued again, with the same witness."""
    job = TwoRosters(lasting=True)
    seen: list[Generation | None] = []
    job.old.leave(job.member)
    job.come(seen).join(30)
    assert [each and each.number for each in seen] == [2]


def test_members_that_signed_up_and_died_leave_the_others_time() -> None:
    """The first member's step takes longer than the grace; the second has signed up, and dies."""
    store = c10d.HashStore()
    first, second, new = (Roster(store, 2, 1, 0.2, 30.0) for _ in range(3))
    members = [first.enroll(0), second.enroll(1)]
    formed: list[Generation | None] = []

    def sign_up(roster: Roster, arrival: Arrival) -> threading.Thread:
        thread = threading.Thread(target=lambda: formed.append(roster.next(arrival, ())))
        thread.start()
        return thread

    for thread in [sign_up(r, Arrival(m, 0, True, False)) for r, m in zip((first, second), members, strict=True)]:
        thread.join(30)
    one = formed.pop()
    assert one is not None
    store.append("ringway/elastic/2/arrivals", json.dumps(asdict(Arrival(members[1], 3, True, True))) + "\n")
    store.append("ringway/elastic/departures", f"{members[1].number} died\n")
    formed.clear()
    waiting = sign_up(new, Arrival(new.enroll(1), 0, True, False))
    waiting.join(0.8)
    assert formed == []
    two = first.next(Arrival(members[0], 3, True, True), ())
    waiting.join(30)
    assert two is not None
    assert formed == [two]
    assert two.sources() == [0]


def test_an_error_of_an_earlier_generation_makes_nobody_lost() -> None:
    """A rank was left out, and its error names a rank that lives."""
    job = TwoRosters()
    seen: list[Generation | None] = []

    def come_back() -> None:
        seen.append(job.new.next(Arrival(job.newcomer, 9, True, True), {job.member.number}))

    waiting = threading.Thread(target=come_back)
    waiting.start()
    waiting.join(0.6)
    assert seen == []
    second = job.old.next(Arrival(job.member, 3, True, True), ())
    waiting.join(30)
    assert seen == [second]
    assert second is not None
    assert second.sources() == [0]


def test_a_rank_of_a_job_whose_data_are_lost_stops() -> None:
    """It is no first rank of a new job: the others may go on."""
    empty = Roster(c10d.HashStore(), 1, 1, 0.2, 30.0)
    member = empty.enroll(0)
    with pytest.raises(RendezvousError, match="has lost the job's data"):
        empty.next(Arrival(member, 3, whole=True, veteran=True), ())
    assert empty.next(Arrival(member, 0, whole=True, veteran=False), ()) is not None


def test_a_newcomer_to_a_job_whose_ranks_failed_begins_again() -> None:
    job = TwoRosters()
    seen: list[Generation | None] = []
    job.old.leave(job.member, failed=True)
    job.come(seen).join(30)
    assert [each and each.number for each in seen] == [2]


def test_a_rank_that_was_left_out_brings_no_state() -> None:
    """The others went on without it, maybe from an earlier step."""
    job = TwoRosters()
    third = job.new.enroll(0)
    second = job.old.next(Arrival(job.member, 3, whole=True, veteran=True), ())
    assert second is not None
    seen: list[Generation | None] = []

    def come_back() -> None:
        seen.append(job.new.next(Arrival(third, 9, whole=True, veteran=True), ()))

    waiting = threading.Thread(target=come_back)
    waiting.start()
    assert Deadline(30).poll(lambda: job.old.someone_waits_after(second) or None)
    formed = job.old.next(Arrival(job.member, 3, whole=True, veteran=True), ())
    waiting.join(30)
    assert formed is not None
    assert seen == [formed]
    assert [arrival.veteran for arrival in formed.arrivals] == [True, False]
    assert formed.sources() == [0]


def _continued_too_late(context: RankContext) -> str:
    """Rank 1 stands still until rank 0 has made the last step."""
    _enter(context)
    state: dict[str, Any] = {"x": torch.zeros(1)}
    with ElasticJob(grace=0.5) as job:
        try:
            for attempt in job.steps(state, until=4):
                with attempt:
                    if attempt.step == 2 and context.rank == 1:
                        context.store.wait(["rank 0 is done"])
                        raise PeerLost("as after a long sleep", rank=0)
                    if attempt.step == 2 and job.size == 2:
                        raise PeerLost("rank 1 stands still")
                    attempt.commit()
        except RendezvousError as error:
            return str(error)
    context.store.set("rank 0 is done", "")
    return f"step {state['step']}"


def test_a_rank_that_stood_still_until_the_end_says_that_its_state_is_stale(pool: RankPool) -> None:
    first, second = _in_a_run(pool, _continued_too_late, 2)
    assert first == "step 4"
    assert "made the last step without this one, whose state is that of step 2" in second


def test_plain_values_of_all_kinds_are_copied() -> None:
    value = {
        "counter": Counter(a=3, b=1),
        "lists": defaultdict(list, x=[torch.ones(2)]),
        "ordered": OrderedDict(y=(1, torch.zeros(1))),
    }
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    sent = _separated(value, tensors, places)
    received: list[torch.Tensor] = []
    again = _joined(sent, received, [])
    for part, tensor in zip(received, tensors, strict=True):
        part.copy_(tensor)
    assert again["counter"] == Counter(a=3, b=1)
    assert again["lists"]["x"][0].tolist() == [1.0, 1.0]
    assert again["lists"]["other"] == []
    assert again["ordered"]["y"][0] == 1
    assert [type(each) for each in again.values()] == [Counter, defaultdict, OrderedDict]
    assert places == [0, 0]


def test_buffers_that_a_step_assigns_or_resizes_are_put_back() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("seen", torch.zeros(3))
    model.register_buffer("later", None)
    before = model.mean
    state = State({"model": model})
    state.prepare()
    model.mean = 0.9 * model.mean + 1
    model.seen.resize_(5).fill_(4)
    model.later = torch.ones(1)
    state.undo()
    assert model.mean is before
    assert model.mean.tolist() == [0.0, 0.0]
    assert model.seen.tolist() == [0.0] * 3
    assert model.later is None


def test_large_tensors_are_received_into_memory_of_their_own() -> None:
    for shape in ((), (0,), (3, 5), (2048, 2049)):
        made = _Slot(shape, torch.bfloat16, "cpu").empty()
        assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), torch.bfloat16, True)
        assert torch.equal(made.fill_(3), torch.full(shape, 3, dtype=torch.bfloat16))
    assert made.nbytes > _LARGE
