"""The backends by name: ringway's own, torch's, and those of third parties.

Users write the name; torch knows the group by its `torch_name`. ringway's own groups need different names there,
because `gloo` always means torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import entry_points

import torch.distributed as c10d

from ringway.backends.base import Backend, GroupInfo
from ringway.errors import BackendUnavailable, UsageError, nearest

Factory = Callable[[GroupInfo], Backend]

ENTRY_POINTS = "ringway.backends"


@dataclass(frozen=True)
class Registration:
    """One backend: how to make it, and which devices it serves."""

    name: str
    torch_name: str
    devices: tuple[str, ...]
    make: Factory
    one_host: bool = False
    others: Mapping[str, Registration] = field(default_factory=dict)
    """Further backends by device, if the user named several, as in 'cpu:shm,cuda:nccl'."""


def _lazily(module: str, name: str) -> Factory:
    """Imports the backend when the first group needs it, so that its optional libraries are not imported before."""

    def make(info: GroupInfo) -> Backend:
        backend: Backend = getattr(import_module(module), name)(info)
        return backend

    return make


_OWN: dict[str, Registration] = {
    "ccl": Registration("ccl", "ringway_ccl", ("cpu",), _lazily("ringway.backends.ccl.backend", "CclBackend")),
    "gloo": Registration(
        "gloo", "ringway_gloo", ("cpu", "cuda"), _lazily("ringway.backends.torch.gloo", "GlooBackend")
    ),
    "hierarchical": Registration(
        "hierarchical", "hierarchical", ("cpu",), _lazily("ringway.backends.several.hierarchical", "over_gloo")
    ),
    "hierarchical_mpi": Registration(
        "hierarchical_mpi",
        "hierarchical_mpi",
        ("cpu",),
        _lazily("ringway.backends.several.hierarchical", "over_mpi"),
    ),
    "mpi": Registration("mpi", "mpi4py", ("cpu", "cuda"), _lazily("ringway.backends.mpi.backend", "MpiBackend")),
    "nccl": Registration("nccl", "ringway_nccl", ("cuda",), _lazily("ringway.backends.nccl.backend", "NcclBackend")),
    "shm": Registration("shm", "shm", ("cpu",), _lazily("ringway.backends.shm.backend", "ShmBackend"), one_host=True),
}

_ELSEWHERE: dict[tuple[str, str], Registration] = {
    ("shm", "cuda"): Registration(
        "shm", "ringway_shm_cuda", ("cuda",), _lazily("ringway.backends.shm.cuda", "ShmCudaBackend"), one_host=True
    ),
}
"""Backends that another class serves on a device, if a user names that device: 'cuda:shm'."""

_COMBINED: dict[str, Registration] = {}
"""Several backends for one group, by the name that torch knows them by."""

_TORCH_ALIASES = {"torch:mpi": "mpi", "torch:ccl": "ccl"}
_PROVIDERS = {"torch:ccl": "oneccl_bindings_for_pytorch"}
"""Packages that register a backend with torch when imported."""


def own(name: str) -> Registration | None:
    """The registration of a backend that ringway runs; None for one that torch runs."""
    known = _OWN.get(name)
    if known is None:
        for entry in entry_points(group=ENTRY_POINTS):
            if entry.name == name:
                register(name, entry.load())
                known = _OWN.get(name)
    return known


def own_names() -> list[str]:
    """The backends that ringway runs, so a policy may choose them call by call."""
    return sorted(_OWN)


def on_device(name: str, device: str) -> Registration | None:
    """What serves a backend's tensors on a device; None if ringway does not run it, or it takes none there."""
    known = _ELSEWHERE.get((name, device), own(name))
    return known if known is not None and device in known.devices else None


def names() -> list[str]:
    """Every name that a user may write."""
    third = [entry.name for entry in entry_points(group=ENTRY_POINTS)]
    builtin = [str(name) for name in c10d.Backend.backend_list if str(name) != "undefined"]
    hidden = {registration.torch_name for registration in (*_OWN.values(), *_COMBINED.values())}
    spelled = (_alias(name) for name in builtin if name not in hidden)
    return sorted({*_OWN, *third, *spelled})


