"""transformers: the Trainer, and a model that from_pretrained splits over the ranks. Random weights, no download."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from report import CHANGED, report
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

if CHANGED == "shm":
    dist.init_process_group("shm")  # TrainingArguments takes no name that it does not know, but a group that exists


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, _arguments: object, _state: object, _control: object, logs: dict[str, float], **_: object) -> None:
        if "loss" in logs:
            self.seen += [logs["loss"], logs["grad_norm"]]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def trainer(folder: str) -> None:
    losses = Losses()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    run = Trainer(tiny(), arguments, train_dataset=Tokens(), callbacks=[losses])
    run.train()
    report("Trainer", losses.seen, run.model)


def split() -> None:
    """Each rank holds a part of every layer, and the ranks sum what the parts compute."""
    path = os.path.join(os.environ["FRAMEWORKS_REPORT"], "tiny")
    tiny().save_pretrained(path)  # transformers writes it on one rank only
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_plan="auto"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    tokens = torch.stack([Tokens()[index]["input_ids"] for index in range(4)])
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report("tp_plan auto", losses, model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        trainer(scratch)
        split()
    dist.destroy_process_group()
