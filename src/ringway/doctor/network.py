"""Interfaces, names and ports: where each library would listen, and whether other hosts can reach it there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringway.doctor.finding import Finding, Findings, error, ok, warning
from ringway.launch.info import LaunchInfo
from ringway.launch.ports import address_towards, is_loopback

_SIOCGIFADDR = 0x8915
_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel")
"""Interfaces that lead to containers of this host, not to other hosts."""


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool

    @property
    def loopback(self) -> bool:
        return self.name == "lo" or any(is_loopback(address) for address in self.addresses)

    @property
    def virtual(self) -> bool:
        return self.name.startswith(_VIRTUAL)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


def interfaces() -> list[Interface]:
    v6 = _ipv6_addresses()
    return [
        Interface(name, tuple(_ipv4_address(name) + v6.get(name, [])), _is_up(name))
        for _, name in socket.if_nameindex()
    ]


def network(info: LaunchInfo | None, environ: Mapping[str, str] = os.environ) -> Findings:
    found = interfaces()
    several_hosts = info is not None and not info.on_one_host
    usable = [each for each in found if each.up and each.addresses and not each.loopback]
    if usable:
        yield ok("interfaces", ", ".join(map(str, usable)))
    else:
        says = "only loopback has an address: other hosts cannot reach this one"
        yield error("interfaces", says, "Bring an interface up") if several_hosts else ok("interfaces", says)
    yield _own_name(environ)
    towards = _towards_store(info)
    if info is not None and info.address is not None and several_hosts:
        yield _store_address(info, towards)
    yield _gloo(found, towards, several_hosts, environ)
    yield _nccl(found, towards, several_hosts, environ)
    if info is not None and info.port is not None and info.rank == 0 and not info.hosted_by_launcher:
        yield _store_port(info)


def _ipv4_address(name: str) -> list[str]:
    request = struct.pack("256s", os.fsencode(name)[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # fails on a kernel without IPv4
            return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])]
    except OSError:
        return []


def _ipv6_addresses() -> dict[str, list[str]]:
    """Those that other hosts can use: link-local ones need a scope."""
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _is_up(name: str) -> bool:
    try:
        state = Path("/sys/class/net", name, "operstate").read_text().strip()
    except OSError:
        return True
    return state in ("up", "unknown")  # loopback and tunnels say "unknown"


def _own_name(environ: Mapping[str, str]) -> Finding:
    name = socket.gethostname()
    try:
        numbers = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as failed:  # a name that is no valid host name raises UnicodeError
        says = f"{name} does not resolve ({getattr(failed, 'strerror', None) or failed})"
        advice = f"Add {name} to /etc/hosts or the name server: torch's own gloo groups listen on its address"
        return warning("host name", says, advice)
    says = f"{name} is {', '.join(numbers)}"
    if all(map(is_loopback, numbers)) and not environ.get("GLOO_SOCKET_IFNAME"):
        says += ": torch's own gloo groups would listen on loopback, where no other host reaches them"
        advice = f"Give {name} the address of an interface in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return warning("host name", says, advice)  # ringway's own groups do not use the name
    return ok("host name", says)


def _towards_store(info: LaunchInfo | None) -> str | None:
    if info is None or info.address is None or info.socket is not None:
        return None
    return address_towards(info.address)


def _store_address(info: LaunchInfo, towards: str | None) -> Finding:
    if towards is None:
        says = f"there is no route to the job's store at {info.address}, or the name does not resolve"
        return error("store", says, "Check MASTER_ADDR and the name server")
    if is_loopback(towards) and info.rank != 0:
        says = f"{info.address} resolves to this host itself here, and the store is elsewhere"
        return error("store", says, "Set MASTER_ADDR to an address that all hosts reach")
    return ok("store", f"at {info.address}:{info.port or 'a port that ringway chooses'}, through {towards}")


def _store_port(info: LaunchInfo) -> Finding:
    assert info.port is not None
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", info.port))
    except OSError as failed:
        if failed.errno != errno.EADDRINUSE:
            return warning("port", f"{info.port}: {failed.strerror}", "Choose another MASTER_PORT")
        says = f"{info.port} is taken by another process (ss -ltnp shows it)"
        return error("port", says, "End it, or choose another MASTER_PORT")
    return ok("port", f"{info.port} is free")


def absent(found: list[Interface], subject: str, variable: str, names: list[str]) -> Finding | None:
    missing = [name for name in names if not any(each.name == name for each in found)]
    if not missing:
        return None
    there = ", ".join(each.name for each in found)
    return error(
        subject, f"{variable} names {', '.join(missing)}, and this host has {there}", f"Correct or unset {variable}"
    )


def leads_elsewhere(
    subject: str, variable: str, taken: list[Interface], towards: str | None, several_hosts: bool
) -> Finding | None:
    """A warning if the named interfaces are not the one that leads to the other ranks."""
    if not several_hosts:
        return None
    names = ", ".join(map(str, taken)) or "none"
    if all(each.loopback for each in taken):
        says = f"would use {names} ({variable}), which other hosts cannot reach"
        return error(subject, says, f"Set {variable} to the interface that leads to the other hosts")
    # On the store's own host its name may resolve to loopback, which says nothing about the way to the others.
    if towards is None or is_loopback(towards) or any(towards in each.addresses for each in taken):
        return None
    says = f"would use {names} ({variable}), and the job's store is reached from {towards}"
    return warning(subject, says, f"Unless a faster network is meant, set {variable} to that address's interface")


def _gloo(found: list[Interface], towards: str | None, several_hosts: bool, environ: Mapping[str, str]) -> Finding:
    variable = "GLOO_SOCKET_IFNAME"
    if not environ.get(variable):
        if towards is None or not several_hosts:
            return ok("gloo", "uses loopback on one host, and the interface that leads to the store on several")
        return ok("gloo", f"would use {towards}, which leads to the job's store")
    names = [name.strip() for name in environ[variable].split(",")]
    taken = [each for each in found if each.name in names]
    return (
        absent(found, "gloo", variable, names)
        or leads_elsewhere("gloo", variable, taken, towards, several_hosts)
        or ok("gloo", f"would use {', '.join(map(str, taken))} ({variable})")
    )


def nccl_interfaces(found: list[Interface], setting: str) -> list[Interface]:
    """Those that NCCL would use for sockets, by its rules: a list of prefixes, `=` for whole names, `^` to exclude.
    Without a setting: InfiniBand first, then anything but docker's, loopback and libvirt's, then these in turn."""
    usable = [each for each in found if each.up and each.addresses]
    if setting:
        excludes, exact = setting.startswith("^"), "=" in setting[:2]
        names = [name for name in setting.lstrip("^=").split(",") if name]
        return [
            each
            for each in usable
            if any(each.name == name if exact else each.name.startswith(name) for name in names) != excludes
        ]
    groups = (
        [each for each in usable if each.name.startswith("ib")],
        [each for each in usable if not each.name.startswith(("docker", "lo", "virbr"))],
        *([each for each in usable if each.name.startswith(name)] for name in ("docker", "lo", "virbr")),
    )
    return next((group for group in groups if group), [])


def _nccl(found: list[Interface], towards: str | None, several_hosts: bool, environ: Mapping[str, str]) -> Finding:
    variable = "NCCL_SOCKET_IFNAME"
    setting = environ.get(variable, "")
    taken = nccl_interfaces(found, setting)
    if not taken:
        if not setting:
            return warning("NCCL", "no interface has an address", "Bring an interface up")
        there = ", ".join(each.name for each in found)
        return error("NCCL", f"{variable}={setting} leaves no interface of {there}", f"Correct or unset {variable}")
    virtual = [each for each in taken if each.virtual]
    says = f"would use {', '.join(map(str, taken))}" + (f" ({variable})" if setting else "")
    if several_hosts and virtual:
        advice = f"Set {variable} to the interface that leads to the other hosts"
        return warning("NCCL", f"{says}; {virtual[0].name} leads to containers of this host only", advice)
    if not setting and not all(each.loopback for each in taken):
        return ok("NCCL", says)  # its own choice: InfiniBand, or all interfaces
    return leads_elsewhere("NCCL", variable, taken, towards, several_hosts) or ok("NCCL", says)
