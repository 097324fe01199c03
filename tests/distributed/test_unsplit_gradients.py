"""Weights that are not split but act on split heads, under tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import TIGHT, Regression, failing, global_batches, loader, quiet, train_by_hand, weights
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

WIDTH, HEAD = 8, 4
SPLIT = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
}
HEADS = SequenceParallel(sequence_dim=2, use_local_output=True)
SUMMED = {**SPLIT, "query_norm": HEADS, "key_norm": HEADS}


class Attention(nn.Module):
    """Normalizes queries and keys by head, as Qwen3 does: (samples, tokens, width) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, HEAD)) for layer in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in (self.query_norm(q), self.key_norm(k), v))
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attending(Regression):
    """Blocks of attention, split by ``plan`` if it is not None."""

    def __init__(self, plan: dict[str, Any] | None = None) -> None:
        super().__init__(lr=0.01)
        self.plan = plan
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.net = nn.ModuleDict(
                    {
                        "stem": nn.Linear(1, WIDTH),
                        "blocks": nn.Sequential(Attention(), Attention()),
                        "head": nn.Linear(WIDTH, 1),
                    }
                )
        if self.plan is not None:
            for block in self.net["blocks"]:
                parallelize_module(block, self.device_mesh["tensor"], self.plan)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = self.net["blocks"](self.net["stem"](x.unsqueeze(-1)))
        return nn.functional.mse_loss(self.net["head"](hidden).mean(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5)


def _trained(plan: Any, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    module = Attending(plan)
    with failing() as error:
        quiet(strategy=FSDPStrategy(**{"tensor_parallel": 2, **options}), **settings).fit(module, loader(40, 8))
    return error, module.net and weights(module)


def test_x() -> None:
    reference = Attending()
    reference.configure_model()
    train_by_hand(reference, global_batches(40, 8))
    for name, plan in (("split", SPLIT), ("summed", SUMMED)):
        for error, found in on_ranks(_trained, 2, plan, {}, {}):
            print(name, error, (found - weights(reference)).abs().max())
