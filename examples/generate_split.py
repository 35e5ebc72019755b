"""Generate tokens with a model of transformers whose layers are split over CPU ranks (tp_plan="auto").

    python examples/generate_split.py                                       # one rank, the whole model
    ringway run -n 2 --replace gloo=shm examples/generate_split.py          # each rank has half of every layer
    ringway run -n 2 --replace gloo=shm examples/generate_split.py --model path/or/name

transformers asks torch for gloo on CPUs, and --replace makes that shared memory. All of them print the same tokens.
Without --model, the model is a small Llama of random weights, so there is nothing to download. Needs transformers 5.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PROMPT = [1, 5, 9, 2, 6]


def small(folder: str) -> str:
    """A Llama of random weights. Every rank makes the same one in a folder of its own."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # so that the most likely token leads clearly, and rounding does not decide
        pad_token_id=0,
    )
    path = Path(folder, "small")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def load(path: str, split: bool) -> torch.nn.Module:
    """The whole model, or this rank's part of it. transformers makes the group of all ranks."""
    how = {"distributed_config": DistributedConfig(tp_plan="auto")} if split else {}
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, **how)
    return model.eval()


def generate(model: torch.nn.Module, count: int) -> list[int]:
    """The tokens that follow the prompt, each the most likely one."""
    prompt = torch.tensor([PROMPT])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    with torch.inference_mode():
        made: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return made[0, len(PROMPT) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the hub; by default a small one of random weights")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load(options.model or small(folder), split=RANKS > 1)
    begun = time.perf_counter()
    tokens = generate(model, options.tokens)
    if RANK == 0:
        print(*tokens)
        print(f"{options.tokens / (time.perf_counter() - begun):.0f} tokens/s on {RANKS} ranks")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
