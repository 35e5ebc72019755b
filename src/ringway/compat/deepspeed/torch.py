"""deepspeed's backend object: the collectives as methods, over ringway's world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from ringway.api import collectives as api
from ringway.api import groups
from ringway.compat.deepspeed import ops
from ringway.compat.deepspeed.backend import Backend
from ringway.compat.deepspeed.reduce_op import ReduceOp, torch_op
from ringway.groups.world import world
from ringway.job.init import init_distributed


class TorchBackend(Backend):
    """The job's collectives as an object. Creating one starts the job, unless it has started already."""

    def __init__(
        self,
        backend: str | None,
        timeout: Any,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        super().__init__(name)
        self.has_all_reduce_coalesced = api.has_all_reduce_coalesced()
        self.has_coalescing_manager = api.has_coalescing_manager()
        self.all_gather_function = self.get_all_gather_function()
        self.reduce_scatter_function = self.get_reduce_scatter_function()
        self.single_gpu_mode = True
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.initialized = True
        self.world_rank, self.world_size = groups.get_rank(), groups.get_world_size()

    @classmethod
    def get_all_gather_function(cls) -> Callable[..., Any]:
        return api.all_gather_into_tensor

    @classmethod
    def get_reduce_scatter_function(cls) -> Callable[..., Any]:
        return api.reduce_scatter_tensor

    def has_all_gather_into_tensor(self) -> bool:
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        return True

    def init_process_group(  # type: ignore[override]
        self, backend: str | None, timeout: timedelta | None, init_method: str | None, rank: int, world_size: int
    ) -> None:
        if not c10d.is_initialized():
            init_distributed(
                backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size, verbose=False
            )
        self.using_mpi = groups.get_backend() in ("mpi", "torch:mpi")

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return api.all_reduce(tensor, torch_op(op), group, async_op)

    def inference_all_reduce(self, tensor: Tensor, op: Any, group: Any = None) -> Tensor:
        api.inference_all_reduce(tensor, torch_op(op), group)
        return tensor

    def all_reduce_coalesced(
        self, tensors: list[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return api.all_reduce_coalesced(tensors, torch_op(op), group, async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return api.reduce(tensor, dst, torch_op(op), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.reduce_scatter(output, input_list, torch_op(op), group, async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        return api.broadcast(tensor, src, group, async_op)

    def broadcast_object_list(self, object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
        ops.broadcast_object_list(object_list, src, group, device)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return api.all_gather(tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        return api.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    all_gather_base = all_gather_into_tensor

    def all_gather_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        return ops.all_gather_coalesced(output_tensors, input_tensors, group, async_op)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        ops.all_gather_object(object_list, obj, group)

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.reduce_scatter_tensor(output_tensor, input_tensor, torch_op(op), group, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.all_to_all(output_tensor_list, input_tensor_list, group, async_op)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        api.send(tensor, dst, group, tag)

    def recv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> int:
        return api.recv(tensor, src, group, tag)

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        return api.isend(tensor, dst, group, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        return api.irecv(tensor, src, group, tag)

    def batch_isend_irecv(self, p2p_op_list: list[ops.P2POp]) -> Any:
        return ops.batch_isend_irecv(p2p_op_list)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.gather(tensor, gather_list, dst, group, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return api.scatter(tensor, scatter_list, src, group, async_op)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return api.barrier(group, async_op, device_ids)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        api.monitored_barrier(group, timeout, wait_all_ranks)

    def get_rank(self, group: Any = None) -> int:
        return groups.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return groups.get_world_size(group)

    def is_initialized(self) -> bool:
        return groups.is_initialized()

    def get_backend(self, group: Any = None) -> str:
        return groups.get_backend(group)

    def new_group(self, ranks: list[int]) -> Any:  # type: ignore[override]
        return groups.new_group(ranks)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        return groups.get_global_rank(group, group_rank)

    def get_world_group(self) -> Any:
        return groups.get_world_group()

    def destroy_process_group(self, group: Any = None) -> None:
        groups.destroy_process_group(group)

    def init_device_mesh(self, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
        return groups.initialize_mesh_device(mesh_shape, mesh_dim_names)

    def enable_symm_mem_for_group(self, group_name: str) -> None:
        ops.enable_symm_mem_for_group(group_name)


def _backend_of_world() -> TorchBackend:
    return TorchBackend(None, None, None)


def current_backend() -> TorchBackend | None:
    """deepspeed's `cdb`: one object for as long as the world is the same."""
    if not groups.is_initialized():
        return None
    return world.communicator(None).parts.part(_backend_of_world)
