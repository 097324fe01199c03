"""ZeRO as a user of plain DeepSpeed would write it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.by_hand import on_device
from benchmarks.nets import BATCH, GPT, Data, checksum, texts
from drivetrain_strategies import DeepSpeedStrategy

STAGES = {"deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3}


def zero(name: str) -> DeepSpeedStrategy:
    """Return the equivalent strategy; stage 3 shards even the smallest parameters."""
    stage = STAGES[name]
    return DeepSpeedStrategy(stage=stage, stage3_param_persistence_threshold=0 if stage == 3 else None)


def train_by_deepspeed(
    stage: int, steps: int, make: Callable[[], GPT] = GPT, data: Data = TensorDataset, device: str = "cpu"
) -> float:
    """Train on this rank's part of the data; returns a checksum of the weights."""
    import deepspeed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed requires a compiler
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.manual_seed(0)
    net = make().to(device)
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": sum(one.numel() for one in net.parameters())}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": section,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3), config=config)
    mine = texts(steps * BATCH * ranks).view(steps, ranks, BATCH, -1)[:, rank].flatten(0, 1)
    for (text,) in on_device(DataLoader(data(mine), batch_size=BATCH), device):
        engine.backward(engine(text))
        engine.step()
    whole = deepspeed.zero.GatheredParameters(list(net.parameters())) if stage == 3 else contextlib.nullcontext()
    with whole:
        total = checksum(net)
    engine.destroy()
    return total
