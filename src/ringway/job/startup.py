"""What `import ringway` does besides defining names. The package calls `start_up` once, at the end of its import."""

from __future__ import annotations

import atexit
import os

import torch

import ringway._core as _core
from ringway import forwarding
from ringway.api.collectives import batch_isend_irecv
from ringway.groups import replacement
from ringway.groups.bridge import Bridge
from ringway.groups.exit import leave_at_exit, leave_in_child
from ringway.groups.factory import introduce_to_torch
from ringway.groups.world import world
from ringway.observe import start as watching
from ringway.torch_versions import batch_messages, builtin_comm_hooks, dlpack_exchange_api, monitored_barriers


def start_up() -> None:
    """Prepares this process, so that a program that imports ringway and then calls torch's own `init_process_group`
    gets everything: the backends, the recorder, the stall watch and explained failures."""
    _core.handle_terminate()
    _describe_python()
    introduce_to_torch()
    forwarding.install()
    batch_messages(Bridge, batch_isend_irecv)
    builtin_comm_hooks(Bridge)
    monitored_barriers(Bridge)
    replacement.install()
    world.listeners_of_every_job = watching.listeners
    os.register_at_fork(after_in_child=leave_in_child)
    os.register_at_fork(after_in_child=watching.forked)
    # Handlers run in reverse order: peers are told why this rank leaves before its groups close.
    atexit.register(leave_at_exit)
    atexit.register(watching.leave)


def _describe_python() -> None:
    """Tells the native core which types are tensors, and which stack frames to skip when it looks for a call site."""
    _core.set_tensor_types((torch.Tensor, torch.nn.Parameter), dlpack_exchange_api())
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    torch_package = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    _core.set_machinery([package, torch_package], [f"{package}{folder}{os.sep}" for folder in ("testing", "bench")])
