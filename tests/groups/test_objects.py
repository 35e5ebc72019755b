"""Object collectives: a corrupt or oversized object is an error that names the sender, and the group stays usable."""

from __future__ import annotations

import pickle
import random
import struct
import threading
from collections import namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringway as dist
import ringway._core as _core
from ringway.call import premul_sum
from ringway.errors import ObjectError, UsageError
from ringway.groups import objects
from ringway.groups.object_frames import HEADER_BYTES, Frames, Header
from ringway.groups.world import world
from ringway.keys import Key
from ringway.testing import RankContext, RankPool

LIMIT = 1 << 20
Point = namedtuple("Point", "x y")


FRAMES = Frames(Key(b"k" * 32))
CALL = "collective 1"


def _encoded(obj: Any) -> tuple[Header, torch.Tensor]:
    header, body, error = FRAMES.encode(obj, LIMIT, False)
    assert error is None
    return header, body


def _hash_in_python(key: bytes, block: bytes) -> bytes:
    """NH as its definition says, for one block of 1024 bytes."""
    words, keys = struct.unpack("<256I", block), struct.unpack(f"<{len(key) // 4}I", key)
    totals = []
    for first in (0, 8, 16):
        total = 0
        for unit in range(0, 256, 8):
            for at in range(unit, unit + 4):
                one = (words[at] + keys[first + at]) % 2**32
                other = (words[at + 4] + keys[first + at + 4]) % 2**32
                total += one * other
        totals.append(total % 2**64)
    return struct.pack("<3Q", *totals)


def test_the_native_hash_is_nh() -> None:
    key = bytes(range(256)) * 4 + bytes(range(64))
    assert len(key) == _core.HASH_KEY_BYTES
    data = random.Random(1).randbytes(2500)
    padded = data.ljust(3072, b"\0")
    expected = b"".join(_hash_in_python(key, padded[at : at + 1024]) for at in range(0, 3072, 1024))
    assert _core.keyed_hash(key, data) == expected
    assert _core.keyed_hash(key, b"") == b""


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(max_size=300), st.lists, max_leaves=20))
def test_encoded_objects_are_decoded(obj: Any) -> None:
    header, body = _encoded(obj)
    assert FRAMES.unpack(FRAMES.pack(header, CALL, 0), CALL, 0, 0) == header
    assert FRAMES.decode(header, body, 0, False) == obj


