"""Ranks that a notebook starts: cells, errors, Ctrl-C, deaths, and the example executed by a real kernel."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import ringway.notebook
from ringway.backends.select import Obstacle
from ringway.errors import BackendUnavailable, UsageError
from ringway.notebook import CellFailed, Ranks
from ringway.notebook.channel import TOKEN_BYTES, Channel, accept, introduce
from ringway.notebook.ranks import _reason

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield ringway.notebook.start(2, "shm")
    ringway.notebook.stop()


@contextmanager
def _ctrl_c_in_cell(folder: Path, ranks: int) -> Iterator[str]:
    """Presses Ctrl-C once so many ranks have run the code that this yields."""
    folder.mkdir()
    ended = threading.Event()

    def press() -> None:
        while len(list(folder.iterdir())) < ranks:
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    try:
        yield f"open(f'{folder}/{{rank}}', 'w').close()"
    finally:
        ended.set()
        presses.join()


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_cells_values_errors_interrupts_and_deaths(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks.run("tensor = torch.ones(1) * (rank + 1)\ndist.all_reduce(tensor)\nprint('summed', end='')\ntensor.item()")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == ["[rank 0] summed", "[rank 1] summed"]  # as they come
    assert lines[2:] == ["[rank 0] 3.0", "[rank 1] 3.0"]
    ranks.push(three=3)
    assert ranks.pull("three + rank") == [3, 4]
    assert ranks.pull("rank", ranks=[1]) == [1]
    with pytest.raises(CellFailed, match=r"cannot pickle|Can't pickle"):
        ranks.pull("lambda: 0")
    # What only one side can unpickle is an error, and neither ends a rank nor leaves answers behind.
    ranks.run("class Own: pass")
    with pytest.raises(CellFailed, match=r"cannot be read here: AttributeError"):
        ranks.pull("Own()")
    sys.modules["only_here"] = only_here = ModuleType("only_here")
    exec("class Theirs: pass", only_here.__dict__)
    try:
        with pytest.raises(CellFailed, match="No module named 'only_here'"):
            ranks.push(theirs=only_here.Theirs())
    finally:
        del sys.modules["only_here"]
    assert ranks.pull("rank") == [0, 1]
    with pytest.raises(UsageError, match="no rank 2"):
        ranks.pull("rank", ranks=[2])
    capsys.readouterr()

    with pytest.raises(CellFailed, match="2 of 2 ranks failed: ZeroDivisionError") as failed:
        ranks.run("value = 1\nvalue / 0")
    shown = capsys.readouterr().err
    assert shown.startswith("[ranks 0, 1] Traceback")  # equal tracebacks once
    assert "    value / 0" in shown
    assert set(failed.value.errors) == {0, 1}
    with pytest.raises(CellFailed, match="SystemExit"):
        ranks.run("raise SystemExit(1)", ranks=[0])

    monkeypatch.setattr("ringway.notebook.ranks._INTERRUPT_SECONDS", 100.0)
    with (
        _ctrl_c_in_cell(tmp_path / "waits", 2) as begun,
        pytest.raises(CellFailed, match="the ranks are ready"),
    ):
        ranks.run(f"{begun}\nimport time\ndist.all_reduce(tensor) if rank == 0 else time.sleep(300)")
    # The interrupted call ended the group, so the ranks join a new one.
    assert ranks.pull("(dist.all_reduce(tensor), tensor.item())[1]") == [6.0, 6.0]

    # A rank that does not heed Ctrl-C answers late, and its answer is not taken for that of the next question.
    monkeypatch.setattr("ringway.notebook.ranks._INTERRUPT_SECONDS", 0.2)
    go_on = tmp_path / "go on"
    with (
        _ctrl_c_in_cell(tmp_path / "slow", 1) as begun,
        pytest.raises(CellFailed, match="interrupted, and rank 0 goes on"),
    ):
        ranks.run(
            f"import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{begun}\n"
            f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n'stale'",
            ranks=[0],
        )
    go_on.touch()
    assert ranks.pull("rank") == [0, 1]
    monkeypatch.setattr("ringway.notebook.ranks._INTERRUPT_SECONDS", 100.0)

    # Ctrl-C while a rank prints all the time.
    with (
        _ctrl_c_in_cell(tmp_path / "prints", 2) as begun,
        pytest.raises(CellFailed, match="the ranks are ready"),
    ):
        ranks.run(f"{begun}\nwhile True: print('x' * 300000)")
    assert ranks.pull("rank") == [0, 1]
    capsys.readouterr()

    with pytest.raises(CellFailed) as failed:
        ranks.run("import os\nos._exit(3) if rank == 1 else dist.all_reduce(tensor)")
    assert "PeerLost" in failed.value.errors[0]
    assert "has ended" in failed.value.errors[1]
    with pytest.raises(CellFailed, match="rank 1 has ended: restart"):
        ranks.run("rank")
    ranks.restart()
    assert ranks.pull("'tensor' in globals()") == [False, False]

    # A start that is refused leaves the ranks and their variables alone.
    ranks.run("kept = 5")
    for number, backend, said in (
        (0, None, "0 is not a number of ranks"),
        ("two", None, "'two' is not a number of ranks"),
        (2, "nosuch", "there is no backend 'nosuch'"),
    ):
        with pytest.raises(UsageError, match=said):
            ringway.notebook.start(number, backend)  # type: ignore[arg-type]
    monkeypatch.setattr("ringway.backends.select.obstacle", lambda name: Obstacle(f"no {name} here"))
    with pytest.raises(BackendUnavailable, match="no shm here"):
        ringway.notebook.start(2, "shm")
    assert ranks.pull("kept") == [5, 5]
    ringway.notebook.stop()
    with pytest.raises(CellFailed, match=r"these ranks were stopped: restart\(\)"):
        ranks.run("kept")


def test_restart_makes_ranks_current_again_and_refuses_ranks_that_were_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Ranks] = []
    monkeypatch.setattr(Ranks, "_start", lambda ranks: started.append(ranks))
    first = ringway.notebook.start(2)
    second = ringway.notebook.start(2)
    with pytest.raises(UsageError, match=r"start\(\) has replaced these ranks"):
        first.restart()
    second.restart()
    ringway.notebook.stop()
    first.restart()
    assert started == [first, second, second, first]
    stopped: list[Ranks] = []
    monkeypatch.setattr(Ranks, "stop", lambda ranks: stopped.append(ranks))
    ringway.notebook.stop()
    assert stopped == [first]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("when", "how", "said"),
    [
        ("import", "os._exit(3)", "failed with exit code 3"),
        ("import", "os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import", "os._exit(0)", "finished"),
        ("join", "os._exit(3)", "failed with exit code 3"),
    ],
)
def test_a_rank_that_dies_while_it_starts_is_reported_at_once(
    when: str, how: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it reaches the notebook, or after that, while the others wait for it. The time limit of a start is far
    longer than that of this test."""
    dies = f"os.write(2, b'out of luck\\n'); {how}"
    if when == "join":
        dies = f"import ringway; ringway.init_distributed = lambda *_, **__: exec({dies!r}, dict(os=os))"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n    {dies}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("ringway.notebook.ranks._START_SECONDS", 100_000.0)
    with pytest.raises(CellFailed, match=f"1 of 2 ranks failed: it {said} while it started") as failed:
        Ranks(2, "shm")
    assert failed.value.errors == {1: f"out of luck\nit {said} while it started\n"}
    assert "[rank 1] out of luck" in capfd.readouterr().err


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    token = bytes(range(TOKEN_BYTES))
    for said, rank in ((token, 1), (bytes(TOKEN_BYTES), None)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            introduce(theirs, said, 1)
            came = accept(ours, token)
            assert (came and came[0]) == rank


def test_a_message_that_is_not_read_is_given_up_and_one_that_is_read_slowly_arrives() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = threading.Thread(target=lambda: arrived.append(Channel(theirs).receive()))
        arrived: list[tuple[object, ...]] = []
        reader.start()
        Channel(ours).send("x" * 5_000_000)
        reader.join(120)
        assert arrived == [("x" * 5_000_000,)]
        with pytest.raises(OSError, match="did not read"):
            Channel(ours).send("x" * 5_000_000, given_up=lambda: True)
        with pytest.raises(OSError):  # noqa: PT011 - half a message, and then the end
            Channel(theirs).receive()


def test_magic_without_ranks_says_what_to_do() -> None:
    ringway.notebook.stop()
    with pytest.raises(UsageError, match=r"ringway\.notebook\.start"):
        ringway.notebook._cell("", "1")


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_example_runs_in_a_kernel() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    texts = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "[rank 1] tensor([3., 3., 3., 3.])" in texts[2]
    assert "1 of 2 ranks failed: ValueError: rank 1 does not like this" in "".join(texts)


def test_the_reason_of_an_error_is_not_its_note() -> None:
    """pickle adds notes from Python 3.14 on."""
    frames = 'Traceback (most recent call last):\n  File "<cell 1>", line 1, in <module>\n    send(lock)\n'
    assert _reason(f"{frames}TypeError: cannot pickle 'lock'\nwhen serializing tuple item 2\n").startswith("TypeError")
    assert _reason(f"{frames}CollectiveMismatch: ranks differ\n  rank 0: barrier\n").endswith("ranks differ")
    assert _reason("rank 1 died") == "rank 1 died"
