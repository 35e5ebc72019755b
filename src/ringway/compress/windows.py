"""How a tensor is cut among ranks, and what a message between two of them looks like.

A tensor of `numel` elements is cut into one contiguous shard a rank, all of the same length (a multiple of
8, so that a shard begins on a whole byte of bits) but the last ones, which may be shorter or empty. Rank r
serves shard r: it averages it and tells everybody. Nothing is padded but the messages.

Large tensors travel in windows: window k is columns [start, stop) of every shard.

A message is a frame: 16 bytes of header, then the codec's bytes, then padding to a multiple of 16. The
header's first four bytes are the status (int32): 0 for well; from a worker 1 for a value that is not finite;
from a server 1 + the group rank of the worker that had it, or 1 + the group's size where only the average
was not finite. The other bytes are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec

HEADER_BYTES = 16
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
        """How many real elements shard `row` has in this window."""
        return max(0, min(self.stop, self.numel - row * self.shard) - self.start)

    def rows(self, ranks: int) -> Iterator[tuple[int, slice]]:
        """Each shard that has elements in this window, and where they are in the flat tensor."""
        for row in range(ranks):
            begin = row * self.shard + self.start
            count = self.count(row)
            if count:
                yield row, slice(begin, begin + count)


@dataclass(frozen=True)
class Layout:
    """A tensor of `numel` elements cut among `ranks`."""

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
        """The tensor in windows of at most `columns` columns."""
        return [
            Window(self.numel, self.shard, start, min(start + columns, self.shard))
            for start in range(0, self.shard, columns)
        ]


def frame_bytes(codec: Codec, columns: int) -> int:
    """How long the frame of so many elements is."""
    return -(-(HEADER_BYTES + codec.nbytes(columns)) // ALIGNMENT) * ALIGNMENT


def new_frames(codec: Codec, rows: int, columns: int, device: torch.device) -> Tensor:
    """Frames to be written, [rows, frame_bytes], with headers of zeros."""
    frames = torch.empty(rows, frame_bytes(codec, columns), dtype=torch.uint8, device=device)
    frames[:, :HEADER_BYTES].zero_()
    return frames


def statuses(frames: Tensor) -> Tensor:
    """The status words of frames [..., frame_bytes]: a view, int32 [...]."""
    return frames.view(torch.int32)[..., 0]


def body(frame: Tensor) -> Tensor:
    """The codec's bytes of one frame (and the padding after them)."""
    return frame[HEADER_BYTES:]
