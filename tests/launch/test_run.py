"""`ringway run`: output, deaths, signals, and a store that outlives any rank."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ringway.errors import RendezvousError, UsageError
from ringway.launch import run as launcher
from ringway.launch.info import LaunchInfo
from ringway.launch.invitation import Invitation
from ringway.launch.live import Progress
from ringway.launch.rank_processes import RankProcesses
from ringway.launch.rendezvous import LastingStore
from ringway.launch.run import run
from ringway.testing import RankContext, RankPool

Ended = tuple[int, str]


def _run(context: RankContext, command: list[str], ranks: int, on_death: str = "stop") -> Ended:
    outcome = run(command, ranks, on_death=on_death)
    return outcome.code, outcome.summary


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def _try(pool: RankPool, *arguments: object) -> tuple[Ended, str]:
    """The launcher runs in a process of the pool, which has imported torch. Its output is what a user sees."""
    (ended,) = pool.try_run(_run, *arguments, world_size=1, timeout=120)
    assert ended.ok, ended
    return ended.value, ended.output


def test_output_carries_the_rank_and_all_variables_are_there(pool: RankPool) -> None:
    script = 'echo "I am $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR"; echo oops >&2'
    (code, summary), output = _try(pool, _shell(script), 3)
    assert code == 0
    assert summary.startswith("3 ranks finished in ")
    for rank in range(3):
        assert f"[rank {rank}] I am {rank} of 3, {rank} of 3, 127.0.0.1" in output
        assert f"[rank {rank}] oops" in output


def test_lines_of_several_ranks_stay_whole(pool: RankPool) -> None:
    """Half a line, bytes that are not text, and a last line without a newline."""
    script = r"printf half; sleep 0.5; printf ' and half] \n\377\376\n'; printf end"
    (code, _), output = _try(pool, _shell(script), 2)
    assert code == 0
    lines = output.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] half and half] ", f"[rank {rank}] \ufffd\ufffd", f"[rank {rank}] end"], output


def test_a_character_written_in_two_pieces_is_shown_whole(pool: RankPool) -> None:
    (_, _), output = _try(pool, _shell(r"printf 'caf\303'; sleep 0.3; printf '\251\n'"), 1)
    assert output.splitlines() == ["café"], "one rank needs no label"
    (_, _), output = _try(pool, _shell(r"printf '10%%\r'; sleep 0.3; printf '100%%\r\n'"), 1)
    assert output.splitlines() == ["10%", "100%"]


def _in_an_empty_folder(context: RankContext, folder: str, command: list[str]) -> list[str]:
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        run(command, 1)
    finally:
        tempfile.tempdir = before
    return os.listdir(folder)


def test_output_is_not_kept_in_files(pool: RankPool, tmp_path: Path) -> None:
    (ended,) = pool.try_run(
        _in_an_empty_folder, str(tmp_path), _shell(f"seq 100000; ls {tmp_path} | wc -l"), world_size=1, timeout=100
    )
    assert ended.value == []
    assert ended.output.splitlines()[-2:] == ["100000", "0"]


BACKGROUND = (
    "sleep 300 & echo $! > $0.$RANK.child; setsid sleep 301 & echo $! > $0.$RANK.session; "
    "env -i sleep 302 & echo $! > $0.$RANK.bare; echo $$ > $0.$RANK.rank; "
)
"""Starts three processes that a rank may leave behind, and writes their ids to files, the rank's last."""


def _ids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.iterdir()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_processes_that_ranks_leave_behind_end_with_the_run(pool: RankPool, tmp_path: Path) -> None:
    (code, _), _ = _try(pool, ["sh", "-c", BACKGROUND + "true", str(tmp_path / "pid")], 2)
    assert code == 0
    assert len(_ids(tmp_path)) == 8
    assert not any(map(_runs, _ids(tmp_path)))


