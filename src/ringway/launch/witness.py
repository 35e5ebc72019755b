"""A store outside the job: it survives the loss of any of the job's hosts, and needs no launcher.

A witness is a Redis or Valkey server (`redis://`, `rediss://`, `unix://`). A job is one hash in it, whose fields are
the keys of the store. A compare-and-set is a script, which the server runs undivided. The hash expires an hour after
the last rank wrote to it.

Redis copies its data to replicas, and to disk, after it has answered. So a server that was restarted, or a replica that
took its place, may have forgotten which ranks the job has. The ranks compare the server's run id, and stop if it is
another one: nothing here replaces a consensus protocol.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import DistNetworkError

from ringway.errors import UsageError
from ringway.launch.store_client import StoreClient, not_an_integer, too_late, unanswered
from ringway.store import Deadline

VARIABLE = "RINGWAY_WITNESS"
_SCHEMES = ("redis", "rediss", "unix")
_SERVER = "ringway/server"
_EXPIRES = 3600
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 0.05

_COMPARE_SET = """
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found == false then
  if ARGV[2] ~= '' then return ARGV[2] end
elseif found ~= ARGV[2] then
  return found
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return ARGV[3]
"""
_APPEND = """
local before = redis.call('HGET', KEYS[1], ARGV[1]) or ''
redis.call('HSET', KEYS[1], ARGV[1], before .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""

T = TypeVar("T")


class RedisStore(StoreClient):
    """A store in a Redis server."""

    def __init__(self, url: str, job: str, timeout: float) -> None:
        """`job` names the hash. Raises `UsageError` if the URL names no witness."""
        super().__init__()
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise UsageError(
                f"the witness '{_without_password(url)}' is not supported: name a Redis or Valkey server as in "
                "redis://host:6379/0, rediss://... with TLS, or unix:///path"
            )
        try:
            redis: Any = importlib.import_module("redis")
        except ImportError as error:
            raise UsageError(f"the witness {self} needs redis: pip install 'ringway[redis]'") from error
        local = parts.scheme == "unix"
        self.host, self.port = ("127.0.0.1", None) if local else (parts.hostname or "localhost", parts.port or 6379)
        self._errors = redis.RedisError
        self._not_an_integer = redis.ResponseError
        self._server = ""
        self._hash = f"ringway:{job}"
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=_ANSWER_SECONDS,
            socket_connect_timeout=_ANSWER_SECONDS,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),
            redis_connect_func=self._connected,
        )
        self._compare: Any = self._client.register_script(_COMPARE_SET)
        self._append: Any = self._client.register_script(_APPEND)
        self.set_timeout(timedelta(seconds=timeout))
        self._ask(self._client.ping)  # connects
        found = self.compare_set(_SERVER, "", self._server).decode(errors="replace")
        if found != self._server:
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

    def _replaced(self) -> DistNetworkError:
        return DistNetworkError(
            f"the witness {self} was restarted, or another server took its place: it may have lost what the ranks "
            "agreed on. Start the job again under another RINGWAY_JOB_TOKEN"
        )

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except self._errors as error:
            raise unanswered(f"the witness {self}", error) from error

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        def store() -> None:
            with self._client.pipeline() as together:
                together.hset(self._hash, mapping=dict(zip(keys, values, strict=True)))
                together.expire(self._hash, _EXPIRES)
                together.execute()

        self._ask(store)

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
            total = self._ask(lambda: self._client.hincrby(self._hash, key, amount))
        except DistNetworkError as error:
            if isinstance(error.__cause__, self._not_an_integer):
                raise not_an_integer(key) from None
            raise
        return int(total)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._append(keys=[self._hash], args=[key, value, _EXPIRES]))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        arguments = [key, expected, desired, _EXPIRES]
        return bytes(self._ask(lambda: self._compare(keys=[self._hash], args=arguments)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda: self._client.hdel(self._hash, key)))

    def num_keys(self) -> int:
        return int(self._ask(lambda: self._client.hlen(self._hash))) - 1  # the server's run id is ringway's


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
