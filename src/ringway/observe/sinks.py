"""The logger's counts for other tools: JSON lines, Prometheus, TensorBoard, Weights & Biases, OpenTelemetry.

    with publish(JsonLines("comms-{rank}.jsonl"), every=30):
        train()

A thread reads the counts periodically and passes them to the sink, so the calls themselves cost nothing extra. A sink
that fails causes one warning and never stops training. Each sink imports the library it needs, which is one of
ringway's extras: `pip install ringway[tensorboard]`.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ringway.errors import BackendUnavailable
from ringway.observe.files import append_whole, filled
from ringway.observe.flight import own_rank
from ringway.observe.log.logger import logger
from ringway.threads import start


@dataclass(frozen=True)
class Sample:
    """Totals of all logged calls of one name and size so far, on this rank."""

    rank: int
    name: str
    nbytes: int
    count: int
    seconds: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    bus_gigabytes_a_second: float


class Sink(Protocol):
    """Receives the counts repeatedly, from one thread."""

    def write(self, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


def samples() -> list[Sample]:
    rank = own_rank()
    return [
        Sample(
            rank,
            line.name,
            line.nbytes,
            line.count,
            line.total_ns / 1e9,
            line.mean_ms,
            line.p50_ns / 1e6,
            line.p99_ns / 1e6,
            line.max_ns / 1e6,
            line.bus_gbps / 8,
        )
        for sizes in logger.table().values()
        for line in sizes.values()
    ]


@contextmanager
def publish(sink: Sink, every: float = 30.0) -> Iterator[None]:
    """Pass the counts to the sink every `every` seconds in this context, and once at the end. The logger must be on."""
    if not logger.settings.enabled:
        warnings.warn("ringway: the comms logger is off, so nothing is published until it is on", stacklevel=3)
    done = threading.Event()
    failed = False

    def write() -> None:
        nonlocal failed
        try:
            sink.write(samples())
        except Exception as error:
            if not failed:
                warnings.warn(f"ringway: {type(sink).__name__} failed: {error}; training continues", stacklevel=2)
            failed = True

    def run() -> None:
        while not done.wait(every):
            write()

    thread = start("ringway-sink", run)
    try:
        yield
    finally:
        done.set()
        thread.join(10.0)
        if not thread.is_alive():  # do not call a sink that hangs a second time
            write()
            with suppress(Exception):
                sink.close()


def _missing(extra: str, error: ImportError) -> BackendUnavailable:
    return BackendUnavailable(extra, str(error), remedy=f"pip install ringway[{extra}]")


class JsonLines:
    """One line of JSON per sample. At `limit` bytes, the file is renamed to `path.1` and a new one begins. Each rank
    needs its own file: `{rank}` and `{pid}` are filled in."""

    def __init__(self, path: str | os.PathLike[str], limit: int = 64 << 20) -> None:
        self._path = os.fspath(path)
        self._limit = limit

    def write(self, samples: Sequence[Sample]) -> None:
        now, path = time.time(), filled(self._path, own_rank())
        text = "".join(json.dumps({"time": now, **asdict(sample)}) + "\n" for sample in samples).encode()
        with suppress(FileNotFoundError):
            if os.stat(path).st_size + len(text) > self._limit:
                os.replace(path, f"{path}.1")
        append_whole(path, text)

    def close(self) -> None:
        return None


_METRICS: tuple[tuple[str, str, str, Callable[[Sample], float]], ...] = (
    ("ringway_calls_total", "counter", "Logged calls", lambda s: s.count),
    ("ringway_call_seconds_total", "counter", "Time from issue to completion", lambda s: s.seconds),
    ("ringway_call_p99_seconds", "gauge", "99th percentile of a call", lambda s: s.p99_ms / 1e3),
    ("ringway_bus_bytes_per_second", "gauge", "Bus bandwidth", lambda s: s.bus_gigabytes_a_second * 1e9),
)


class Prometheus:
    """An endpoint to scrape, on loopback unless another address is given. `port` 0 takes a free one."""

    def __init__(self, port: int = 0, address: str = "127.0.0.1") -> None:
        sink = self

        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                body = sink.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self.text = ""
        self._server = http.server.ThreadingHTTPServer((address, port), Page)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        start("ringway-prometheus", self._server.serve_forever)

    def write(self, samples: Sequence[Sample]) -> None:
        lines = []
        for metric, kind, about, value in _METRICS:
            lines += [f"# HELP {metric} {about}", f"# TYPE {metric} {kind}"]
            for sample in samples:
                name = sample.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                labels = f'name="{name}",bytes="{sample.nbytes}",rank="{sample.rank}"'
                lines.append(f"{metric}{{{labels}}} {value(sample):.9g}")
        self.text = "\n".join(lines) + "\n"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class PrometheusRegistry:
    """The same metrics in a prometheus_client registry, for a program that already has an endpoint. A `registry` of
    None is that library's default."""

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError as error:
            raise _missing("prometheus", error) from None
        self._families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        self._samples: Sequence[Sample] = ()
        self._registry = registry or prometheus_client.REGISTRY
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """prometheus_client calls this at each scrape."""
        for metric, kind, about, value in _METRICS:
            family = self._families[kind](metric, about, labels=("name", "bytes", "rank"))
            for sample in self._samples:
                family.add_metric((sample.name, str(sample.nbytes), str(sample.rank)), value(sample))
            yield family

    def write(self, samples: Sequence[Sample]) -> None:
        self._samples = tuple(samples)

    def close(self) -> None:
        self._registry.unregister(self)


