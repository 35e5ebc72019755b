"""Data parallelism without a wrapper: hooks that average gradients during backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringway.call import ReduceOp
from ringway.errors import UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.split import is_split
from ringway.parallel import sparse
from ringway.parallel.agreement import agreed, broadcast, describe, member
from ringway.parallel.buckets import Bucket, Slot, Transport, assign, first_assignment
from ringway.parallel.compression import Compression, codec_name
from ringway.parallel.guards import ModelSnapshot, refuse_gradient, refuse_split
from ringway.torch_versions import untraced

_registered: weakref.WeakSet[DataParallel] = weakref.WeakSet()
_current_task = torch._C._current_graph_task_id
"""The id of the backward that runs on this thread; a nested backward has its own."""


def register_data_parallel_hooks(
    model: nn.Module,
    group: c10d.ProcessGroup | None = None,
    bucket_mb: float = 25,
    codec: Any = None,
    *,
    gradient_as_bucket_view: bool = True,
    communication_dtype: torch.dtype | None = None,
    predivide_factor: float | None = None,
    sparse_embeddings: bool = False,
) -> DataParallel:
    """Average the model's gradients over the group's ranks, while backward computes them.

    Parameters and buffers take rank 0's values once, now. From then on, gradients are the mean over the ranks when
    `backward()` returns. Gradients travel in buckets of about `bucket_mb` MiB. From the second step on, buckets follow
    the order in which the first backward produced the gradients, and `codec` (a name or a codec of `ringway.compress`)
    compresses them, with error feedback.

    With `gradient_as_bucket_view`, gradients are views of the buckets, which saves a copy: a gradient that a program
    kept from the last step is overwritten by the next. With False, they are copied out.

    Gradients travel in `communication_dtype` (default: their own) where no codec compresses them. They are divided by
    the number of ranks before they are summed; with a `predivide_factor` they are divided by that, and the sum by the
    rest. With `sparse_embeddings`, gradients of all embeddings travel as the rows that are not zero, not only those of
    embeddings with sparse=True.

    The model is not wrapped, so its state-dict keys stay. All ranks of the group call this together. If ranks hold
    different models, all of them get an error here.
    """
    communicator = member(group, "register_data_parallel_hooks")

    def prepare() -> tuple[list[str], Compression | None]:
        if has_data_parallel_hooks(model):
            raise UsageError("this model, or a part of it, has data-parallel hooks already; remove() those first")
        refuse_split(model, communicator)
        settings = described(bucket_mb, codec, communication_dtype, predivide_factor, sparse_embeddings)
        return settings + describe(model), None if codec is None else Compression(codec, group)

    compression = agreed(communicator, prepare, "register_data_parallel_hooks")
    broadcast(communicator, [*model.parameters(), *model.buffers()])
    transport = Transport.of(communicator.size, predivide_factor, communication_dtype)
    bucket_bytes = int(bucket_mb * (1 << 20))
    return DataParallel(
        model, communicator, bucket_bytes, compression, gradient_as_bucket_view, transport, sparse_embeddings
    )


def described(
    bucket_mb: float,
    codec: Any,
    communication_dtype: torch.dtype | None = None,
    predivide_factor: float | None = None,
    sparse_embeddings: bool = False,
) -> list[str]:
    """Check the settings, and describe them as text."""
    if not 0 < bucket_mb < float("inf"):
        raise UsageError(f"bucket_mb={bucket_mb} must be above 0 and finite")
    if communication_dtype is not None and not communication_dtype.is_floating_point:
        raise UsageError(f"communication_dtype={communication_dtype}: gradients need a floating-point type")
    if predivide_factor is not None and not 0 < predivide_factor < float("inf"):
        raise UsageError(f"predivide_factor={predivide_factor} must be above 0 and finite")
    return [
        f"bucket_mb={bucket_mb}",
        f"codec={None if codec is None else codec_name(codec)}",
        f"communication_dtype={communication_dtype}",
        f"predivide_factor={predivide_factor}",
        f"sparse_embeddings={sparse_embeddings}",
    ]


def has_data_parallel_hooks(model: nn.Module) -> bool:
    """Whether a parameter of the model has data-parallel hooks, of this model or of another that shares it."""
    return any(handle.trains(model.parameters()) for handle in _registered)


class _End:
    """Ends a step at the end of the backward it was queued in. Only that backward holds a reference: if it raises an
    error, a weak reference to this object is dead."""

    def __init__(self, handle: DataParallel, task: int) -> None:
        self.handle = handle
        self.task = task

    def __call__(self) -> None:
        self.handle._backward_ended(self.task)


def _nothing() -> None:
    """Used instead of a dead weak reference."""


@untraced
class DataParallel:
    """The data-parallel hooks of one model, as returned by `register_data_parallel_hooks`."""

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        bucket_bytes: int,
        compression: Compression | None,
        as_views: bool,
        transport: Transport,
        sparse_embeddings: bool,
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._as_views = as_views
        self._transport = transport
        self._lock = threading.Lock()
        self._synchronizing = True
        self._snapshot = ModelSnapshot(model)
        sparse_ids = sparse.announced(model, sparse_embeddings)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._dense = [(name, p) for name, p in trained if id(p) not in sparse_ids]
        self._sparse = [(name, p) for name, p in trained if id(p) in sparse_ids]
        self._densified = {place for place, (_, p) in enumerate(self._sparse) if sparse_ids[id(p)]}
        self._trained_ids = {id(p) for _, p in trained}
        self._keys = [(p.dtype, p.device, is_split(p)) for _, p in self._dense]
        self._sizes = [p.nbytes for _, p in self._dense]
        self._buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        self._build(first_assignment(self._keys, self._sizes, bucket_bytes))
        self._follows_backward = False
        self._order_seen: list[int] = []
        self._step = 0
        self._open = False
        self._next_bucket = 0
        self._outermost: Callable[[], _End | None] = _nothing
        self._ends: dict[int, Callable[[], _End | None]] = {}
        self._handles: list[Any] = []
        if communicator.size > 1:
            self._install()
        _registered.add(self)

    # Public methods

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, gradients stay local; the next backward outside it averages the accumulated sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def remove(self) -> None:
        """Remove the hooks and leave an ordinary model. Safe to call more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _registered.discard(self)
        if self._compression is not None:
            self._compression.close()

    def __deepcopy__(self, memo: Any) -> DataParallel:
        """A copy of the model shares the forward hook, which does nothing for a model that is not its own."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a model with data-parallel hooks cannot be pickled; save its state_dict or remove() them")

    def trains(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of the parameters is averaged by these hooks."""
        return any(id(parameter) in self._trained_ids for parameter in parameters)

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameter names of each bucket, in the order in which buckets are sent."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    def state_dict(self) -> dict[str, Any]:
        """What this rank's checkpoint needs besides the model: the buckets, and the residuals of compression."""
        return {
            "buckets": self.bucket_names,
            "follows_backward": self._follows_backward,
            "feedback": None if self._compression is None else self._compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore a rank's state. With a codec and another number of ranks, pass the list of all ranks' states."""
        states = [state] if isinstance(state, Mapping) else list(state)
        buckets = states[0]["buckets"]
        index = {name: i for i, (name, _) in enumerate(self._dense)}
        names = [name for bucket in buckets for name in bucket]
        if sorted(names) != sorted(index):
            differing = sorted(set(names) ^ set(index))[:4]
            raise UsageError(f"this state belongs to another model: only one of them has {', '.join(differing)}")
        members = [[index[name] for name in bucket] for bucket in buckets]
        if any(len({self._keys[i] for i in bucket}) > 1 for bucket in members):
            raise UsageError("this state belongs to another model: its dtypes, devices or split layers differ")
        self._build(members)
        self._follows_backward = states[0]["follows_backward"]
        if self._compression is not None and states[0]["feedback"] is not None:
            feedback = [one["feedback"] for one in states]
            self._compression.load_state_dict(feedback[0] if isinstance(state, Mapping) else feedback)

    # Hooks

    def _install(self) -> None:
        for index, (_, parameter) in enumerate(self._dense):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, index)))
        for place, (_, parameter) in enumerate(self._sparse):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived_sparse, place)))
        self._handles.append(self._model.register_forward_hook(self._after_forward))

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Hook into the start of backward. Without this (a model that is compiled, or not called as a module) gradients
        are still correct, but each reentrant checkpoint costs a round of messages."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or module is not self._model:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # a hook on a parameter would stay forever
                leaf.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        """This backward is not nested in another, so its end is the end of the step. It may not be a step at all:
        `torch.autograd.grad` gets here too."""
        with self._lock:
            if self._synchronizing and self._outermost() is None:
                self._forget_failed()
                self._outermost = self._finish_with_this_backward()

    def _arrived(self, index: int, parameter: Tensor) -> None:
        """A gradient has arrived. Runs once per parameter and step, so the usual case comes first, inline."""
        if not self._synchronizing:
            return
        with self._lock:
            if not self._open or self._outermost() is None:
                self._follow()
            slot, gradient = self._slots[index], parameter.grad
            bucket = slot.bucket
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or gradient.requires_grad
                or gradient.nbytes != slot.nbytes
                or gradient.dtype is not slot.dtype
                or slot.step == self._step
                or bucket.launched
            ):
                refuse_gradient(slot, gradient)
            bucket.fill(slot, gradient)
            if self._as_views and not slot.in_place:
                parameter.grad = slot.view  # now, so that this gradient's memory can be reused for the next
            slot.step = self._step
            self._order_seen.append(index)
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_complete()

    def _arrived_sparse(self, place: int, parameter: Tensor) -> None:
        if not self._synchronizing:
            return
        dense = parameter.grad is not None and parameter.grad.layout is not torch.sparse_coo
        if dense and place not in self._densified:
            raise UsageError(
                f"parameter '{self._sparse[place][0]}' belongs to an embedding with sparse=True, but its gradient is "
                "dense: it is shared with a layer that produces dense gradients; set sparse=False"
            )
        with self._lock:
            self._follow()

    # One step, from the first gradient to the end of backward

    def _follow(self) -> None:
        """Begin the step at its first gradient, and finish it at the end of the running backward."""
        if self._outermost() is None:
            self._forget_failed()
        if not self._open:
            self._begin()
        if self._outermost() is None and _current_task() not in self._ends:
            self._ends[_current_task()] = self._finish_with_this_backward()

    def _finish_with_this_backward(self) -> Callable[[], _End | None]:
        end = _End(self, _current_task())
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return weakref.ref(end)

    def _forget_failed(self) -> None:
        """If a step is open but no backward is left to finish it, the last backward raised an error. Wait for the
        buckets it sent. Raise if gradients still live in them, because this backward would add to them."""
        if not self._open or any(end() is not None for end in self._ends.values()):
            return
        self._open = False
        sent = [bucket for bucket in self._buckets if bucket.work is not None]
        self._await_buckets()
        if any(slot.holds_gradient() for bucket in sent for slot in bucket.slots):
            raise UsageError(
                "the previous backward ended in an error while gradients were in flight, and they are mixed with those "
                "of this one; after an error in backward, call zero_grad(set_to_none=True) before the next backward"
            )

    def _await_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.finish()

    def _begin(self) -> None:
        self._snapshot.check()
        self._step += 1
        self._next_bucket = 0
        self._ends.clear()
        self._order_seen.clear()
        for bucket in self._buckets:
            bucket.begin(self._transport, self._compresses(bucket))
        self._open = True

    def _compresses(self, bucket: Bucket) -> bool:
        """Residuals need buckets that stay the same, so the first step, before the buckets are rebuilt, is plain."""
        return self._compression is not None and self._follows_backward and self._compression.takes(bucket.flat)

    def _launch_complete(self) -> None:
        """Send complete buckets in order, which is the same on every rank."""
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].missing == 0:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.scale_in_place()
        bucket.launched = True
        if bucket.compressed and self._compression is not None:
            bucket.work = self._compression.start(bucket)
        else:
            bucket.work = self._communicator.all_reduce(bucket.wire(), async_op=True, log_name=bucket.label)

    def _backward_ended(self, task: int) -> None:
        outermost = self._outermost()
        if outermost is not None and outermost.task != task:
            return
        self._outermost = _nothing
        if self._open:
            try:
                self._finish()
            finally:
                self._open = False

    def _finish(self) -> None:
        for bucket in self._buckets[self._next_bucket :]:
            for slot in bucket.slots:
                if slot.step != self._step:
                    bucket.fill(slot, slot.parameter.grad)
            bucket.missing = 0
        self._launch_complete()
        used = self._used_somewhere()
        self._await_buckets()
        for slot in self._slots:
            if slot.step == self._step and slot.parameter.grad is None:
                refuse_gradient(slot, None)
        if used is not None:
            self._put_unused_back(used)
        if used is not None or not self._as_views:  # otherwise all gradients are already in place, as bucket views
            for slot in self._slots:
                if used is None or used[slot.index]:
                    self._hand_over(slot)
        for place, (_, parameter) in enumerate(self._sparse):
            if used is None or used[len(self._dense) + place]:
                mean = sparse.average(
                    self._communicator, sparse.rows(parameter.grad), parameter, transport=self._transport
                )
                parameter.grad = mean.to_dense() if place in self._densified else mean
        if not self._follows_backward:
            self._rebuild()

    def _used_somewhere(self) -> list[int] | None:
        """Which parameters have a gradient on some rank. None for all, if this rank has them all."""
        total = len(self._dense) + len(self._sparse)
        if len(self._order_seen) == total:
            own = torch.ones(total, dtype=torch.uint8)
        else:
            trained = (*self._dense, *self._sparse)
            own = torch.tensor([parameter.grad is not None for _, parameter in trained], dtype=torch.uint8)
        self._communicator.all_reduce(own, ReduceOp.MAX, log_name="parameters used")
        return None if len(self._order_seen) == total else own.tolist()

    def _put_unused_back(self, used: Sequence[int]) -> None:
        """The results of parameters that no rank used are discarded. With a codec they came from the residuals, and
        return to them."""
        for slot in self._slots:
            if not used[slot.index] and slot.bucket.compressed and self._compression is not None:
                start = slot.view.storage_offset()
                self._compression.put_back(slot.bucket, slice(start, start + slot.view.numel()))

    def _hand_over(self, slot: Slot) -> None:
        """Set the gradient to the mean. A gradient that no rank computed stays None."""
        if slot.in_place or (self._as_views and slot.step == self._step):
            return
        if self._as_views:
            slot.parameter.grad = slot.view
        elif slot.parameter.grad is None:
            slot.parameter.grad = slot.view.clone()
        else:
            slot.parameter.grad.copy_(slot.view)

    # Buckets

    def _build(self, buckets: Sequence[Sequence[int]]) -> None:
        alone = self._communicator.size == 1  # nothing is sent: buckets have names, but no memory
        self._buckets = [
            Bucket(number, [(i, *self._dense[i]) for i in members], "meta" if alone else None)
            for number, members in enumerate(buckets)
        ]
        slots = {slot.index: slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = [slots[i] for i in range(len(self._dense))]

    def _rebuild(self) -> None:
        """Order the buckets as gradients arrived on rank 0; parameters without a gradient come last."""
        self._follows_backward = True
        if not self._dense:
            return
        seen = set(self._order_seen)
        unseen = [i for bucket in self._buckets for i in (s.index for s in bucket.slots) if i not in seen]
        order = torch.tensor(self._order_seen + unseen, dtype=torch.int64)
        self._communicator.broadcast(order, group_src=0, log_name="bucket order")
        self._build(assign(order.tolist(), self._keys, self._sizes, self._bucket_bytes))
