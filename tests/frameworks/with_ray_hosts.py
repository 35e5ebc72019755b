"""Ray on two hosts: two nodes in network namespaces with a link between them. with_ray.py trains there, two ranks on
each. Needs root and iproute2."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from slow_link import Host, two_hosts

PORT = 6379
START_SECONDS = 120


def command(host: Host, *words: str) -> list[str]:
    return ["ip", "netns", "exec", host.namespace, *words]


def wait_for_cluster(host: Host, address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    tried = command(host, "ray", "health-check", f"--address={address}")
    while subprocess.run(tried, capture_output=True, timeout=START_SECONDS, check=False).returncode != 0:
        if time.monotonic() > deadline:
            raise SystemExit(f"Ray did not start within {START_SECONDS} s")
        time.sleep(0.5)


def main() -> int:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # of this cluster only
    nodes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ray") as scratch, two_hosts() as hosts:
        address = f"{hosts[0].address}:{PORT}"
        roles = (
            ["--head", f"--port={PORT}", f"--temp-dir={scratch}", "--include-dashboard=false"],
            [f"--address={address}"],
        )
        try:
            for host, role in zip(hosts, roles, strict=True):
                start = ("ray", "start", "--block", "--num-cpus=2", f"--node-ip-address={host.address}", *role)
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface}
                nodes.append(subprocess.Popen(command(host, *start), env=environment))
                wait_for_cluster(hosts[0], address)
            program = str(Path(__file__).with_name("with_ray.py"))
            return subprocess.run(command(hosts[0], sys.executable, program, address), check=False).returncode
        finally:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                node.wait(60)


if __name__ == "__main__":
    sys.exit(main())
