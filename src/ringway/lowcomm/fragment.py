"""A part of a model that is synchronized at one time: its anchor, and how it is read from and written to parameters.

The anchor is the value that all sites agreed on at the last outer step, flat and in fp32. If several ranks of a site
hold the same parameters (DDP), each keeps and exchanges one slice of the anchor, and the site gathers the slices again.
If they hold different shards (FSDP2), each exchanges its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringway.compress.feedback import Slot
from ringway.errors import NotFinite
from ringway.groups.communicator import Communicator
from ringway.work import Work


def local_part(parameter: Tensor) -> Tensor:
    """The memory of a parameter on this rank: the shard of a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Exchange:
    """An average that is on its way. `result` is ready when `work` is done, or if there is none.

    What an exchange sends leaves the residuals of its `slot`. If the average is not used, the next exchange sends all
    of it again, so the residuals must be again what they were: `undo`.
    """

    def __init__(self, result: Tensor, due: int, slot: Slot | None = None) -> None:
        self.result = result
        self.due = due
        """The step at which it is applied."""
        self.work: Work | None = None
        self._error: NotFinite | None = None
        self._slot = slot
        self._residuals = None if slot is None else slot.copies()

    def begin(self, start: Callable[[], Work | None]) -> None:
        """Call `start`, which averages `result` in place now, or in the background if it returns a Work."""
        try:
            self.work = start()
        except BaseException as error:
            self._failed(error)

    def failure(self) -> NotFinite | None:
        """Wait for the average. The error if a value was not finite."""
        work, self.work = self.work, None
        if work is not None:
            try:
                work.wait()
                if self._slot is not None:
                    self._slot.read_outcome()  # on a GPU, only the stream has waited
            except Exception as error:
                self._failed(error)
        return self._error

    def undo(self) -> None:
        """Give the residuals back what the exchange took."""
        residuals, self._residuals = self._residuals, None
        if self._slot is not None and residuals is not None:
            self._slot.restore(*residuals)

    def _failed(self, error: BaseException) -> None:
        self.undo()
        if not isinstance(error, NotFinite):
            raise error
        self._error = error


class Fragment:
    """Parameters that are synchronized together."""

    def __init__(self, parameters: Sequence[Tensor], site: Communicator | None) -> None:
        self._parameters = list(parameters)
        self._site = site
        self.numel = sum(local_part(parameter).numel() for parameter in parameters)
        ranks, rank = (1, 0) if site is None else (site.size, site.rank)
        self._length = -(-self.numel // ranks)
        self._slice = slice(min(rank * self._length, self.numel), min((rank + 1) * self._length, self.numel))
        self.pending: Exchange | None = None
        self.lost: dict[int, Tensor] = {}
        """What rounding took from a mix, in fp32, for each parameter in 16 bits by its number. Without it, updates
        smaller than an ulp would be lost at every mix."""
        self.anchor = self._read()

    def _places(self) -> Iterator[tuple[Tensor, int]]:
        start = 0
        for parameter in self._parameters:
            part = local_part(parameter)
            yield part, start
            start += part.numel()

    def _sliced(self) -> Iterator[tuple[Tensor, slice]]:
        """What this rank's slice has of each parameter, flat, and its place in the anchor."""
        begin, end = self._slice.start, self._slice.stop
        for number, (part, start) in enumerate(self._places()):
            low, high = max(begin, start), min(end, start + part.numel())
            if low < high:
                values = self._exact(number, part).reshape(-1)
                yield values[low - start : high - start], slice(low - begin, high - begin)

    def _read(self) -> Tensor:
        """This rank's slice of the parameters, as a new tensor."""
        device = local_part(self._parameters[0]).device
        flat = torch.empty(self._slice.stop - self._slice.start, dtype=torch.float32, device=device)
        for values, place in self._sliced():
            flat[place].copy_(values)
        return flat

    def moved(self) -> Tensor:
        """How far this rank's slice of the parameters has moved from the anchor. Parameters in 16 bits hold a rounded
        anchor, and the rounding is not a movement."""
        delta = torch.empty_like(self.anchor)
        for values, place in self._sliced():
            start = self.anchor[place].to(values.dtype)
            torch.sub(start.to(torch.float32), values.to(torch.float32), out=delta[place])
        return delta

    def write(self, own: float) -> None:
        """Make the parameters `own` times themselves plus the rest of the anchor."""
        whole = self._whole_anchor()
        lost: dict[int, Tensor] = {}
        for number, (part, start) in enumerate(self._places()):
            anchor = whole[start : start + part.numel()].view(part.shape)
            if own:
                mixed = torch.lerp(anchor, self._exact(number, part).to(torch.float32), own)
                part.copy_(mixed)
                if part.itemsize < mixed.itemsize:
                    lost[number] = torch.nan_to_num(mixed - part, nan=0.0, posinf=0.0, neginf=0.0)
            else:
                part.copy_(anchor)
        self.lost = lost

    def _exact(self, number: int, part: Tensor) -> Tensor:
        """A parameter, with what rounding took from its last mix."""
        return part + self.lost[number] if number in self.lost else part

    def _whole_anchor(self) -> Tensor:
        if self._site is None or self._site.size == 1:
            return self.anchor
        mine = self.anchor.new_zeros(self._length)
        mine[: self.anchor.numel()] = self.anchor
        whole = self.anchor.new_empty(self._length * self._site.size)
        self._site.all_gather_into_tensor(whole, mine, log_name="lowcomm: anchors of the site")
        return whole


def split_evenly(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Runs of consecutive parameters, each on one device: `count` of them, if there are as many parameters, or more if
    the devices change more often. Of all such splits, this is one whose largest run is smallest."""
    count = max(1, min(count, len(parameters)))
    low, high = 0, sum(parameter.numel() for parameter in parameters)
    fewest = len(_runs(parameters, high, 1))
    while low < high:
        limit = (low + high) // 2
        if len(_runs(parameters, limit, 1)) <= max(count, fewest):
            high = limit
        else:
            low = limit + 1
    return _runs(parameters, high, count)


def _runs(parameters: Sequence[Tensor], limit: int, least: int) -> list[list[Tensor]]:
    """Runs of at most `limit` elements, if no parameter has more, and as few as possible, but at least `least`."""
    runs: list[list[Tensor]] = []
    size = 0
    for place, parameter in enumerate(parameters):
        size += parameter.numel()
        each_alone = len(parameters) - place <= least - len(runs)
        if not runs or size > limit or each_alone or parameter.device != runs[-1][0].device:
            runs.append([])
            size = parameter.numel()
        runs[-1].append(parameter)
    return runs
