"""transformers: the example that generates tokens with split layers, started by `ringway run`. No download."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from report import report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import generate_split

if __name__ == "__main__":
    folder = Path(os.environ["FRAMEWORKS_REPORT"], os.environ["RANK"])
    path = generate_split.small(str(folder))
    split = generate_split.load(path, split=True)
    tokens = generate_split.generate(split, 32)
    alone = generate_split.generate(generate_split.load(path, split=False), 32)
    assert tokens == alone, f"split over the ranks: {tokens}; in one process: {alone}"
    report("tokens of a split model", tokens, split)
    dist.destroy_process_group()
