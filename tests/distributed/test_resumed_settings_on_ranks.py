"""A resume on several ranks compares the optimizers' settings alike, under whatever strategy. Q-04."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet
from torch import nn

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(wrap=[nn.Linear]),
    "zero 2": lambda: "deepspeed_stage_2",
    "zero 3": lambda: "deepspeed_stage_3",
}


class Adam(Regression):
    def __init__(self, grouped: bool, **options: Any) -> None:
        super().__init__()
        self.grouped, self.options = grouped, options

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]] if self.grouped else [self.net]
        groups = [{"params": list(layer.parameters())} for layer in layers]
        optimizer = torch.optim.AdamW(groups, **{"lr": 0.01, **self.options})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Watching(Callback):
    """Saves after the first epoch, and records the learning rate of each step."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0 and self.path:
            trainer.save_checkpoint(self.path)


def fit(strategy: str, grouped: bool = True, resume: str = "", allow: Any = (), path: str = "", **options: Any) -> Any:
    """Return the error, the learning rates of the steps, and the warnings."""
    watching = Watching(path)
    trainer = quiet(strategy=STRATEGIES[strategy](), max_epochs=2, callbacks=[watching], seed=1)
    with captured_warnings() as warned, failing() as caught:
        trainer.fit(Adam(grouped, **options), loader(16, 4), ckpt_path=resume or None, allow=allow)
    return caught["text"], watching.rates, [text for text in warned if "goes on" in text]


def _in_turn(strategies: tuple[str, str], path: str) -> dict[str, Any]:
    saved, now = strategies
    assert fit(saved, path=path)[0] == ""
    return {
        "the same": fit(now, resume=path),
        "amsgrad": fit(now, resume=path, amsgrad=True),
        "merged": fit(now, grouped=False, resume=path),
        "rate": fit(now, resume=path, lr=0.32),
        "allowed": fit(now, grouped=False, resume=path, allow="optimizer", lr=0.32),
    }


PAIRS = [("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", "zero 2"), ("zero 3", "fsdp")]


@pytest.mark.parametrize("strategies", PAIRS, ids=" to ".join)
def test_settings_are_compared_alike_under_every_strategy(strategies: tuple[str, str], tmp_path: Path) -> None:
    #
    for rank, found in enumerate(on_ranks(_in_turn, 2, strategies, str(tmp_path / "saved"), timeout=170)):
        goes_on = [0.01 * 0.5**step for step in (2, 3)]
        assert found["the same"] == ("", pytest.approx(goes_on), [])
        assert "amsgrad=False in group 0 of AdamW, and this one amsgrad=True" in found["amsgrad"][0]
        assert "'net.2.weight', 'net.2.bias' in group 1 of AdamW, and this one in group 0" in found["merged"][0]
        error, rates, lines = found["rate"]
        assert (error, rates) == ("", pytest.approx(goes_on))
        assert len(lines) == (rank == 0)
        assert all("initial_lr=0.01 in group 0 of AdamW, not 0.32" in line for line in lines)
        assert found["allowed"] == ("", pytest.approx([0.32, 0.16]), [])