class TensorBoard:
    """Scalars by name and size. `writer` is a SummaryWriter, or a folder to write to."""

    def __init__(self, writer: Any) -> None:
        self._own = isinstance(writer, (str, os.PathLike))
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("tensorboard", error) from None
            writer = SummaryWriter(os.fspath(writer))
        self._writer = writer
        self._step = 0

    def write(self, samples: Sequence[Sample]) -> None:
        self._step += 1
        for sample in samples:
            tag = f"comms/{sample.name}/{sample.nbytes}"
            self._writer.add_scalar(f"{tag}/mean_ms", sample.mean_ms, self._step)
            self._writer.add_scalar(f"{tag}/bus_GBps", sample.bus_gigabytes_a_second, self._step)

    def close(self) -> None:
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()


class WeightsAndBiases:
    """Metrics of a W&B run: `run` is what `wandb.init()` returned. They are added to the row that the program logs
    next, because a separate row would advance the run's step. `commit=True` logs a separate row anyway."""

    def __init__(self, run: Any, commit: bool = False) -> None:
        self._run = run
        self._commit = commit

    def write(self, samples: Sequence[Sample]) -> None:
        values = {}
        for sample in samples:
            tag = f"comms/{sample.name}/{sample.nbytes}"
            values[f"{tag}/mean_ms"] = sample.mean_ms
            values[f"{tag}/bus_GBps"] = sample.bus_gigabytes_a_second
        if values:
            self._run.log(values, commit=self._commit)

    def close(self) -> None:
        return None


class OpenTelemetry:
    """Counters of an OpenTelemetry meter (`opentelemetry.metrics.get_meter("ringway")`)."""

    def __init__(self, meter: Any) -> None:
        self._calls = meter.create_counter("ringway.calls", unit="1", description="Logged calls")
        self._time = meter.create_counter("ringway.call.time", unit="s", description="From issue to completion")
        self._before: dict[tuple[str, int], tuple[int, float]] = {}

    def write(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            count, seconds = self._before.get((sample.name, sample.nbytes), (0, 0.0))
            if sample.count < count:  # the log was reset
                count, seconds = 0, 0.0
            attributes = {"name": sample.name, "bytes": sample.nbytes, "rank": sample.rank}
            self._calls.add(sample.count - count, attributes)
            self._time.add(max(sample.seconds - seconds, 0.0), attributes)
            self._before[sample.name, sample.nbytes] = (sample.count, sample.seconds)

    def close(self) -> None:
        return None
