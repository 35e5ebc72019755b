"""A rank's responder answers those who prove that they have its token, and its answers prove where they come from."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

import ringway._core as _core
from ringway.keys import TAG_BYTES
from ringway.observe.stall.peers import _NONCE_BYTES, Address, Answer, ask, request
from ringway.store import Deadline

TOKEN = "0123456789abcdef" * 2
LIMIT = 20.0
"""Seconds after which a refusal counts as missing: ten times the responder's own limit."""
NOBODY = 65534


@pytest.fixture
def responder() -> Iterator[_core.Responder]:
    made = _core.Responder(_core.Recorder(64), "127.0.0.1", TOKEN, "{}")
    yield made
    made.close()


def _address(port: int, token: str = TOKEN) -> Address:
    return Address(1, "elsewhere", "127.0.0.1", port, token, os.getpid())


@contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), LIMIT) as link:
        yield link


def _rest(link: socket.socket) -> bytes:
    """What comes until the other side closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := link.recv(1 << 16):
            received += part
    return received


def _exactly(link: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (part := link.recv(size - len(received))):
        received += part
    return received


@contextmanager
def _middle(port: int, forward: Callable[[bytes], bytes], back: Callable[[bytes], bytes]) -> Iterator[int]:
    """Someone between a rank and a responder. `forward` and `back` may change the request and the answer."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                with caller, _connected(port) as link, suppress(OSError):
                    caller.sendall(_exactly(link, _NONCE_BYTES))
                    link.sendall(forward(_rest(caller)))
                    link.shutdown(socket.SHUT_WR)
                    caller.sendall(back(_rest(link)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT)


def _same(data: bytes) -> bytes:
    return data


@pytest.mark.timeout(60)
def test_requests_of_every_length_are_verified(responder: _core.Responder) -> None:
    """Around the hash's blocks of 64 bytes: both ends compute the same tag, with code of their own."""
    for length in [*range(140), 2048]:
        with _connected(responder.port) as link:
            assert request(link, TOKEN, "C", "g" * length, Deadline(LIMIT))["calls"] == []


@pytest.mark.timeout(60)
def test_the_token_does_not_cross_the_wire(responder: _core.Responder) -> None:
    seen: list[bytes] = []

    def note(data: bytes) -> bytes:
        seen.append(data)
        return data

    with _middle(responder.port, note, note) as port:
        assert ask(_address(port), "group", stacks=False).state == "here"
    sent, answered = seen
    assert sent.endswith(b"Cgroup")
    assert answered[TAG_BYTES:].startswith(b'{"facts"')
    assert TOKEN.encode() not in sent + answered
    assert bytes.fromhex(TOKEN) not in sent + answered


@pytest.mark.timeout(60)
def test_only_the_token_gets_an_answer(responder: _core.Responder) -> None:
    stranger = ask(_address(responder.port, "f" * 32), stacks=False)
    assert (stranger.state, stranger.calls) == ("silent", ())
    assert "closed the connection without an answer" in stranger.detail
    assert ask(_address(responder.port), stacks=False).state == "here"


def _sent(port: int, make: Callable[[bytes], bytes]) -> bytes:
    """What a request, made for the responder's challenge, gets."""
    with _connected(port) as link:
        with suppress(OSError):  # it may refuse before the whole request is sent
            link.sendall(make(_exactly(link, _NONCE_BYTES)))
            link.shutdown(socket.SHUT_WR)
        return _rest(link)


def _recorded(port: int) -> tuple[bytes, bytes]:
    """A whole exchange, as someone on the network reads it: the request and the answer."""
    kept: list[bytes] = []

    def keep(data: bytes) -> bytes:
        kept.append(data)
        return data

    with _middle(port, keep, keep) as middle:
        assert ask(_address(middle), "group", stacks=False).state == "here"
    return kept[0], kept[1]


@pytest.mark.timeout(120)
def test_replayed_and_damaged_requests_are_refused(responder: _core.Responder) -> None:
    recorded, _ = _recorded(responder.port)
    chosen = random.Random(0)
    assert _sent(responder.port, lambda _: recorded) == b""
    for cut in range(len(recorded)):
        assert _sent(responder.port, lambda _, cut=cut: recorded[:cut]) == b""  # type: ignore[misc]
    for _ in range(100):
        assert _sent(responder.port, lambda _: chosen.randbytes(chosen.randrange(200))) == b""
    assert _sent(responder.port, lambda _: bytes(1 << 16)) == b""  # longer than any request

    def changed(data: bytes) -> bytes:
        at = chosen.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << chosen.randrange(8)]) + data[at + 1 :]

    got: list[bytes] = []

    def note(data: bytes) -> bytes:
        got.append(data)
        return data

    with _middle(responder.port, changed, note) as port:  # a fresh request each time, with one bit changed
        for _ in range(8):
            assert ask(_address(port), "group", stacks=False).state == "silent"
    assert set(got) == {b""}
    assert ask(_address(responder.port), stacks=False).state == "here"


