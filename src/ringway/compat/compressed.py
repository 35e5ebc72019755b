"""DeepSpeed's 1-bit backends under their own names, over ringway's compressed all-reduce.

`compressed_allreduce(buffer_m, worker_error, server_error, local_rank)` works as in DeepSpeed: the root mean square of
the padded buffer is its only scale, errors are updated in place, and the averaged buffer is returned. With
`kernels="reference"`, the bits are DeepSpeed's too (its own formulas in fp32). The fused kernels sum more accurately:
their scale differs from DeepSpeed's by at most `scale_bound` of the buffer's length, and signs differ only for values
that close to zero.

It needs two collectives instead of DeepSpeed's four, runs on any backend and on CPU tensors, and does not need CuPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as c10d
from torch import Tensor

from ringway.api import groups
from ringway.api.collectives import irecv, isend, recv, send
from ringway.compress.all_reduce import AllReduce, Setting
from ringway.compress.codecs.onebit import OneBit
from ringway.compress.kernels.select import kernels_for
from ringway.errors import BackendUnavailable, UsageError
from ringway.groups.world import world

__all__ = ["NcclBackend", "MpiBackend", "CompressedBackend", "CupyBackend"]

_SUMMED_AT_ONCE = 4
"""The fewest running sums in which torch adds up a norm on the CPU: the fp32 lanes of its narrowest vectors."""


def scale_bound(numel: int) -> float:
    """The largest relative difference between DeepSpeed's fp32 norm of `numel` values and the exact one.

    torch adds the squares on the CPU in a few running sums, each of which rounds at every step and stops growing once a
    square is too small to change it. So the bound grows with the length. Measured with normal values: 7e-4 of 8 Mi
    elements, 3e-2 of 100 Mi; 100 Mi ones give 0.2. GPUs sum in a tree, and stay below 2^-12.
    """
    return 2.0**-12 + numel / _SUMMED_AT_ONCE * 2.0**-25


class ModelParallelUnit(Protocol):
    """DeepSpeed's mpu."""

    def get_data_parallel_group(self) -> c10d.ProcessGroup: ...


class _DeepSpeedOneBit(OneBit):
    """One scale per tensor, with its norm taken in fp32 as in DeepSpeed."""

    def __init__(self) -> None:
        super().__init__(block=None)

    def measure(self, values: Tensor) -> Tensor:
        return torch.linalg.norm(values)


class _Compressed:
    """The base class of the backends."""

    world_group: c10d.ProcessGroup | None

    def __init__(self, group: c10d.ProcessGroup | None, kernels: str | None) -> None:
        self.world_group = group
        self._kernels = kernels
        communicator = world.communicator(group)
        self.rank = communicator.rank
        self.size = communicator.size

    @cached_property
    def compression_backend(self) -> CupyBackend:
        """DeepSpeed's CuPy helper, created on first use: nothing here needs it."""
        return CupyBackend()

    @torch.no_grad()
    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int
    ) -> Tensor:
        """The average of `buffer_m` over the group, compressed to one bit. Both errors are updated.

        `worker_error` is as long as the buffer padded to a multiple of 8 times the group's size; `server_error` is one
        rank's share of it. `local_rank` is ignored: tensors know their device.
        """
        if buffer_m.numel() == 0:
            worker_error.zero_()
            server_error.zero_()
            return buffer_m
        padded = self._padded(buffer_m, worker_error, server_error)
        codec = _DeepSpeedOneBit()
        setting = Setting(codec, kernels_for(codec, padded.device, self._kernels), True, padded.numel())
        exchange = AllReduce(padded, None, world.communicator(self.world_group), setting)
        exchange.use_residuals(worker_error, server_error, buffer_m.numel())
        exchange.run()
        if padded.data_ptr() == buffer_m.data_ptr():
            return buffer_m
        return padded[: buffer_m.numel()].view(buffer_m.shape)

    def _padded(self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor) -> Tensor:
        length = worker_error.numel()
        if length < buffer_m.numel() or length % (8 * self.size) or server_error.numel() * self.size != length:
            raise UsageError(
                f"compressed_allreduce: a buffer of {buffer_m.numel()} elements over {self.size} ranks needs a "
                f"worker_error padded to a multiple of {8 * self.size} and a server_error 1/{self.size} as long, got "
                f"{length} and {server_error.numel()}"
            )
        flat = torch.flatten(buffer_m)
        if length == buffer_m.numel():
            return flat
        return torch.cat([flat, flat.new_zeros(length - flat.numel())])


