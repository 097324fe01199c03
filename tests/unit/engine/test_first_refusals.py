"""Errors and warnings before the first step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, Tiny, fit
from torch import nn

from drivetrain import ConfigurationError


def test_a_long_list_of_batches_is_not_iterated(tmp_path: Path) -> None:
    class Counted(list[Any]):
        reads = 0

        def __iter__(self) -> Any:
            Counted.reads += 1
            return super().__iter__()

    trainer = fit(tmp_path, max_steps=1)
    trainer.fit(Bare(), [Counted([torch.ones(4, 2)]) for _ in range(100)])
    assert trainer.global_step == 1
    assert Counted.reads < 100


class Lazy(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))


FORKED: dict[str, Any] = {"devices": 2, "launcher": "fork", "accelerator": "cpu"}


@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp", **FORKED}])
def test_lazy_layers_without_a_shape_are_named(tmp_path: Path, settings: dict[str, Any]) -> None:  # I-12
    with pytest.raises(ConfigurationError, match=r"layer\.0 \(LazyLinear\), layer\.1 \(LazyBatchNorm1d\)\.") as caught:
        fit(tmp_path, **settings).fit(Lazy(), [torch.ones(4, 2)])
    with pytest.raises(ConfigurationError, match=r"layer\.0 \(LazyLinear\)"):
        fit(tmp_path).predict(Lazy(), [torch.ones(4, 2)])
    assert "one forward" in caught.value.fix
    assert "configure_model" in caught.value.fix


@pytest.mark.parametrize("settings", [{}, {"strategy": "ddp", **FORKED}])
def test_lazy_layers_train_after_one_forward(tmp_path: Path, settings: dict[str, Any]) -> None:  # I-12
    class Shaped(Lazy):
        def configure_model(self) -> None:
            with torch.no_grad():
                self.layer(torch.ones(2, 2))

    before = Lazy()
    before.layer(torch.ones(2, 2))
    for module in (before, Shaped()):
        trainer = fit(tmp_path, **settings)
        trainer.fit(module, [torch.randn(4, 2)])
        assert trainer.global_step == 1
        assert type(module.layer[0]) is nn.Linear  # also in the caller of started ranks
        assert module.layer[0].weight.shape == (4, 2)