def register(name: str, factory: type[Backend] | Factory, devices: tuple[str, ...] | None = None) -> Registration:
    """Adds a third party's backend."""
    if not name.isidentifier():
        raise UsageError(f"'{name}' cannot name a backend; use letters, digits and underscores")
    if name in _OWN or name in c10d.Backend.backend_list:
        raise UsageError(f"a backend named '{name}' is registered already")
    served = devices or getattr(factory, "devices", None) or ("cpu",)
    _OWN[name] = Registration(name, name, tuple(served), factory)
    return _OWN[name]


def registrations() -> list[Registration]:
    return list(_OWN.values())


def parse(backend: str) -> dict[str, str]:
    """Parses 'cpu:shm,cuda:nccl' or 'gloo', by device ('' for all). Refuses unknown names."""
    if not isinstance(backend, str):
        raise UsageError(f"a backend is named by a string, not by {backend!r}")
    parsed: dict[str, str] = {}
    for part in backend.lower().split(","):
        if part in _TORCH_ALIASES or ":" not in part:
            device, name = "", part.strip()
        else:
            device, name = (piece.strip() for piece in part.split(":", 1))
        if device in parsed or (parsed and not device):
            raise UsageError(f"backend '{backend}': name one backend for each device, as in 'cpu:gloo,cuda:nccl'")
        if own(name) is None and name not in _TORCH_ALIASES and name not in c10d.Backend.backend_list:
            near = nearest(name, names()) or "."
            raise UsageError(f"there is no backend '{name}'{near} Known here: {', '.join(names())}")
        parsed[device] = name
    return parsed


def combined(backend: str) -> Registration | None:
    """The registration of several backends that ringway runs together, one for each device; None if `backend` names
    only one, or one that torch runs."""
    parts = {device: _ELSEWHERE.get((name, device), own(name)) for device, name in parse(backend).items()}
    owned = {device: part for device, part in parts.items() if part is not None}
    if list(owned) == ["cuda"] and owned["cuda"] in _ELSEWHERE.values():
        owned["cpu"] = _OWN[owned["cuda"].name]  # 'cuda:shm' alone: what serves one device serves the other too
    elif len(owned) != len(parts) or len({part.torch_name for part in owned.values()}) == 1:
        return None
    # The CPU first, in whatever order the user names them: calls without tensors run there.
    owned = dict(sorted(owned.items(), key=lambda item: item[0] != "cpu"))
    (device, first), *others = owned.items()
    torch_name = "_".join(["ringway", *(f"{device}_{part.name}" for device, part in owned.items())])
    spelled = ",".join(f"{device}:{part.name}" for device, part in owned.items())
    return _COMBINED.setdefault(
        torch_name, replace(first, name=spelled, torch_name=torch_name, devices=(device,), others=dict(others))
    )


def torch_spelling(backend: str) -> str:
    """The name by which torch makes the group. torch must have been told of combined backends before."""
    together = combined(backend)
    if together is not None:
        return together.torch_name

    def one(name: str) -> str:
        registration = own(name)
        if registration is None and name in _PROVIDERS:
            _provide(name)
        return registration.torch_name if registration else _TORCH_ALIASES.get(name, name)

    return ",".join(f"{device}:{one(name)}" if device else one(name) for device, name in parse(backend).items())


def user_spelling(torch_name: str) -> str:
    """The user's name for a backend that torch knows by `torch_name`, or for one on each device, as in
    'cpu:ringway_gloo'."""
    own_names = {known.torch_name: known.name for known in (*_OWN.values(), *_COMBINED.values())}

    def one(part: str) -> str:
        device, colon, name = part.rpartition(":")
        return device + colon + (own_names.get(name) or _alias(name))

    return ",".join(map(one, torch_name.split(",")))


def _alias(torch_name: str) -> str:
    return next((alias for alias, name in _TORCH_ALIASES.items() if name == torch_name), torch_name)


def _provide(name: str) -> None:
    package = _PROVIDERS[name]
    try:
        import_module(package)
    except ImportError as error:
        raise BackendUnavailable(name, str(error), remedy=f"Install {package}, or use ringway's own") from error


def make(registration: Registration, info: GroupInfo) -> Backend:
    """Makes the backend, or raises a BackendUnavailable that says what to install."""
    try:
        return registration.make(info)
    except ImportError as error:
        raise BackendUnavailable(
            registration.name, str(error), remedy=f"Install it with: pip install 'ringway[{registration.name}]'"
        ) from error
