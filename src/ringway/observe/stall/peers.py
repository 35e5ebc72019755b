"""Asks other ranks what they are doing.

Each rank has a responder (csrc/record/responder.h) and publishes its address in the job's store. Asking takes one short
connection, on which both sides prove that they have the rank's token. The responder needs neither the GIL nor the
rank's own threads.
"""

from __future__ import annotations

import hmac
import json
import secrets
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ringway.keys import TAG_BYTES
from ringway.launch.processes import pid_namespace, process_state, seems_gone
from ringway.observe.recorder import RecordedCall, recorded
from ringway.store import Deadline

ASK_SECONDS = 3.0
"""A rank that holds the GIL answers after one second."""

_MAX_REPLY = 4 << 20
_MAX_NAME = 2048
_NONCE_BYTES = 16


def _namespace() -> str:
    try:
        return pid_namespace()
    except OSError:
        return ""


@dataclass(frozen=True)
class Address:
    """Where a rank answers, and which process it is."""

    rank: int
    host: str
    ip: str
    port: int
    token: str
    pid: int
    namespace: str = field(default_factory=_namespace)

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str) -> Address:
        return Address(**json.loads(text))

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def seems_gone(self) -> bool:
        """Whether the process is gone, according to this host's process table. Nothing is sent."""
        return seems_gone(self.pid, self.namespace)


@dataclass(frozen=True)
class Answer:
    """A rank's answer. Its `state` is 'here', 'leaving', 'gone' (the process is) or 'silent' (no answer)."""

    rank: int
    state: str
    address: Address | None = None
    calls: tuple[RecordedCall, ...] = ()
    now_ns: int = 0
    stacks: str = ""
    detail: str = ""
    signal: int | None = None
    total: int = 0

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.address is None else self.address.who

    def of_group(self, group: str) -> dict[int, RecordedCall]:
        """The collectives of a group by number."""
        return {call.sequence: call for call in self.calls if call.group == group and call.op not in ("send", "recv")}

    def under_way(self) -> list[RecordedCall]:
        return [call for call in self.calls if call.state == "issued"]


class _NoAnswer(ConnectionError):
    """The other side closed the connection without an answer."""


def request(connection: socket.socket, token: str, kind: str, group: str, deadline: Deadline) -> dict[str, Any]:
    """Sends one request and returns the answer. With an empty token, the connection is a unix socket, and the caller
    has checked whose it is. Raises OSError, or ValueError for an answer that is not JSON."""
    question = kind.encode() + group.encode()[:_MAX_NAME]
    if not token:
        connection.sendall(question)
        return _parsed(_received(connection, deadline))
    challenge = _received(connection, deadline, _NONCE_BYTES)
    question = secrets.token_bytes(_NONCE_BYTES) + question
    connection.sendall(_tag(token, b"ask", challenge, question) + question)
    answer = _received(connection, deadline)
    tag, text = answer[:TAG_BYTES], answer[TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(token, b"answer", challenge, question, text)):
        raise ConnectionError("the answer does not come from this rank, or was changed on its way, and was not used")
    return _parsed(text)


def _tag(token: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"".join(parts), "sha256")


def _parsed(text: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(text.decode("utf-8", "replace"))
    return answer


def _received(connection: socket.socket, deadline: Deadline, size: int | None = None) -> bytes:
    """`size` bytes; without a size, all that comes after the request."""
    if size is None:
        with suppress(OSError):  # the other side has closed already, as `recv` will say
            connection.shutdown(socket.SHUT_WR)  # the request is complete
    received = bytearray()
    while size is None or len(received) < size:
        connection.settimeout(_left(deadline))
        part = connection.recv(1 << 16 if size is None else size - len(received))
        received += part
        if not part and (size is not None or not received):
            raise _NoAnswer("it closed the connection without an answer")
        if not part:
            break
        if len(received) > _MAX_REPLY:
            raise ConnectionError("the answer is too long")
        if deadline.left() == 0:
            raise TimeoutError("the answer did not come in time")
    return bytes(received)


def ask(address: Address, group: str = "", *, stacks: bool = True, timeout: float = ASK_SECONDS) -> Answer:
    """Asks the rank at `address` where it is. Never raises, and returns within about `timeout`."""
    if address.seems_gone():
        return _gone(address)
    deadline = Deadline(timeout)
    failed: OSError = TimeoutError("timed out")
    for pause in (0, 0.1, 0.1):  # a process that is being torn down loses its sockets one by one
        time.sleep(pause)
        try:
            with socket.create_connection((address.ip, address.port), _left(deadline)) as connection:
                return _answer(address, request(connection, address.token, "S" if stacks else "C", group, deadline))
        except (_NoAnswer, ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
            failed = error
        except (OSError, ValueError) as error:
            return _silent(address, str(error) or type(error).__name__)
    # Only a closed port proves that the process is gone: a stranger can have open connections dropped.
    return _gone(address) if isinstance(failed, ConnectionRefusedError) else _silent(address, str(failed))


def _left(deadline: Deadline) -> float:
    return max(deadline.left(), 0.001)  # a socket with a timeout of 0 does not wait at all


def _answer(address: Address, reply: Mapping[str, Any]) -> Answer:
    return Answer(
        address.rank,
        "leaving" if reply["leaving"] else "here",
        address,
        tuple(recorded(row) for row in reply["calls"]),
        reply["now"],
        reply["stacks"],
        reply["leaving"],
        total=reply["total"],
    )


def _silent(address: Address, why: str) -> Answer:
    state, code = process_state(address.pid, address.namespace)
    if state in ("Z", "X", "gone"):
        return _gone(address)
    if state in ("T", "t"):
        why = "its process is stopped (SIGSTOP, or a debugger)"
    return Answer(address.rank, "silent", address, detail=why, signal=code)


def _gone(address: Address) -> Answer:
    _, code = process_state(address.pid, address.namespace)
    detail = "its process is gone"
    if code:
        detail += f", killed by {_signal_name(code)}"
    return Answer(address.rank, "gone", address, detail=detail, signal=code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ask_all(addresses: Iterable[Address], group: str, *, stacks: bool = True) -> dict[int, Answer]:
    """Asks all ranks in parallel, so that a silent one does not delay the others."""
    targets = list(addresses)
    if not targets:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(targets), 32)) as threads:
        answers = threads.map(lambda address: ask(address, group, stacks=stacks), targets)
        return {answer.rank: answer for answer in answers}
