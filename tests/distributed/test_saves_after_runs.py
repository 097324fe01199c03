"""`save_checkpoint` after and within a run of several ranks never writes what cannot be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet, weights

from worlds import on_ranks


class Saving(Regression):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.path}/within")


def _save_after(strategy: str, folder: str) -> dict[str, Any]:
    module, trainer = Saving(folder), quiet(strategy=strategy)
    trainer.fit(module, loader(32, 4))
    found: dict[str, Any] = {"weights": weights(module)}
    with failing() as found["whole"]:
        trainer.save_checkpoint(f"{folder}/whole")
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    resumed = Saving(folder)
    quiet(strategy=strategy, max_epochs=2).fit(resumed, loader(32, 4), ckpt_path=f"{folder}/within")
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_a_save_after_a_run_of_two_ranks_names_the_way_out(strategy: str, tmp_path: Path) -> None:
    # S-01: a checkpoint holds the state of one step, of all ranks
    found = on_ranks(_save_after, 2, strategy, str(tmp_path))
    for each in found:
        assert "needs the state of every rank" in each["whole"]["text"]
        assert "on_train_end, or with weights_only=True" in each["whole"]["text"]
    assert not (tmp_path / "whole").exists()
    again = Regression.load_from_checkpoint(tmp_path / "weights", strict=False)
    torch.testing.assert_close(weights(again), found[0]["weights"])


class SavingWithin(Regression):
    """Has running statistics, and saves within its third step."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.net.append(torch.nn.BatchNorm1d(1))
        self.path = path
        self.backwards = 0

    def on_after_backward(self) -> None:
        self.backwards += 1
        if self.path and self.backwards == 3:
            self.trainer.save_checkpoint(self.path)


def _save_within(strategy: str, path: str) -> list[torch.Tensor]:
    found = []
    for module, ckpt_path in ((SavingWithin(), None), (SavingWithin(path), None), (SavingWithin(), path)):
        quiet(strategy=strategy).fit(module, loader(48, 4), ckpt_path=ckpt_path)
        found.append(torch.cat([value.flatten().double() for value in module.state_dict().values()]))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_save_within_a_step_resumes_exactly_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    # S-01
    for whole, saving, resumed in on_ranks(_save_within, 2, strategy, str(tmp_path / "saved")):
        torch.testing.assert_close(saving, whole, atol=0, rtol=0)
        torch.testing.assert_close(resumed, whole, atol=1e-7, rtol=0)
