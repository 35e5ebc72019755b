"""Calls as events in torch's profiler: `shm:all_reduce`, like torch's own `gloo:all_reduce`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringway.call import ANY_SOURCE, RECV, Call
from ringway.work import Handle


def profiled(call: Call, start: Callable[[Call], Handle]) -> Handle:
    """Starts the call. Its event has the shapes of the inputs and lasts until the call is done, on whatever thread."""
    anyone = call.op is RECV and call.peer == ANY_SOURCE
    name = "shm:recvAnySource" if anyone else f"shm:{call.op.name}"
    event = torch._C._profiler._RecordFunctionFast(name, list(call.inputs or call.outputs), {})
    event.__enter__()
    try:
        handle = start(call)
    except BaseException:
        event.__exit__(None, None, None)
        raise
    handle.when_done(lambda _: event.__exit__(None, None, None))
    return handle
