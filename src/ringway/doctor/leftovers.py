"""What dead jobs left behind: ranks that still run, and files in /dev/shm that nobody uses."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ringway.doctor.finding import Finding, Findings, in_bytes, ok, warning

_PREFIXES = ("nccl-", "torch_", "sem.", "vader_segment", "psm3_", "ringway")
_YOUNG = 60.0
"""Seconds: a file may be about to be used."""
_NOTHING = 1 << 20
"""Bytes: smaller leftovers harm nobody."""
_LAUNCHERS = (
    *("python", "pypy", "pt_main", "torchrun", "accelerate", "deepspeed", "ringway", "uv"),
    *("mpi", "orted", "prte", "hydra", "pmi", "srun", "slurmstepd"),
)
"""How the names of programs begin that start ranks. In a container, one may be process 1."""
_REAPERS = ("init", "systemd", "tini", "dumb-init", "docker-init", "containerd-shim", "s6-svscan", "catatonit")
"""Programs that adopt the children of ended processes, besides process 1."""


def leftovers(root: Path = Path("/")) -> Findings:
    orphans = list(_orphans(root))
    yield from orphans or [ok("leftover ranks", "none")]
    yield _files(root)


def _orphans(root: Path) -> Findings:
    """Ranks of this user whose launcher has ended."""
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.geteuid() or int(folder.name) == os.getpid():
                continue
            status = (folder / "status").read_text(errors="replace")  # a process chooses its name freely
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to somebody else
        parent = status.partition("\nPPid:\t")[2].partition("\n")[0]
        if "\nState:\tZ" in status or not _adopts(root / "proc" / parent):
            continue
        environ = {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}
        rank, size = environ.get(b"RANK"), environ.get(b"WORLD_SIZE")
        if rank is None or size is None:
            continue
        says = f"process {folder.name} is rank {_text(rank)} of {_text(size)}, and its launcher has ended"
        yield warning("leftover ranks", says, f"kill {folder.name}, if nothing needs it")


def _adopts(parent: Path) -> bool:
    try:
        name = (parent / "comm").read_text(errors="replace").strip()
    except OSError:
        return parent.name == "1"
    return name in _REAPERS or (parent.name == "1" and not name.startswith(_LAUNCHERS))


def _text(value: bytes) -> str:
    return value.decode("ascii", "replace")[:20]


def _files(root: Path) -> Finding:
    used = _used_files(root)
    unused, size = [], 0
    for path in (root / "dev/shm").glob("*"):
        try:
            facts = path.lstat()
        except OSError:
            continue
        mine = facts.st_uid == os.geteuid() and path.name.startswith(_PREFIXES)
        if mine and time.time() - facts.st_mtime > _YOUNG and facts.st_ino not in used:
            unused.append(path.name)
            size += facts.st_blocks * 512
    if size < _NOTHING:
        return ok("leftover files", "none of any size in /dev/shm")
    listed = ", ".join(sorted(unused)[:3]) + (" and more" if len(unused) > 3 else "")
    says = f"{len(unused)} in /dev/shm, {in_bytes(size)}, that no process of yours has mapped ({listed})"
    return warning("leftover files", says, "Delete them, if no job in another container uses them")


def _used_files(root: Path) -> set[int]:
    """The inodes of files in /dev/shm that a process of this user has mapped or open."""
    used: set[int] = set()
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    used.add(int(fields[4]))
            for link in (folder / "fd").iterdir():
                with suppress(OSError):  # it has been closed
                    if os.readlink(link).startswith("/dev/shm/"):
                        used.add(link.stat().st_ino)
        except OSError:
            continue
    return used
