"""The counts as other tools get them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringway
from ringway.observe.books import USER_OP
from ringway.observe.sinks import JsonLines, OpenTelemetry, Prometheus, TensorBoard, WeightsAndBiases, publish
from ringway.world import world


@pytest.fixture(autouse=True)
def some_calls() -> Iterator[None]:
    ringway.configure(enabled=True, prof_all=True)
    ringway.reset_log()
    for _ in range(3):
        world.recorder.log(USER_OP, 'my "op"\n', 4, 1 << 20, 2_000_000)
    yield
    ringway.reset_log()
    ringway.configure(enabled=False)


def test_json_lines_are_appended_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "comms.jsonl"
    with publish(JsonLines(path), every=3600):
        pass
    [line] = path.read_text().splitlines()
    sample = json.loads(line)
    assert (sample["name"], sample["nbytes"], sample["count"], sample["rank"]) == ('my "op"\n', 1 << 20, 3, 0)
    assert sample["mean_ms"] == pytest.approx(2.0)
    assert sample["bus_gigabytes_a_second"] == pytest.approx((1 << 20) / 2e6)
    for _ in range(5):
        with publish(JsonLines(path, limit=2 * len(line) + 10), every=3600):
            pass
    assert len(path.read_text().splitlines()) <= 2
    assert (tmp_path / "comms.jsonl.1").exists()


def test_prometheus_is_scraped_on_loopback() -> None:
    sink = Prometheus()
    assert sink._server.server_address[0] == "127.0.0.1"
    with publish(sink, every=0.05):
        deadline = 200
        text = ""
        while "ringway_calls_total{" not in text and deadline:
            text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10).read().decode()
            deadline -= 1
        assert 'ringway_calls_total{name="my \\"op\\"\\n",bytes="1048576",rank="0"} 3' in text
        assert "# TYPE ringway_calls_total counter" in text
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/else", timeout=10)
    with pytest.raises(OSError, match=r"refused|Connection"):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10)


class Kept:
    """Stands for a writer, a run and a meter: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def add_scalar(self, *told: Any) -> None:
        self.told.append(told)

    def log(self, *told: Any) -> None:
        self.told.append(told)

    def add(self, *told: Any) -> None:
        self.told.append(told)

    def create_counter(self, name: str, unit: str, description: str) -> Kept:
        return self

    def flush(self) -> None:
        self.told.append(("flushed",))


def test_tensorboard_wandb_and_opentelemetry_get_their_own_shapes() -> None:
    board, run, meter = Kept(), Kept(), Kept()
    for sink in (TensorBoard(board), WeightsAndBiases(run)):
        with publish(sink, every=3600):
            pass
    assert board.told[0] == ('comms/my "op"\n/1048576/mean_ms', pytest.approx(2.0), 1)
    assert board.told[-1] == ("flushed",)
    assert run.told == [({k: pytest.approx(v) for k, v in run.told[0][0].items()},)]
    assert set(run.told[0][0]) == {'comms/my "op"\n/1048576/mean_ms', 'comms/my "op"\n/1048576/bus_GBps'}
    counters = OpenTelemetry(meter)
    from ringway.observe.sinks import samples

    counters.write(samples())
    world.recorder.log(USER_OP, 'my "op"\n', 4, 1 << 20, 2_000_000)
    counters.write(samples())
    assert [told[0] for told in meter.told] == [3, pytest.approx(0.006), 1, pytest.approx(0.002)]


def test_a_sink_that_fails_is_a_warning_once() -> None:
    class Broken:
        def write(self, samples: Any) -> None:
            raise OSError("the disk is full")

        def close(self) -> None:
            raise OSError("still full")

    with pytest.warns(UserWarning, match="the disk is full") as caught, publish(Broken(), every=3600):
        pass
    assert len(caught) == 1
