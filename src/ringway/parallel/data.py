"""Data parallelism without a wrapper: hooks that average gradients while backward runs."""

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
from ringway.parallel import sparse
from ringway.parallel.agreement import agreed, broadcast, describe, member
from ringway.parallel.buckets import Bucket, Slot, assign, first_assignment
from ringway.parallel.census import Census, is_split, refuse_gradient
from ringway.parallel.compression import Compression, codec_name

_registered: weakref.WeakSet[DataParallel] = weakref.WeakSet()
_current_task = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; one inside another has its own."""


def register_data_parallel_hooks(
    model: nn.Module,
    group: c10d.ProcessGroup | None = None,
    bucket_mb: float = 25,
    codec: Any = None,
    *,
    gradient_as_bucket_view: bool = True,
) -> DataParallel:
    """Average the model's gradients over the group's ranks, while backward computes them.

    Parameters and buffers take rank 0's values once, now. From then on, when `backward()` returns, the
    gradients are the mean over the ranks. Gradients travel in buckets of about `bucket_mb` MiB; from the second
    step on the buckets follow the order in which the first backward produced the gradients, and `codec` (a name
    or a codec of `ringway.compress`) compresses them, with error feedback.

    With `gradient_as_bucket_view` gradients live in the buckets, which saves a copy: a gradient that a program
    kept from the last step is overwritten by the next. With False they are copied out.

    The model is not wrapped: its state-dict keys stay. All ranks of the group call this together; ranks that
    hold different models get an error here, all of them.
    """
    communicator = member(group, "register_data_parallel_hooks")

    def prepare() -> tuple[list[str], Compression | None]:
        if has_data_parallel_hooks(model):
            raise UsageError("this model, or a part of it, has data-parallel hooks already; remove() those first")
        settings = described(bucket_mb, codec)
        return settings + describe(model), None if codec is None else Compression(codec, group)

    compression = agreed(communicator, prepare, "register_data_parallel_hooks")
    broadcast(communicator, [*model.parameters(), *model.buffers()])
    return DataParallel(model, communicator, int(bucket_mb * (1 << 20)), compression, gradient_as_bucket_view)


def described(bucket_mb: float, codec: Any) -> list[str]:
    """The settings in words, once they are found to be possible."""
    if not 0 < bucket_mb < float("inf"):
        raise UsageError(f"bucket_mb={bucket_mb} is not above 0 and finite")
    return [f"bucket_mb={bucket_mb}", f"codec={None if codec is None else codec_name(codec)}"]


def has_data_parallel_hooks(model: nn.Module) -> bool:
    """Whether a parameter of the model has such hooks, by this model or another that shares it."""
    return any(handle.trains(model.parameters()) for handle in _registered)


class _End:
    """Ends a step with the backward it was queued in. Only that backward holds it: if it raises an error, a weak
    reference to this finds nothing."""

    def __init__(self, handle: DataParallel, task: int) -> None:
        self.handle = handle
        self.task = task

    def __call__(self) -> None:
        self.handle._backward_ended(self.task)


def _nothing() -> None:
    """What a weak reference gives whose object is gone."""


class DataParallel:
    """What `register_data_parallel_hooks` returns: the hooks on one model."""

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        bucket_bytes: int,
        compression: Compression | None,
        as_views: bool,
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._as_views = as_views
        self._scale = 1.0 / communicator.size
        self._lock = threading.Lock()
        self._synchronizing = True
        self._census = Census(model)
        sparse_ids = sparse.announced(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._dense = [(name, p) for name, p in trained if id(p) not in sparse_ids]
        self._sparse = [(name, p) for name, p in trained if id(p) in sparse_ids]
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

    # For the user

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a backward in here stay this rank's own; the next backward outside averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def remove(self) -> None:
        """Takes the hooks off; the model is an ordinary one again. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _registered.discard(self)
        if self._compression is not None:
            self._compression.close()

    def __deepcopy__(self, memo: Any) -> DataParallel:
        """A copy of the model has the forward hook too; it knows that the copy is not its own and does nothing."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a model with data-parallel hooks cannot be pickled; save its state_dict, or remove() them")

    def trains(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of the parameters is averaged here."""
        return any(id(parameter) in self._trained_ids for parameter in parameters)

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket, in the order in which they are sent."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs besides the model: the buckets, and what compression still owes."""
        return {
            "buckets": self.bucket_names,
            "follows_backward": self._follows_backward,
            "feedback": None if self._compression is None else self._compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes a rank's state back; with a codec at another number of ranks, the list of all ranks' states."""
        states = [state] if isinstance(state, Mapping) else list(state)
        buckets = states[0]["buckets"]
        index = {name: i for i, (name, _) in enumerate(self._dense)}
        names = [name for bucket in buckets for name in bucket]
        if sorted(names) != sorted(index):
            differing = sorted(set(names) ^ set(index))[:4]
            raise UsageError(f"this state is of another model: {', '.join(differing)} on one side only")
        members = [[index[name] for name in bucket] for bucket in buckets]
        if any(len({self._keys[i] for i in bucket}) > 1 for bucket in members):
            raise UsageError("this state is of another model: its dtypes, devices or split layers were others")
        self._build(members)
        self._follows_backward = states[0]["follows_backward"]
        if self._compression is not None and states[0]["feedback"] is not None:
            feedback = [one["feedback"] for one in states]
            self._compression.load_state_dict(feedback[0] if isinstance(state, Mapping) else feedback)

    # Hooks

    def _install(self) -> None:
        for index, (_, parameter) in enumerate(self._dense):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, index)))
        for name, parameter in self._sparse:
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived_sparse, name)))
        self._handles.append(self._model.register_forward_hook(self._after_forward))

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Marks where backward will begin. Without the mark (a model that is not called as a module, or compiled)
        gradients are right as well; reentrant checkpoints then cost a round of messages each."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or module is not self._model:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # a mark on a parameter would stay for ever
                leaf.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        """The backward that is seen here is not one inside another, so its end is the end of the step. Whether it
        is a step at all is not known yet: `torch.autograd.grad` comes by here too."""
        with self._lock:
            if self._synchronizing and self._outermost() is None:
                self._forget_failed()
                self._outermost = self._finish_with_this_backward()

    def _arrived(self, index: int, parameter: Tensor) -> None:
        """A gradient is there. Runs once a parameter and step, so what is ordinary comes first, in one piece."""
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
                parameter.grad = slot.view  # now, so that the memory of this gradient serves for the next
            slot.step = self._step
            self._order_seen.append(index)
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_complete()

    def _arrived_sparse(self, name: str, parameter: Tensor) -> None:
        if not self._synchronizing:
            return
        if parameter.grad is not None and parameter.grad.layout is not torch.sparse_coo:
            raise UsageError(
                f"parameter '{name}' belongs to an embedding with sparse=True, and its gradient is dense: it is "
                "shared with a layer that makes dense ones; set sparse=False"
            )
        with self._lock:
            self._follow()

    # One step, from the first gradient to the end of backward

    def _follow(self) -> None:
        """Has the step begin with its first gradient, and be finished at the end of the backward that runs."""
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
        """A step is open, and no backward is left that would finish it: the last one ended in an error. What it had
        sent is awaited, and where that arrived is no place for the gradients of this backward."""
        if not self._open or any(end() is not None for end in self._ends.values()):
            return
        self._open = False
        sent = [bucket for bucket in self._buckets if bucket.work is not None]
        self._await_buckets()
        if any(slot.holds_gradient() for bucket in sent for slot in bucket.slots):
            raise UsageError(
                "the backward before ended in an error while gradients travelled, and what arrived is mixed with those "
                "of this one; after such an error call zero_grad(), with set_to_none=True, before the next backward"
            )

    def _await_buckets(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _begin(self) -> None:
        self._census.check()
        self._step += 1
        self._next_bucket = 0
        self._ends.clear()
        self._order_seen.clear()
        for bucket in self._buckets:
            bucket.begin(self._scale, self._compresses(bucket))
        self._open = True

    def _compresses(self, bucket: Bucket) -> bool:
        """Residuals belong to buckets that stay, so the first step, before the buckets are rebuilt, is plain."""
        return self._compression is not None and self._follows_backward and self._compression.takes(bucket.flat)

    def _launch_complete(self) -> None:
        """Sends what is complete, in the buckets' order: it is the same on every rank."""
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].missing == 0:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.scale_in_place()
        bucket.launched = True
        if bucket.compressed and self._compression is not None:
            bucket.work = self._compression.start(bucket)
        else:
            bucket.work = self._communicator.all_reduce(bucket.flat, async_op=True, log_name=bucket.label)

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
        if used is not None or not self._as_views:  # else every gradient came, and was put where the mean is now
            for slot in self._slots:
                if used is None or used[slot.index]:
                    self._hand_over(slot)
        for place, (_, parameter) in enumerate(self._sparse, start=len(self._dense)):
            if used is None or used[place]:
                parameter.grad = sparse.average(self._communicator, parameter.grad, parameter)
        if not self._follows_backward:
            self._rebuild()

    def _used_somewhere(self) -> list[int] | None:
        """Which parameters have a gradient on some rank; None for all, as is plain on a rank that has them all."""
        everybody = len(self._dense) + len(self._sparse)
        if len(self._order_seen) == everybody:
            own = torch.ones(everybody, dtype=torch.uint8)
        else:
            trained = (*self._dense, *self._sparse)
            own = torch.tensor([parameter.grad is not None for _, parameter in trained], dtype=torch.uint8)
        self._communicator.all_reduce(own, ReduceOp.MAX, log_name="parameters used")
        return None if len(self._order_seen) == everybody else own.tolist()

    def _hand_over(self, slot: Slot) -> None:
        """A gradient that no rank computed stays None; any other is the mean."""
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
        alone = self._communicator.size == 1  # nothing travels: buckets then have names, and no memory
        self._buckets = [
            Bucket(number, [(i, *self._dense[i]) for i in members], "meta" if alone else None)
            for number, members in enumerate(buckets)
        ]
        slots = {slot.index: slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = [slots[i] for i in range(len(self._dense))]

    def _rebuild(self) -> None:
        """Buckets by the order in which rank 0 saw gradients arrive; those it did not see come last."""
        self._follows_backward = True
        if not self._dense:
            return
        seen = set(self._order_seen)
        unseen = [i for bucket in self._buckets for i in (s.index for s in bucket.slots) if i not in seen]
        order = torch.tensor(self._order_seen + unseen, dtype=torch.int64)
        self._communicator.broadcast(order, group_src=0, log_name="bucket order")
        self._build(assign(order.tolist(), self._keys, self._sizes, self._bucket_bytes))
