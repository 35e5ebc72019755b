"""Sends Ctrl-C at a known point of a test."""

from __future__ import annotations

import os
import signal
import threading
import time

import ringway as dist


def interrupt_inside(op: str, *, elsewhere: bool = False) -> None:
    """Interrupts this process once it waits in its next call of `op`, however long it takes to get there.

    With `elsewhere`, a thread other than the main one receives the signal, so the main thread keeps sleeping.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not any(call.op == op and call.state == "issued" for call in dist.recent_calls()):
            time.sleep(0.01)
        time.sleep(0.3)
        if elsewhere:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
