"""DeepSpeed's engine, ZeRO 0 to 3, fp32."""

from __future__ import annotations

from report import BACKEND, CHANGED, batches, network, report

if CHANGED == "install":
    import ringway.compat

    ringway.compat.install()

import deepspeed
import torch


def train(stage: int) -> None:
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for inputs, targets in batches(torch.distributed.get_rank()):
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(f"ZeRO {stage}", losses, engine.module)
    engine.destroy()


if __name__ == "__main__":
    if CHANGED == "install":
        deepspeed.init_distributed()
    else:
        deepspeed.init_distributed(dist_backend=BACKEND)
    for stage in range(4):
        train(stage)
    torch.distributed.destroy_process_group()
