"""The suggestion to use fused or foreach optimizer kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, fit
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from drivetrain._engine.fused_optimizers import suggest_fused_optimizers
from drivetrain._runtime import console_logging


def _optimizer(kind: Any, layer: nn.Module | None = None, **options: Any) -> Any:
    return kind((layer or nn.Linear(2, 1)).parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (AdamW, {}, True),
        (Adam, {}, True),
        (Adagrad, {}, True),
        (SGD, {"momentum": 0.9}, True),
        (SGD, {}, False),  # one pass over the gradients either way
        (RMSprop, {}, False),  # torch has no fused kernel for it
        (AdamW, {"fused": True}, False),
        (AdamW, {"fused": False}, False),  # the user's own choice
        (AdamW, {"foreach": True}, False),
        (AdamW, {"differentiable": True}, False),
        (AdamW, {"lr": torch.tensor(0.1)}, False),
    ],
)
def test_only_useful_kernels_are_suggested(kind: Any, options: dict[str, Any], named: bool) -> None:
    line = suggest_fused_optimizers([_optimizer(kind, **options)])
    assert (line is not None) == named
    if named:
        assert f"{kind.__name__}(fused=True)" in str(line)
        _optimizer(kind, **{**options, "fused": True}).step()  # it is available


def test_a_kernel_that_does_not_support_every_parameter_is_not_suggested() -> None:
    assert suggest_fused_optimizers([_optimizer(AdamW, nn.Linear(2, 1, dtype=torch.complex64))]) is None
    assert suggest_fused_optimizers([_optimizer(AdamW, nn.Linear(2, 1, device="meta"))]) is None
    assert suggest_fused_optimizers([]) is None


class Module(Bare):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.1)


def test_a_process_logs_the_suggestion_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L-09
    monkeypatch.setattr(console_logging, "_LOGGED", set())
    data = DataLoader(TensorDataset(torch.ones(4, 2)))
    fit(tmp_path).fit(Module(), data)  # without a listener it has not been logged
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        for _ in range(2):
            fit(tmp_path).fit(Module(), data)
        fit(tmp_path, precision="bf16-mixed").fit(Module(), data)
    said = [record.getMessage() for record in caplog.records]
    assert sum("AdamW(fused=True)" in line and "torch does not select it by default" in line for line in said) == 1
    told = [line.partition(":")[0] for line in said if line.startswith("Precision")]
    assert told == ["Precision 32-true", "Precision bf16-mixed"]
