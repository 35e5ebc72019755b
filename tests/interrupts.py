"""Ctrl-C, at a moment that a test knows."""

from __future__ import annotations

import os
import signal
import threading
import time

import ringway as dist


def interrupt_inside(op: str) -> None:
    """This process is interrupted once it waits in its next call of `op`, however long it takes to get there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not any(call.op == op and call.state == "issued" for call in dist.recent_calls()):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
