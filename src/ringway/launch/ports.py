"""Ports and addresses of this host, using only the standard library."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
from collections.abc import Iterator

from ringway.errors import RendezvousError

# Below the range from which Linux assigns ports to outgoing connections, so accidental conflicts are rare.
_FIRST_CHOICE, _LAST_CHOICE = 20000, 32000
CHOICES = 16
_TRIES = 200


def choices(job: str) -> list[int]:
    """The ports a job may use if none was given: the same list on every rank."""
    digest = hashlib.sha256(job.encode("utf-8", "surrogateescape")).digest()
    span = _LAST_CHOICE - _FIRST_CHOICE
    start, step = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:6], "big") | 1
    return [_FIRST_CHOICE + (start + step * turn) % span for turn in range(CHOICES)]


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on the interface that has this address. Raises OSError if the port is taken.

    If the address is not one of this host's interfaces (a name that the host itself takes for loopback, or the public
    side of a translated network), the socket listens on all.
    """
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return _bound(family, loopback_number(address), port)
    for family, number in _numbers(address):
        if not is_loopback(number):
            try:
                return _bound(family, number, port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    if socket.has_dualstack_ipv6():
        return _bound(socket.AF_INET6, "::", port)
    return _bound(socket.AF_INET, "0.0.0.0", port)


def _numbers(address: str) -> list[tuple[socket.AddressFamily, str]]:
    """What a name resolves to. Nothing if it does not: then the ranks cannot find it either, and the caller says so."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(where[0])) for family, _, _, _, where in found]


def reserve() -> socket.socket:
    """A socket that holds a free port of all interfaces without listening: another process that reuses addresses may
    listen there."""
    for port in random.SystemRandom().sample(range(_FIRST_CHOICE, _LAST_CHOICE), _TRIES):
        holder = socket.socket()
        try:
            holder.bind(("", port))  # fails if any other socket has the port
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return holder
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise RendezvousError(f"{_TRIES} ports from {_FIRST_CHOICE} to {_LAST_CHOICE} were tried, and all are taken")


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def loopback_number(address: str) -> str:
    """A loopback address as a number: `localhost` may resolve to two, and a store listens on one."""
    return address if ":" in address else "127.0.0.1"


def address_towards(host: str) -> str | None:
    """This host's address on the route to another host, so that hosts on that route can reach it."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, _, _, _, target in found:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # on a datagram socket: picks the route, sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def own_address() -> str:
    """An address of this host that others can reach: the source address of its default route."""
    for outside in ("192.0.2.1", "2001:db8::1"):  # reserved for documentation, so they use the default route
        address = address_towards(outside)
        if address is not None:
            return address
    address = address_towards(socket.gethostname())
    if address is None:
        raise RendezvousError(
            f"this host has no route, and its name {socket.gethostname()!r} has no address; set MASTER_ADDR"
        )
    return address


def holder(port: int) -> tuple[int, str] | None:
    """The process that listens on a port, as (pid, command), if the system shows it."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(descriptor.path) in inodes:
                    with open(f"/proc/{pid}/cmdline", "rb") as file:
                        command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                    return int(pid), command[:200]
        except OSError:  # it has ended, or belongs to another user
            continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.readlines()[1:]
        except OSError:
            continue
        for row in rows:
            column = row.split()
            if column[3] == "0A" and int(column[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{column[9]}]"
