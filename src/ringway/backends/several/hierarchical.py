"""Groups that span hosts with several ranks each: shared memory inside a host, gloo or MPI between hosts.

Rank i of every host owns slice i. The slice is reduced inside each host, then between the hosts by its owners, then
gathered inside each host. So only one copy of each host's data crosses the wire, spread over as many connections as the
host has ranks. Large tensors go in chunks, so that a host works on one while another is on the wire. Calls that gain
nothing from this use one flat gloo of the whole group: the other ops, and small calls of ops with few flat steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as c10d
from torch import Tensor

from ringway import call as ops
from ringway.backends.base import Backend, GroupInfo
from ringway.backends.compose import Routes, in_parts, padded, routes_of
from ringway.backends.exchange import exchange
from ringway.backends.queue import CallQueue, queued
from ringway.backends.several.hosts import HostGrid, host_identity
from ringway.backends.several.parts import BackendOfParts
from ringway.backends.shm.backend import ShmBackend
from ringway.backends.torch.gloo import GlooBackend
from ringway.call import Call, Reduce, reduces
from ringway.errors import BackendUnavailable
from ringway.work import Handle

_CHUNK_BYTES = 8 << 20
_FLAT = "flat"
_BY_HOSTS = "by hosts"
_FLAT_UP_TO = {"broadcast": 64 << 10, "reduce_scatter_tensor": 64 << 10}
"""Bytes up to which flat gloo is no slower: these ops cross the wire as often there, in fewer steps."""


def _part(info: GroupInfo, name: str, members: Sequence[int]) -> GroupInfo:
    return replace(
        info,
        rank=members.index(info.rank),
        size=len(members),
        ranks=[info.ranks[member] for member in members],
        store=c10d.PrefixStore(f"ringway/{name}", info.store),
        name=f"{info.name}/{name}",
    )


def over_gloo(info: GroupInfo) -> Backend:
    return _fitting(info, "hierarchical", GlooBackend)


def over_mpi(info: GroupInfo) -> Backend:
    from ringway.backends.mpi.backend import part_of_world

    return _fitting(info, "hierarchical_mpi", part_of_world)


def _fitting(info: GroupInfo, name: str, across: Callable[[GroupInfo], Backend]) -> Backend:
    """The world must have equally many ranks on each host. A later group may have ranks of one host only, or unequally
    many: it gets shared memory alone, or the backend between the hosts alone."""
    identities = [said.decode() for said in exchange(info, "hosts", host_identity().encode())]
    try:
        grid = HostGrid.of(identities, info.rank)
    except BackendUnavailable:
        if not c10d.is_initialized():
            raise
        return ShmBackend(info) if len(set(identities)) == 1 else across(info)
    return HierarchicalBackend(info, grid, name, across)


class HierarchicalBackend(BackendOfParts):
    """Shared memory inside a host; `across` makes the backend between the hosts."""

    name = "hierarchical"
    origins: ClassVar[Mapping[str, str]] = {
        "all_reduce": "reduced inside the host, between hosts by slices, gathered inside",
        "all_gather_into_tensor": "gathered between hosts by slices, then inside",
        "reduce_scatter_tensor": f"through gloo up to {_FLAT_UP_TO['reduce_scatter_tensor']} B, else reduced inside "
        "the host by slices, then between hosts",
        "broadcast": f"through gloo up to {_FLAT_UP_TO['broadcast']} B, else by slices between hosts, gathered inside",
        **dict.fromkeys(
            ("reduce", "gather", "scatter", "all_to_all_single", "barrier", "send", "recv"), "through gloo"
        ),
    }

    def __init__(self, info: GroupInfo, grid: HostGrid, name: str, across: Callable[[GroupInfo], Backend]) -> None:
        super().__init__(info)
        self.name = name  # type: ignore[misc]
        self._grid = grid
        flat = GlooBackend(replace(info, store=c10d.PrefixStore("ringway/flat", info.store)))
        self.torch_group = flat.torch_group
        local = ShmBackend(_part(info, f"host{grid.host}", grid.neighbours))
        between = across(_part(info, f"slice{grid.place}", grid.counterparts))
        self._backends.update(local=local, between=between, flat=flat)
        self._local_routes, self._across_routes, self._flat_routes = map(routes_of, (local, between, flat))
        self._by_hosts = CallQueue(f"hierarchical-{info.name}", info.timeout)

    def can_reduce(self, dtype: torch.dtype, reduce: Reduce) -> bool:
        # A mean of means would round twice, and a factor would be applied twice.
        return reduces(dtype, reduce) and reduce not in (Reduce.AVG, Reduce.PREMUL_SUM)

    def _submit(self, call: Call, body: Callable[[Call], None]) -> Handle:
        if call.nbytes <= _FLAT_UP_TO.get(call.op.name, -1):
            return self._flatly(call)
        return self._order.start(_BY_HOSTS, lambda c: self._by_hosts.submit(c, partial(_in_steps, body, c)), call)

    def _flatly(self, call: Call) -> Handle:
        return self._order.start(_FLAT, self._flat_routes.runners[call.op.name], call)

    def _inside(self, call: Call, **changes: object) -> Handle:
        return self._step(self._local_routes, self._backends["local"], call, **changes)

    def _between(self, call: Call, **changes: object) -> Handle:
        return self._step(self._across_routes, self._backends["between"], call, **changes)

    @staticmethod
    def _step(routes: Routes, part: Backend, call: Call, **changes: object) -> Handle:
        size, ranks = part.group.size, part.group.ranks
        step = replace(call, size=size, ranks=ranks, async_op=True, input_splits=None, output_splits=None, **changes)  # type: ignore[arg-type]
        return routes.runners[step.op.name](step)

    def _chunks(self, tensor: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Flat pieces that divide by the ranks of a host. The last may be padded; it then comes with the original."""
        flat, width = tensor.view(-1), self._grid.width
        length = max(_CHUNK_BYTES // tensor.element_size() // width, 1) * width
        pieces: list[tuple[Tensor, Tensor | None]] = []
        for piece in flat.split(length) if flat.numel() else ():
            whole = padded(piece, width)
            pieces.append((whole, None if whole is piece else piece))
        return pieces

    def _join_slices(self, call: Call, under_way: list[tuple[Tensor, Tensor | None, Tensor, Handle]]) -> None:
        """Ends chunks: waits for the hosts' exchange of each rank's own slice, then gathers the slices in the host."""
        for piece, pads, own, handle in under_way:
            handle.wait()
            self._inside(call, op=ops.ALL_GATHER_SINGLE, inputs=[own], outputs=[piece]).wait()
            if pads is not None:
                pads.copy_(piece[: pads.numel()])

    @queued
    def all_reduce(self, call: Call) -> None:
        source, target = call.inputs[0], call.outputs[0]
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        under_way = []
        for piece, pads in self._chunks(target):
            own = piece.new_empty(piece.numel() // self._grid.width)
            self._inside(call, op=ops.REDUCE_SCATTER_SINGLE, inputs=[piece], outputs=[own]).wait()
            under_way.append((piece, pads, own, self._between(call, op=ops.ALL_REDUCE, inputs=[own], outputs=[own])))
        self._join_slices(call, under_way)

    @queued
    def broadcast(self, call: Call) -> None:
        grid = self._grid
        root_host = next(host for host, members in enumerate(grid.hosts) if call.peer in members)
        under_way = []
        for piece, pads in self._chunks(call.outputs[0]):
            own = piece.new_empty(piece.numel() // grid.width)
            if grid.host == root_host:
                root = grid.neighbours.index(call.peer)
                slices = list(piece.chunk(grid.width)) if grid.place == root else []
                self._inside(call, op=ops.SCATTER, inputs=slices, outputs=[own], peer=root).wait()
            step = self._between(call, op=ops.BROADCAST, inputs=[own], outputs=[own], peer=root_host)
            under_way.append((piece, pads, own, step))
        self._join_slices(call, under_way)

    @queued
    def all_gather_into_tensor(self, call: Call) -> None:
        grid, source, target = self._grid, call.inputs[0].reshape(-1), call.outputs[0]
        if not source.numel():
            return
        counterparts = source.new_empty(len(grid.hosts) * source.numel())
        self._between(call, op=ops.ALL_GATHER_SINGLE, inputs=[source], outputs=[counterparts]).wait()
        everybody = source.new_empty(self.size * source.numel())
        self._inside(call, op=ops.ALL_GATHER_SINGLE, inputs=[counterparts], outputs=[everybody]).wait()
        rows = target.view(self.size, -1)
        for rank, row in zip(grid.by_place(), everybody.view(self.size, -1), strict=True):
            rows[rank].copy_(row)

    @queued
    def reduce_scatter_tensor(self, call: Call) -> None:
        grid, source, target = self._grid, call.inputs[0], call.outputs[0]
        if not source.numel():
            return
        rows = source.view(self.size, -1)
        by_place = rows[torch.tensor(grid.by_place(), device="cpu")].view(-1)
        counterparts = by_place.new_empty(by_place.numel() // grid.width)
        self._inside(call, op=ops.REDUCE_SCATTER_SINGLE, inputs=[by_place], outputs=[counterparts]).wait()
        share = counterparts.new_empty(target.numel())
        self._between(call, op=ops.REDUCE_SCATTER_SINGLE, inputs=[counterparts], outputs=[share]).wait()
        target.copy_(share.view(target.shape))

    # Through the flat backend

    reduce = gather = scatter = all_to_all_single = barrier = _flatly

    def send(self, call: Call) -> Handle:
        return self._flat_routes.runners["send"](call)

    def recv(self, call: Call) -> Handle:
        return self._flat_routes.runners["recv"](call)

    def _stop(self, error: BaseException) -> None:
        super()._stop(error)
        self._by_hosts.stop(error)


def _in_steps(body: Callable[[Call], None], call: Call) -> None:
    with in_parts():
        body(call)
