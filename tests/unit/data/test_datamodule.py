"""DataModule: hyper-parameters, defaults, and what exists only in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError


class Texts(DataModule):
    def __init__(self, path: str, batch_size: int = 8, fold: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="fold")


def test_hyper_parameters() -> None:
    data = Texts("corpus", fold=object())
    assert dict(data.hparams) == {"path": "corpus", "batch_size": 8}
    assert data.hparams.batch_size == 8
    assert DataModule().hparams == {}


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_a_loader_that_was_not_written_is_named(stage: str) -> None:
    with pytest.raises(NotImplementedError, match=f"Texts has no {stage}_dataloader"):
        getattr(Texts("corpus"), f"{stage}_dataloader")()


def test_the_trainer_exists_only_in_a_run() -> None:
    #
    with pytest.raises(ConfigurationError, match="not in a run"):
        _ = Texts("corpus").trainer
    with pytest.raises(AttributeError, match="no attribute 'trainr'"):
        _ = Texts("corpus").trainr  # type: ignore[attr-defined]


def test_batches_are_moved_and_state_is_empty() -> None:
    data = DataModule()
    batch = data.on_after_batch_transfer(
        data.transfer_batch_to_device(data.on_before_batch_transfer([torch.zeros(2)], 0), torch.device("meta"), 0), 0
    )
    assert batch[0].device.type == "meta"
    assert data.state_dict() == {}
