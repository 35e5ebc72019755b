"""ringway.compat.deepspeed in the place of deepspeed.comm: its modules, its timers, its logger's dictionary."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ringway
from ringway.compat import deepspeed as dist
from ringway.compat import install
from ringway.compat.deepspeed.reduce_op import torch_op
from ringway.errors import UsageError
from ringway.testing import RankContext, RankPool

SIZE = 2


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No deepspeed is imported before or after the test, and the finders that it adds do not stay."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that imports deepspeed.comm in the ways in which DeepSpeed does, and must not get its own."""
    package = tmp_path / "deepspeed"
    (package / "comm").mkdir(parents=True)
    (package / "comm" / "__init__.py").write_text("raise AssertionError('its own deepspeed.comm')\n")
    (package / "__init__.py").write_text(
        "from .comm.comm import init_distributed\n"
        "from . import comm as dist\n"
        "from deepspeed.comm.torch import TorchBackend\n"
        "from deepspeed.comm.ccl import CCLBackend\n"
        "from deepspeed.comm.utils import *\n"
        "from deepspeed.comm.reduce_op import ReduceOp\n"
        "from .comm.config import DeepSpeedCommsConfig\n"
        "from deepspeed.comm.backend import Backend\n"
        "from deepspeed.comm.constants import COMMS_LOGGER\n"
        "from deepspeed.comm import pg_utils\n"
        "import deepspeed.comm\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("imports", "engine")
def test_install_stands_in_for_a_deepspeed_that_is_installed() -> None:
    install()
    install()
    import deepspeed  # type: ignore[import-not-found]

    assert deepspeed.comm is deepspeed.dist is sys.modules["deepspeed.comm"] is dist
    assert deepspeed.init_distributed is dist.init_distributed
    assert deepspeed.TorchBackend is dist.TorchBackend
    assert deepspeed.CCLBackend is dist.CCLBackend
    assert deepspeed.ReduceOp is dist.ReduceOp
    assert deepspeed.get_local_rank_from_launcher is dist.get_local_rank_from_launcher
    assert deepspeed.comm.comm.all_reduce is dist.all_reduce
    assert deepspeed.pg_utils.is_parallel(None) is False
    assert (dist.__name__, dist.__spec__.name) == ("ringway.compat.deepspeed", "ringway.compat.deepspeed")
    settings = deepspeed.DeepSpeedCommsConfig({"comms_logger": {"enabled": True, "prof_ops": ["reduce"]}})
    assert (settings.comms_logger_enabled, settings.comms_logger.prof_ops) == (True, ["reduce"])
    assert not deepspeed.DeepSpeedCommsConfig({}).comms_logger_enabled


@pytest.mark.usefixtures("imports")
def test_install_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A developer may have deepspeed installed: nothing is found below a path that is empty.
    monkeypatch.setattr(sys, "path", [])
    install()
    import deepspeed.comm as theirs  # type: ignore[import-not-found]

    assert theirs is dist
    assert sys.modules["deepspeed"].init_distributed is dist.init_distributed
    with pytest.raises(ModuleNotFoundError):
        import deepspeed.runtime  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.usefixtures("imports", "engine")
def test_install_after_deepspeed_is_refused() -> None:
    sys.modules["deepspeed.comm"] = sys  # any module that is not ours
    with pytest.raises(UsageError, match=r"before the first `import deepspeed`"):
        install()


def test_the_package_itself_can_be_put_into_sys_modules(imports: None) -> None:
    sys.modules["deepspeed"] = ModuleType("deepspeed")
    sys.modules["deepspeed.comm"] = dist
    import deepspeed.comm as theirs
    from deepspeed.comm.reduce_op import ReduceOp  # type: ignore[import-not-found]

    assert theirs is dist
    assert torch_op(ReduceOp.MAX) == torch.distributed.ReduceOp.MAX
    install()
    assert sys.modules["deepspeed.comm"] is dist


def test_timers() -> None:
    timers = dist.SynchronizedWallClockTimer()
    timer = timers("step")
    assert timers("step") is timer is timers.get_timers()["step"]
    timer.start()
    with pytest.raises(AssertionError, match="step has already been started"):
        timer.start()
    first = timer.elapsed(reset=False)
    assert first > 0, "a running timer counts up to now"
    assert timer.started_, "and runs on"
    assert timer.elapsed() >= first
    timer.stop()
    with pytest.raises(AssertionError, match="not started"):
        timer.stop()
    timer.reset()
    assert timer.elapsed() == timer.mean() == 0
    for interval in (*[2.0] * 9, 200.0):
        timer.add(interval)
    assert timer.elapsed(reset=False) == pytest.approx(218.0)
    assert timer.mean() == 2.0, "the largest 10 % do not count"
    assert timers.get_mean(["step", "nothing"], normalizer=2.0) == {"step": 1000.0}
    with pytest.raises(AssertionError, match="normalizer"):
        timers.get_mean(["step"], normalizer=0)


def test_timers_print_and_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    timers = dist.SynchronizedWallClockTimer()
    for _ in range(10_000):
        timers("step").add(0.5)
    assert len(timers("step")._intervals) < 10_000
    timers.log(["step", "nothing"], normalizer=100.0, memory_breakdown=True)
    printed = capsys.readouterr().out
    assert "time (ms) | step: 50.00 | mem_allocated: 0.0000 GB" in printed
    timers.log(["step"], ranks=[7])
    assert not capsys.readouterr().out
    assert timers("step").elapsed() == 0


def test_trim_mean_leaves_its_argument_alone() -> None:
    data = [3.0, 1.0, 2.0]
    assert dist.trim_mean(data, 0.1) == 2.0
    assert data == [3.0, 1.0, 2.0]
    assert dist.trim_mean([], 0.1) == 0
    with pytest.raises(AssertionError):
        dist.trim_mean(data, 2)


def test_small_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    assert (dist.convert_size(0), dist.convert_size(1536)) == ("0B", "1.5 KB")
    dist.print_rank_0("hello")
    assert capsys.readouterr().out == "hello\n"
    assert dist.calc_bw_log("all_reduce", 1_000_000, 2.0) == (4.0, 0.0)
    assert dist.calc_bw_log("isend", 1_000_000, 2.0) == (4.0, 4.0)
    with pytest.raises(UsageError, match=r"no op 'all_redcue'.*all_reduce"):
        dist.calc_bw_log("all_redcue", 1, 1.0)


def test_comms_dict_is_settable_and_clearable() -> None:
    logger = dist.CommsLogger()
    latencies, rates = [3.0, 1.0, 2.0], [1.0, 3.0, 1.5]
    try:
        logger.comms_dict = {"all_reduce": {1024: [3, latencies, rates, [2 * rate for rate in rates]]}}
        assert logger.get_operation_summary("all_reduce")[1024]["avg_latency_ms"] == 2.0
        stored = logger.get_raw_data()["all_reduce"][1024]
        assert stored == [3, latencies, rates, [2 * rate for rate in rates]]
        assert dist.has_comm_data()
        assert dist.get_logged_comm_ops() == ["all_reduce"]
        logger.append("all_reduce", "all_reduce", 6.0, 1024)
        assert dist.get_comm_operation_count() == 4
        assert dist.comms_logger.comms_dict["all_reduce"][1024][:2] == [4, [3.0, 1.0, 2.0, 6.0]]
        logger.comms_dict.clear()
        assert not dist.has_comm_data()
        assert logger.comms_dict == {}
    finally:
        dist.reset_log()


def _logged(context: RankContext) -> None:
    context.start("shm")
    backend = dist.cdb
    assert backend is dist.cdb is dist.comm.cdb
    dist.configure(enabled=True, prof_all=True)
    dist.reset_log()
    dist.timers("all_reduce").reset()
    tensor = torch.ones(256)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    count, latencies, algorithm, bus = dist.comms_logger.comms_dict["all_reduce"][1024]
    assert count == len(latencies) == len(algorithm) == len(bus) == 4
    assert len(set(latencies)) > 1, "the latency of each call, not their mean"
    summary = dist.comms_logger.get_operation_summary("all_reduce")[1024]
    assert sum(latencies) == pytest.approx(summary["total_latency_ms"])
    for latency, rate, on_bus in zip(latencies, algorithm, bus, strict=True):
        assert rate == pytest.approx(1024 * 8 / latency / 1e6)
        assert on_bus == pytest.approx(rate)  # 2 (n - 1) / n of two ranks
    assert dist.timers("all_reduce").elapsed(reset=False) >= sum(latencies) * 0.99
    dist.all_reduce(tensor, dist.ReduceOp.SUM, None, False, False, "by position", None)
    assert dist.timers("by position").elapsed() > 0
    dist.reset_log()
    dist.configure(enabled=False)
    before = dist.timers("all_reduce").elapsed(reset=False)
    dist.all_reduce(tensor)
    assert dist.timers("all_reduce").elapsed() == before, "the logger is off"
    dist.destroy_process_group()
    assert dist.cdb is None
    context.start("shm")
    assert dist.cdb is not backend


def test_ops_fill_timers_and_raw_lists(pool: RankPool) -> None:
    pool.run(_logged, world_size=SIZE)


def _means(context: RankContext) -> None:
    context.start("shm")
    rank = context.rank
    half = torch.full((6,), float(rank), dtype=torch.half)
    (share,) = dist.reduce_scatter_coalesced([half], dist.get_world_group())
    assert torch.equal(share, torch.full((3,), 0.5, dtype=torch.half))
    assert torch.equal(half, torch.full((6,), float(rank), dtype=torch.half)), "the input is left alone"
    large = torch.full((4,), 40000.0, dtype=torch.half)
    assert dist.reduce_scatter_coalesced([large])[0].tolist() == [40000.0] * 2, "divided before the sum overflows"
    for shape, sizes in (((10,), (5, 5)), ((7, 7), (25, 24))):
        (share,) = dist.all_to_all_quant_reduce([torch.full(shape, float(rank))], {})
        assert torch.equal(share, torch.full((sizes[rank],), 0.5)), "uncompressed, as in deepspeed"
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    expected = sum(torch.randn(8, 16, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)) / SIZE
    (share,) = dist.all_to_all_quant_reduce([values], {})
    assert share.shape == (64,)
    assert not torch.equal(share, expected.view(-1).chunk(SIZE)[rank])
    torch.testing.assert_close(share, expected.view(-1).chunk(SIZE)[rank], rtol=0, atol=0.5)
    assert ringway.reduce_scatter_coalesced([torch.ones(4)])[0].tolist() == [2.0, 2.0], "ringway's own is the sum"


def test_coalesced_collectives_return_the_mean(pool: RankPool) -> None:
    pool.run(_means, world_size=SIZE)
