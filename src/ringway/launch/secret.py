"""Where a rank gets the job's secret from, without asking anyone over the network.

1. `RINGWAY_JOB_SECRET`, or the file that `RINGWAY_JOB_SECRET_FILE` names. `ringway run` makes such a file for each run,
   in memory.
2. Under another launcher, if it says that all ranks are on this host: a file in this user's runtime directory, named
   after the job. The first rank makes it, and rank 0 removes it once all have proved that they have read it.
3. MPI hands one over with rank 0's address (`rendezvous.py`).
4. Otherwise there is none, and the job is open: anyone who reaches its store can join it. Hosts cannot be assumed to
   share a home directory, so across hosts the user names the file.

Every way to start a job asks `job_secret`, and says with `say_open` that there is none.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ringway.descriptors import shortage_named
from ringway.errors import ConfigError
from ringway.keys import Key
from ringway.launch.info import LaunchInfo

SECRET = "RINGWAY_JOB_SECRET"
SECRET_FILE = "RINGWAY_JOB_SECRET_FILE"
OPEN_JOB = "this job is open: it has no secret, so anyone who reaches its store can join it and run code in it"
REMEDY = f"set {SECRET}, or {SECRET_FILE} to a file of mode 0600 that all hosts have, to the same 32 random bytes"


def job_secret(info: LaunchInfo, *, required: bool) -> tuple[Key, HostFile | None]:
    """The job's secret as a key, and the host's file if it comes from there. An open key if there is none; with
    `required` that is an error."""
    key, file = given_key(), None
    if key.open:
        file = host_file(info)
        key = key if file is None else file.key()
    if key.open and required:
        raise ConfigError(f"require_secret is set, but the job has no secret: {REMEDY}", key="require_secret")
    return key, file


def say_open() -> None:
    """Rank 0 of a job without a secret says so."""
    print(f"ringway: {OPEN_JOB}: {REMEDY}", file=sys.stderr, flush=True)


def given_key(environ: Mapping[str, str] | None = None) -> Key:
    """The key of the secret that the variables name; an open key if there is none."""
    environ = os.environ if environ is None else environ
    text, path = environ.get(SECRET, "").strip(), environ.get(SECRET_FILE, "").strip()
    if text and path:
        raise ConfigError(f"both {SECRET} and {SECRET_FILE} are set; set one of them", source=SECRET)
    source = SECRET if text else f"{path} ({SECRET_FILE})"
    if path:
        text = _read(path)
    if not text and not path:
        return Key()
    try:
        return Key.from_text(text, source)
    except ValueError as error:
        raise ConfigError(f"the job's secret in {source} {error}", source=source) from None


class PrivateSecret:
    """A new secret in memory. `path` leads to it through a descriptor of this process, which only the same user may
    follow, and nothing is left behind."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ringway-secret")
        os.fchmod(self._fd, 0o600)
        os.write(self._fd, secrets.token_hex(32).encode())
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def key(self) -> Key:
        return given_key({SECRET_FILE: self.path})

    def __enter__(self) -> PrivateSecret:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _read(path: str) -> str:
    try:
        name = os.path.expanduser(path)
        with shortage_named("the job's secret"), open(name, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{path} ({SECRET_FILE}) can be read by other users, so it is no secret; "
                    "it must be yours, with mode 0600",
                    source=SECRET_FILE,
                )
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({SECRET_FILE}): {error.strerror}", source=SECRET_FILE) from None


_known: dict[Path, Key] = {}
"""What this process has read: a program may start again after rank 0 has removed the file."""


class HostFile:
    """The file through which the ranks of one host share a secret. The first rank that looks for it makes it."""

    def __init__(self, info: LaunchInfo) -> None:
        named = "\n".join(map(str, (info.job, info.attempt, info.address, info.port, info.size)))
        self._path = _runtime_folder() / hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def key(self) -> Key:
        if self._path not in _known:
            _known[self._path] = self._share()
        return _known[self._path]

    def _share(self) -> Key:
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_hex(32).encode())
            os.close(fd)
            with suppress(FileExistsError):
                os.link(fresh, self._path)  # appears whole, or not at all
                atexit.register(self._remove_at_exit, os.getpid())  # if the ranks never meet, or only some of them do
            return Key.from_text(_read(str(self._path)), f"this host's file {self._path}")
        finally:
            fresh.unlink()

    def remove(self) -> None:
        """All ranks have read it."""
        self._path.unlink(missing_ok=True)

    def _remove_at_exit(self, maker: int) -> None:
        if os.getpid() == maker:  # not a forked child
            self.remove()


def host_file(info: LaunchInfo) -> HostFile | None:
    """The host's file, if the launcher says that all ranks are here and which job it is."""
    return HostFile(info) if info.on_one_host and info.size > 1 and info.job else None


def _runtime_folder() -> Path:
    """A directory that only this user can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR")  # a launcher may pass that of another host
    private = base is not None and os.path.isdir(base)
    folder = Path(base or "", "ringway") if private else Path(tempfile.gettempdir(), f"ringway-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} is not a directory of this user with mode 0700, so no secret can be kept there; remove it, "
            f"or {REMEDY}"
        )
    return folder
