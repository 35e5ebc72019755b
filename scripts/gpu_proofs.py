"""The proofs that need a GPU or many cores, in one command, each within its time. Their pages go to docs/proofs.

    sh scripts/build_in_place.sh
    PYTHONPATH=src python scripts/gpu_proofs.py suite_gpu:200 topk_gpu:60 kills+elastic_programs:500

Proofs joined by + run at the same time. The number is the limit in seconds: then a proof is ended with all its
processes, and its page stays as it was. What a proof prints goes to a file of its own next to the page. NCCL_LIBRARY
names an NCCL that allows several ranks on one GPU (2.30 or newer); proofs of nccl need it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import proofs

PROOFS = {
    "suite_gpu": "scripts/suite_proof.py suite_gpu",
    "kills": "scripts/suite_proof.py kills",
    "elastic_programs": "scripts/suite_proof.py elastic_programs",
    "numerics_gpu": "scripts/numerics_proof.py",
    "topk_gpu": "scripts/topk_proof.py",
    "shm_cuda": "scripts/shm_cuda_proof.py",
    "nccl": "scripts/nccl_proof.py",
    "nccl_faults": "scripts/nccl_faults.py",
    "elastic": "benchmarks/elastic.py --chaos --ranks 32 --minutes 8 --every 29 --calm 20 --check",
}
"""By page: the command that makes it. All take --output and --commit."""
MEASUREMENTS = {
    "gpu_turns": "-m ringway run -n 2 benchmarks/gpu_turns.py",
    "elastic_nccl": "benchmarks/elastic.py --cuda --ranks 2 --rounds 8 --check",
    "lowcomm_loss": "benchmarks/lowcomm.py loss --task gpt --device cuda --backend cpu:shm,cuda:shm --pairs 3",
}
"""What only prints."""
WITH_NCCL = {"shm_cuda", "nccl", "nccl_faults", "elastic_nccl"}


def run(name: str, seconds: float, folder: Path, commit: str | None) -> None:
    command = [sys.executable, *(PROOFS.get(name) or MEASUREMENTS[name]).split()]
    if name in PROOFS:
        command += ["--output", str(folder / f"{name}.md"), *(["--commit", commit] if commit else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if name in WITH_NCCL and "NCCL_LIBRARY" in os.environ:
        environment |= {"LD_PRELOAD": os.environ["NCCL_LIBRARY"], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    began = time.monotonic()
    with open(folder / f"{name}.log", "wb") as log:
        # In a session of its own, so that all its processes can be ended.
        child = subprocess.Popen(
            command, cwd=proofs.ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            said = f"ended with {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            said = "ran out of time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    print(f"{name}: {said} after {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proofs", nargs="+", metavar="NAME[+NAME][:SECONDS]", help=", ".join([*PROOFS, *MEASUREMENTS]))
    parser.add_argument("--output", type=Path, default=proofs.FOLDER, help="the folder of the pages")
    parser.add_argument("--commit", help="for a tree without git history")
    options = parser.parse_args()
    steps = []
    for given in options.proofs:
        names, _, limit = given.partition(":")
        steps.append((names.split("+"), float(limit or 3600)))
        for name in steps[-1][0]:
            if name not in PROOFS and name not in MEASUREMENTS:
                parser.error(f"there is no proof {name!r}; known are {', '.join([*PROOFS, *MEASUREMENTS])}")
    for names, seconds in steps:
        together = [
            threading.Thread(target=run, args=(name, seconds, options.output, options.commit)) for name in names
        ]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()


if __name__ == "__main__":
    main()
