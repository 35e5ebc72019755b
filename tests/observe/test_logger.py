"""The comms logger on real ranks: what it counts, times and names, and what it costs in memory."""

from __future__ import annotations

import io
import re
import threading
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ringway._core as _core
from ringway.errors import ConfigError
from ringway.observe.log.summary import size_text, totals
from ringway.testing import RankContext, RankPool


def fresh(context: RankContext, **settings: Any) -> Any:
    dist = context.start("gloo")
    dist.configure(**{"enabled": True, "prof_all": True, "prof_ops": [], "verbose": False, "debug": False, **settings})
    dist.reset_log()
    return dist


def summary(dist: Any, **options: Any) -> tuple[dict[str, Any], str]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = dist.log_summary(return_dict=True, **options)
    return result, printed.getvalue()


def several_ops(context: RankContext) -> Any:
    dist = fresh(context)
    assert not dist.has_comm_data()
    tensor = torch.ones(256)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor[:8], log_name="loss")
    dist.broadcast(tensor, 0)
    out = torch.empty(256 * context.world_size)
    dist.all_gather_into_tensor(out, tensor)
    dist.barrier()
    result, printed = summary(dist)
    names, count = dist.get_logged_comm_ops(), dist.get_comm_operation_count()
    dist.configure(enabled=False)
    dist.all_reduce(tensor)
    assert dist.get_comm_operation_count() == count
    return result, printed, names, count