def _killed_launcher(context: RankContext, command: list[str], folder: str, temporary: str) -> list[Any]:
    """Kills a launcher whose ranks are ready. Returns their processes that still run after that, and what is left of it
    in the temporary directory."""
    child = os.fork()
    if child == 0:
        tempfile.tempdir = temporary
        run(command, 2)
        os._exit(0)
    deadline = time.monotonic() + 60
    while len(list(Path(folder).glob("*.rank"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pids = _ids(Path(folder))
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [*(pid for pid in pids if _runs(pid)), *os.listdir(temporary)]


def test_nothing_survives_a_launcher_that_is_killed(pool: RankPool, tmp_path: Path) -> None:
    ids, temporary = tmp_path / "ids", tmp_path / "temporary"
    ids.mkdir()
    temporary.mkdir()
    command = ["sh", "-c", BACKGROUND + "while :; do sleep 0.05; done", str(ids / "pid")]
    (left,) = pool.run(_killed_launcher, command, str(ids), str(temporary), world_size=1, timeout=100)
    assert left == []
    assert len(_ids(ids)) == 8


def test_program_that_cannot_be_started_is_named(pool: RankPool, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("neither a script nor a program")
    program.chmod(0o755)
    (ended,) = pool.try_run(_run, [str(program)], 2, world_size=1, timeout=120)
    assert not ended.ok
    assert "Exec format error" in str(ended)


def test_first_failure_stops_the_others_and_gives_the_exit_code(pool: RankPool) -> None:
    began = time.monotonic()
    (code, summary), output = _try(pool, _shell("test $RANK = 1 && exit 7; sleep 100; echo late"), 3)
    assert code == 7
    assert "rank 1 (pid " in summary
    assert "failed with exit code 7" in summary
    assert "stopped: 0, 2" in summary
    assert "late" not in output
    assert time.monotonic() - began < 60


def test_killed_rank_is_named_by_its_signal(pool: RankPool) -> None:
    (code, summary), _ = _try(pool, _shell("test $RANK = 0 && kill -SEGV $$; sleep 100"), 2)
    assert code == 128 + signal.SIGSEGV
    assert "rank 0" in summary
    assert "was killed by SIGSEGV" in summary


def test_others_are_kept_when_asked_for(pool: RankPool) -> None:
    (code, summary), output = _try(pool, _shell("test $RANK = 0 && exit 3; sleep 0.5; echo done"), 3, "keep")
    assert code == 3
    assert "finished: 1, 2" in summary
    assert output.count("done") == 2


def _run_elastic(context: RankContext, command: list[str], ranks: int, fewest: int, restarts: int) -> Ended:
    outcome = run(command, ranks, elastic=launcher.Elastic(fewest, restarts))
    return outcome.code, outcome.summary


def _try_elastic(pool: RankPool, script: str, *arguments: object) -> tuple[Ended, str]:
    (ended,) = pool.try_run(_run_elastic, _shell(script), *arguments, world_size=1, timeout=120)
    assert ended.ok, ended
    return ended.value, ended.output


def test_an_elastic_run_starts_ranks_again(pool: RankPool, tmp_path: Path) -> None:
    """Rank 1 fails once and is killed once; the others wait for its third start."""
    mark = tmp_path / "mark"
    script = (
        f"if [ $RANK = 1 ]; then echo x >> {mark}; test $(wc -l < {mark}) = 1 && exit 3; "
        f"test $(wc -l < {mark}) = 2 && kill -9 $$; touch {mark}.done; fi; "
        f"while [ ! -e {mark}.done ]; do sleep 0.05; done; echo min $RINGWAY_MIN_RANKS"
    )
    (code, summary), output = _try_elastic(pool, script, 3, 2, 2)
    assert code == 0, output
    assert summary.startswith("3 ranks finished")
    assert output.count("min 2") == 3
    assert "failed with exit code 3; 2 of 3 run; it starts again in 1 s (restart 1 of 2)" in output
    assert "was killed by SIGKILL; 2 of 3 run; it starts again in 2 s (restart 2 of 2)" in output


def test_a_restarted_rank_has_the_secret_of_the_job_that_lives_and_another_run_has_another(
    pool: RankPool, tmp_path: Path
) -> None:
    """The other ranks go on with the secret that they have, so the restarted one needs the same."""
    told = tmp_path / "secrets"
    script = f"echo $RANK $(sha256sum <$RINGWAY_JOB_SECRET_FILE) >> {told}"
    script += f"; test $RANK = 1 && test $(grep -c ^1 {told}) = 1 && exit 3"
    script += f"; while test $(wc -l <{told}) -lt 3; do sleep 0.02; done"
    seen = []
    for _ in range(2):
        told.write_text("")
        (code, _), output = _try_elastic(pool, script, 2, 2, 1)
        assert code == 0, output
        lines = [line.split()[:2] for line in told.read_text().splitlines()]
        assert sorted(rank for rank, _ in lines) == ["0", "1", "1"]
        (secret,) = {secret for _, secret in lines}
        seen.append(secret)
    assert seen[0] != seen[1]


def test_an_elastic_run_ends_with_too_few_ranks(pool: RankPool) -> None:
    (code, summary), output = _try_elastic(pool, "test $RANK = 0 && exit 4; sleep 100", 2, 2, 0)
    assert code == 4
    assert "rank 0" in summary
    assert "1 ranks are left, and the job needs 2: it ends" in output


def _run_with_long_polls(context: RankContext, command: list[str]) -> Ended:
    with patch.object(launcher, "_POLL", 1.0):
        return _run_elastic(context, command, 3, 3, 0)


def test_too_few_ranks_are_a_failure_though_one_ended_well_at_the_same_time(pool: RankPool) -> None:
    command = _shell("test $RANK = 0 && exit 4; test $RANK = 1 && exit 0; sleep 100")
    (ended,) = pool.try_run(_run_with_long_polls, command, world_size=1, timeout=120)
    assert ended.ok, ended
    code, summary = ended.value
    assert "1 ranks are left, and the job needs 3: it ends" in ended.output
    assert code == 4, summary
    assert summary.endswith("stopped: 2; finished: 1")


class Ranks(RankProcesses):
    """Two ranks, whose ends do not matter."""

    def __init__(self) -> None:
        self._first = 0

    def __len__(self) -> int:
        return 2


def test_a_run_whose_ranks_were_stopped_did_not_finish() -> None:
    outcome = launcher._outcome(Ranks(), [], [1], time.monotonic())
    assert outcome.code == 1
    assert outcome.summary.endswith("stopped: 1")


def _run_and_lose_one(context: RankContext, command: list[str], told: str) -> Ended:
    """The file `told` appears once the launcher has said that a rank is lost."""
    say = Progress.say

    def say_and_mark(progress: Progress, line: str) -> None:
        say(progress, line)
        Path(told).touch()

    with patch.object(Progress, "say", say_and_mark):
        return _run_elastic(context, command, 2, 1, 0)


def test_a_rank_that_an_elastic_run_lost_for_good_is_no_failure_of_the_job(pool: RankPool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = _shell(f"test $RANK = 0 && exit 4; while ! test -e {told}; do sleep 0.02; done")
    (ended,) = pool.try_run(_run_and_lose_one, command, str(told), world_size=1)
    assert ended.ok, ended
    assert ended.value[0] == 0, ended.output
    assert "failed with exit code 4; 1 of 2 run" in ended.output


def test_a_rank_that_fails_after_others_have_left_is_a_failure_of_the_job(pool: RankPool, tmp_path: Path) -> None:
    """It is started again, because the job has not made its last step."""
    starts = tmp_path / "starts"
    script = f"test $RANK = 1 && exit 0; echo x >> {starts}; sleep 0.6; exit 5"
    (code, summary), output = _try_elastic(pool, script, 2, 1, 1)
    assert code == 5, output
    assert "rank 0" in summary
    assert starts.read_text() == "x\nx\n"


def _run_without_memory(context: RankContext, command: list[str]) -> Ended:
    """The second start of a rank fails, as if there were no memory."""
    start_again, tries = RankProcesses.start_again, []

    def start(*given: Any) -> None:
        tries.append(given)
        if len(tries) == 1:
            raise OSError(errno.ENOMEM, "no memory")
        start_again(*given)

    with patch.object(RankProcesses, "start_again", start):
        return _run_elastic(context, command, 2, 1, 2)


def test_a_restart_that_fails_is_tried_again_and_ends_no_other_rank(pool: RankPool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"if [ $RANK = 1 ]; then test -e {mark} || {{ touch {mark}; exit 3; }}; touch {mark}.done; fi; "
    script += f"while [ ! -e {mark}.done ]; do sleep 0.05; done"
    (ended,) = pool.try_run(_run_without_memory, _shell(script), world_size=1, timeout=120)
    assert ended.ok, ended
    assert ended.value[0] == 0, ended.output
    assert "could not be started" in ended.output


def _run_and_join(context: RankContext) -> tuple[list[int], list[str]]:
    """A launcher of this process is joined by one of a child: both see the same store and secret."""
    refused = []
    for wrong in (os.getpid(), 1 << 30):
        try:
            launcher.join(_shell("true"), 1, str(wrong))
        except UsageError as error:
            refused.append(str(error))
    script = 'test $(wc -c < $RINGWAY_JOB_SECRET_FILE) = 64 && echo "$WORLD_SIZE ranks at $RINGWAY_RUN_STORE"'
    with launcher.store_of_a_run() as variables, Invitation(variables, 2):
        child = os.fork()
        if child == 0:
            os._exit(launcher.join(_shell(script), 2, str(os.getppid())).code)
        joined = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"expected: 2 ranks at {variables['RINGWAY_RUN_STORE']}", flush=True)
    return [joined], refused


def test_ranks_join_the_run_of_another_launcher(pool: RankPool) -> None:
    (ended,) = pool.try_run(_run_and_join, world_size=1, timeout=120)
    assert ended.ok, ended
    assert ended.value[0] == [0]
    expected = ended.output.split("expected: ")[1].splitlines()[0]
    assert f"[rank 0] {expected}" in ended.output
    assert f"[rank 1] {expected}" in ended.output
    assert "is not the launcher of a 'ringway run --elastic'" in ended.value[1][0]
    assert "there is no process" in ended.value[1][1]


def _join_with(variables: dict[str, str], command: list[str]) -> int:
    """A child joins the run of this process, with only these of the user's variables."""
    child = os.fork()
    if child == 0:
        for name in ("RINGWAY_WITNESS", "RINGWAY_JOB_TOKEN"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        code = 99
        try:
            for _ in range(1000):
                try:
                    Invitation.of(os.getppid())
                    break
                except UsageError:  # not yet
                    time.sleep(0.02)
            code = launcher.join(command, 1, str(os.getppid())).code
        except UsageError as error:
            print(f"refused: {error}", flush=True)
            code = 98
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def _run_with_variables(context: RankContext, told: str) -> tuple[list[int], int]:
    says = _shell(f'echo "told $RINGWAY_WITNESS $RINGWAY_JOB_TOKEN"; touch {told}')
    others = {"RINGWAY_JOB_TOKEN": "other"}, {"RINGWAY_WITNESS": "redis://127.0.0.1:2/0"}, {}
    children = [_join_with(variables, says) for variables in others]
    os.environ.update(RINGWAY_WITNESS="redis://127.0.0.1:1/0", RINGWAY_JOB_TOKEN="ours")
    waits = _shell(f"while ! test -e {told}; do sleep 0.05; done")
    outcome = run(waits, 1, elastic=launcher.Elastic(1, 0, lambda store: None))
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], outcome.code


def test_ranks_that_join_get_the_witness_and_the_token_of_the_run(pool: RankPool, tmp_path: Path) -> None:
    (ended,) = pool.try_run(_run_with_variables, str(tmp_path / "told"), world_size=1, timeout=120)
    assert ended.ok, ended
    assert ended.value == ([98, 98, 0], 0), ended.output
    assert "told redis://127.0.0.1:1/0 ours" in ended.output
    assert "RINGWAY_JOB_TOKEN is not the same here and where the run was started" in ended.output
    assert "RINGWAY_WITNESS is not the same here and where the run was started" in ended.output


def test_a_rank_with_another_token_than_its_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher.store_of_a_run() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        info = LaunchInfo(
            rank=0,
            size=1,
            source="ringway run",
            job=variables["RINGWAY_RUN_ID"],
            socket=variables["RINGWAY_RUN_STORE"],
        )
        LastingStore(info, 5.0)
        with pytest.raises(RendezvousError, match="another RINGWAY_JOB_TOKEN than the launcher"):
            LastingStore(info, 5.0, token="another")


_USES_STORE_AFTER_DEATH = """
import os, signal, time
from ringway.launch.discover import discover
from ringway.launch.rendezvous import rendezvous
info = discover()
assert info.source == "ringway run" and info.hosted_by_launcher
store = rendezvous(info, 60, token=os.environ["RINGWAY_JOB_TOKEN"])
if info.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
store.set(f"alive {info.rank}", "yes")
store.wait([f"alive {info.rank}"])
print("the store lives", flush=True)
"""


def test_store_outlives_rank_0(pool: RankPool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_USES_STORE_AFTER_DEATH)
    environment: dict[str, str | None] = {"RINGWAY_JOB_TOKEN": "the user's"}  # part of the identity on both sides
    (ended,) = pool.try_run(
        _run, [sys.executable, str(program)], 2, "keep", world_size=1, timeout=120, environment=environment
    )
    assert ended.ok, ended
    assert ended.value[0] == 128 + signal.SIGKILL, ended.output
    assert "rank 0" in ended.value[1]
    assert "the store lives" in ended.output


_PLAIN_TORCH = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(f"plain torch sees {tensor[0].item():.0f}", flush=True)
dist.destroy_process_group()
"""


def test_program_of_plain_torch_runs_too(pool: RankPool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PLAIN_TORCH)
    (code, _), output = _try(pool, [sys.executable, str(program)], 2)
    assert code == 0, output
    assert output.count("plain torch sees 2") == 2


def _signal_when_ready(context: RankContext, number: int, script: str, ready: str) -> Ended:
    """Send this process, the launcher, a signal once both ranks have written their file."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not all(Path(ready + str(rank)).exists() for rank in range(2)) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()
    outcome = run(["sh", "-c", script, ready], 2, grace=20)
    return outcome.code, outcome.summary


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_reaches_every_rank_and_ends_the_run(pool: RankPool, tmp_path: Path, name: str) -> None:
    script = f"trap 'echo saw {name}; exit 0' {name[3:]}; touch $0$RANK; while :; do sleep 0.05; done"
    arguments = (getattr(signal, name), script, str(tmp_path / "ready"))
    (ended,) = pool.try_run(_signal_when_ready, *arguments, world_size=1, timeout=100)
    assert ended.ok, ended
    assert ended.value[0] == 128 + getattr(signal, name)
    assert f"ended by {name}" in ended.value[1]
    assert ended.output.count(f"saw {name}") == 2


def _signal_while_ranks_start(context: RankContext, script: str, ready: str) -> Ended:
    start = launcher.RankProcesses.start

    def start_and_signal(self: launcher.RankProcesses, *arguments: object) -> None:
        start(self, *arguments)  # type: ignore[arg-type]
        deadline = time.monotonic() + 60
        while not Path(ready + "0").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    launcher.RankProcesses.start = start_and_signal  # type: ignore[method-assign]
    try:
        outcome = run(["sh", "-c", script, ready], 2, grace=20)
    finally:
        launcher.RankProcesses.start = start  # type: ignore[method-assign]
    return outcome.code, outcome.summary


def test_signal_while_ranks_start_reaches_those_that_have_started(pool: RankPool, tmp_path: Path) -> None:
    script = "trap 'echo saw SIGINT; exit 0' INT; touch $0$RANK; while :; do sleep 0.05; done"
    arguments = (script, str(tmp_path / "ready"))
    (ended,) = pool.try_run(_signal_while_ranks_start, *arguments, world_size=1, timeout=100)
    assert ended.ok, ended
    assert ended.value[0] == 128 + signal.SIGINT
    assert ended.output.count("saw SIGINT") == 1


def _insist(context: RankContext, script: str, ready: str) -> tuple[Ended, float]:
    """Repeat Ctrl-C until the ranks, which ignore it, are gone."""
    ended = threading.Event()

    def watch() -> None:
        while not all(Path(ready + str(rank)).exists() for rank in range(2)):
            time.sleep(0.02)
        while not ended.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for signals that arrive after the run
    outcome = run(["sh", "-c", script, ready], 2, grace=100)
    ended.set()
    return (outcome.code, outcome.summary), time.monotonic() - began


def test_ctrl_c_again_does_not_wait_for_ranks_that_ignore_it(pool: RankPool, tmp_path: Path) -> None:
    script = "trap '' INT TERM; touch $0$RANK; while :; do sleep 0.05; done"
    (ended,) = pool.try_run(_insist, script, str(tmp_path / "ready"), world_size=1, timeout=100)
    assert ended.ok, ended
    (code, summary), seconds = ended.value
    assert (code, summary.startswith("ended by SIGINT")) == (128 + signal.SIGINT, True)
    assert seconds < 50
    pool.replace()  # that process now ignores Ctrl-C


def test_user_signal_is_passed_on_without_ending_the_run(pool: RankPool, tmp_path: Path) -> None:
    script = "trap 'echo saw it; exit 0' USR1; touch $0$RANK; while :; do sleep 0.05; done"
    arguments = (signal.SIGUSR1, script, str(tmp_path / "ready"))
    (ended,) = pool.try_run(_signal_when_ready, *arguments, world_size=1, timeout=100)
    assert ended.ok, ended
    assert ended.value[0] == 0
    assert ended.output.count("saw it") == 2
