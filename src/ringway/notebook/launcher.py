"""Starts the ranks of a notebook, and tells the notebook how each of them ends.

Its arguments are the path of the notebook's socket, the number of ranks and, if the user named one, the backend.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from ringway.launch.run import run
from ringway.notebook.channel import TOKEN, introduce


def main() -> int:
    path, number = sys.argv[1], int(sys.argv[2])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        channel = introduce(connection, bytes.fromhex(os.environ[TOKEN]), number)  # the ranks are 0 to number - 1

        def tell(rank: int, how: str) -> None:
            with suppress(OSError):  # the notebook has ended
                channel.send("ended", rank, how)

        command = [sys.executable, "-m", "ringway.notebook.rank", path, *sys.argv[3:]]
        return run(command, number, on_death="keep", ended=tell).code


if __name__ == "__main__":
    sys.exit(main())
