"""Conversions around a call, for what a backend does not accept: strided tensors, dtypes, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import ringway._core as _core
from ringway.backends.base import Backend
from ringway.call import Call, Reduce
from ringway.work import Handle

Runner = Callable[[Call], Handle]

SMALL_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})
BOOL_AS_BYTES = {
    Reduce.SUM: Reduce.MAX,
    Reduce.MAX: Reduce.MAX,
    Reduce.BOR: Reduce.MAX,
    Reduce.PRODUCT: Reduce.MIN,
    Reduce.MIN: Reduce.MIN,
    Reduce.BAND: Reduce.MIN,
    Reduce.BXOR: Reduce.BXOR,
}


def native(backend: Backend, method: Runner) -> Runner:
    """The backend's own method, with every call converted to what it accepts."""
    start = method if backend.says_when_it_sends else partial(_core.pass_on, method)

    def run(call: Call) -> Handle:
        if _accepted(backend, call):
            return start(call)
        staging = _Staging(backend, call)
        staging.call.record = call.record
        handle = start(staging.call)
        return handle.then(staging.finish, staging.device) if staging.has_finish else handle

    return run


def _accepted(backend: Backend, call: Call) -> bool:
    """Whether the backend accepts the call unchanged. Nearly all calls qualify, so this is quick."""
    dtype = call.dtype
    if dtype is None:
        return True
    if not (backend.can_reduce(dtype, call.reduce) if "reduce" in call.op.agree else backend.can_move(dtype)):
        return False
    anyhow = not backend.needs_contiguous
    for tensor in (*call.inputs, *call.outputs):
        if tensor.is_conj() or tensor.is_neg() or not (anyhow or tensor.is_contiguous()):
            return False
    return True


class _Staging:
    """One call, converted: contiguous, in a dtype and with a reduction that the backend accepts."""

    def __init__(self, backend: Backend, call: Call) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []
        self._divided: list[Tensor] = []
        self.call = call
        dtype = call.dtype
        assert dtype is not None, "a call without tensors needs no conversion"
        if any(t.is_conj() or t.is_neg() for t in (*call.inputs, *call.outputs)):
            self._replace(lambda t: t.resolve_conj().resolve_neg())
        if "reduce" in call.op.agree:
            if not backend.can_reduce(dtype, call.reduce):
                self._convert_reduction(backend, dtype)
        elif not backend.can_move(dtype):
            self._replace(_as_bytes)
        if backend.needs_contiguous and not all(t.is_contiguous() for t in (*self.call.inputs, *self.call.outputs)):
            self._replace(lambda t: t if t.is_contiguous() else t.contiguous())

    @property
    def has_finish(self) -> bool:
        return bool(self._back)

    @property
    def device(self) -> torch.device | None:
        """The CUDA device on which the results are copied back."""
        output = self._back[0][0]
        return output.device if output.is_cuda else None

    def finish(self) -> None:
        for original, staged in reversed(self._back):
            if any(staged is total for total in self._divided):
                divide(staged, self.call.size)
            _copy_back(original, staged)

    def _replace(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Passes converted tensors instead. Outputs that are not the caller's memory are copied back at the end."""
        converted = {id(t): convert(t) for t in (*self.call.inputs, *self.call.outputs)}
        for output in self.call.outputs:
            staged = converted[id(output)]
            if staged is not output and staged.data_ptr() != output.data_ptr():
                self._back.append((output, staged))
        splits = (self.call.input_splits, self.call.output_splits)
        if splits != (None, None):
            splits = (
                _scaled(self.call.input_splits, self.call.inputs[0], converted),
                _scaled(self.call.output_splits, self.call.outputs[0], converted),
            )
        self.call = replace(
            self.call,
            inputs=[converted[id(t)] for t in self.call.inputs],
            outputs=[converted[id(t)] for t in self.call.outputs],
            input_splits=splits[0],
            output_splits=splits[1],
        )

    def _convert_reduction(self, backend: Backend, dtype: torch.dtype) -> None:
        reduce = self.call.reduce
        if dtype is torch.bool:
            self._replace(lambda t: t.contiguous().view(torch.uint8))
            self.call = replace(self.call, reduce=BOOL_AS_BYTES[reduce])
            return
        if reduce is Reduce.PREMUL_SUM:
            factor = self.call.factor
            self._replace(lambda t: t * factor)
            reduce = Reduce.SUM
        elif reduce is Reduce.AVG:
            wide = torch.int64 if dtype in SMALL_INTEGERS else dtype
            self._replace(lambda t: t.to(wide, copy=True, memory_format=torch.contiguous_format))
            self._divided = list(self.call.outputs)
            reduce = Reduce.SUM
        self.call = replace(self.call, reduce=reduce)
        staged = self.call.dtype
        assert staged is not None
        if staged.is_complex:
            self._replace(lambda t: torch.view_as_real(t))
        elif not backend.can_reduce(staged, reduce):
            self._replace(lambda t: t.to(torch.int32))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory, flat. One element counts as contiguous whatever its stride, so the stride is set here."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_back(original: Tensor, staged: Tensor) -> None:
    if staged.dtype is torch.uint8 and original.dtype is not torch.uint8:
        staged = staged.view(original.dtype)
    elif original.is_complex() and not staged.is_complex():
        staged = torch.view_as_complex(staged)
    original.copy_(staged.view(original.shape))


def divide(tensor: Tensor, divisor: int) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(divisor)
    else:
        tensor.div_(divisor, rounding_mode="trunc")


def _scaled(splits: Sequence[int] | None, before: Tensor, converted: dict[int, Tensor]) -> list[int] | None:
    """Splits count rows of the first dimension; a tensor passed as flat bytes has more of them."""
    if splits is None:
        return None
    rows = before.shape[0] if before.dim() else 1
    after = converted[id(before)]
    factor = after.shape[0] // rows if rows else 1
    return [split * factor for split in splits]