@pytest.mark.timeout(120)
def test_forged_and_replayed_answers_are_not_parsed(
    responder: _core.Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recorded = _recorded(responder.port)
    chosen = random.Random(1)

    def parsed(text: bytes) -> Answer:
        pytest.fail(f"an answer that proves nothing was parsed: {text[:80]!r}")

    monkeypatch.setattr("ringway.observe.stall.peers._parsed", parsed)
    forgeries: list[Callable[[bytes], bytes]] = [
        lambda _: recorded,
        lambda real: real[:-1],
        lambda real: real + b" ",
        lambda real: real[TAG_BYTES:],
        lambda real: recorded[:TAG_BYTES] + real[TAG_BYTES:],
        lambda real: real[:TAG_BYTES] + recorded[TAG_BYTES:],
        lambda real: real[: TAG_BYTES - 1],
        lambda _: b'{"leaving": "", "calls": [], "now": 0, "stacks": "", "total": 0}',
        lambda _: chosen.randbytes(500),
    ]
    for forgery in forgeries:
        with _middle(responder.port, _same, forgery) as port:
            answer = ask(_address(port), "group", stacks=False)
        assert answer.state == "silent"
        assert "does not come from this rank, or was changed on its way, and was not used" in answer.detail


@pytest.mark.timeout(60)
def test_a_replayed_challenge_with_its_answer_proves_nothing(responder: _core.Responder) -> None:
    """Someone took over the rank's port and plays back what the rank once said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def twice() -> None:
            caller, _ = listener.accept()
            with caller, _connected(responder.port) as link:
                challenge = _exactly(link, _NONCE_BYTES)
                caller.sendall(challenge)
                link.sendall(_rest(caller))
                link.shutdown(socket.SHUT_WR)
                answer = _rest(link)
                caller.sendall(answer)
            caller, _ = listener.accept()
            with caller:
                caller.sendall(challenge)
                _rest(caller)
                caller.sendall(answer)

        thread = threading.Thread(target=twice, daemon=True)
        thread.start()
        address = _address(listener.getsockname()[1])
        assert ask(address, stacks=False).state == "here"
        assert "does not come from this rank" in ask(address, stacks=False).detail
        thread.join(LIMIT)


@pytest.mark.timeout(60)
def test_slow_handshakes_end_in_bounded_time(responder: _core.Responder) -> None:
    def drip(link: socket.socket) -> None:
        with suppress(OSError):
            while True:
                link.send(b"x")
                time.sleep(0.1)

    with _connected(responder.port) as slow, _connected(responder.port) as silent:
        _exactly(slow, _NONCE_BYTES)
        _exactly(silent, _NONCE_BYTES)
        began = time.monotonic()
        threading.Thread(target=drip, args=(slow,), daemon=True).start()
        assert _rest(slow) == _rest(silent) == b""
        assert time.monotonic() - began < LIMIT

    # A responder that does not answer, or only byte by byte, holds up the rank that asks as little.
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def slowly() -> None:
            with suppress(OSError):
                for _ in range(2):
                    link, _ = listener.accept()
                    threading.Thread(target=drip, args=(link,), daemon=True).start()
                time.sleep(LIMIT)

        threading.Thread(target=slowly, daemon=True).start()
        for _ in range(2):
            began = time.monotonic()
            assert ask(_address(listener.getsockname()[1]), stacks=False, timeout=0.5).state == "silent"
            assert time.monotonic() - began < LIMIT / 2


def _flood(port: int, sources: Iterator[str], kept: int) -> None:
    """Opens connections that say nothing, as fast as it can, and keeps the latest open."""
    links: deque[socket.socket] = deque()
    while True:
        link = socket.socket()
        link.setblocking(False)
        links.append(link)
        with suppress(OSError):
            link.bind((next(sources), 0))
            link.connect(("127.0.0.1", port))
        if len(links) > kept:
            links.popleft().close()


@contextmanager
def _flooded(port: int, uid: int, sources: Iterator[str], kept: int) -> Iterator[None]:
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(uid, uid, uid)
            _flood(port, sources, kept)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _many() -> Iterator[str]:
    chosen = random.Random(2)
    while True:
        yield f"127.{chosen.randrange(1, 255)}.{chosen.randrange(255)}.{chosen.randrange(1, 255)}"


@pytest.mark.timeout(120)
def test_a_flood_of_strangers_shuts_nobody_out(responder: _core.Responder) -> None:
    """A caller that takes its time to prove the token is answered, whatever others open in the meantime."""
    floods: list[tuple[int, Iterator[str], int]] = [(os.geteuid(), itertools.repeat("127.0.0.2"), 500)]
    if os.geteuid() == 0:  # another user can come from the same address, and from any other of the host
        floods += [(NOBODY, itertools.repeat("127.0.0.1"), 500), (NOBODY, _many(), 500), (NOBODY, _many(), 1)]
    before = len(os.listdir("/proc/self/fd"))
    for uid, sources, kept in floods:
        with _flooded(responder.port, uid, sources, kept):
            for attempt in range(10):
                with _connected(responder.port) as link:
                    time.sleep(0.05)
                    assert request(link, TOKEN, "C", "", Deadline(LIMIT))["calls"] == [], (uid, kept, attempt)
                    assert len(os.listdir("/proc/self/fd")) < before + 100
