"""Whether the ranks make the same compressed call.

A plain collective is compared by dtype and length. Of a compressed one, that comparison sees bytes only, and different
codecs or lengths may give the same number of bytes. So every frame carries what the ranks must agree on in its header
(see `windows.py`), and every rank compares the headers that it receives before it uses the values. A frame goes to
every rank, so all ranks find the same difference.
"""

from __future__ import annotations

from itertools import count
from zlib import crc32

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec, codec_names, get_codec
from ringway.compress.kernels.base import VALUE_DTYPES
from ringway.compress.windows import STATUS_BITS, headers, statuses
from ringway.compress.workspace import HostCopy
from ringway.errors import UsageError, mismatch_error
from ringway.groups.communicator import Communicator

OPS = ("", "compressed_all_reduce", "all_to_all_quant_reduce", "quantized_all_gather", "gathered_all_reduce")
"""The ops by number. No frame has number 0, so zeros are not a header."""
NUMEL_BITS, OP_BITS, DTYPE_BITS, EXCHANGE_BITS = 40, 3, 2, 19
_WORD = 1 << 64

Heading = tuple[int, int]
"""The two words of a frame's header, with a status of 0."""


class _Exchanges(count):  # type: ignore[type-arg]
    """Numbers the compressed exchanges of a group."""


def count_exchange(communicator: Communicator) -> int:
    """The number of the group's next exchange. A rank that gives up a call counts one more than its peers, so that its
    next call is not taken for the one that they are still in."""
    return next(communicator.parts.part(_Exchanges))


class Agreement:
    """What the ranks must agree on in one call."""

    def __init__(self, communicator: Communicator, op: str, codec: Codec, dtype: torch.dtype, numel: int) -> None:
        self._communicator = communicator
        self._codec = codec
        self._first = _signed(crc32(codec.spec.encode()) << STATUS_BITS)
        kind = OPS.index(op) | VALUE_DTYPES.index(dtype) << OP_BITS
        self._second = numel & _mask(NUMEL_BITS) | kind << NUMEL_BITS

    def stamp(self, frames: Tensor) -> Heading:
        """Write the headers of frames that are about to be filled and sent: status 0, and the next exchange's
        number."""
        number = count_exchange(self._communicator) & _mask(EXCHANGE_BITS)
        heading = self._first, _signed(self._second | number << NUMEL_BITS + OP_BITS + DTYPE_BITS)
        words = headers(frames)
        for place, word in enumerate(heading):
            words[..., place].fill_(word)
        return heading

    def check(self, heading: Heading, received: list[list[int]]) -> None:
        """End the group and raise `CollectiveMismatch` if a rank sent another header than `heading`."""
        expected = _facts(heading)
        if all(_facts(words) == expected for words in received):
            return
        sides = {rank: self._describe(words) for rank, words in zip(self._communicator.ranks, received, strict=True)}
        error = mismatch_error(self._communicator.name, sides, what="made different compressed calls")
        raise self._communicator.health.fail(error)

    def _describe(self, words: list[int]) -> str:
        codec, rest = (word % _WORD for word in words)
        codec >>= STATUS_BITS
        numel, rest = rest & _mask(NUMEL_BITS), rest >> NUMEL_BITS
        op, rest = rest & _mask(OP_BITS), rest >> OP_BITS
        dtype, exchange = rest & _mask(DTYPE_BITS), rest >> DTYPE_BITS
        if not 0 < op < len(OPS) or dtype >= len(VALUE_DTYPES):
            return "a call that is not a compressed collective, or one of another version of ringway"
        name = str(VALUE_DTYPES[dtype]).removeprefix("torch.")
        return f"{OPS[op]} ({name}[{numel}], codec {self._codec_of(codec)}, exchange {exchange})"

    def _codec_of(self, checksum: int) -> str:
        """The codec with this checksum, among those that a program is likely to use."""
        blocks = ["", ":tensor", *(f":{1 << power}" for power in range(3, 20))]
        likely: list[str | Codec] = [self._codec, *(name + block for name in codec_names() for block in blocks)]
        for codec in likely:
            try:
                spec = get_codec(codec).spec
            except (UsageError, TypeError):  # this codec has no such block
                continue
            if crc32(spec.encode()) == checksum:
                return spec
        return "unknown to this rank"


class PendingStatus:
    """The headers of received frames, to be read later."""

    def __init__(self, frames: Tensor, heading: Heading, agreement: Agreement, reports: bool) -> None:
        self._heading, self._agreement, self._reports = heading, agreement, reports
        self._headers = HostCopy(headers(frames))

    def read(self) -> int:
        """The highest status, or 0 if statuses are not reported. Raises if the frames belong to different calls."""
        received = self._headers.read().tolist()
        self._agreement.check(self._heading, received)
        return max(words[0] & _mask(STATUS_BITS) for words in received) if self._reports else 0


def spoil_if_different(frames: Tensor, heading: Heading) -> None:
    """Give frames of different calls the status of values that are not finite, without waiting for the device: until
    the headers are read, the result is NaN, not garbage."""
    words = headers(frames)
    differ = (words[:, 0] >> STATUS_BITS != heading[0] >> STATUS_BITS) | (words[:, 1] != heading[1])
    statuses(frames).masked_fill_(differ.any(), 1)


def _facts(words: Heading | list[int]) -> Heading:
    """A header without its status."""
    return words[0] >> STATUS_BITS, words[1]


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _signed(word: int) -> int:
    """A word of 64 bits as torch stores it."""
    return word - _WORD if word >= _WORD // 2 else word
