"""Export and import of recorded calls: as JSON, in the layout of PyTorch's flight recorder, from the recorder file of a
process that is gone, and from torch's own flight recorder for groups that are not ringway's.
"""

from __future__ import annotations

import json
import os
import pickle
import signal as signals
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed.distributed_c10d as c10d_module

import ringway._core as _core
from ringway.call import OP_BY_NAME
from ringway.errors import RingwayError, UsageError
from ringway.groups.communicator import Communicator
from ringway.groups.listener import Group, Listener
from ringway.groups.world import world
from ringway.observe.files import filled, write_whole
from ringway.observe.recorder import RecordedCall, recent_calls, recorded
from ringway.observe.stall.watch import StallWatch
from ringway.torch_versions import flight_trace

_LAYOUT_VERSION = "2.10"

# The ops that torch's flight recorder and its tools call by another name.
_TORCH_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_coalesced": "reduce_scatter_tensor_coalesced",
}
_OUR_NAMES = {theirs: ours for ours, theirs in _TORCH_NAMES.items()}

# torch's names of the scalar types, where they differ from the dtype's name with a capital letter.
_TORCH_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_OUR_DTYPES = {theirs: ours for ours, theirs in _TORCH_DTYPES.items()}
_TORCH_HOME = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def own_rank() -> int:
    return c10d.get_rank() if c10d.is_initialized() else 0


def dump(path: str | os.PathLike[str], calls: Sequence[RecordedCall] | None = None) -> bool:
    """Writes the recorder's calls as JSON. Returns whether that worked; a failure is a warning."""
    kept = recent_calls(world.recorder.capacity) if calls is None else calls
    story = {
        "rank": own_rank(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "unix_time": time.time(),
        "now_ns": _core.monotonic_ns(),
        "calls": [_plain(call) for call in kept],
    }
    return write_whole(path, [json.dumps(story).encode()])


class ErrorDumps(Listener):
    """Dumps the recorder to `path`, if it is set, at the first failed call of each group. `{rank}` and `{pid}` are
    filled in."""

    def __init__(self) -> None:
        self.path: str | None = None
        self._dumped: weakref.WeakSet[Group] = weakref.WeakSet()

    def failed(self, group: Group, error: BaseException) -> BaseException:
        if self.path is not None and group not in self._dumped:
            self._dumped.add(group)
            dump(filled(self.path, own_rank()))
        return error


def _plain(call: RecordedCall) -> dict[str, Any]:
    return {**vars(call), "dtype": None if call.dtype is None else str(call.dtype).removeprefix("torch.")}


def read_file(path: str | os.PathLike[str]) -> list[RecordedCall]:
    """The calls in the recorder file (`recorder_file`) of a process, which may have ended."""
    try:
        return [recorded(row) for row in _core.read_record_file(os.fspath(path))["calls"]]
    except RuntimeError as error:
        raise RingwayError(str(error)) from None


def dump_on_signal(number: int | str, path: str) -> None:
    """Makes this process write its calls to `path` when it receives that signal, even while it is stuck in native code
    with the GIL held. A handler that was installed before is still called. `{rank}` and `{pid}` are filled in."""
    responder = world.listener(StallWatch).responder
    if responder is None:
        raise UsageError("dump_on_signal needs a group: call it after init_distributed() or init_process_group()")
    resolved = signals.Signals[number] if isinstance(number, str) else signals.Signals(number)
    responder.dump_at(int(resolved), filled(path, own_rank()))


def flight_record(calls: Iterable[RecordedCall] | None = None) -> dict[str, Any]:
    """The calls in the layout of PyTorch's flight recorder, which its analyzer (`torchfrtrace`) reads."""
    kept = list(recent_calls(world.recorder.capacity) if calls is None else calls)
    members = {each.name: each for each in world.communicators()}
    config = {name: {"name": name, "desc": "ringway", "ranks": str(list(each.ranks))} for name, each in members.items()}
    known = [call for call in kept if call.group in members]
    shift = time.time_ns() - _core.monotonic_ns()
    return {
        "version": _LAYOUT_VERSION,
        "comm_lib_version": "",
        "pg_config": config,
        "pg_status": {
            name: {
                "last_enqueued_collective": each.record.collectives - 1,
                "last_started_collective": each.record.collectives - 1,
                "last_completed_collective": each.record.completed - 1,
            }
            for name, each in members.items()
        },
        "entries": [_entry(number, call, members[call.group], shift) for number, call in enumerate(known)],
    }


def _entry(number: int, call: RecordedCall, group: Communicator, shift: int) -> dict[str, Any]:
    point_to_point = call.op in ("send", "recv")
    name = f"gloo:{_TORCH_NAMES.get(call.op, call.op)}"
    # torch names the group's ranks
    peer = group.ranks.index(call.peer) if call.peer in group.ranks else call.peer
    if call.op == "send":
        name += f" {group.rank}->{peer}"
    elif call.op == "recv":
        name += f" {group.rank}<-{peer}"
    numel = call.nbytes // call.dtype.itemsize if call.dtype is not None else 0
    dtype = "" if call.dtype is None else _TORCH_DTYPES.get(call.dtype, str(call.dtype).removeprefix("torch.").title())
    frames = [] if call.site is None else [{"name": call.site[2], "filename": call.site[0], "line": call.site[1]}]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": (call.group, "ringway"),
        "thread_name": "",
        "thread_id": "",
        # torch counts from 1
        "collective_seq_id": 0 if point_to_point else call.sequence + 1,
        "p2p_seq_id": call.sequence + 1 if point_to_point else 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": call.issued_ns + shift,
        "duration_ms": None if call.duration is None else call.duration * 1e3,
        "input_sizes": [[numel]],
        "input_dtypes": [dtype],
        "output_sizes": [[numel]],
        "output_dtypes": [dtype],
        "state": "completed" if call.state == "completed" else "started",
        "time_discovered_started_ns": call.issued_ns + shift,
        "time_discovered_completed_ns": call.completed_ns + shift if call.completed_ns else None,
        "retired": call.state == "completed",
        "timeout_ms": 0,
        "is_p2p": point_to_point,
    }


