"""What other packages call to find ringway: torch, and vLLM. It lets `torch.distributed.init_process_group("shm")` work
without `import ringway`.

torch calls `register` at the end of `import torch`, through the entry point group `torch.backends`, in every process
that imports torch. So this module imports nothing of ringway, takes microseconds, and never raises. ringway itself is
imported when a group on one of its backends is made, or here if RINGWAY_REPLACE asks it to replace torch's gloo.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off, as it does for all packages that use this entry point.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

_DEVICES = {
    "shm": ("cpu",),
    "mpi4py": ("cpu", "cuda"),
    "hierarchical": ("cpu",),
    "hierarchical_mpi": ("cpu",),
}
"""The backends that programs of torch alone may name, by the devices they serve."""


def register() -> None:
    """Registers the names with torch. From 2.14 on, torch finds them itself when a program names one (entry point group
    `torch.distributed.backends`)."""
    if os.environ.get("RINGWAY_REPLACE", "").strip():
        _import_ringway()
        return
    try:
        import torch.distributed as c10d

        if c10d.is_available() and not hasattr(c10d.Backend, "_ensure_backend_registered"):
            _register(c10d.Backend)
    except Exception:  # a program that does not use ringway must not fail because of it
        pass


def vllm_plugin() -> None:
    """vLLM calls this in each of its processes (entry point group `vllm.general_plugins`)."""
    asked = os.environ.get("RINGWAY_VLLM", "").strip()
    if asked in ("", "0"):
        return
    if asked != "1":
        raise ValueError(f"RINGWAY_VLLM is {asked!r}; use 1, or 0")
    from ringway.compat.vllm import install

    install()


def _import_ringway() -> None:
    try:
        import ringway  # noqa: F401
    except Exception as error:
        print(f"ringway: RINGWAY_REPLACE is set, but ringway cannot be imported: {error}", file=sys.stderr, flush=True)


def _register(backend: Any) -> None:
    defaults = dict(backend.default_device_backend_map)
    for name, devices in _DEVICES.items():
        if name.upper() not in backend._plugins:
            backend.register_backend(name, partial(_make, name), extended_api=True, devices=list(devices))
    # torch makes the first backend registered for a device the default of programs that name none.
    backend.default_device_backend_map.clear()
    backend.default_device_backend_map.update(defaults)


def _make(name: str, options: Any, extra: Any) -> Any:
    """Makes a group. Importing ringway registers the function that does."""
    import torch.distributed as c10d

    import ringway  # noqa: F401

    return c10d.Backend._plugins[name.upper()].creator_fn(options, extra)
