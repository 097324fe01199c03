"""Mismatched weights are listed by name, and skipped ones are reported: F-11."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_case import quiet

from drivetrain import Callback, CheckpointError, Fit, TrainModule
from drivetrain.testing import requires_package
from worlds import on_ranks

BATCHES = [torch.ones(2, 4)] * 2


class Net(TrainModule):
    """A body with named heads; one head is unused and gets no gradient."""

    def __init__(self, heads: tuple[str, ...] = ("used", "unused"), width: int = 8) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, width)
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(width, 1) for name in heads})

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.heads["used"](self.body(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(max_steps: int = 1, **options: Any) -> Fit:
    return quiet(max_steps=max_steps, enable_checkpointing=False, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("fit") / "c")
    run = fit()
    run.fit(Net(), BATCHES)
    run.save_checkpoint(path)
    return path


OTHER = ("used", "other")
DIFFERENT = (
    r"missing \['heads.other.weight', 'heads.other.bias'\], unexpected \['heads.unused.weight', 'heads.unused.bias'\]"
)


def test_names_that_differ_are_listed(saved: str) -> None:  # F-11
    with pytest.raises(CheckpointError, match=f"do not fit Net: {DIFFERENT}"):
        Net.load_from_checkpoint(saved, heads=OTHER)
    with pytest.raises(CheckpointError, match=f"do not fit Net: {DIFFERENT}") as caught:
        fit(2).fit(Net(OTHER), BATCHES, ckpt_path=saved, allow=("module", "optimizer"))
    assert "load_from_checkpoint(path, strict=False)" in str(caught.value)
    with pytest.warns(UserWarning, match=f"skipped, with strict=False: {DIFFERENT}"):
        module = Net.load_from_checkpoint(saved, strict=False, heads=OTHER)
    assert torch.equal(module.body.weight, Net.load_from_checkpoint(saved).body.weight)


def test_another_shape_is_refused_with_and_without_strict(saved: str) -> None:  # F-11
    message = r"of another shape \['body.weight \(\(8, 4\) instead of \(16, 4\)\)'"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=message) as caught:
            Net.load_from_checkpoint(saved, strict=strict, width=16)
        assert "strict=False" not in str(caught.value)  # it would not help


class LoadsMismatched(Callback):
    """Loads mismatched weights through the strategy during a run."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        load = trainer.strategy.load_model_state
        whole = {name: torch.ones(value.shape) for name, value in Net().state_dict().items()}
        renamed = {name.replace("unused", "other"): value for name, value in whole.items()}
        other = r"unexpected \['heads.other.weight', 'heads.other.bias'\]"
        with pytest.raises(CheckpointError, match=other):
            load(renamed, strict=True)
        with pytest.raises(CheckpointError, match=r"body.weight \(\(16, 4\) instead of \(8, 4\)\)"):
            load({**whole, "body.weight": torch.ones(16, 4)}, strict=False)
        with pytest.warns(UserWarning, match=f"do not fit Net; skipped, with strict=False: .*{other}"):
            load(renamed, strict=False)


def _load_mismatched(strategies: list[str]) -> None:
    for strategy in strategies:
        data: Any = torch.ones(8, 4)  # a tensor is a dataset, too
        run = fit(strategy=strategy, callbacks=LoadsMismatched())
        run.fit(Net(), torch.utils.data.DataLoader(data, 2))
        assert run.global_step == 1


@requires_package("deepspeed")
def test_strategies_that_shard_parameters_list_the_same_names() -> None:  # F-11
    on_ranks(_load_mismatched, 2, ["fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
