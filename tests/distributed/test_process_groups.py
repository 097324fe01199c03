"""A process group of the user's is used and kept: rows A-02, A-03, A-06, on two ranks."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from small_runs import Regression, global_batches, loader, quiet, refusal, train_by_hand, trained, weights

from drivetrain_strategies import DDPStrategy
from worlds import on_ranks


class Fails(Regression):
    """Changes process-wide state, as library code may do, and fails on every rank; `on_ranks` finds what remains."""

    def on_train_start(self) -> None:
        os.environ["SOMETHING_NEW"] = "1"
        torch.set_default_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("missing")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def _group() -> tuple[Any, ...]:
    return (
        dist.group.WORLD,
        dist.get_backend(),
        dist.get_world_size(),
        dist.get_rank(),
        tuple(dist.distributed_c10d._world.pg_map),
        dist.distributed_c10d._get_default_store(),
    )


def _users_group() -> dict[str, Any]:
    own = dist.new_group([0, 1])
    before = _group()
    found: dict[str, Any] = {"weights": [], "refused": []}
    for _ in range(2):
        found["weights"].append(trained(Regression(), loader(64, 4), strategy="ddp"))
        assert _group() == before
    found["raised"] = refusal(Fails(), loader(64, 4), strategy="ddp")
    assert _group() == before
    for settings in (
        {"strategy": "ddp", "devices": 3},
        {"strategy": "ddp", "devices": 1},
        {"strategy": DDPStrategy(process_group_backend="nccl")},
    ):
        found["refused"].append(refusal(Regression(), loader(64, 4), **settings))
        assert _group() == before
    module, trainer = Regression(), quiet()  # "auto" is DDP with several ranks
    trainer.fit(module, loader(64, 4))
    found["weights"].append(weights(module))
    found["strategy"] = trainer.strategy.name
    quiet(strategy="ddp").validate(Fails(), loader(64, 4), verbose=False)
    assert _group() == before
    sums = [torch.tensor(float(dist.get_rank() + 1)), torch.ones(())]
    dist.all_reduce(sums[0])
    dist.all_reduce(sums[1], group=own)
    found["sums"] = [value.item() for value in sums]
    return found


def test_a_users_process_group_is_used_and_kept() -> None:  # G-07
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for found in on_ranks(_users_group, 2):
        for one in found["weights"]:
            torch.testing.assert_close(one, reference)
        assert found["raised"] == "KeyError: 'missing'"
        for text, told in zip(found["refused"], ("3.*2 processes", "1", "'nccl'"), strict=True):
            assert re.match(f"(?s)ConfigurationError: .*{told}", text)
        assert (found["strategy"], found["sums"]) == ("ddp", [3.0, 2.0])
