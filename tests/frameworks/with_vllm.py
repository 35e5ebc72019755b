"""vLLM on two CPU ranks, with a tiny model of random weights: which tokens it makes, and how fast. No download.

    python with_vllm.py FOLDER --tensor 2 [--compiled] [--seconds 5]

Prints one line of JSON. scripts/vllm_proof.py runs it without and with RINGWAY_VLLM=1.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

VOCABULARY, CONTEXT = 512, 256


def tiny(folder: Path, hidden: int, layers: int) -> str:
    """A Llama of random weights, in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / f"llama-{hidden}-{layers}"
    if not (path / "config.json").exists():
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            # So that the most likely token leads clearly, and rounding does not decide.
            initializer_range=0.3,
            torch_dtype="bfloat16",
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def carried_by(worker: Any) -> list[str]:
    """What carries the collectives of a worker's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    made = get_tp_group().device_communicator
    return [f"{type(made).__module__}, {type(made.device_group).__module__}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to measure tokens a second")
    given = parser.parse_args()

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=tiny(given.folder, given.hidden, given.layers),
        skip_tokenizer_init=True,
        tensor_parallel_size=given.tensor,
        dtype=given.dtype,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        enforce_eager=not given.compiled,
        enable_prefix_caching=False,
        seed=0,
    )
    prompts = [
        {"prompt_token_ids": [(7 * place + 13 * number) % VOCABULARY for place in range(8 + number)]}
        for number in range(8)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    rates = []
    began = time.perf_counter()
    while time.perf_counter() - began < given.seconds:
        start = time.perf_counter()
        made = sum(len(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False))
        rates.append(made / (time.perf_counter() - start))
    carried = engine.collective_rpc(carried_by)
    print("RESULT " + json.dumps({"tokens": tokens, "rates": rates, "carried_by": carried}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc sends `carried_by`
    main()
