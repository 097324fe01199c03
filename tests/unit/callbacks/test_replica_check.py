"""ReplicaCheck: differences between ranks that it finds, and those that it allows. Causes: tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from torch import nn

from drivetrain import ConfigurationError, DistributedError
from drivetrain.callbacks import LambdaCallback, ReplicaCheck
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


class Still(Regression):
    """Keeps its weights, and has statistics of each rank's data, which may differ until the next forward."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(self.norm(x)) - y).square().mean()


def _change(module: Any, change: str) -> None:
    with torch.no_grad():
        if change == "extra":
            module.register_buffer("extra", torch.zeros(1))
        elif change == "all":
            for parameter in module.parameters():
                parameter += 1
        else:
            tensor = module.scale if change == "scale" else module.norm.weight
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            value = local.view(-1)[0]
            local.view(-1)[0] = torch.nextafter(value, torch.tensor(9.0))  # the last bit


def _found(strategy: str, change: str, step: int, rank: int, options: dict[str, Any]) -> str:
    """Change a tensor of one rank after a step, and return the error."""

    def change_one_rank(trainer: Any, module: Any, *arguments: Any) -> None:
        if trainer.global_step == step and trainer.global_rank == rank:
            _change(module, change)

    changing = LambdaCallback(on_train_batch_end=change_one_rank, priority=200)  # before the check
    fit = quiet_fit(
        strategy=FSDPStrategy(sharding="hybrid", replicate_size=2) if strategy == "hsdp" else strategy,
        devices=torch.distributed.get_world_size(),
        max_steps=5,
        callbacks=[changing, ReplicaCheck(**options)],
    )
    try:
        fit.fit(Still(), loader(80))
    except DistributedError as error:
        return error.what
    return ""


TWO = {"every_n_steps": 2}


@pytest.mark.parametrize(
    ("strategy", "ranks", "change", "step", "rank", "options", "found"),
    [
        pytest.param("ddp", 2, "", 0, 0, TWO, "", id="none"),
        pytest.param("ddp_static_graph", 2, "", 0, 0, TWO, "", id="none, with a static graph"),
        pytest.param(
            "ddp", 4, "weight", 3, 1, TWO, "step 4: parameter 'norm.weight' is not the same on ranks 0, 2, 3 and on"
            " rank 1", id="the last bit, at the next check",
        ),
        pytest.param(
            "ddp", 2, "weight", 3, 0, {}, "step 5: parameter 'norm.weight' is not the same on rank 0 and on rank 1",
            id="before the first interval",
        ),
        pytest.param("ddp", 2, "scale", 4, 0, TWO, "step 4: buffer 'scale' is not the same on rank 0", id="a buffer"),
        pytest.param("ddp", 2, "scale", 4, 0, {**TWO, "buffers": False}, "", id="a buffer, not compared"),
        pytest.param("ddp", 2, "all", 4, 0, TWO, "rank 1 (the first of 4 that differ)", id="several"),
        pytest.param("ddp", 2, "all", 4, 0, {**TWO, "ignore": ["net.*"]}, "parameter 'norm.weight'", id="some ignored"),
        pytest.param("ddp", 2, "all", 4, 0, {**TWO, "ignore": ["*"]}, "", id="all ignored"),
        pytest.param("ddp", 2, "extra", 4, 1, TWO, "buffer 'extra': missing on rank(s) [0]", id="names"),
        pytest.param("hsdp", 4, "", 0, 0, TWO, "", id="none of shards"),
        pytest.param(
            "hsdp", 4, "weight", 3, 3, TWO, "parameter 'norm.weight' is not the same on rank 1 and on rank 3",
            id="shards",
        ),
    ],
)  # fmt: skip
def test_replicas_are_compared(
    strategy: str, ranks: int, change: str, step: int, rank: int, options: dict[str, Any], found: str
) -> None:
    # C-04, B-20
    results = on_ranks(_found, ranks, strategy, change, step, rank, options)
    assert len(set(results)) == 1  # the same on every rank
    assert found in results[0]
    assert bool(found) is bool(results[0])


def test_bad_intervals_are_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        ReplicaCheck(every_n_steps=0)
    assert ReplicaCheck().state_key != ReplicaCheck(buffers=False).state_key
