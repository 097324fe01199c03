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


def test_defaults_of_a_data_module() -> None:
    data = Texts("corpus", fold=object())
    assert dict(data.hparams) == {"path": "corpus", "batch_size": 8}
    assert (DataModule().hparams, data.state_dict()) == ({}, {})
    batch = data.on_before_batch_transfer([torch.zeros(2)], 0)
    batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, torch.device("meta"), 0), 0)
    assert batch[0].device.type == "meta"
    for stage in ("train", "val", "test", "predict"):
        with pytest.raises(NotImplementedError, match=f"Texts has no {stage}_dataloader"):
            getattr(data, f"{stage}_dataloader")()
    with pytest.raises(ConfigurationError, match="not in a run"):
        _ = data.trainer
    with pytest.raises(AttributeError, match="no attribute 'trainr'"):
        _ = data.trainr  # type: ignore[attr-defined]
