"""What runs in a rank of the pool: a loop that receives a job, runs it, and answers."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

STACK_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write the Python stacks of all its threads to its output, even while it holds the GIL."""

_MAIN_ON_RANKS = "__rank_main__"
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class FunctionRef:
    """A function by name: its module, the module's file, and a dotted name inside it."""

    module: str
    path: str | None
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any] | str) -> FunctionRef:
        """From a function, or from `"package.module:name"`."""
        if isinstance(function, str):
            module, _, qualname = function.partition(":")
        else:
            module, qualname = function.__module__, function.__qualname__
        if not qualname or "<" in qualname:
            raise ValueError(
                f"{function!r} cannot run on a rank: it must be a module-level function that can be found by name "
                "(not a lambda, not nested in another function)"
            )
        found = sys.modules.get(module)
        if module == "__main__" and found is not None:
            sys.modules[_MAIN_ON_RANKS] = found  # so that its classes unpickle as themselves
        return cls(module, getattr(found, "__file__", None), qualname)

    def load(self) -> Callable[..., Any]:
        """The function. Its module is imported by name, or otherwise from its file."""
        target: Any = _import(self.module, self.path)
        for name in self.qualname.split("."):
            target = getattr(target, name)
        function: Callable[..., Any] = target
        return function


def _import(name: str, path: str | None) -> ModuleType:
    if name == "__main__":
        known = sys.modules.get(_MAIN_ON_RANKS)
        return known if known is not None and known.__file__ == path else _import_file(name, path)
    with suppress(ModuleNotFoundError):
        found = importlib.import_module(name)
        if path is None or found.__file__ == path:
            return found
    return _import_file(name, path)


def _import_file(name: str, path: str | None) -> ModuleType:
    """Import a script, or a test module that is not on the import path.

    `__main__` is loaded under another name, so that its `if __name__ == "__main__"` does not run. It is also registered
    under its own name, so that pickle finds its contents.
    """
    own_name = _MAIN_ON_RANKS if name == "__main__" else name
    spec = None if path is None else importlib.util.spec_from_file_location(own_name, path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"a rank cannot import {name!r} (file: {path})", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[own_name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Job:
    """One run of a function on one rank. `generation` changes whenever cached worlds cannot be trusted."""

    number: int
    generation: int
    rank: int
    world_size: int
    function: FunctionRef
    arguments: bytes
    store: tuple[str, int]
    timeout: float
    path: list[str]
    environment: dict[str, str | None]


@dataclass(frozen=True)
class Answer:
    """The result of a job: a pickled value, or an error as text and, if it can be pickled, the error itself."""

    value: bytes | None = None
    error: bytes | None = None
    error_text: str = ""


@dataclass
class _Started:
    """The process group that this process is in, if the pool started it."""

    key: tuple[int, str, str] | None = None
    generation: int = -1
    count: int = 0
    dist: Any = None


_started = _Started()


@dataclass(frozen=True)
class RankContext:
    """What a function learns about its rank."""

    rank: int
    world_size: int
    store: Store
    """A store that is empty at the start, shared by the ranks of this run, and hosted by the parent."""
    timeout: float
    """The time limit of this run, in seconds."""
    _job: Job = field(repr=False)
    _root_store: Store = field(repr=False)

    def start(self, backend: str, module: str = "ringway", **options: Any) -> Any:
        """Join a process group of all ranks of this run, and return the module (`ringway`) to call.

        The group is kept for the next run on the same ranks with the same backend. If you destroy it, the next run has
        to start a new one.
        """
        dist = importlib.import_module(module)
        key = (self._job.generation, module, f"{backend} {sorted(options.items())}")
        if _started.key == key and dist.is_initialized():
            return dist
        leave(dist)
        if _started.generation != self._job.generation:
            _started.generation, _started.count = self._job.generation, 0
        _started.count += 1
        store = PrefixStore(f"world{self._job.generation}.{_started.count}", self._root_store)
        options.setdefault("timeout", timedelta(seconds=max(self.timeout / 2, 1)))
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, **options)
        _started.key, _started.dist = key, dist
        return dist


def leave(dist: Any = c10d) -> None:
    """Destroy the process group that this process is in, even if something else started it."""
    starter, _started.key, _started.dist = _started.dist or dist, None, None
    if c10d.is_initialized():
        starter.destroy_process_group()
    # A start that failed on this rank only has incremented the group count, and group names contain the count.
    c10d.distributed_c10d._world.group_count = 0


def serve(control: socket.socket, output_fd: int) -> None:
    """Run jobs until the pool closes the socket."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    torch.set_num_threads(1)
    stores: dict[tuple[str, int], Store] = {}
    while (message := receive(control)) is not None:
        job: Job = pickle.loads(message)
        if job.store not in stores:
            host, port = job.store
            stores[job.store] = TCPStore(host, port, is_master=False)
        answer = _run(job, stores[job.store])
        sys.stdout.flush()
        sys.stderr.flush()
        send(control, pickle.dumps(answer))
    os._exit(0)


def _run(job: Job, root_store: Store) -> Answer:
    sys.path.extend(entry for entry in job.path if entry not in sys.path)
    before = {name: os.environ.get(name) for name in job.environment}
    _set_environment(job.environment)
    try:
        root_store.set_timeout(timedelta(seconds=job.timeout))
        context = RankContext(
            job.rank,
            job.world_size,
            PrefixStore(f"run{job.number}", root_store),
            job.timeout,
            job,
            root_store,
        )
        function = job.function.load()
        return Answer(value=pickle.dumps(function(context, *pickle.loads(job.arguments))))
    except BaseException as error:
        below_here = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, below_here))
        return Answer(error=_pickled(error), error_text=text)
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _pickled(error: BaseException) -> bytes | None:
    """The error for the parent, if it can be pickled and unpickled."""
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:  # a class may fail to pickle in any way; the text is sent anyway
        return None
    return message


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes | None:
    """The next message, or None if the other side is gone."""
    header = _receive_exactly(connection, _LENGTH.size)
    return None if header is None else _receive_exactly(connection, _LENGTH.unpack(header)[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = connection.recv(min(count, 1 << 20))
        except (ConnectionResetError, BlockingIOError, TimeoutError):
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


__all__: Sequence[str] = ["FunctionRef", "RankContext", "leave"]
