"""The largest magnitudes of each chunk, with their places: a few bits for each kept element, nothing for the others.

`topk:RATE:BITS` keeps RATE of the elements of each chunk of 4096, and sends a sign and BITS - 1 bits of magnitude for
each of them. What is not kept stays in the residual. Of equal magnitudes, the first are kept.

The message is one record for each chunk. A record of m elements of which k are kept is the smallest and the largest
kept magnitude (fp32, little endian), then a string of bits, the first in the highest bit of a byte, padded to a byte:

- for each kept element, in order of its place, its sign (1 for zero and above) and its level;
- for each, the lowest `low` bits of its place;
- the other bits of the places, in unary: of k + (m - 1 >> low) bits, bit (place >> low) + i is set for the i-th.

The places are thus in Elias-Fano code. With `low` = floor(log2(m / k)) it takes at most 2 + log2(m / k) bits for each:
8.5 at 1 %, of which log2(binomial(m, k)) / k = 8.0 are their entropy. Unlike arithmetic coding it has a fixed length,
which collectives need, and is decoded quickly.

Levels divide the range between the two magnitudes into 2**(BITS - 1) equal parts, and decode to the middle of theirs.
If the smallest kept magnitude is zero, the lowest level decodes to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringway.compress.codecs.codec import Codec
from ringway.compress.codecs.onebit import pack_bits, unpack_bits
from ringway.errors import UsageError

CHUNK = 4096
RANGE_BYTES = 8
DEFAULT_RATE, DEFAULT_BITS = 0.01, 2


class TopK(Codec):
    """The largest elements of each chunk, coarsely rounded."""

    name = "topk"
    code = 4
    granule = CHUNK

    def __init__(self, rate: float = DEFAULT_RATE, bits: int = DEFAULT_BITS) -> None:
        if not 0 < rate <= 0.5:
            raise UsageError(f"codec 'topk': the rate must be above 0 and at most 0.5, got {rate}")
        if not 2 <= bits <= 8:
            raise UsageError(f"codec 'topk': a kept element takes 2 to 8 bits, got {bits}")
        self.rate, self.bits = rate, bits
        self.kept = -int(-rate * CHUNK // 1)
        """Elements kept of a whole chunk."""

    @classmethod
    def from_argument(cls, argument: str) -> TopK:
        """The codec of `topk:RATE` or `topk:RATE:BITS`."""
        rate, _, bits = argument.partition(":")
        try:
            return cls(float(rate) if rate else DEFAULT_RATE, int(bits) if bits else DEFAULT_BITS)
        except ValueError:
            raise UsageError(
                f"codec 'topk:{argument}': expected topk:RATE or topk:RATE:BITS, as in topk:0.01:2"
            ) from None

    @property
    def native_format(self) -> tuple[int, int, int]:
        return self.code, self.kept, self.bits

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.rate!r}:{self.bits}"  # every digit, so that it reads back as the same codec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopK) and (other.rate, other.bits) == (self.rate, self.bits)

    def __hash__(self) -> int:
        return hash((TopK, self.rate, self.bits))

    def nbytes(self, numel: int) -> int:
        return sum(rows * self._layout(length).nbytes for rows, length in _shapes(numel))

    def encode(self, values: Tensor, message: Tensor, scale: Tensor | None = None) -> None:
        start = written = 0
        for rows, length in _shapes(values.numel()):
            layout = self._layout(length)
            part = values[start : start + rows * length].view(rows, length)
            records = message[written : written + rows * layout.nbytes].view(rows, layout.nbytes)
            records.copy_(layout.encode(part))
            start, written = start + part.numel(), written + records.numel()

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.zero_()
        self.decode_accumulate(message, values)

    def decode_accumulate(self, message: Tensor, accumulator: Tensor, factor: float = 1.0) -> None:
        start = read = 0
        for rows, length in _shapes(accumulator.numel()):
            layout = self._layout(length)
            records = message[read : read + rows * layout.nbytes].view(rows, layout.nbytes)
            places, kept = layout.decode(records)
            part = accumulator[start : start + rows * length].view(rows, length)
            part.scatter_(1, places, part.gather(1, places) + kept * factor)
            start, read = start + part.numel(), read + records.numel()

    def _layout(self, length: int) -> _Layout:
        return _Layout(length, -(-self.kept * length // CHUNK), self.bits)


class _Layout:
    """The record of a chunk of `length` elements."""

    def __init__(self, length: int, kept: int, bits: int) -> None:
        self.length, self.kept, self.bits = length, kept, bits
        self.low = (length // kept).bit_length() - 1
        self.unary = kept + (length - 1 >> self.low)
        self.nbytes = RANGE_BYTES + -(-(kept * (bits + self.low) + self.unary) // 8)

    @property
    def levels(self) -> int:
        return 1 << self.bits - 1

    def encode(self, rows: Tensor) -> Tensor:
        """The records of chunks, [rows, nbytes]."""
        order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices
        places = order[:, : self.kept].sort(dim=1).values
        kept = rows.gather(1, places)
        magnitudes = kept.abs()
        low, high = magnitudes.amin(dim=1, keepdim=True), magnitudes.amax(dim=1, keepdim=True)
        shares = torch.where(high > low, (magnitudes - low) / (high - low), torch.zeros_like(kept))
        levels = (shares * self.levels).to(torch.int64).clamp_(max=self.levels - 1)
        fields = (kept >= 0).to(torch.int64) * self.levels + levels
        unary = torch.zeros(len(rows), self.unary, dtype=torch.int64, device=rows.device)
        unary.scatter_(1, (places >> self.low) + torch.arange(self.kept, device=rows.device), 1)
        lowest = places & (1 << self.low) - 1
        bits = torch.cat([_bits_of(fields, self.bits), _bits_of(lowest, self.low), unary], dim=1)
        padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
        packed = pack_bits(padded.flatten().to(torch.bool)).view(len(rows), -1)
        return torch.cat([torch.cat([low, high], dim=1).view(torch.uint8), packed], dim=1)

    def decode(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """The places and values of the kept elements of chunks, [rows, kept]."""
        ends = records[:, :RANGE_BYTES].flatten().clone().view(torch.float32).view(-1, 2)  # a copy, to be aligned
        low, high = ends[:, :1], ends[:, 1:]
        packed = records[:, RANGE_BYTES:].flatten()
        bits = unpack_bits(packed, 8 * packed.numel()).view(len(records), -1)
        fields, lowest, unary, _ = bits.split(
            [
                self.kept * self.bits,
                self.kept * self.low,
                self.unary,
                bits.shape[1] - self.kept * (self.bits + self.low) - self.unary,
            ],
            dim=1,
        )
        found = torch.sort(unary, dim=1, descending=True, stable=True).indices[:, : self.kept]
        upper = found - torch.arange(self.kept, device=records.device)
        places = (upper << self.low) + _number_of(lowest, self.kept, self.low)
        codes = _number_of(fields, self.kept, self.bits)
        levels = codes % self.levels
        magnitudes = low + (high - low) / self.levels * (levels.to(torch.float32) + 0.5)
        magnitudes = torch.where((low == 0) & (levels == 0), torch.zeros_like(magnitudes), magnitudes)
        return places, torch.where(codes >= self.levels, magnitudes, -magnitudes)


def _shapes(numel: int) -> list[tuple[int, int]]:
    """Numbers of chunks and their length: whole chunks, and one for the rest."""
    whole, rest = divmod(numel, CHUNK)
    return [(rows, length) for rows, length in ((whole, CHUNK), (1, rest)) if rows and length]


def _bits_of(numbers: Tensor, width: int) -> Tensor:
    """The bits of numbers [rows, n], highest first: [rows, n * width]."""
    places = torch.arange(width - 1, -1, -1, device=numbers.device)
    return ((numbers.unsqueeze(2) >> places) & 1).flatten(1)


def _number_of(bits: Tensor, count: int, width: int) -> Tensor:
    """The opposite: [rows, count]."""
    weights = 1 << torch.arange(width - 1, -1, -1, device=bits.device)
    return (bits.reshape(len(bits), count, width).to(torch.int64) * weights).sum(dim=2)
