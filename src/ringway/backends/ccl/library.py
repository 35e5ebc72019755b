"""oneCCL's C API (libccl.so.2), through ctypes. A test compares the prototypes below with the real header."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
from ctypes import CDLL, POINTER, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from ringway.call import Reduce
from ringway.errors import BackendUnavailable

SONAME = "libccl.so.2"
ID_BYTES = 4096

SUCCESS = 0

_REMEDY = "Install it with: pip install oneccl, or set CCL_ROOT to where it is"

DATATYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
BYTES = DATATYPES[torch.uint8]

REDUCTIONS: dict[Reduce, int] = {Reduce.SUM: 0, Reduce.PRODUCT: 1, Reduce.MAX: 2, Reduce.MIN: 3}
"""Without oneCCL's average, which its CPU library does not have for every dtype."""


class UniqueId(ctypes.Structure):
    """How the ranks of a communicator find each other. Passed by value."""

    _fields_ = (("data", c_char * ID_BYTES),)


_COUNTS = POINTER(c_size_t)

PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "onecclGetVersion": (c_int, (POINTER(c_int),)),
    "onecclGetUniqueId": (c_int, (POINTER(UniqueId),)),
    "onecclCommInitRank": (c_int, (POINTER(c_void_p), c_size_t, UniqueId, c_int)),
    "onecclCommDestroy": (c_int, (c_void_p,)),
    "onecclGetErrorString": (c_char_p, (c_int,)),
    "onecclGetLastError": (c_char_p, (c_void_p,)),
    "onecclAllReduce": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
    "onecclReduce": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p)),
    "onecclBroadcast": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
    "onecclReduceScatter": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
    "onecclAllGather": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)),
    "onecclAllToAllV": (c_int, (c_void_p, _COUNTS, c_void_p, _COUNTS, c_int, c_void_p, c_void_p)),
}
"""Each function's result and arguments. Data type, reduction and result are enums, which are ints in C."""


def candidates() -> list[str]:
    """Where the library may be: in CCL_ROOT, where the loader looks, in the wheel `oneccl`."""
    found: list[str] = []
    root = os.environ.get("CCL_ROOT")
    if root:
        found.append(str(Path(root, "lib", SONAME)))
    found.append(SONAME)
    try:
        files = importlib.metadata.files("oneccl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found += [str(Path(str(file.locate())).resolve()) for file in files if file.name == SONAME]
    return found


@functools.cache
def load() -> CDLL:
    """The library with typed functions, or a BackendUnavailable that says where it was looked for."""
    failures: list[str] = []
    for path in candidates():
        try:
            library = CDLL(path)
        except OSError as error:
            failures.append(str(error))
            if Path(path).is_file():  # in CCL_ROOT or the wheel: the user did not mean another one
                raise BackendUnavailable("ccl", f"{path} does not load ({error})", remedy=_REMEDY) from None
            continue
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise BackendUnavailable("ccl", f"{path} has no {name}: it is not oneCCL 2022 or later")
            function.restype, function.argtypes = result, arguments
        return library
    machine = platform.machine()
    if machine != "x86_64":
        reason = f"oneCCL exists for x86_64 only, and this is {machine} ({'; '.join(failures)})"
        raise BackendUnavailable("ccl", reason, remedy="Use shm on one host, and gloo or mpi across hosts")
    raise BackendUnavailable(
        "ccl",
        f"{SONAME} does not load ({'; '.join(failures)})",
        remedy=_REMEDY,
    )


def version() -> str:
    """The library's version. It encodes 2022.2 as 20220200."""
    code = c_int()
    load().onecclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}"
