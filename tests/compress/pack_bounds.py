"""Runs every pack kernel on buffers that end, or begin, at an inaccessible page.

Each length from 0 to 300, and some around the strips and blocks; every dtype, codec and kind of residual; one, two and
three frames. The buffers have the exact length, so one byte read or written beyond them is a crash. The test therefore
runs this file as a separate process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap

import torch

import ringway._core as _core
from ringway.call import DTYPE_CODE
from ringway.compress import Codec, get_codec
from ringway.compress.codecs.scaled import ScaledCodec
from ringway.compress.windows import HEADER_BYTES

LENGTHS = [*range(301), *(around + by for around in (1024, 4096) for by in (-9, -1, 0, 1, 7))]
SPECS = ("onebit:tensor", "onebit:64", "onebit:1024", "int8:24", "int8:256", "int4:8", "int4:128", "fp8:256")
SPECS += ("topk:0.01:2", "topk:0.1:3", "topk:0.5:8")
CODES = {dtype: DTYPE_CODE[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}
LARGEST = 1 << 16


class Fenced:
    """Memory with an inaccessible page on either side."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        page = mmap.PAGESIZE
        whole = libc.mmap(None, LARGEST + 2 * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._begin = whole + page
        assert libc.mprotect(self._begin, LARGEST, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def place(self, nbytes: int, at_end: bool) -> int:
        """The address of `nbytes` bytes next to one of the pages, filled with small numbers of any dtype."""
        address = self._begin + (LARGEST - nbytes if at_end else 0)
        ctypes.memset(address, 0x31, nbytes)
        return address


def walk(
    fences: list[Fenced], codec: Codec, dtype: torch.dtype, kept: torch.dtype | None, numel: int, at_end: bool
) -> None:
    """All steps of a rank that serves the first of several shards."""
    rows = 1 + numel % 3
    shard = (numel // rows + 8) // 8 * 8
    count = min(shard, numel)
    stride = HEADER_BYTES + codec.nbytes(shard)
    form = codec.native_format
    assert form is not None

    def array(fence: Fenced, of: torch.dtype | None, elements: int) -> tuple[int, int]:
        if of is None:
            return 0, CODES[torch.float32]
        return fence.place(of.itemsize * elements, at_end), CODES[of]

    values, lost = array(fences[0], dtype, numel), array(fences[1], kept, numel)
    server = array(fences[2], kept, count)
    frames = (fences[3].place(rows * stride, at_end), stride, rows)
    frame = fences[4].place(stride, at_end)
    for row in range(rows):
        ctypes.memset(frames[0] + row * stride, 0, HEADER_BYTES)
    ctypes.memset(frame, 0, HEADER_BYTES)
    window = (numel, shard, 0, shard)
    if isinstance(codec, ScaledCodec):
        _core.pack_measure(form, values, lost, numel, 1)
    _core.pack_encode(form, values, lost, window, frames, 0.75, 1)
    whole = array(fences[5], dtype, numel)
    _core.pack_decode(form, frames, window, whole, 1)
    # What the first server receives: its own shard from every rank. All are the same here.
    for row in range(1, rows):
        ctypes.memmove(frames[0] + row * stride, frames[0], stride)
    if isinstance(codec, ScaledCodec):
        _core.pack_measure_mean(form, frames, server, count, 1)
    _core.pack_encode_mean(form, frames, server, count, frame, 0.75, 1)
    target = array(fences[5], dtype, count)
    _core.pack_decode_mean(form, frames, count, target, 1)
    _core.pack_decode(form, (frame, stride, 1), (count, shard, 0, shard), target, 1)


def main() -> None:
    fences = [Fenced() for _ in range(6)]
    walks = 0
    for spec, dtype, kept, at_end in itertools.product(
        SPECS, CODES, (torch.float32, torch.bfloat16, None), (True, False)
    ):
        codec = get_codec(spec)
        for numel in LENGTHS:
            walk(fences, codec, dtype, kept, numel, at_end)
            walks += 1
    print(f"ok: {walks} walks, {_core.pack_instructions()}")


if __name__ == "__main__":
    main()
