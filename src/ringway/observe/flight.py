"""The recorder's contents for others to read: as JSON, in PyTorch's flight-recorder layout, from the file of a
process that is gone, and what torch's own recorder saw of groups that are not ours.
"""

from __future__ import annotations

import json
import os
import pickle
import signal as signals
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch._C import _distributed_c10d as native

from ringway import _core
from ringway.errors import RingwayError, UsageError
from ringway.observe.files import filled, write_whole
from ringway.observe.recorder import RecordedCall, recent_calls, recorded
from ringway.world import world

_LAYOUT_VERSION = "2.10"

# torch's names of the ops, as its flight recorder and the tools around it know them.
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


def own_rank() -> int:
    return c10d.get_rank() if c10d.is_initialized() else 0


def dump(path: str | os.PathLike[str], calls: Sequence[RecordedCall] | None = None) -> bool:
    """Writes the recorder's calls as JSON. Whether it could; a failure is a warning."""
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


def _plain(call: RecordedCall) -> dict[str, Any]:
    return {**vars(call), "dtype": None if call.dtype is None else str(call.dtype).removeprefix("torch.")}


def read_file(path: str | os.PathLike[str]) -> list[RecordedCall]:
    """The calls in the recorder's file (`recorder_file`) of a process, which may be gone."""
    try:
        return [recorded(row) for row in _core.read_record_file(os.fspath(path))["calls"]]
    except RuntimeError as error:
        raise RingwayError(str(error)) from None


def dump_on_signal(number: int | str, path: str) -> None:
    """From now on that signal makes this process write its calls to `path`, even while it is stuck in native code
    with the GIL held. A handler that was installed before is still called. `{rank}` and `{pid}` are filled in."""
    from ringway.observe.stall import watch

    if watch.responder is None:
        raise UsageError("dump_on_signal needs a group: call it after init_distributed() or init_process_group()")
    resolved = signals.Signals[number] if isinstance(number, str) else signals.Signals(number)
    watch.responder.dump_at(int(resolved), filled(path, own_rank()))


def flight_record(calls: Iterable[RecordedCall] | None = None) -> dict[str, Any]:
    """The calls in the layout of PyTorch's flight recorder, as its analyzer (`torchfrtrace`) reads it."""
    kept = list(recent_calls(world.recorder.capacity) if calls is None else calls)
    members = {each.name: each for each in world.communicators()}
    config = {name: {"name": name, "desc": "ringway", "ranks": str(list(each.ranks))} for name, each in members.items()}
    known = [call for call in kept if call.group in members]
    shift = time.time_ns() - _core.monotonic_ns()
    return {
        "version": _LAYOUT_VERSION,
        "pg_config": config,
        "pg_status": {
            name: {
                "last_enqueued_collective": each.lane.collectives - 1,
                "last_completed_collective": each.lane.completed - 1,
            }
            for name, each in members.items()
        },
        "entries": [_entry(number, call, members[call.group].rank, shift) for number, call in enumerate(known)],
    }


def _entry(number: int, call: RecordedCall, rank: int, shift: int) -> dict[str, Any]:
    point_to_point = call.op in ("send", "recv")
    name = f"gloo:{_TORCH_NAMES.get(call.op, call.op)}"
    if call.op == "send":
        name += f" {rank}->{call.peer}"
    elif call.op == "recv":
        name += f" {rank}<-{call.peer}"
    numel = call.nbytes // call.dtype.itemsize if call.dtype is not None else 0
    dtype = (
        ""
        if call.dtype is None
        else {"float32": "Float", "int64": "Long"}.get(
            str(call.dtype).removeprefix("torch."), str(call.dtype).removeprefix("torch.").capitalize()
        )
    )
    frames = [] if call.site is None else [{"name": call.site[2], "filename": call.site[0], "line": call.site[1]}]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": (call.group, "ringway"),
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
    """Writes `PREFIX<rank>`, the file that torch's analyzer expects of each rank."""
    return write_whole(f"{prefix}{own_rank()}", [pickle.dumps(flight_record())])


def torch_calls() -> list[RecordedCall]:
    """What torch's own flight recorder holds: calls of adopted and nccl groups that did not pass through us. Empty
    unless torch records them (TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE)."""
    dump_trace = getattr(native, "_dump_fr_trace", None) or getattr(native, "_dump_nccl_trace", None)
    if dump_trace is None:
        return []
    trace = pickle.loads(dump_trace())
    return [_from_torch(entry) for entry in trace.get("entries", [])]


def _from_torch(entry: dict[str, Any]) -> RecordedCall:
    name = entry["profiling_name"].partition(":")[2].split(" ")[0]
    dtype = next(iter(entry.get("input_dtypes") or ()), "")
    known = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16}
    known |= {"Long": torch.int64, "Int": torch.int32, "Byte": torch.uint8, "Char": torch.int8, "Bool": torch.bool}
    kind = known.get(dtype)
    count = sum(_product(shape) for shape in entry.get("input_sizes") or ())
    frame = next(iter(entry.get("frames") or ()), None)
    point_to_point = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if point_to_point else entry["collective_seq_id"]
    return RecordedCall(
        sequence=max(number - 1, 0),
        op=_OUR_NAMES.get(name, name),
        nbytes=count * (kind.itemsize if kind is not None else 1),
        dtype=kind,
        reduce=None,
        peer=None,
        group=entry["process_group"][0],
        label="",
        site=None if frame is None else (frame["filename"], frame["line"], frame["name"]),
        issued_ns=entry["time_created_ns"],
        completed_ns=entry.get("time_discovered_completed_ns") or 0,
        state={"completed": "completed"}.get(entry["state"], "issued"),
    )


def _product(shape: Sequence[int]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result
