"""Stands in for a rank's interpreter under a launcher: `python -I -S handover.py FOLDER`.

Hands its environment, its standard streams and its connection to the launcher to the forked rank that listens in
FOLDER, which has already imported torch, and exits as that rank exits. See `run_launched` in `programs.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

SECONDS = 60.0
"""How long the two sides wait for each other."""
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_CONNECTION = "PMI_FD"  # a descriptor with which MPICH's launcher talks to a rank; Open MPI's gives an address
_MESSAGE_BYTES = 1 << 17


@dataclass
class Launched:
    """On the forked rank: what the launched process has handed over."""

    connection: socket.socket
    parent: int
    variables: dict[str, str]
    descriptors: list[int]

    @classmethod
    def accept(cls, folder: str, rank: int) -> Launched:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{folder}/{rank}")
            listener.listen()
            listener.settimeout(SECONDS)
            connection, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        return cls(connection, *json.loads(message), descriptors)

    def replace_this_process(self) -> None:
        """Give this process the environment, the streams, the connection and the parent of the launched one."""
        os.getppid = lambda: self.parent  # ringway looks for the launcher among this process's ancestors
        os.environ.clear()
        os.environ.update(self.variables)
        for number, descriptor in enumerate(self.descriptors[:3]):
            os.dup2(descriptor, number)
        if self.descriptors[3:]:
            os.environ[_CONNECTION] = str(self.descriptors[3])
        self.connection.close()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def end(self, status: int) -> None:
        """Make the launched process exit with this wait status."""
        with suppress(OSError), self.connection:  # the launcher may have killed it
            self.connection.send(str(status).encode())


def _hand_over(folder: str) -> None:
    rank = next(os.environ[name] for name in _RANK if name in os.environ)
    descriptors = [0, 1, 2]
    if _CONNECTION in os.environ:
        descriptors.append(int(os.environ[_CONNECTION]))
    forked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            forked.connect(f"{folder}/{rank}")
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    socket.send_fds(forked, [json.dumps([os.getppid(), dict(os.environ)]).encode()], descriptors)
    status = os.waitstatus_to_exitcode(int(forked.recv(64) or b"256"))
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    _hand_over(sys.argv[1])
