"""The communicator that vLLM's CPU platform gets from ringway."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import init_logger

import ringway
from ringway.groups.replacement import choose

_logger = init_logger("vllm.ringway")  # vLLM shows only loggers of its own name


class RingwayCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's communicator on a group of ringway's: shared memory if the ranks share a host, and between hosts if they
    are spread evenly over them. Otherwise it is vLLM's own.

    vLLM's class calls `dist_module` for collectives, and torch's functions for everything else; both get the group of
    ringway's as `device_group`. Inside a compiled model, ringway's functions become torch's functional collectives.
    """

    def __init__(
        self,
        cpu_group: c10d.ProcessGroup,
        device: torch.device | None = None,
        device_group: c10d.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        info = ringway.communicator(cpu_group).info
        choice = choose(info)
        self._replaces = choice.backend != "gloo"
        super().__init__(cpu_group, device, device_group, self._name_for_vllm(unique_name), use_all2all)
        self.unique_name = unique_name
        if not self._replaces:
            _logger.warning("RINGWAY_VLLM=1 has no effect on group %s: %s", unique_name, choice.reason)
            return
        # vLLM's groups have the same members on all their ranks, but not on all ranks of the world.
        self.device_group = ringway.new_group(
            info.ranks,
            timeout=timedelta(seconds=info.timeout),
            backend=choice.backend,
            use_local_synchronization=True,
            sort_ranks=False,
        )
        self.dist_module = ringway
        self.supports_tensor_dict = True
        _logger.info("Group %s communicates through ringway: %s (%s)", unique_name, choice.backend, choice.reason)

    def _name_for_vllm(self, unique_name: str) -> str:
        """vLLM makes shared memory of its own for groups whose name begins with tp or pp."""
        return f"ringway {unique_name}" if self._replaces and unique_name[:2] in ("tp", "pp") else unique_name

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """`dst` is a rank of the group."""
        if not self._replaces:
            super().send_tensor_dict(tensor_dict, dst)
            return
        sent = {key: value.contiguous() for key, value in tensor_dict.items() if isinstance(value, Tensor)}
        described = [
            (key, (value.dtype, list(value.shape)) if key in sent else None, None if key in sent else value)
            for key, value in tensor_dict.items()
        ]
        ringway.send_object_list([described], group=self.device_group, group_dst=dst)
        for tensor in sent.values():
            ringway.send(tensor, group=self.device_group, group_dst=dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """`src` is a rank of the group."""
        if not self._replaces:
            received: dict[str, Any] = super().recv_tensor_dict(src)
            return received
        arrived: list[Any] = [None]
        ringway.recv_object_list(arrived, group=self.device_group, group_src=src)
        result = {}
        for key, kind, value in arrived[0]:
            if kind is not None:
                dtype, shape = kind
                value = torch.empty(shape, dtype=dtype)
                ringway.recv(value, group=self.device_group, group_src=src)
            result[key] = value
        return result

    def destroy(self) -> None:
        super().destroy()
        if self._replaces:
            ringway.destroy_process_group(self.device_group)