class _GroupBackend(_Compressed):
    """A backend over torch's groups: the data-parallel group of an mpu, or the world."""

    def __init__(self, mpu: ModelParallelUnit | None = None, *, kernels: str | None = None) -> None:
        super().__init__(None if mpu is None else mpu.get_data_parallel_group(), kernels)
        self.mpu = mpu

    def my_igather(
        self, rank: int, size: int, group: Any, sendbuf: Tensor, recvbuf: Sequence[Tensor], root: int
    ) -> list[Any]:
        """Start gathering `sendbuf` at `root`; returns the handles to wait for."""
        if rank != root:
            return [isend(sendbuf, root, group=group)]
        recvbuf[rank].copy_(sendbuf)
        return [irecv(recvbuf[index], index, group=group) for index in range(size) if index != rank]

    def my_gather(
        self, rank: int, size: int, group: Any, sendbuf: Tensor, recvbuf: Sequence[Tensor], root: int
    ) -> None:
        """Gather `sendbuf` at `root`."""
        if rank != root:
            send(sendbuf, root, group=group)
            return
        for index in range(size):
            if index != rank:
                recv(recvbuf[index], index, group=group)
            else:
                recvbuf[rank].copy_(sendbuf)


class NcclBackend(_GroupBackend):
    """DeepSpeed's 1-bit backend over NCCL; here it uses the group's backend."""


