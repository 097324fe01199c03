"""Distributed training as a user of plain PyTorch would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.nets import BATCH, GPT, Data, checksum, texts


def on_device(batches: Iterable[Any], device: str) -> Iterable[Any]:
    """Return the batches on the device; nothing is copied if the device is the CPU."""
    return batches if device == "cpu" else ([part.to(device) for part in batch] for batch in batches)


def ddp(net: GPT) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: GPT, reshard_after_forward: bool = True) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(net)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support PREMUL_SUM
    return net


def fsdp_grad_op(net: GPT) -> nn.Module:
    return fsdp(net, reshard_after_forward=False)


WRAPS: dict[str, Callable[[GPT], nn.Module]] = {"ddp": ddp, "fsdp": fsdp, "fsdp_grad_op": fsdp_grad_op}
"""By the name of the strategy that does the same."""


def train_by_hand(
    strategy: str,
    steps: int,
    make: Callable[[], GPT] = GPT,
    data: Data = TensorDataset,
    device: str = "cpu",
    wrap: Callable[[GPT], nn.Module] | None = None,
) -> float:
    """Train on this rank's part of the data; returns a checksum of the weights.

    Args:
        strategy: one of `WRAPS`.
        steps: to train.
        make: makes the network.
        data: makes the data set.
        device: the kind of device.
        wrap: what to wrap the network in instead.
    """
    torch.manual_seed(0)
    net = make().to(device)
    model = (wrap or WRAPS[strategy])(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = texts(steps * BATCH * ranks).view(steps, ranks, BATCH, -1)[:, rank].flatten(0, 1)
    for (text,) in on_device(DataLoader(data(mine), batch_size=BATCH), device):
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()
    return checksum(net)
