"""Train a small GPT on two sites that are joined by a slow link, and watch what it costs.

    sudo python examples/train_two_sites.py                                  # Streaming DiLoCo over 10 Mbit/s
    sudo python examples/train_two_sites.py --method ddp --mbit 100
    sudo python examples/train_two_sites.py --method sparse --mbit 1 --delay 100

The sites are network namespaces of this machine. A relay in user space carries packets between them at the rate and
with the delay (each way) that you choose, so nothing depends on the kernel's own emulation. Needs root, `ip` and
/dev/net/tun. Site 0 prints the loss, what it has sent, and its utilization: the share of the time in which it did not
wait for the other site.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NAMESPACES = (f"ringway-{os.getpid()}-site-0", f"ringway-{os.getpid()}-site-1")
"""Of the process that makes the link, so that several can run at the same time."""
ADDRESSES = ("10.214.7.1", "10.214.7.2")
DEVICE = "site"
PORT = 29714
"""Always free: the namespaces are new."""
MTU = 32000
BACKLOG_SECONDS = 0.2
"""What a queue of the link holds. Beyond that, packets are dropped, and TCP slows down."""


# The link


@contextmanager
def slow_link(mbit: float, delay_ms: float) -> Iterator[None]:
    """Two namespaces and the relay between them, removed afterwards."""
    relay = None
    try:
        for namespace in NAMESPACES:
            _run("ip", "netns", "add", namespace)
        command = [sys.executable, os.path.abspath(__file__), "--relay", str(mbit), str(delay_ms), *NAMESPACES]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert relay.stdout is not None
        if relay.stdout.readline() != b"ready\n":
            raise SystemExit("the relay between the sites did not start")
        yield
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        _remove_link()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _remove_link() -> None:
    for namespace in NAMESPACES:
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _tunnel(namespace: str, address: str) -> int:
    """A network device in a namespace whose packets this process reads and writes."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH", DEVICE.encode(), 0x1001))  # TUNSETIFF: packets, no header
    _run("ip", "addr", "add", f"{address}/24", "dev", DEVICE)
    _run("ip", "link", "set", DEVICE, "mtu", str(MTU), "up")
    _run("ip", "link", "set", "lo", "up")
    return tunnel


def relay(mbit: float, delay_ms: float, namespaces: Sequence[str]) -> None:
    """Carry packets in both directions, each at most at `mbit`, and `delay_ms` late."""
    tunnels = [_tunnel(namespace, address) for namespace, address in zip(namespaces, ADDRESSES, strict=True)]
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]
    """When each direction has sent what it accepted."""
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=time.monotonic() + 1)
        readable, _, _ = select.select(tunnels, [], [], max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for side, tunnel in enumerate(tunnels):
            if tunnel in readable:
                packet = os.read(tunnel, 1 << 16)
                start = max(now, free[side])
                if start - now <= BACKLOG_SECONDS:
                    free[side] = start + len(packet) * 8 / (mbit * 1e6)
                    queues[1 - side].append((free[side] + delay_ms / 1e3, packet))
            while queues[side] and queues[side][0][0] <= now:
                os.write(tunnel, queues[side].popleft()[1])


def run_sites(program: str, *arguments: str, capture: bool = False) -> str:
    """Run a Python program on both sites, with `--site N` and these arguments. What site 0 printed, with `capture`."""
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, program, *arguments, "--site", str(site)],
            stdout=subprocess.PIPE if capture and site == 0 else None,
            text=True,
        )
        for site, name in enumerate(NAMESPACES)
    ]
    printed = ranks[0].communicate()[0]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit(f"a site failed: {statuses}")
    return printed or ""


def join(site: int) -> Any:
    """Join the group of the two sites."""
    import torch

    import ringway

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    ringway.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=site, world_size=2)
    return ringway


# Training


def train(options: argparse.Namespace) -> None:
    """One site."""
    ringway = join(options.site)
    import torch
    from train_gpt import GPT, LETTERS, batches, made_up_text

    from ringway.lowcomm import DiLoCo, Report, SparseLoCo

    torch.manual_seed(0)
    model = GPT(len(LETTERS), options.context, options.width, 4, options.blocks)
    inner = torch.optim.AdamW(model.parameters(), lr=options.rate)
    every, report = options.every, Report()
    if options.method == "ddp":
        optimizer: torch.optim.Optimizer = inner
    else:
        if options.method == "sparse":
            wrapped: DiLoCo = SparseLoCo(model, inner, every=every)
        elif options.method == "streaming":
            wrapped = DiLoCo(model, inner, every=every, codec="int4", fragments=min(4, every), delay=every // 4)
        else:
            wrapped = DiLoCo(model, inner, every=every, codec="int8")
        optimizer, report = wrapped, wrapped.report
    text = torch.tensor([LETTERS.index(letter) for letter in made_up_text(2000, 0)])
    for step, batch in enumerate(batches(text, options.steps, options.batch, options.context, 0), start=1):
        own = batch.chunk(2)[options.site]
        logits = model(own[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if options.method == "ddp":
            average_gradients(ringway, model, report)
        optimizer.step()
        if options.site == 0 and (step % options.show == 0 or step == options.steps):
            print(
                f"step {step:4}  loss {loss.item():.4f}  sent {report.sent_bytes / 1e6:8.3f} MB "
                f"({report.times_fewer:6.0f} x fewer than DDP)  utilization {report.utilization:.2f}",
                flush=True,
            )
    if options.method != "ddp":
        wrapped.close()
    ringway.destroy_process_group()


def average_gradients(ringway: Any, model: Any, report: Any) -> None:
    """What DDP does, without overlap, and counted."""
    report.begin()
    report.steps += 1
    for parameter in model.parameters():
        nbytes = parameter.grad.nbytes  # a ring of two sends a tensor once
        report.sent_bytes, report.ddp_bytes = report.sent_bytes + nbytes, report.ddp_bytes + nbytes
        with report.waiting():
            ringway.all_reduce(parameter.grad, ringway.ReduceOp.AVG)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["ddp", "diloco", "streaming", "sparse"], default="streaming")
    parser.add_argument("--mbit", type=float, default=10, help="rate of the link, each way")
    parser.add_argument("--delay", type=float, default=50, help="delay of the link, in ms each way")
    parser.add_argument("--every", type=int, default=40, help="steps between two outer steps")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over both sites together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--show", type=int, default=10, help="steps between printed lines")
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.relay is not None:
        mbit, delay_ms, *namespaces = options.relay
        relay(float(mbit), float(delay_ms), namespaces)
    if options.site is not None:
        train(options)
        return 0
    with slow_link(options.mbit, options.delay):
        run_sites(os.path.abspath(__file__), *sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
