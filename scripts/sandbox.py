"""Runs a command as an ordinary user of a container would. Needs root.

    python scripts/sandbox.py [--seccomp FILE] [--reach FOLDER] COMMAND...

The command runs as nobody, without capabilities. /dev/shm has 64 MB, and no C or C++ compiler can be executed. FILE is
docker's default seccomp profile (seccomp/default.json of github.com/moby/profiles), which libseccomp applies. FOLDER,
such as a Python's, can be reached even if it is inside a folder that only root may enter.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import glob
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOBODY = 65534
SHM_SIZE = "64m"
COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99|cc1plus|cc1|tcc|zig)(-[0-9.]+)?")
_NEW_MOUNTS = 0x00020000
_SET_NO_NEW_PRIVILEGES = 38
_DROP_BOUNDING = 24
_ARCHITECTURE = {"aarch64": "arm64", "x86_64": "amd64"}.get(platform.machine(), platform.machine())
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_COMPARISONS = {
    name: number
    for number, name in enumerate(
        (
            "SCMP_CMP_NE",
            "SCMP_CMP_LT",
            "SCMP_CMP_LE",
            "SCMP_CMP_EQ",
            "SCMP_CMP_GE",
            "SCMP_CMP_GT",
            "SCMP_CMP_MASKED_EQ",
        ),
        1,
    )
}


class _Argument(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def compilers() -> list[str]:
    """Every file in the usual folders that is a compiler by its name, behind links too."""
    folders = "/usr/bin", "/usr/local/bin", "/bin", *glob.glob("/usr/lib/gcc/*/*"), *glob.glob("/usr/libexec/gcc/*/*")
    paths = (path for folder in folders if os.path.isdir(folder) for path in Path(folder).iterdir())
    return sorted({str(path.resolve()) for path in paths if COMPILER.fullmatch(path.name) and path.is_file()})


def isolate(reach: Path | None) -> None:
    """Mounts, which no other process sees."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        raise SystemExit(f"no namespace of mounts: {os.strerror(ctypes.get_errno())}")
    for options in (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "-o", f"size={SHM_SIZE},mode=1777", "tmpfs", "/dev/shm"],
        *(["--bind", "/dev/null", path] for path in compilers()),
    ):
        subprocess.run(["mount", *options], check=True)
    closed = None if reach is None else next((p for p in reversed(reach.parents) if not p.stat().st_mode & 1), None)
    if closed is not None:
        aside = tempfile.mkdtemp()
        subprocess.run(["mount", "--bind", str(reach), aside], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed)], check=True)
        assert reach is not None
        reach.mkdir(parents=True)
        subprocess.run(["mount", "--move", aside, str(reach)], check=True)
        os.rmdir(aside)


def become_nobody() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def filter_calls(profile: dict[str, Any]) -> None:
    """Applies docker's profile as for a container without capabilities."""
    name = ctypes.util.find_library("seccomp") or "libseccomp.so.2"
    library = ctypes.CDLL(name, use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(
        library.seccomp_init(_action(profile["defaultAction"], profile.get("defaultErrnoRet", 1)))
    )
    for rule in profile["syscalls"]:
        needed, excluded = rule.get("includes") or {}, rule.get("excludes") or {}
        if needed.get("caps") or _ARCHITECTURE in excluded.get("arches", ()):
            continue
        if "arches" in needed and _ARCHITECTURE not in needed["arches"]:
            continue
        given = [
            _Argument(each["index"], _COMPARISONS[each["op"]], each["value"], each.get("valueTwo", 0))
            for each in rule.get("args") or ()
        ]
        action = _action(rule["action"], rule.get("errnoRet", 1))
        for call in rule["names"]:
            number = library.seccomp_syscall_resolve_name(call.encode())
            if number != -1:  # a call that this libseccomp does not know stays forbidden
                library.seccomp_rule_add_array(context, action, number, len(given), (_Argument * len(given))(*given))
    status = library.seccomp_load(context)
    if status != 0:
        raise SystemExit(f"the seccomp profile cannot be applied: {os.strerror(-status)}")


def _action(name: str, errno: int) -> int:
    return {"SCMP_ACT_ALLOW": _ALLOW, "SCMP_ACT_ERRNO": _ERRNO | errno}[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seccomp", type=Path, help="docker's default profile")
    parser.add_argument("--reach", type=Path, help="a folder that the command needs")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    profile = None if given.seccomp is None else json.loads(given.seccomp.read_text())
    isolate(given.reach)
    become_nobody()
    if profile is not None:
        filter_calls(profile)
    try:
        os.execvp(given.command[0], given.command)
    except OSError as error:
        sys.exit(f"{given.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
