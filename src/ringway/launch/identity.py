"""Which job a store belongs to. The store names its job; a store of another job, or of one with another secret, is
refused."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from ringway.errors import RendezvousError
from ringway.keys import Key
from ringway.launch.attempts import must_agree
from ringway.launch.info import LaunchInfo
from ringway.launch.roll_call import Place, printable
from ringway.launch.secret import REMEDY, HostFile, job_secret
from ringway.store import Deadline, read

IDENTITY = "ringway/job"
"""The key under which a store names its job."""

TOKEN = "RINGWAY_JOB_TOKEN"
"""The variable with which the user tells jobs apart."""

_LONGEST_IDENTITY = 1024


@dataclass(frozen=True)
class Job:
    """Which job this is, and its key. The name is only a name: it may be public."""

    name: str
    key: Key
    file: HostFile | None = None

    @classmethod
    def of(cls, info: LaunchInfo, token: str, require_secret: bool) -> Job:
        key, file = job_secret(info, required=require_secret)
        return cls(identity(info.job, token), job_key(key, info.job, token), file)

    def all_have_met(self, info: LaunchInfo) -> None:
        if self.file is not None and info.rank == 0:
            self.file.remove()

    @property
    def digest(self) -> str:
        """A job's id may be private, and anyone who can reach the store can read its contents."""
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def identity(self, size: int, host: str, opened: str) -> str:
        """What the store says about itself."""
        facts = {"job": self.digest, "size": size, "host": host, "opened": opened}
        tag = "" if self.key.open else self.key.tag("identity", str(size), host, opened).hex()
        return json.dumps({**facts, "tag": tag})


def job_key(key: Key, job: str, token: str) -> Key:
    """One secret may serve several jobs: each gets a key of its own."""
    return key.derive("job", identity(job, token))


def identity(job: str, token: str) -> str:
    """Distinguishes a job from others: the launcher's id for it, and the user's token if there is one."""
    return f"{job}\n{token}" if token else job


def signature() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def recognize(store: Store, info: LaunchInfo, job: Job, place: Place, patience: float) -> str:
    """Check that the store belongs to this job, and return the nonce of the process that opened it. `patience`
    is how long to wait for the store to name its job.

    Anyone who reaches the store may have written what it says, so no value may raise anything but RendezvousError.
    """
    if place.port is None or info.hosted_by_launcher:
        # A file or a launcher's store does not name its job: the first rank to arrive writes it, the others compare.
        host = "torchrun" if place.port else signature()
        key = f"{IDENTITY}/{info.attempt}" if info.attempt else IDENTITY  # an attempt has its own secret
        size = 0 if must_agree(info) else info.size  # a later attempt may have more or fewer ranks
        said = bytes(store.compare_set(key, "", job.identity(size, host, secrets.token_hex(16))))
    else:
        found = Deadline(patience).poll(lambda: read(store, IDENTITY))
        if found is None:
            raise RendezvousError(
                f"the store at {place} is not ringway's: it does not name its job, or a stranger deleted the name"
            )
        said = found
    try:
        if len(said) > _LONGEST_IDENTITY:
            raise ValueError("too long")
        theirs = json.loads(said)
        host, size, opened, tag = str(theirs["host"]), int(theirs["size"]), str(theirs["opened"]), str(theirs["tag"])
        matches = theirs["job"] == job.digest
        expected = json.loads(job.identity(size, host, opened))["tag"]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise RendezvousError(
            f"the store at {place} names its job in an unknown format: it is another version of ringway's, or a "
            "stranger changed it. Install the same version on all hosts"
        ) from None
    host = printable(host, 128)
    if not matches:
        raise RendezvousError(f"the store at {place} belongs to another job, opened by {host}")
    if bool(tag) == job.key.open or not hmac.compare_digest(tag.encode(), expected.encode()):
        theirs, ours = ("a" if tag else "no"), ("none" if job.key.open else "another" if tag else "one")
        raise RendezvousError(
            f"the store at {place}, opened by {host}, has {theirs} secret, and rank {info.rank} has {ours}: it is "
            f"another job's, or this job's secret is not the same on all ranks. In that case: {REMEDY}"
        )
    if size not in (0, info.size):
        raise RendezvousError(
            f"the store at {place}, opened by {host}, expects {size} ranks, but rank {info.rank} was started as "
            f"one of {info.size}"
        )
    place.host = host
    return opened
