"""The GPU that a rank will use, by its UUID, which is the same in every process. Numbers depend on each process's
CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import ctypes

import torch


def gpu_of_rank(local_rank: int) -> str | None:
    """The UUID of this rank's GPU; None without one.

    It is the current device, if the program has set one. Many programs set it after they have started communication, so
    device 0 says nothing: then it is the device that such programs will set, number `local_rank`, and around again if
    there are more ranks than devices.
    """
    if not torch.cuda.is_available():
        return None
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return _uuid(chosen or local_rank % torch.cuda.device_count())


def _uuid(number: int) -> str | None:
    """Asks the driver. torch would initialize CUDA first, and programs may still want to fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
        return None
    return None if driver.cuDeviceGetUuid_v2(uuid, device) else uuid.raw.hex()
