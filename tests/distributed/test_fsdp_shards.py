"""The parts of a sharded state that ranks provide to and load from checkpoints: D-01, F-13."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_nets import Deep
from small_runs import Regression, loader, quiet, weights
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain._distributed.shards import Box, ParameterShard, Region, cut
from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


class Split(Regression):
    """Has a width that is not divisible, with its blocks split if there is a mesh for it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.net = Deep(width=6)

    def configure_model(self) -> None:
        if "tensor" not in (self.device_mesh.mesh_dim_names or ()):
            return
        for block in self.net.blocks:
            parallelize_module(block, self.device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _parts(strategy: Any, state: Any) -> dict[str, Any]:
    parts = {}
    for name, value in state.items():
        shard = strategy.shard_of(value)
        if isinstance(shard, ParameterShard):
            parts[name] = shard.local.clone(), shard.shape, shard.region, shard.is_primary, shard.full_tensor().clone()
    return parts


def _run(options: dict[str, Any]) -> Any:
    found: dict[str, Any] = {}

    def look(trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        found["model"] = _parts(strategy, strategy.model_state())
        moments = {name: state["exp_avg"] for name, state in strategy.optimizer_state()["state"].items()}
        found["moments"] = _parts(strategy, moments)
        wanted = strategy.model_regions()
        found["wanted"] = wanted
        # Doubled values are loaded from parts of this rank's own, without communication.
        doubled = {}
        for name, value in strategy.model_state().items():
            shard = strategy.shard_of(value)
            doubled[name] = (
                ParameterShard(2 * shard.local, shard.shape, wanted[name])
                if isinstance(shard, ParameterShard)
                else 2 * shard
            )
        strategy.load_model_state(doubled)

    module = Split()
    fit = quiet(strategy=FSDPStrategy(**options), callbacks=LambdaCallback(on_train_end=look))
    fit.fit(module, loader(16, 2))
    return found, weights(module)


def _part(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[region.index] if isinstance(region, Box) else whole.view(-1)[region.start : region.stop]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (4, {"sharding": "hybrid", "replicate_size": 2}),
        (4, {"tensor_parallel": 2}),
        (4, {"sharding": "hybrid", "replicate_size": 2, "tensor_parallel": 2}),
    ],
    ids=["full", "hybrid", "tensor parallel", "hybrid and tensor parallel"],
)
def test_the_provided_parts_make_up_the_whole(ranks: int, options: dict[str, Any]) -> None:
    runs = on_ranks(_run, ranks, options)
    for what in ("model", "moments"):
        for name, (_, shape, _, _, whole) in runs[0][0][what].items():
            made, count = torch.full(shape, float("nan")), torch.zeros(shape)
            for found, _ in runs:
                local, _, region, is_primary, _ = found[what][name]
                assert region == found["wanted"][name]
                assert torch.equal(cut(whole, region), local)
                if is_primary:
                    _part(made, region).copy_(local)
                    _part(count, region).add_(1)
            assert torch.equal(made, whole), name
            assert bool((count == 1).all()), name
    sharded = sum(part[-1].numel() for part in runs[0][0]["model"].values())
    assert sharded == runs[0][1].numel()  # all of them hold parts
    doubled = torch.cat([2 * part[-1].flatten() for part in runs[0][0]["model"].values()])
    for _, trained in runs:
        assert torch.equal(trained.sort().values, doubled.sort().values)
