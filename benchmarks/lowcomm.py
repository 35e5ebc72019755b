"""Low-communication training: bytes, utilization on slow links, and loss.

    python benchmarks/lowcomm.py bytes
    python benchmarks/lowcomm.py loss --plot docs/proofs/lowcomm.svg
    python benchmarks/lowcomm.py loss --task gpt --device cuda --backend cpu:shm,cuda:shm --pairs 3
    sudo python benchmarks/lowcomm.py links

- `bytes`: the bytes that a rank sends in a step, and how many times fewer they are than DDP's in fp32, for 10 M
  parameters and 2, 4 and 8 sites. Exits with 1 unless DiLoCo with int8 sends at least 390 times fewer at every = 100,
  and SparseLoCo with 1 % at least 6,000 times fewer at every = 30, with 2 sites.
- `links`: two network namespaces, joined by a link of 1000, 100 and 10 Mbit/s with a delay of 50 ms each way
  (`examples/train_two_sites.py` makes it), 10 M parameters, and a step of 0.5 s. The step is a sleep, so that other
  processes of the machine matter less. Utilization is the time of the steps divided by all time. Exits with 1 unless
  that of Streaming DiLoCo is at least 0.95 at 1000 and 100 Mbit/s and 0.85 at 10. Takes about 3 minutes.
- `loss`: a small transformer (`--task transformer`) or a GPT (`--task gpt`) on 2 ranks, three seeds, the same tokens
  for every method; `lowcomm_loss.py` describes both. Exits with 1 unless DiLoCo and SparseLoCo end at most 1 % above
  DDP, and ZeroOneAdam and OneBitLamb at most 0.5 % above Adam and LAMB. `--pairs 3` trains three seeds at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from lowcomm_loss import TASKS, show_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from train_two_sites import join, run_sites, slow_link

NUMEL = 10_000_000
STEP_SECONDS, DELAY_MS, EVERY, DELAY_STEPS = 0.5, 50, 40, 6
LEAST_UTILIZATION = {1000: 0.95, 100: 0.95, 10: 0.85}
"""Of Streaming DiLoCo, by Mbit/s."""


# Bytes


def show_bytes() -> bool:
    from ringway.compress import get_codec
    from ringway.compress.windows import compressed_bytes, ring_bytes

    print(
        f"bytes that a rank sends in a step, {NUMEL / 1e6:.0f} M parameters, and how many times fewer than DDP in fp32"
    )
    fine = True
    for sites in (2, 4, 8):
        whole = ring_bytes(NUMEL, sites)
        for name, spec, every, servers, least in (
            ("DiLoCo, int8", "int8", 100, True, 390),
            ("DiLoCo, int4", "int4", 100, True, 0),
            ("DiLoCo, onebit", "onebit", 100, True, 0),
            ("SparseLoCo, 1 %, 2 bits", "topk:0.01:2", 30, False, 6000),
        ):
            sent = compressed_bytes(get_codec(spec), NUMEL, sites, servers) / every
            held = sites > 2 or whole / sent >= least
            fine &= held
            print(
                f"{sites} sites  {name:24} every {every:3}  {sent:12,.0f}  {whole / sent:8,.0f} times fewer"
                f"{'' if held else f'   NO: at least {least}'}"
            )
    return fine


# Links


def train_on_link(site: int, mbit: float, steps: int) -> None:
    """One site, with Streaming DiLoCo. Its step is a sleep. The first exchanges make a group, which takes many round
    trips once, so the time counts from the second half of the first interval on."""
    ringway = join(site)
    from ringway.lowcomm import DiLoCo, measure_link

    link = measure_link()
    side = int(NUMEL**0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side // 4, bias=False) for _ in range(4)])
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = DiLoCo(model, inner, every=EVERY, codec="int4", fragments=4, delay=DELAY_STEPS, broadcast=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=1e-3)
    waited = sent = exchanges = 0.0
    for step in range(EVERY // 2 + steps):
        if step == EVERY // 2:
            report = optimizer.report
            began, waited, sent, exchanges = time.perf_counter(), report.waited, report.sent_bytes, report.exchanges
        time.sleep(STEP_SECONDS)
        optimizer.step()
    elapsed, report = time.perf_counter() - began, optimizer.report
    optimizer.close()
    if site == 0:
        print(
            f"{mbit:5.0f} Mbit/s, measured as {link.bytes_per_second * 8 / 1e6:.0f}: utilization "
            f"{steps * STEP_SECONDS / elapsed:.3f}, waited {report.waited - waited:.2f} s of {elapsed:.1f}, "
            f"{(report.sent_bytes - sent) / 1e6:.1f} MB in {report.exchanges - exchanges:.0f} exchanges",
            flush=True,
        )
    ringway.destroy_process_group()


def show_links(steps: int) -> bool:
    fine = True
    for mbit, least in LEAST_UTILIZATION.items():
        with slow_link(mbit, DELAY_MS):
            arguments = ("links", "--mbit", str(mbit), "--steps", str(steps))
            shown = run_sites(os.path.abspath(__file__), *arguments, capture=True)
        print(shown, end="", flush=True)
        found = float(shown.partition("utilization ")[2].partition(",")[0])
        fine &= found >= least
        if found < least:
            print(f"NO: at {mbit} Mbit/s the utilization of Streaming DiLoCo must be at least {least}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "links", "loss"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"800 or 2000 for loss, {3 * EVERY // 2} for links")
    parser.add_argument("--task", choices=list(TASKS), default="transformer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="shm", help="for loss: of its ranks")
    parser.add_argument("--pairs", type=int, default=1, help="for loss: how many seeds train at the same time")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="for loss: methods with one of these in their name, and what they are held to",
    )
    parser.add_argument("--mbit", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plot", type=Path, help="write the curves of the first seed to this SVG file")
    options = parser.parse_args()
    if options.site is not None:
        train_on_link(options.site, options.mbit, options.steps)
        return 0
    began = time.perf_counter()
    if options.what == "bytes":
        fine = show_bytes()
    elif options.what == "links":
        fine = show_links(options.steps or 3 * EVERY // 2)
    else:
        fine = show_loss(
            options.task,
            device=options.device,
            backend=options.backend,
            pairs=options.pairs,
            seeds=options.seeds,
            steps=options.steps,
            path=options.plot,
            only=options.only,
        )
    print(f"{'all within their limits' if fine else 'a limit was passed'}, {time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
