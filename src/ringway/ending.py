"""Threads that the interpreter's end waits for.

All threads of ringway's are daemons: none may keep a program from ending. But one that is inside torch at that
moment, or frees something of torch's, has given the GIL away in the midst of C++; when it asks for it back too late,
the process is taken down. So those that are about to end are waited for, a while.
"""

from __future__ import annotations

import threading
import time
import weakref

_MOST_SECONDS = 5.0

_ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def will_end(thread: threading.Thread) -> None:
    """The thread is short, or has been told to end."""
    _ending.add(thread)


def wait_for_the_ending() -> None:
    """Nothing is started any more, and everything has been told to end."""
    deadline = time.monotonic() + _MOST_SECONDS
    for thread in list(_ending):
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