class CompressedBackend(_GroupBackend):
    """DeepSpeed's 1-bit backend for other accelerators, with its `pack` and `unpack`."""

    def pack(self, buffer: Tensor, size: int) -> Tensor:
        """The signs of a buffer, eight per byte, in `size` rows."""
        codec = OneBit(None)
        flat = buffer.reshape(1, -1).to(torch.float32)
        return codec.pack(flat, flat.new_ones(1), flat.numel()).reshape(size, -1)

    def unpack(self, buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Signs as -1 and 1, in `size` rows."""
        return OneBit(None).unpack(buffer.reshape(-1), buffer.numel() * 8).reshape(size, -1).to(dtype)


class MpiBackend(_Compressed):
    """DeepSpeed's 1-bit backend over MPI: the world, started on MPI if nothing is started yet.

    `cuda_aware` is accepted for compatibility; ringway's MPI backend detects it. The gathers are the steps of
    DeepSpeed's `compressed_allreduce`. They take CuPy arrays, and NumPy arrays and tensors too.
    """

    def __init__(self, cuda_aware: bool, *, kernels: str | None = None) -> None:
        if not groups.is_initialized():
            from ringway.job.init import init_distributed

            init_distributed("mpi")
        super().__init__(None, kernels)
        self.cuda_aware = cuda_aware

    @cached_property
    def comm(self) -> Any:
        """mpi4py's COMM_WORLD. It has this job's ranks if an MPI launcher started it."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as missing:
            raise BackendUnavailable(
                "mpi", f"mpi4py cannot be imported ({missing})", remedy="Install mpi4py and an MPI"
            ) from missing
        return MPI.COMM_WORLD

    def my_igather(self, rank: int, size: int, comm: Any, sendbuf: Any, recbuf: Any, root: int) -> list[Any]:
        """Start gathering `sendbuf` at `root` over an mpi4py communicator; returns the requests."""
        if rank != root:
            return [comm.Isend(sendbuf, dest=root)]
        recbuf[rank] = sendbuf
        return [comm.Irecv(recbuf[index], source=index) for index in range(size) if index != rank]

    def my_gather(self, rank: int, size: int, comm: Any, sendbuf: Any, recbuf: Any, root: int) -> None:
        """Gather `sendbuf` at `root` over an mpi4py communicator."""
        for request in self.my_igather(rank, size, comm, sendbuf, recbuf, root):
            request.Wait()

    def gather_cuda(
        self,
        rank: int,
        world_size: int,
        comm: Any,
        cupy_sign_list_packed: Sequence[Any],
        cupy_recvbuf_sign: Any,
        cupy_worker_scale: Any,
        cupy_recvbuf_scale: Any,
    ) -> None:
        """Send chunk i of the signs, and the scale, to rank i; receive every rank's into the two buffers."""
        requests = []
        for root in range(world_size):
            requests += self.my_igather(rank, world_size, comm, cupy_sign_list_packed[root], cupy_recvbuf_sign, root)
        for root in range(world_size):
            requests += self.my_igather(rank, world_size, comm, cupy_worker_scale, cupy_recvbuf_scale, root)
        for request in requests:
            request.Wait()

    def gather_host(
        self,
        rank: int,
        world_size: int,
        comm: Any,
        cupy_sign_list_packed: Sequence[Any],
        cupy_recvbuf_sign: Any,
        cupy_worker_scale: Any,
        cupy_recvbuf_scale: Any,
    ) -> tuple[Sequence[Any], Any, Any, Any]:
        """`gather_cuda` through host memory: returns the four arrays, the two received ones new."""
        signs = [_to_host(chunk) for chunk in cupy_sign_list_packed]
        scale = _to_host(cupy_worker_scale)
        all_signs = np.zeros([world_size, signs[rank].size], dtype=signs[rank].dtype)
        all_scales = np.zeros([world_size, 1], dtype=scale.dtype)
        self.gather_cuda(rank, world_size, comm, signs, all_signs, scale, all_scales)
        return (
            cupy_sign_list_packed,
            _from_host(all_signs, cupy_recvbuf_sign),
            cupy_worker_scale,
            _from_host(all_scales, cupy_recvbuf_scale),
        )

    def allgather_cuda(
        self,
        comm: Any,
        cupy_server_sign_packed: Any,
        cupy_recvbuf_sign_server: Any,
        cupy_server_scale: Any,
        cupy_recvbuf_scale_server: Any,
    ) -> None:
        """Gather every rank's signs and scale on every rank, in the two buffers."""
        comm.Allgather(cupy_server_sign_packed, cupy_recvbuf_sign_server)
        comm.Allgather(cupy_server_scale, cupy_recvbuf_scale_server)

    def allgather_host(
        self,
        comm: Any,
        cupy_server_sign_packed: Any,
        cupy_recvbuf_sign_server: Any,
        cupy_server_scale: Any,
        cupy_recvbuf_scale_server: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """`allgather_cuda` through host memory: returns the four arrays, the two received ones new."""
        signs, scale = _to_host(cupy_server_sign_packed), _to_host(cupy_server_scale)
        all_signs = np.zeros([comm.Get_size(), signs.size], dtype=signs.dtype)
        all_scales = np.zeros([comm.Get_size(), 1], dtype=scale.dtype)
        self.allgather_cuda(comm, signs, all_signs, scale, all_scales)
        return (
            cupy_server_sign_packed,
            _from_host(all_signs, cupy_recvbuf_sign_server),
            cupy_server_scale,
            _from_host(all_scales, cupy_recvbuf_scale_server),
        )


def _to_host(array: Any) -> Any:
    """A CuPy array or a tensor as a NumPy array."""
    if isinstance(array, Tensor):
        return array.detach().cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _from_host(values: Any, like: Any) -> Any:
    """A NumPy array as what `like` is."""
    if isinstance(like, Tensor):
        return torch.from_numpy(values).to(like.device)
    return importlib.import_module("cupy").asarray(values) if hasattr(like, "get") else values


class CupyBackend:
    """Converts tensors to CuPy and back, and runs its `packbits` in chunks. The only class here that needs CuPy."""

    def __init__(self) -> None:
        try:
            self._cupy = importlib.import_module("cupy")
        except ImportError as missing:
            raise BackendUnavailable(
                "cupy",
                f"CuPy cannot be imported ({missing})",
                remedy="Install cupy-cuda12x (or your CUDA's); NcclBackend and CompressedBackend do not need it",
            ) from missing

    def torch2cupy(self, tensor: Tensor) -> Any:
        """The tensor as a CuPy array that shares its memory."""
        return self._cupy.from_dlpack(tensor)

    def cupy2torch(self, cupy_tensor: Any) -> Tensor:
        """The array as a tensor that shares its memory."""
        tensor: Tensor = torch.from_dlpack(cupy_tensor)
        return tensor

    def compress_by_chunk(self, cupy_bool_tensor: Any, num_chunks: int) -> list[Any]:
        """Booleans packed eight per byte, in `num_chunks` equal chunks."""
        pieces: list[Any] = self._cupy.split(self._cupy.packbits(cupy_bool_tensor), num_chunks)
        self._cupy.cuda.get_current_stream().synchronize()
        return pieces