def test_calls_are_logged_by_name_and_size(pool: RankPool) -> None:
    results = pool.run(several_ops, world_size=2)
    for rank, (result, printed, names, count) in enumerate(results):
        assert names == ["all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "loss"]
        assert count == 7
        assert result["summary"]["all_reduce"][1024]["count"] == 3
        assert result["summary"]["loss"][32]["count"] == 1
        # The gathered whole is what nccl-tests counts.
        line = result["summary"]["all_gather_into_tensor"][2048]
        assert line["msg_size_str"] == "2.0 KB"
        assert line["busbw_avg_gbps"] == pytest.approx(line["tput_avg_gbps"] / 2)
        assert line["tput_avg_gbps"] == pytest.approx(2048 * 8 / 1e6 / line["avg_latency_ms"])
        assert result["metadata"]["world_size"] == 2
        assert result["metadata"]["rank"] == rank
        assert bool(printed) == (rank == 0)
    printed = results[0][1]
    heads = printed.splitlines()[0]
    assert heads.startswith(f"{'Comm. Op': <20}{'Message Size': <20}{'Count': <20}{'Total Latency(ms)': <20}")
    assert heads.split()[-3:] == ["p50(ms)", "p99(ms)", "max(ms)"]
    assert re.search(r"^all_reduce\n +1\.0 KB +3 ", printed, re.MULTILINE)


def subgroup(context: RankContext) -> Any:
    dist = fresh(context)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = torch.ones(1 << 16)
    dist.reset_log()
    dist.all_reduce(tensor, group=pairs[context.rank // 2])
    pair = summary(dist)[0]["summary"]["all_reduce"][tensor.nbytes]
    dist.reset_log()
    dist.all_reduce(tensor)
    whole = summary(dist)[0]["summary"]["all_reduce"][tensor.nbytes]
    return pair["busbw_avg_gbps"] / pair["tput_avg_gbps"], whole["busbw_avg_gbps"] / whole["tput_avg_gbps"]


def test_bandwidth_uses_the_size_of_the_group_that_called(pool: RankPool) -> None:
    for pair, whole in pool.run(subgroup, world_size=4):
        assert pair == pytest.approx(1.0)
        assert whole == pytest.approx(1.5)


def asynchronous(context: RankContext) -> Any:
    dist = fresh(context)
    tensor = torch.ones(8)
    dist.barrier()
    dist.reset_log()
    if context.rank == 1:
        context.store.wait(["rank 0 has issued"])
        time.sleep(0.4)
    work = dist.all_reduce(tensor, async_op=True)
    issued_at_once = not dist.has_comm_data() or context.rank == 1
    if context.rank == 0:
        context.store.set("rank 0 has issued", "")
    work.wait()
    first = summary(dist)[0]["summary"]["all_reduce"][32]
    dist.reset_log()
    began = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    took = 1000 * (time.monotonic() - began)
    time.sleep(0.4)  # a late wait does not make the call longer
    second = summary(dist)[0]["summary"]["all_reduce"][32]
    return issued_at_once, first["total_latency_ms"], second["total_latency_ms"], took


def test_an_asynchronous_call_lasts_until_its_own_end(pool: RankPool) -> None:
    reported = pool.run(asynchronous, world_size=2)
    assert reported[0][0]
    assert reported[0][1] >= 399
    for *_, second, took in reported:
        assert second < took + 399


def chosen_only(context: RankContext) -> Any:
    dist = fresh(context, prof_all=False, prof_ops=["broadcast", "loss", "isend"])
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="loss")
    dist.broadcast(tensor, 0)
    if context.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    names = dist.get_logged_comm_ops()
    dist.configure(prof_all=True, debug=True)
    dist.reset_log()
    dist.all_reduce(tensor)
    return names, dist.get_logged_comm_ops()


def test_prof_ops_choose_by_op_or_label_and_debug_names_the_caller(pool: RankPool) -> None:
    sender, receiver = pool.run(chosen_only, world_size=2)
    assert sender[0] == ["broadcast", "loss", "send"]
    assert receiver[0] == ["broadcast", "loss"]
    assert sender[1] == ["all_reduce | [Caller Func: chosen_only]"]


def printed_calls(context: RankContext) -> Any:
    dist = fresh(context, verbose=True)
    printed = io.StringIO()
    with redirect_stdout(printed):
        dist.all_reduce(torch.ones(1024))
        dist.all_reduce(torch.ones(1024), log_name="loss")
        dist.log_summary(show_straggler=True)
    dist.configure(verbose=False)
    return printed.getvalue(), dist.get_comm_operation_count()


def test_verbose_prints_each_call_on_rank_0_and_our_own_traffic_is_not_logged(pool: RankPool) -> None:
    (printed, count), (other, _) = pool.run(printed_calls, world_size=2)
    shown = re.findall(r"^comm op: (\w+) \| time \(ms\): [\d.]+ \| msg size: 4.0 KB \| algbw", printed, re.MULTILINE)
    assert shown == ["all_reduce", "loss"]
    assert count == 2
    assert other == ""


def train(context: RankContext) -> Any:
    dist = fresh(context)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    dist.reset_log()
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
    return summary(dist)[0]["summary"]


def test_calls_made_by_ddp_are_logged(pool: RankPool) -> None:
    for table in pool.run(train, world_size=2):
        assert table["all_reduce"][(64 * 64 + 64) * 4]["count"] == 2


def own_collective(context: RankContext) -> Any:
    dist = fresh(context)

    @dist.timed_op
    def ring_shift(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    ring_shift(torch.ones(16))
    ring_shift(torch.ones(16), async_op=True).wait()
    ring_shift(torch.ones(32), log_name="shift of weights")
    return {name: [*table] for name, table in summary(dist)[0]["summary"].items()}, dist.get_comm_operation_count()


def test_a_users_own_op_is_logged(pool: RankPool) -> None:
    for table, count in pool.run(own_collective, world_size=2):
        assert table == {"all_reduce": [64, 128], "ring_shift": [64], "shift of weights": [128]}
        assert count == 6


def from_threads(context: RankContext) -> int:
    dist = fresh(context)
    groups = [dist.new_group() for _ in range(3)]
    dist.reset_log()

    def call(group: Any) -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(4), group=group)

    threads = [threading.Thread(target=call, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count: int = dist.get_comm_operation_count()
    return count


def test_calls_of_several_threads_are_counted_correctly(pool: RankPool) -> None:
    assert pool.run(from_threads, world_size=2) == [150, 150]


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def a_million_calls(context: RankContext) -> tuple[int, int, int]:
    fresh(context)
    recorder = _core.Recorder(4096)
    recorder.choose(True, True, False, [], [])
    record = _core.GroupRecord(recorder, "g", 2)
    before = resident_bytes()
    for number in range(1_000_000):
        # Every size is used only once: the worst case for a table of sizes.
        record.end(record.begin(1, number, 0, 0, -1, 0), True)
    grown = resident_bytes() - before
    rows = recorder.logged()
    return grown, len(rows), sum(row[5] for row in rows)


def test_a_million_calls_take_less_than_ten_megabytes(pool: RankPool) -> None:
    [(grown, rows, counted)] = pool.run(a_million_calls, world_size=1)
    assert grown < 10e6
    assert rows < 4096
    assert counted == 1_000_000


def ever_new_labels(context: RankContext) -> tuple[int, int, int]:
    dist = fresh(context)
    tensor = torch.ones(1)
    for number in range(2000):
        dist.all_reduce(tensor, log_name=f"warm {number}")
    before = resident_bytes()
    for number in range(20_000):
        dist.all_reduce(tensor, log_name=f"step {number}")
    grown = resident_bytes() - before
    logged, names = dist.get_comm_operation_count(), len(dist.get_logged_comm_ops())
    group = dist.new_group()
    dist.all_reduce(tensor, group=group)  # names of groups still fit
    assert dist.recent_calls(1)[0].group == dist.communicator(group).name
    return grown, logged, names


def test_labels_that_are_used_only_once_are_bounded_too(pool: RankPool) -> None:
    [(grown, counted, names)] = pool.run(ever_new_labels, world_size=1, timeout=100)
    pool.replace()  # the earlier test used up that process's labels
    assert grown < 4e6
    assert counted == 22_000
    assert names < 4096


def odd_labels(context: RankContext) -> Any:
    dist = fresh(context)
    for label in ("\x1b[31mred\x07\nline", "\ud800", "x" * 100_000, "a\0b"):
        dist.all_reduce(torch.ones(1), log_name=label)
    printed = io.StringIO()
    with redirect_stdout(printed):
        dist.log_summary()
    return printed.getvalue(), max(map(len, dist.get_logged_comm_ops()))


def test_labels_are_truncated_and_escaped_for_the_terminal(pool: RankPool) -> None:
    [(printed, longest)] = pool.run(odd_labels, world_size=1)
    assert longest == 200
    assert "\x1b" not in printed
    assert "\0" not in printed
    assert "\N{REPLACEMENT CHARACTER}[31mred" in printed
    assert "\\ud800" in printed


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"enabled": "perhaps"}, "true or false"),
        ({"verbose": 3}, "true or false"),
        ({"prof_ops": "all_reduce"}, "a list of names"),
        ({"prof_ops": [1]}, "a list of names"),
    ],
)
def test_invalid_settings_are_refused_and_change_nothing(said: dict[str, Any], expected: str) -> None:
    import ringway
    from ringway.observe.log.logger import logger

    before = logger.settings
    with pytest.raises(ConfigError, match=expected):
        ringway.configure(**said)
    assert logger.settings is before


def test_percentiles_are_near_the_truth() -> None:
    recorder = _core.Recorder(16)
    recorder.choose(True, True, False, [], [])
    for number in range(1, 1001):
        recorder.log(255, "mine", 4, 100, number * 1_000_000)
    line = totals(recorder.logged())["mine"][100]
    assert line.count == 1000
    assert line.p50_ns == pytest.approx(500e6, rel=0.07)
    assert line.p99_ns == pytest.approx(990e6, rel=0.07)
    assert line.max_ns == 1000e6
    assert line.mean_ms == pytest.approx(500.5)


def test_sizes_are_written_as_in_deepspeed() -> None:
    assert [size_text(n) for n in (0, 5, 1024, 711836303)] == ["0B", "5 B", "1.0 KB", "678.86 MB"]


def test_configuration_is_deepspeeds_and_strict() -> None:
    with pytest.raises(ConfigError, match="prof_all"):
        pool_free_configure({"comms_logger": {"enabled": True, "prof_al": True}})


def pool_free_configure(config: Any) -> None:
    import ringway

    ringway.configure(config)
