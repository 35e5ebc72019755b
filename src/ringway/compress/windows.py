"""How a tensor is split among ranks, and the layout of a message between two of them.

A tensor of `numel` elements is split into one contiguous shard per rank. All shards have the same length (a multiple
of 8, so that a shard starts at a whole byte of bits), except that the last ones may be shorter or empty. Rank r serves
shard r: it averages the shard and sends the result to everyone. Only messages are padded.

Large tensors travel in windows: window k is columns [start, stop) of every shard.

A message is a frame: 16 bytes of header, then the codec's bytes, then padding to a multiple of 16. The header is two
64-bit words. The low half of the first is the status (int32): 0 means success. A worker sends 1 if a value is not
finite. A server sends 1 + the group rank of the worker that had such a value, or 1 + the group's size if only the
average is not finite. The other bits say which call the frame belongs to (see `agreement.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec

HEADER_BYTES = 16
STATUS_BITS = 32
ALIGNMENT = 16
SHARD_MULTIPLE = 8


@dataclass(frozen=True)
class Window:
    """Columns [start, stop) of every shard of a tensor."""

    numel: int
    shard: int
    start: int
    stop: int

    @property
    def columns(self) -> int:
        return self.stop - self.start

    def count(self, row: int) -> int:
        """The number of real elements of shard `row` in this window."""
        return max(0, min(self.stop, self.numel - row * self.shard) - self.start)

    def rows(self, ranks: int) -> Iterator[tuple[int, slice]]:
        """Each shard that has elements in this window, and their position in the flat tensor."""
        for row in range(ranks):
            begin = row * self.shard + self.start
            count = self.count(row)
            if count:
                yield row, slice(begin, begin + count)


@dataclass(frozen=True)
class Sharding:
    """A tensor of `numel` elements split among `ranks`."""

    numel: int
    ranks: int

    @property
    def shard(self) -> int:
        per_rank = -(-self.numel // self.ranks)
        return -(-per_rank // SHARD_MULTIPLE) * SHARD_MULTIPLE

    def served(self, rank: int) -> slice:
        """The elements that `rank` serves."""
        return slice(min(rank * self.shard, self.numel), min((rank + 1) * self.shard, self.numel))

    def windows(self, columns: int) -> list[Window]:
        """Split the tensor into windows of at most `columns` columns."""
        return [
            Window(self.numel, self.shard, start, min(start + columns, self.shard))
            for start in range(0, self.shard, columns)
        ]


def frame_bytes(codec: Codec, columns: int) -> int:
    """The length of a frame of `columns` elements."""
    return -(-(HEADER_BYTES + codec.nbytes(columns)) // ALIGNMENT) * ALIGNMENT


def ring_bytes(numel: int, ranks: int, element_size: int = 4) -> int:
    """The bytes that a rank sends in a ring all-reduce of uncompressed values."""
    return 2 * (ranks - 1) * numel * element_size // ranks


def compressed_bytes(codec: Codec, numel: int, ranks: int, servers: bool = True) -> int:
    """The bytes that a rank sends in a compressed all-reduce. Every further window adds a header for each message."""
    if servers:
        return 2 * (ranks - 1) * frame_bytes(codec, Sharding(numel, ranks).shard)
    return (ranks - 1) * frame_bytes(codec, numel)


def new_frames(codec: Codec, rows: int, columns: int, device: torch.device) -> Tensor:
    """Empty frames to write into, [rows, frame_bytes], with zeroed headers."""
    frames = torch.empty(rows, frame_bytes(codec, columns), dtype=torch.uint8, device=device)
    frames[:, :HEADER_BYTES].zero_()
    return frames


def headers(frames: Tensor) -> Tensor:
    """The header words of frames [..., frame_bytes]: a view, int64 [..., 2]."""
    return frames.view(torch.int64)[..., : HEADER_BYTES // 8]


def clear_spoiled(frames: Tensor) -> None:
    """Zero the frames whose status is set. They hold what was in their memory before, which may be NaN."""
    frames[:, HEADER_BYTES:].masked_fill_((statuses(frames) != 0).unsqueeze(1), 0)


def statuses(frames: Tensor) -> Tensor:
    """The status words of frames [..., frame_bytes]: a view, int32 [...]."""
    return frames.view(torch.int32)[..., 0]


def body(frame: Tensor) -> Tensor:
    """The codec's bytes of one frame, and the padding after them."""
    return frame[HEADER_BYTES:]