def save_flight_record(prefix: str) -> bool:
    """Writes `PREFIX<rank>`, the file that torch's analyzer expects from each rank."""
    return write_whole(f"{prefix}{own_rank()}", [pickle.dumps(flight_record())])


def torch_calls() -> list[RecordedCall]:
    """The calls in torch's own flight recorder: those of adopted and nccl groups that did not go through ringway. Empty
    unless torch records them (TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE)."""
    sizes = {str(name): group.size() for group, name in c10d_module._world.pg_names.items()}
    return [_from_torch(entry, sizes) for entry in flight_trace().get("entries", [])]


def _from_torch(entry: dict[str, Any], sizes: Mapping[str, int]) -> RecordedCall:
    name = entry["profiling_name"].partition(":")[2].split(" ")[0]
    op = _OUR_NAMES.get(name, name)
    side = OP_BY_NAME[op].counts.removesuffix("s") if op in OP_BY_NAME else "input"
    kind = _OUR_DTYPES.get(next(iter(entry.get(f"{side}_dtypes") or ()), ""))
    count = sum(_product(shape) for shape in entry.get(f"{side}_sizes") or ())
    # The innermost frames are torch's own functions.
    frames = [frame for frame in entry.get("frames") or () if not frame["filename"].startswith(_TORCH_HOME)]
    point_to_point = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if point_to_point else entry["collective_seq_id"]
    group = entry["process_group"][0]
    # torch retires gloo's calls when they end, without ever recording that they started.
    ended = entry["state"] == "completed" or bool(entry.get("retired"))
    return RecordedCall(
        sequence=max(number - 1, 0),
        op=op,
        nbytes=count * (kind.itemsize if kind is not None else 1),
        dtype=kind,
        reduce=None,
        peer=None,
        group=group,
        label="",
        site=(frames[0]["filename"], frames[0]["line"], frames[0]["name"]) if frames else None,
        issued_ns=entry["time_created_ns"],
        completed_ns=entry.get("time_discovered_completed_ns") or 0,
        state="completed" if ended else "issued",
        size=sizes.get(group, 1),
    )


def _product(shape: Sequence[int]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result
