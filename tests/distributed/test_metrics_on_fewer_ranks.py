"""A metric with a special state, resumed on fewer ranks: merged by its own method, or refused (I-16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import Regression, data, failing, loader, quiet, weights

from drivetrain.callbacks import Checkpoint
from drivetrain_strategies import DDPStrategy
from mergeable import MergeablePearson
from worlds import on_ranks

SAMPLES = 24


class Correlated(Regression):
    """Measures the correlation of the data's first number with the target: the same for any split, order and
    weights.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.pearson = kind()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pearson.update(batch[0][:, 0], batch[1][:, 0])
        self.log("pearson", self.pearson, on_step=False, on_epoch=True)
        return self.loss(batch)


def _run(kind: Any, folder: Path, start: Path | None, max_steps: int) -> Any:
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)
    settings = {"strategy": DDPStrategy(), "callbacks": saver, "max_steps": max_steps, "default_root_dir": folder}
    module, trainer = Correlated(kind), quiet(**settings, seed=3)
    before = weights(module).clone()
    with failing() as caught:
        trainer.fit(module, loader(SAMPLES, 2, shuffle=True), ckpt_path=start)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return caught, found, torch.equal(before, weights(module))


def _by_hand() -> float:
    x, y = data(SAMPLES).tensors
    return float(torch.corrcoef(torch.stack([x[:, 0], y[:, 0]]))[0, 1])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2), (2, 3)])
def test_a_mergeable_metric_resumes(before: int, after: int, tmp_path: Path) -> None:
    # I-16
    on_ranks(_run, before, MergeablePearson, tmp_path / "a", None, 2)
    for caught, found, _ in on_ranks(
        _run, after, MergeablePearson, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", -1
    ):
        assert caught["type"] == "nothing was raised", caught
        assert found["pearson"] == pytest.approx(_by_hand(), abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2)])
def test_an_unmergeable_metric_is_refused_on_every_rank_before_anything_changes(
    before: int, after: int, tmp_path: Path
) -> None:
    # I-16: with three ranks' states on two ranks, one rank gets two states, and the other could resume
    plain = torchmetrics.PearsonCorrCoef
    on_ranks(_run, before, plain, tmp_path / "a", None, 2)
    for caught, _, unchanged in on_ranks(_run, after, plain, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", -1):
        assert caught["type"] == "CheckpointError"
        assert "PearsonCorrCoef 'pearson'" in caught["text"]
        assert "merge_state" in caught["text"]
        assert unchanged
    # On the same number of ranks nothing needs to be merged.
    for caught, found, _ in on_ranks(_run, before, plain, tmp_path / "c", tmp_path / "a" / "epoch=0-step=2", -1):
        assert caught["type"] == "nothing was raised", caught
        assert found["pearson"] == pytest.approx(_by_hand(), abs=1e-5)
