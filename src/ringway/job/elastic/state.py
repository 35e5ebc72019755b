"""The state that all ranks of an elastic job have in common: what a failed step changes, and copying it to ranks that
lack it."""

from __future__ import annotations

import copy
import math
import mmap
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringway.api.groups import settled
from ringway.api.objects import broadcast_object_list
from ringway.errors import UsageError
from ringway.groups.world import world

_PIECE = 16 << 20
"""Bytes that travel at a time."""
_LARGE = 8 << 20
"""Bytes from which a tensor is received into huge pages. The page faults of new memory take longer than the copy."""
_FEW = 2
"""Newcomers to which the state is sent one by one. More of them are sent it at once, by a broadcast to all ranks."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a state dict whose tensors travel separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    place: int = 0
    """Of its device, among those that the sender's tensors are on."""

    def empty(self) -> Tensor:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.device != "cpu" or nbytes < _LARGE:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(self.shape)


class State:
    """The objects that the user named: modules, optimizers, anything with a `state_dict`, and plain values."""

    def __init__(self, parts: MutableMapping[str, Any]) -> None:
        step = parts.setdefault("step", 0)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"state['step'] is {step!r}; it counts the steps done, so it is a number from 0 on")
        self._parts = parts
        self._kept: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []
        self._random: list[Callable[[], None]] = []
        self.require_whole()

    @property
    def step(self) -> int:
        step: int = self._parts["step"]
        return step

    def advance(self) -> None:
        self._parts["step"] = self.step + 1

    def tensors(self) -> set[Tensor]:
        """The parameters and buffers of all modules."""
        modules = [part for part in self._parts.values() if isinstance(part, nn.Module)]
        return {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}

    def require_whole(self) -> None:
        """Every rank must have all of the state. A program may shard a model once the ranks have met."""
        for name, part in self._parts.items():
            if isinstance(part, nn.Module):
                for parameter, tensor in part.named_parameters():
                    if isinstance(tensor, DTensor):
                        raise UsageError(
                            f"state['{name}'] is sharded: {parameter} is a DTensor, as fully_shard and tensor "
                            "parallelism make it. A rank that dies takes its shards with it, so the others cannot "
                            "repair the state. Use job.ddp or job.data_parallel; or save the shards with "
                            "torch.distributed.checkpoint, and restart the whole job from there"
                        )

    # One attempt

    def prepare(self) -> None:
        """Before an attempt: clears gradients, and keeps what a forward pass changes: buffers and random numbers."""
        for part in self._parts.values():
            if isinstance(part, (nn.Module, torch.optim.Optimizer)):
                part.zero_grad(set_to_none=True)
        self._kept = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module, name, buffer in self._buffers()
        ]
        cpu = torch.get_rng_state()
        self._random = [lambda: torch.set_rng_state(cpu)]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.get_rng_state()
            self._random.append(lambda: torch.cuda.set_rng_state(device))

    def undo(self) -> None:
        """After an attempt that failed before its commit: the state is as before it."""
        with torch.no_grad():
            for module, name, buffer, before in self._kept:
                module._buffers[name] = buffer  # a forward pass may assign another tensor
                if buffer is not None and before is not None:
                    if buffer.shape != before.shape:
                        buffer.resize_(before.shape)
                    buffer.copy_(before)
        for restore in self._random:
            restore()
        for part in self._parts.values():
            if isinstance(part, torch.amp.GradScaler):
                part._per_optimizer_states.clear()  # it unscales each optimizer's gradients once per step

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
        for part in self._parts.values():
            if isinstance(part, nn.Module):
                for module in part.modules():
                    for name, buffer in module._buffers.items():
                        yield module, name, buffer

    # Copying

    def copy_from(self, sources: Sequence[int]) -> None:
        """Every rank of the default group calls this. The state of the ranks in `sources`, which is the same on all of
        them, becomes every rank's. Each of them sends a share."""
        communicator = world.communicator(None)
        has_it = communicator.rank in sources
        tensors: list[Tensor] = []
        places: list[int] = []
        told = [_separated(self._dicts(), tensors, places) if has_it else None]
        broadcast_object_list(told, src=sources[0])
        if not has_it:
            dicts = _joined(told[0], tensors, places)
        newcomers = [rank for rank in range(communicator.size) if rank not in sources]
        for turn, piece in enumerate(_pieces(tensors, places)):
            source = sources[turn % len(sources)]
            if len(newcomers) <= _FEW and piece[0].device.type == "cpu":
                _send_piece(piece, source, newcomers)
            else:
                _broadcast_piece(piece, source, has_it)
        settled()  # a copy on a GPU that was aborted has left garbage
        if not has_it:
            self._load(dicts)

    def _dicts(self) -> dict[str, Any]:
        return {name: _contents(part) for name, part in self._parts.items()}

    def _load(self, dicts: dict[str, Any]) -> None:
        if dicts.keys() != self._parts.keys():
            differing = ", ".join(sorted(dicts.keys() ^ self._parts.keys()))
            raise UsageError(f"the ranks' states differ: only some of them have {differing}")
        for name, value in dicts.items():
            if not _load_into(self._parts[name], value):
                self._parts[name] = value


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _contents(part: Any) -> Any:
    if isinstance(part, nn.Module):
        return part.state_dict(), {name: buffer for name, (_, buffer) in _unsaved_buffers(part).items()}
    return part.state_dict() if _has_state(part) else part


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    """The buffers that are in no state dict, with the modules that have them."""
    return {
        f"{path}.{name}": (module, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


def _load_into(part: Any, value: Any) -> bool:
    """Gives an object new contents; whether it can have them. The program may hold the object under another name."""
    if isinstance(part, nn.Module):
        saved, unsaved = value
        part.load_state_dict(saved)
        for name, (module, buffer) in _unsaved_buffers(part).items():
            if name in unsaved and not _load_into(buffer, unsaved[name]):
                module._buffers[name.rpartition(".")[2]] = unsaved[name]
    elif _has_state(part):
        part.load_state_dict(value)
    elif type(part) is not type(value):
        return False
    elif isinstance(part, Tensor):
        if part.shape != value.shape or part.dtype != value.dtype:
            return False
        with torch.no_grad():
            part.copy_(value)
    elif isinstance(part, list):
        part[:] = value
    elif isinstance(part, (dict, set)):
        part.clear()
        part.update(value)
    else:
        return False
    return True


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with `change` applied to everything else."""
    if isinstance(value, dict):
        made = copy.copy(value)  # a Counter, a defaultdict and the like are not made from pairs
        for key, each in value.items():
            made[key] = _mapped(each, change)
        return made
    if isinstance(value, list):
        listed = copy.copy(value)
        listed[:] = [_mapped(each, change) for each in value]
        return listed
    return tuple(_mapped(each, change) for each in value) if type(value) is tuple else change(value)


def _separated(value: Any, tensors: list[Tensor], places: list[int]) -> Any:
    """`value` with a slot instead of each tensor; the tensors and the places of their devices are appended to the
    lists."""
    devices: dict[torch.device, int] = {}

    def take(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        tensors.append(each.detach())
        places.append(devices.setdefault(each.device, len(devices)))
        return _Slot(tuple(each.shape), each.dtype, each.device.type, places[-1])

    return _mapped(value, take)


def _joined(value: Any, tensors: list[Tensor], places: list[int]) -> Any:
    """`value` with an empty tensor instead of each slot; the tensors and the places of the senders' devices are
    appended to the lists."""

    def make(each: Any) -> Any:
        if not isinstance(each, _Slot):
            return each
        tensors.append(each.empty())
        places.append(each.place)
        return tensors[-1]

    return _mapped(value, make)


def _pieces(tensors: Sequence[Tensor], places: Sequence[int]) -> Iterator[list[Tensor]]:
    """The tensors' bytes in pieces of about the same size, each of one device. The senders' devices decide, so all
    ranks cut alike."""
    piece: list[Tensor] = []
    last = -1
    filled = [(place, tensor) for place, tensor in zip(places, tensors, strict=True) if tensor.numel()]
    for place, tensor in sorted(filled, key=lambda each: each[0]):  # stable, so the same on every rank
        for part in tensor.contiguous().reshape(-1).view(torch.uint8).split(_PIECE):
            if piece and (sum(map(len, piece)) + len(part) > _PIECE or place != last):
                yield piece
                piece = []
            piece.append(part)
            last = place
    if piece:
        yield piece


def _send_piece(piece: list[Tensor], source: int, newcomers: Sequence[int]) -> None:
    """To each newcomer in turn. Other ranks are not disturbed, so several sources send at the same time."""
    communicator = world.communicator(None)
    if communicator.rank == source:
        together = torch.cat(piece) if len(piece) > 1 else piece[0]
        for newcomer in newcomers:
            communicator.send(together, newcomer)
    elif communicator.rank in newcomers:
        together = piece[0].new_empty(sum(map(len, piece))) if len(piece) > 1 else piece[0]
        communicator.recv(together, source)
        _scatter(together, piece)


def _broadcast_piece(piece: list[Tensor], source: int, has_it: bool) -> None:
    communicator = world.communicator(None)
    if has_it and communicator.rank != source:  # receives what it has: not into the tensors, which stay as they are
        together = piece[0].new_empty(sum(map(len, piece)))
    else:
        together = torch.cat(piece) if len(piece) > 1 else piece[0]
    communicator.broadcast(together, src=source)
    if not has_it:
        _scatter(together, piece)


def _scatter(together: Tensor, piece: list[Tensor]) -> None:
    """Copies what was received into the parts of a piece, unless it is the only one."""
    if len(piece) > 1:
        for part, received in zip(piece, together.split([len(each) for each in piece]), strict=True):
            part.copy_(received)