@given(st.integers(min_value=0), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(place: int, bit: int) -> None:
    header, body = _encoded({"numbers": np.arange(20), "word": "abc"})
    damaged = body.clone()
    damaged[place % len(body)] ^= 1 << bit
    with pytest.raises(ObjectError, match="rank 3 arrived damaged"):
        FRAMES.decode(header, damaged, 3, False)
    packed = FRAMES.pack(header, CALL, 0).clone()
    packed[place % len(packed)] ^= 1 << bit
    with pytest.raises(ObjectError, match="rank 3 is corrupt"):
        FRAMES.unpack(packed, CALL, 0, 3)


class _Runs:
    """Notes that it was unpickled."""

    def __reduce__(self) -> Any:
        return list.append, (_ran, "code of a stranger")


_ran: list[str] = []


def test_nothing_is_unpickled_that_does_not_prove_the_key() -> None:
    """A stranger knows everything but the key: the format, the group, the call, a message that was really sent."""
    stranger = Frames(Key(b"s" * 32))
    header, body, _ = stranger.encode(_Runs(), LIMIT, False)
    for forged in (stranger.pack(header, CALL, 0), torch.randint(0, 256, (HEADER_BYTES,), dtype=torch.uint8)):
        with pytest.raises(ObjectError, match="process without the job's secret"):
            FRAMES.unpack(forged, CALL, 0, 0)
    real, _ = _encoded("an object")
    with pytest.raises(ObjectError, match="process without the job's secret"):
        FRAMES.decode(replace(real, nbytes=len(body)), body, 0, False)
    packed = FRAMES.pack(real, CALL, 0)
    for call, sender in (("collective 2", 0), ("message 0 to 1", 0), (CALL, 1)):  # replayed, or as another rank's
        with pytest.raises(ObjectError, match="its header is invalid"):
            FRAMES.unpack(packed, call, sender, 0)
    assert _ran == []


def test_weights_only_runs_no_code() -> None:
    tensors = {"weight": torch.arange(4.0), "step": 3, "names": ["a", "b"]}
    header, body, _ = FRAMES.encode(tensors, LIMIT, True)
    decoded = FRAMES.decode(header, body, 0, True)
    assert decoded["weight"].equal(tensors["weight"])
    assert (decoded["step"], decoded["names"]) == (3, ["a", "b"])
    header, body, _ = FRAMES.encode(_Runs(), LIMIT, True)
    with pytest.raises(ObjectError, match="cannot be unpickled here"):
        FRAMES.decode(header, body, 0, True)
    header, body = _encoded("a pickle")
    with pytest.raises(ObjectError, match="rank 5 sent a pickle, and this rank takes weights only"):
        FRAMES.decode(header, body, 5, True)
    assert _ran == []


def test_large_buffers_are_not_copied_into_the_pickle() -> None:
    array = np.zeros(1 << 16)
    _, body = _encoded(array)
    assert body.numel() < array.nbytes + 1024
    assert len(pickle.dumps(array, protocol=5)) >= array.nbytes


class _Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def _failures(context: RankContext, backend: str) -> None:
    """One rank at a time has an object that cannot be sent. Every rank gets an error, and the next call works."""
    context.start(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    world.max_object_bytes = LIMIT
    large = "x" * (2 * LIMIT)
    for sender in range(size):
        mine: Any = large if rank == sender else rank
        with pytest.raises(ObjectError, match=f"object of rank {sender} has .* the limit is {LIMIT}"):
            dist.allgather_object(mine)
        with pytest.raises(ObjectError) as caught:
            dist.broadcast_object(large if rank == sender else None, src=sender)
        assert caught.value.sender == sender
        with pytest.raises(ObjectError, match=f"rank {sender} could not pickle"):
            dist.gather_object(_Unpicklable() if rank == sender else 1, [None] * size if rank == 0 else None, dst=0)
        inputs = [_Unpicklable()] * size if rank == sender else None
        with pytest.raises(ObjectError, match=f"rank {sender} could not pickle"):
            dist.scatter_object_list([None], inputs, src=sender)
        assert dist.allgather_object(rank) == list(range(size)), "the group stays usable"
    received: list[Any] = [None] * size
    dist.all_gather_object(received, {"weight": torch.tensor([rank])}, weights_only=True)
    assert [int(each["weight"]) for each in received] == list(range(size))
    # A receiver with a smaller limit than the sender's refuses alone, and stays in step.
    world.max_object_bytes = 100 if rank == size - 1 else LIMIT
    places: list[Any] = [None]
    inputs = ["y" * 5000] * size if rank == 0 else None
    if rank == size - 1:
        with pytest.raises(ObjectError, match="RINGWAY_MAX_OBJECT_BYTES"):
            dist.broadcast_object(None, src=0)
        with pytest.raises(ObjectError, match="the limit is 100"):
            dist.scatter_object_list(places, inputs, src=0)
    else:
        assert dist.broadcast_object("y" * 5000, src=0) == "y" * 5000
        dist.scatter_object_list(places, inputs, src=0)
        assert places == ["y" * 5000]
    # If all ranks send, the smallest limit applies to all.
    with pytest.raises(ObjectError, match=r"object of rank 0 has .* the limit is 100"):
        dist.allgather_object("y" * 5000)
    world.max_object_bytes = LIMIT
    with torch.device("meta"):  # a program's default device, such as cuda, is not the objects'
        assert dist.broadcast_object(rank, src=1) == 1
        assert dist.allgather_object(rank) == list(range(size))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_failures_reach_every_rank(pool: RankPool, backend: str) -> None:
    pool.run(_failures, backend, world_size=3)


def test_reducing_objects() -> None:
    each = [{"a": i, "b": [torch.tensor([i, 1]), (np.array(2.0 * i), Point(i, -i))]} for i in range(1, 4)]
    total = objects.reduce_objects(each, [0, 1, 2])
    assert total["a"] == 6
    assert total["b"][0].tolist() == [6, 3]
    assert total["b"][1][0] == 12
    assert total["b"][1][1] == Point(6, -6)
    assert objects.reduce_objects(each, [0, 1, 2], dist.ReduceOp.AVG)["a"] == 2
    assert objects.reduce_objects(each, [0, 1, 2], dist.ReduceOp.MAX)["b"][0].tolist() == [3, 1]
    assert objects.reduce_objects([1, 2, 3], [0, 1, 2], premul_sum(0.5)) == 3
    assert objects.reduce_objects([6, 3], [0, 1], dist.ReduceOp.BXOR) == 5
    assert objects.reduce_objects(["a", "b"], [0, 1], lambda a, b: a + b) == "ab"
    with pytest.raises(UsageError, match=r"the keys of the object\['x'\] differ on rank 5: q"):
        objects.reduce_objects([{"x": {"p": 1}}, {"x": {"p": 1, "q": 2}}], [0, 5])
    with pytest.raises(UsageError, match=r"the object\[0\] is str"):
        objects.reduce_objects([["a"], ["b"]], [0, 1])


def test_means_of_objects_neither_wrap_nor_overflow() -> None:
    def mean(*leaves: Any) -> Any:
        return objects.reduce_objects(leaves, range(len(leaves)), dist.ReduceOp.AVG)

    two_hundred = torch.full((2,), 200, dtype=torch.uint8)
    assert mean(two_hundred, two_hundred).tolist() == [200, 200]
    assert mean(torch.tensor(True), torch.tensor(True)).item() == 1
    assert mean(np.uint8(200), np.uint8(200)) == 200
    assert mean(np.array([100], np.int8), np.array([101], np.int8)).tolist() == [100.5]
    assert mean({"a": 1}, {"a": 2}) == {"a": 1.5}
    assert mean(2**70, 2**70) == 2.0**70
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        large = torch.tensor(60000.0 if dtype is torch.float16 else 3e38, dtype=dtype)
        assert torch.equal(mean(large, large, large), large), dtype
        assert mean(large, large).dtype is dtype
    assert mean(np.float32(3e38), np.float32(3e38)) == np.float32(3e38)
    assert mean(np.float16(60000), np.float16(60000)).dtype == np.float16


def test_extremes_of_objects_keep_a_nan_of_any_rank() -> None:
    nan = float("nan")
    for convert in (float, np.float32, torch.tensor, lambda value: np.array([value])):
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            for values in ((nan, 1.0, 2.0), (1.0, nan, 2.0), (1.0, 2.0, nan)):
                result = objects.reduce_objects([convert(value) for value in values], [0, 1, 2], op)
                assert result != result, (convert, op, values)
    assert objects.reduce_objects([1, np.int64(3), 2], [0, 1, 2], dist.ReduceOp.MAX) == 3
    assert objects.reduce_objects([torch.tensor(1), 3], [0, 1], dist.ReduceOp.MAX) == 3
    for convert in (complex, np.complex64, torch.tensor):
        with pytest.raises(UsageError, match="complex"):
            objects.reduce_objects([convert(1j), convert(2j)], [0, 1], dist.ReduceOp.MAX)


def test_objects_of_different_shapes_are_refused() -> None:
    for one, other in ((torch.ones(3), torch.ones(1)), (np.ones((2, 1)), np.ones(2)), (torch.ones(3), 1.0)):
        with pytest.raises(UsageError, match=r"'x'\] has the shape \[.*on rank 7"):
            objects.reduce_objects([{"x": one}, {"x": other}], [0, 7])
