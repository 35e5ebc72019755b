"""Ranks for a notebook or a REPL.

    import ringway.notebook
    ranks = ringway.notebook.start(2)

    %%ranks
    tensor = torch.ones(1) * rank
    dist.all_reduce(tensor)
    tensor

A cell that begins with `%%ranks` runs on every rank, or on those that follow (`%%ranks 0 2`). In a REPL without magics,
`ranks.run("...")` does the same. The ranks have joined one group already, and have `dist`, `torch`, `rank` and
`world_size`. Ctrl-C interrupts the cell on all ranks, and they go on living.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from ringway.errors import UsageError
from ringway.notebook.ranks import CellFailed, Ranks, check

__all__ = ["CellFailed", "Ranks", "load_ipython_extension", "start", "stop"]

_current: Ranks | None = None


class _Current(Ranks):
    """What `start` returns: the ranks of `%%ranks` and `stop`, until `start` is called again."""

    def restart(self) -> None:
        global _current
        if _current is not None and _current is not self:
            raise UsageError("start() has replaced these ranks: use those that it returned, or call it again")
        super().restart()
        _current = self


def start(number: int, backend: str | None = None) -> Ranks:
    """Start ranks on this host, and end those that were started before. If ranks cannot be started with these
    arguments, those go on."""
    global _current
    check(number, backend)
    stop()
    _current = _Current(number, backend)
    shell = _shell()
    if shell is not None:
        load_ipython_extension(shell)
    return _current


@atexit.register
def stop() -> None:
    """End the ranks."""
    global _current
    if _current is not None:
        _current.stop()
    _current = None


def load_ipython_extension(shell: Any) -> None:
    """For `%load_ext ringway.notebook`; `start` does this too."""
    shell.register_magic_function(_cell, magic_kind="cell", magic_name="ranks")


def _cell(line: str, cell: str) -> None:
    """%%ranks [RANK ...]: run this cell on all ranks, or on these."""
    if _current is None:
        raise UsageError("no ranks are running: ringway.notebook.start(2) starts two")
    try:
        chosen = [int(word) for word in line.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"%%ranks takes the numbers of ranks, and '{line}' is none") from None
    _current.run(cell, chosen or None)


def _shell() -> Any:
    """IPython's shell, if this program runs in one."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
