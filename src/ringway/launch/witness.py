"""A store outside the job: it survives the loss of any of the job's hosts, and needs no launcher.

A witness is a Redis or Valkey server (`redis://`, `rediss://`, `unix://`). A job is one hash in it, whose fields are
the keys of the store. A change is a script, which the server runs undivided. The hash expires an hour after the last
change; the ranks that run renew it.

The hash has a mark, which its first user makes. A client that finds another mark, or none, raises `DataLost`: the hash
has expired, or was deleted, and what is there now may be a second job.

Redis copies its data to replicas, and to disk, after it has answered. So a server that was restarted, or a replica that
took its place, may have forgotten which ranks the job has. The ranks compare the server's run id, and stop if it is
another one: nothing here replaces a consensus protocol.
"""

from __future__ import annotations

import importlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import DistNetworkError

from ringway.errors import UsageError
from ringway.launch import ports
from ringway.launch.store_client import StoreClient, not_an_integer, too_late, unanswered
from ringway.store import Deadline

VARIABLE = "RINGWAY_WITNESS"
_SCHEMES = ("redis", "rediss", "unix")
_MARK = "ringway/server"
_EXPIRES = 3600
_RENEWALS = 4  # in the time until the hash would expire
_LOST = "RINGWAYLOST"
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 0.05

# The arguments of each script begin with the mark, and with the seconds until the hash expires.
_OPEN = f"""
redis.call('HSETNX', KEYS[1], '{_MARK}', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGET', KEYS[1], '{_MARK}')
"""
_GUARD = f"""
if redis.call('HGET', KEYS[1], '{_MARK}') ~= ARGV[1] then
  return redis.error_reply('{_LOST} the hash has another mark, or none')
end
"""
_RENEW = "redis.call('EXPIRE', KEYS[1], ARGV[2])\n"
_COMPARE_SET = f"""
local found = redis.call('HGET', KEYS[1], ARGV[3])
if found == false then
  if ARGV[4] ~= '' then return ARGV[4] end
elseif found ~= ARGV[4] then
  return found
end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[5])
{_RENEW}
return ARGV[5]
"""
_SET = f"""
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
{_RENEW}
"""
_APPEND = f"""
local before = redis.call('HGET', KEYS[1], ARGV[3]) or ''
redis.call('HSET', KEYS[1], ARGV[3], before .. ARGV[4])
{_RENEW}
"""
_ADD = f"""
local total = redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[4])
{_RENEW}
return total
"""

T = TypeVar("T")


class DataLost(DistNetworkError):
    """The witness answers, and no longer has what the ranks agreed on."""


class RedisStore(StoreClient):
    """A store in a Redis server."""

    def __init__(self, url: str, job: str, timeout: float) -> None:
        """`job` names the hash. Raises `UsageError` if the URL names no witness."""
        super().__init__()
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise UsageError(
                f"the witness '{public(url)}' is not supported: name a Redis or Valkey server as in "
                "redis://host:6379/0, rediss://... with TLS, or unix:///path"
            )
        try:
            redis: Any = importlib.import_module("redis")
        except ImportError as error:
            raise UsageError(f"the witness {self} needs redis: pip install 'ringway[redis]'") from error
        local = parts.scheme == "unix"
        seconds = min(_ANSWER_SECONDS, timeout)
        self.host, self.port = ("127.0.0.1", None) if local else (parts.hostname or "localhost", parts.port or 6379)
        self._errors = redis.RedisError
        self._not_an_integer = redis.ResponseError
        self._server = ""
        self._hash = f"ringway:{job}"
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),
            redis_connect_func=self._connected,
        )
        self._scripts: dict[str, Any] = {
            script: self._client.register_script(_GUARD + script)
            for script in (_COMPARE_SET, _SET, _APPEND, _ADD, _RENEW)
        }
        self._next_renewal = 0.0
        self.set_timeout(timedelta(seconds=timeout))
        self._ask(self._client.ping)  # connects
        mark = f"{self._server} {secrets.token_hex(16)}"
        opened = self._client.register_script(_OPEN)
        self._mark = bytes(self._ask(lambda: opened(keys=[self._hash], args=[mark, _EXPIRES])))
        if self._mark.partition(b" ")[0] != self._server.encode():
            raise self._replaced()

    def __str__(self) -> str:
        return f"at {self.host}:{self.port}" if getattr(self, "port", None) else "on this host"

    def _connected(self, connection: Any) -> None:
        """Runs for each new connection."""
        connection.on_connect()
        connection.send_command("INFO", "server")
        told = connection.read_response()
        found = re.search(r"run_id:(\w+)", told.decode() if isinstance(told, bytes) else str(told))
        server = found.group(1) if found else ""
        if self._server not in ("", server):
            raise self._replaced()
        self._server = server

    def _replaced(self) -> DataLost:
        return DataLost(
            f"the witness {self} was restarted, or another server took its place: it may have lost what the ranks "
            "agreed on. Start the job again under another RINGWAY_JOB_TOKEN"
        )

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except self._errors as error:
            if _LOST in str(error):
                raise DataLost(
                    f"the witness {self} has lost the job's data: they expired or were deleted while this rank ran. "
                    "Another job may have begun under the same name, so this rank stops. Start the job again"
                ) from None
            raise unanswered(f"the witness {self}", error) from error

    def _change(self, script: str, *arguments: str | bytes | int) -> Any:
        given = [self._mark, _EXPIRES, *arguments]
        return self._ask(lambda: self._scripts[script](keys=[self._hash], args=given))

    def renew(self) -> None:
        """Each rank that runs calls this often: its job may go on for hours without a change. Few calls send a
        request."""
        if time.monotonic() >= self._next_renewal:
            self._change(_RENEW)
            self._next_renewal = time.monotonic() + _EXPIRES / _RENEWALS

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._change(_SET, *(part for pair in zip(keys, values, strict=True) for part in pair))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        def look() -> list[bytes] | None:
            values = self._ask(lambda: self._client.hmget(self._hash, keys))
            return values if None not in values else None

        return self._awaited(look, keys, self.timeout)

    def _awaited(self, look: Callable[[], T | None], keys: Sequence[str], limit: timedelta) -> T:
        found = Deadline(limit.total_seconds()).poll(look, _LONGEST_PAUSE)
        if found is None:
            raise too_late(keys, limit.total_seconds())
        return found

    def check(self, keys: list[str]) -> bool:
        def look() -> list[bool]:
            with self._client.pipeline(transaction=False) as together:
                for key in keys:
                    together.hexists(self._hash, key)
                return list(together.execute())

        return all(self._ask(look))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(lambda: self.check(keys) or None, keys, self.timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        try:
            total = self._change(_ADD, key, amount)
        except DistNetworkError as error:
            if isinstance(error.__cause__, self._not_an_integer):
                raise not_an_integer(key) from None
            raise
        return int(total)

    def append(self, key: str, value: str | bytes) -> None:
        self._change(_APPEND, key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._change(_COMPARE_SET, key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda: self._client.hdel(self._hash, key)))

    def num_keys(self) -> int:
        return int(self._ask(lambda: self._client.hlen(self._hash))) - 1  # the mark is ringway's


def public(url: str) -> str:
    """The URL without a password."""
    bare = re.sub(r"//[^/]*@", "//", url)
    return bare.partition("?")[0] if "password" in bare.partition("?")[2] else bare


def is_local(url: str) -> bool:
    """Whether the URL names another server on each host."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or ports.is_loopback(parts.hostname or "localhost")
