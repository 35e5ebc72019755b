from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringway.launch.nodelist import compress_hosts, expand_hosts, tasks_per_node

HOST = st.builds(
    lambda name, number, tail: name + number + tail,
    st.text("abcxyz-.", min_size=1, max_size=5),
    st.one_of(st.just(""), st.integers(0, 120).map(str), st.integers(0, 120).map("{:03d}".format)),
    st.sampled_from(["", "", "", "-ib", ".lan"]),
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b[9-11],c", ["a", "b9", "b10", "b11", "c"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("gpu[5]-ib", ["gpu5-ib"]),
    ],
)
def test_expands(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "n[", "n]", "n[1-", "n[a-b]", "n[3-1]", "n[]", "a b", "n[0-999999999999]", "n[1[2]]"],
)
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        expand_hosts(text)


@given(st.lists(HOST, min_size=1, max_size=30))
def test_host_lists_round_trip(hosts: list[str]) -> None:
    assert expand_hosts(compress_hosts(hosts)) == hosts


@given(st.integers(0, 990), st.integers(1, 60), st.sampled_from(["", "02d", "05d"]))
def test_counting_hosts_become_one_bracket(first: int, count: int, width: str) -> None:
    hosts = [f"n{number:{width}}" for number in range(first, first + count)]
    text = compress_hosts(hosts)
    assert expand_hosts(text) == hosts
    assert text.count("[") <= 1
    assert "," not in text


@given(st.text(max_size=30))
def test_any_text_expands_or_is_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all(expand_hosts(text))
    with contextlib.suppress(ValueError):
        assert all(count >= 0 for count in tasks_per_node(text))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)
    assert tasks_per_node(text) == [count for count, repeat in runs for _ in range(repeat)]
