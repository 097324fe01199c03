"""Mismatched weights are listed by name, and skipped ones are reported: F-11."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


class OtherHead(Net):
    def __init__(self) -> None:
        super().__init__(("used", "other"))


class Wide(Net):
    def __init__(self) -> None:
        super().__init__(width=16)


def fit(max_steps: int = 1, **options: Any) -> Fit:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Fit(accelerator="cpu", max_steps=max_steps, **quiet, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fit") / "c"
    run = fit()
    run.fit(Net(), BATCHES)
    run.save_checkpoint(path)
    return str(path)


DIFFERENT = (
    r"missing \['heads.other.weight', 'heads.other.bias'\], unexpected \['heads.unused.weight', 'heads.unused.bias'\]"
)


def test_names_that_differ_are_listed(saved: str) -> None:
    with pytest.raises(CheckpointError, match=f"do not fit OtherHead: {DIFFERENT}"):
        OtherHead.load_from_checkpoint(saved)
    with pytest.raises(CheckpointError, match=f"do not fit OtherHead: {DIFFERENT}") as caught:
        fit(2).fit(OtherHead(), BATCHES, ckpt_path=saved, allow=("module", "optimizer"))
    assert "load_from_checkpoint(path, strict=False)" in str(caught.value)
    with pytest.warns(UserWarning, match=f"skipped, with strict=False: {DIFFERENT}"):
        module = OtherHead.load_from_checkpoint(saved, strict=False)
    assert torch.equal(module.body.weight, Net.load_from_checkpoint(saved).body.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_with_and_without_strict(saved: str, strict: bool) -> None:
    message = r"of another shape \['body.weight \(\(8, 4\) instead of \(16, 4\)\)'"
    with pytest.raises(CheckpointError, match=message) as caught:
        Wide.load_from_checkpoint(saved, strict=strict)
    assert "strict=False" not in str(caught.value)  # it would not help


class LoadsMismatched(Callback):
    """Loads mismatched weights through the strategy during a run."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        whole = {name: torch.ones(value.shape) for name, value in Net().state_dict().items()}
        renamed = {name.replace("unused", "other"): value for name, value in whole.items()}
        wide = {**whole, "body.weight": torch.ones(16, 4)}
        for what, weights, strict in (("names", renamed, True), ("shapes", wide, False)):
            try:
                strategy.load_model_state(weights, strict=strict)
            except CheckpointError as error:
                self.found[what] = str(error)
        with pytest.warns(UserWarning, match="do not fit Net") as warned:
            strategy.load_model_state(renamed, strict=False)
        self.found["warning"] = str(warned[0].message)


def _loaded(strategies: list[str]) -> list[dict[str, str]]:
    every = []
    for strategy in strategies:
        loading = LoadsMismatched()
        data: Any = torch.ones(8, 4)  # a tensor is a dataset, too
        fit(strategy=strategy, callbacks=loading).fit(Net(), torch.utils.data.DataLoader(data, 2))
        every.append(loading.found)
    return every


@requires_package("deepspeed")
def test_strategies_that_shard_parameters_list_the_same_names() -> None:
    other = "unexpected ['heads.other.weight', 'heads.other.bias']"
    for found in on_ranks(_loaded, 2, ["fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])[0]:
        assert other in found["names"]
        assert "body.weight ((16, 4) instead of (8, 4))" in found["shapes"]
        assert "skipped" in found["warning"]
        assert other in found["warning"]
