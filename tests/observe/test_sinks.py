"""The logger's counts as other tools receive them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringway
from ringway.errors import BackendUnavailable
from ringway.groups.world import world
from ringway.observe.log.summary import USER_OP
from ringway.observe.sinks import (
    JsonLines,
    OpenTelemetry,
    Prometheus,
    PrometheusRegistry,
    TensorBoard,
    WeightsAndBiases,
    publish,
    samples,
)

NAME = 'my "op"\n'


@pytest.fixture(autouse=True)
def some_calls() -> Iterator[None]:
    ringway.configure(enabled=True, prof_all=True)
    ringway.reset_log()
    for _ in range(3):
        world.recorder.log(USER_OP, NAME, 4, 1 << 20, 2_000_000)
    yield
    ringway.reset_log()
    ringway.configure(enabled=False)


def test_json_lines_are_appended_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "comms-0.jsonl"
    with publish(JsonLines(tmp_path / "comms-{rank}.jsonl"), every=3600):
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
    assert (tmp_path / "comms-0.jsonl.1").exists()


def test_prometheus_can_scrape_on_loopback() -> None:
    sink = Prometheus()
    assert sink._server.server_address[0] == "127.0.0.1"
    with publish(sink, every=0.05):
        deadline = time.monotonic() + 60
        text = ""
        while "ringway_calls_total{" not in text and time.monotonic() < deadline:
            time.sleep(0.01)
            text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10).read().decode()
        assert 'ringway_calls_total{name="my \\"op\\"\\n",bytes="1048576",rank="0"} 3' in text
        assert "# TYPE ringway_calls_total counter" in text
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/else", timeout=10)
    with pytest.raises(OSError, match=r"refused|Connection"):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10)


def test_the_endpoint_uses_the_format_of_prometheus() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    sink = Prometheus()
    sink.write(samples())
    families = {family.name: family for family in parser.text_string_to_metric_families(sink.text)}
    sink.close()
    assert {name: family.type for name, family in families.items()} == {
        "ringway_calls": "counter",
        "ringway_call_seconds": "counter",
        "ringway_call_p99_seconds": "gauge",
        "ringway_bus_bytes_per_second": "gauge",
    }
    [calls] = families["ringway_calls"].samples
    assert calls.labels == {"name": NAME, "bytes": "1048576", "rank": "0"}
    assert calls.value == 3


def test_a_registry_of_prometheus_client_has_the_same_metrics() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    labels = {"name": NAME, "bytes": "1048576", "rank": "0"}
    with publish(PrometheusRegistry(registry), every=3600):
        assert registry.get_sample_value("ringway_calls_total", labels) is None
    assert registry.get_sample_value("ringway_calls_total", labels) is None  # it is removed at the end of the block
    sink = PrometheusRegistry(registry)
    sink.write(samples())
    assert registry.get_sample_value("ringway_calls_total", labels) == 3
    assert registry.get_sample_value("ringway_call_seconds_total", labels) == pytest.approx(0.006)
    assert b"ringway_bus_bytes_per_second" in prometheus_client.generate_latest(registry)


def test_tensorboard_can_read_the_files(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with publish(TensorBoard(tmp_path), every=3600):
        pass
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"comms/{NAME}/1048576/mean_ms", f"comms/{NAME}/1048576/bus_GBps"}
    [event] = events.Scalars(f"comms/{NAME}/1048576/mean_ms")
    assert (event.step, event.value) == (1, pytest.approx(2.0))


def test_the_programs_own_writer_stays_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with publish(TensorBoard(writer), every=3600):
        pass
    writer.add_scalar("loss", 1.0, 7)
    writer.close()
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert "loss" in events.Tags()["scalars"]
    assert len(events.Tags()["scalars"]) == 3


def test_wandb_gets_the_metrics_and_keeps_its_steps(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    try:
        run.log({"loss": 1.0})
        with publish(WeightsAndBiases(run), every=3600):
            pass
        run.log({"loss": 0.5})
        summary = dict(run.summary)
    finally:
        run.finish()
    assert summary[f"comms/{NAME}/1048576/mean_ms"] == pytest.approx(2.0)
    assert (summary["loss"], summary["_step"]) == (0.5, 1)  # a separate row would have made it 2


def test_opentelemetry_gets_the_increase_since_the_last_sample() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    sink = OpenTelemetry(provider.get_meter("ringway"))

    def totals() -> dict[str, Any]:
        [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
        return {metric.name: metric.data.data_points[0] for metric in scope.metrics}

    sink.write(samples())
    world.recorder.log(USER_OP, NAME, 4, 1 << 20, 2_000_000)
    sink.write(samples())
    assert totals()["ringway.calls"].value == 4
    assert totals()["ringway.call.time"].value == pytest.approx(0.008)
    assert dict(totals()["ringway.calls"].attributes) == {"name": NAME, "bytes": 1 << 20, "rank": 0}
    ringway.reset_log()  # OpenTelemetry's counters never decrease
    world.recorder.log(USER_OP, NAME, 4, 1 << 20, 2_000_000)
    sink.write(samples())
    assert totals()["ringway.calls"].value == 5
    provider.shutdown()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, extra, make in (
        ("prometheus_client", "prometheus", PrometheusRegistry),
        ("torch.utils.tensorboard", "tensorboard", lambda: TensorBoard(tmp_path)),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(BackendUnavailable, match=rf"ringway\[{extra}\]"):
            make()


def test_publishing_warns_if_the_logger_is_off(tmp_path: Path) -> None:
    ringway.configure(enabled=False)
    with pytest.warns(UserWarning, match="logger is off"), publish(JsonLines(tmp_path / "x"), every=3600):
        pass


@pytest.mark.processes
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "comms.jsonl"
    program = f"""
import resource, signal, warnings, ringway
from ringway.observe.sinks import JsonLines, publish
from ringway.groups.world import world
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ringway.configure(enabled=True)
world.recorder.log(255, "op", 2, 8, 1000)
sink = JsonLines({str(path)!r})
with publish(sink, every=3600):
    pass
one = len(open({str(path)!r}).read())
resource.setrlimit(resource.RLIMIT_FSIZE, (one + one // 2, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught, publish(sink, every=3600):
    warnings.simplefilter("always")
print([str(warning.message) for warning in caught])
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "training continues" in finished.stdout
    [line] = path.read_text().splitlines()
    assert json.loads(line)["name"] == "op"


def test_a_failing_sink_warns_once() -> None:
    class Broken:
        def write(self, samples: Any) -> None:
            raise OSError("the disk is full")

        def close(self) -> None:
            raise OSError("still full")

    with pytest.warns(UserWarning, match="the disk is full") as caught, publish(Broken(), every=3600):
        pass
    assert len(caught) == 1
