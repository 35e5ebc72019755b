"""How `ringway run --join` finds the run of another launcher: by its pid, through a file in memory that only the same
user may open."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from ringway.errors import UsageError

_NAME = "ringway-run"
_LONGEST = 1 << 16


class Invitation:
    """What a rank needs to join the run of this process: its environment variables, and the size of the job. They are
    readable as long as the object is open."""

    def __init__(self, variables: Mapping[str, str], size: int) -> None:
        self._fd = os.memfd_create(_NAME)
        os.fchmod(self._fd, 0o600)
        os.write(self._fd, json.dumps({"variables": dict(variables), "size": size}).encode())

    def __enter__(self) -> Invitation:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    @staticmethod
    def of(launcher: int) -> tuple[dict[str, str], int]:
        """The variables and the size of the elastic run whose launcher has this pid."""
        folder = f"/proc/{launcher}/fd"
        try:
            if os.stat(folder).st_uid != os.geteuid():
                raise PermissionError
            names = os.listdir(folder)
        except FileNotFoundError:
            raise UsageError(f"--join {launcher}: there is no process {launcher} on this host") from None
        except PermissionError:
            raise UsageError(f"--join {launcher}: that process belongs to another user") from None
        for name in names:
            with suppress(OSError):  # it has been closed
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):
                    with open(f"{folder}/{name}", "rb") as file:
                        facts = json.loads(file.read(_LONGEST))
                    return {str(key): str(value) for key, value in facts["variables"].items()}, int(facts["size"])
        raise UsageError(f"--join {launcher}: process {launcher} is not the launcher of a 'ringway run --elastic'")
