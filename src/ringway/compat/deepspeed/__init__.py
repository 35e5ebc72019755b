"""Every public name of `deepspeed.comm`, with its parameters: `import ringway.compat.deepspeed as dist`.

The modules beneath it have the names of deepspeed's, so that this package can stand in for `deepspeed.comm`
(`ringway.compat.install`). Their content is in `ringway.compat.deepspeed.comm`.
"""

from __future__ import annotations

from typing import Any

from ringway.compat.deepspeed import backend, ccl, comm, config, constants, pg_utils, reduce_op, torch, utils
from ringway.compat.deepspeed.comm import *  # noqa: F403
from ringway.compat.deepspeed.comm import __all__ as _names

SUBMODULES = (backend, ccl, comm, config, constants, pg_utils, reduce_op, torch, utils)
"""The modules that `deepspeed.comm` has too."""

__all__ = list(_names)


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
