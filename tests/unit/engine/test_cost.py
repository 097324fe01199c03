"""The Python calls of a step over a hand-written loop's (H-01); `test_on_emulated_cuda` counts waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import StringIO
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, fit
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.calls import count_calls
from drivetrain.callbacks import Checkpoint, ProgressBar, progress_bar
from drivetrain.loggers import CSVLogger

_SHORT, _LONG = 100, 300


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Logging(Bare):
    names: tuple[str, ...] = ("loss",)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).mean()
        for name in self.names:
            self.log(name, loss)
        return loss


class LoggingFive(Logging):
    names = ("a", "b", "c", "d", "e")


class Validating(Bare):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(600, 2)))


def calls_a_step(run: Callable[[int], None]) -> float:
    """Return the Python calls of each further step of a run."""
    return (count_calls(partial(run, _LONG)) - count_calls(partial(run, _SHORT))) / (_LONG - _SHORT)


def _hand_written(steps: int, accumulate: int = 1) -> None:
    """Train with as few calls as possible; those of `optimizer.zero_grad()` vary with torch."""
    # Written by hand: its calls are counted.
    module = Bare()
    parameters = list(module.parameters())
    optimizer = module.configure_optimizers()
    for batch_idx, batch in enumerate(_loader()):
        if batch_idx % accumulate == 0:
            for parameter in parameters:
                parameter.grad = None
        loss = module.training_step(batch, batch_idx)
        (loss if accumulate == 1 else loss / accumulate).backward()
        if (batch_idx + 1) % accumulate == 0:
            optimizer.step()
            if batch_idx + 1 >= steps * accumulate:
                return


@pytest.mark.parametrize(
    ("what", "kind", "options", "most"),
    [
        # H-01 allows 25 bare and 35 with one log; these bounds are what is reached, plus a call or two.
        ("bare", Bare, {}, 6),
        ("with a validation loader", Validating, {}, 6),
        ("one self.log", Logging, {}, 9),
        ("five of them", LoggingFive, {}, 21),
        ("bf16-mixed", Bare, {"precision": "bf16-mixed"}, 13),
        ("16-mixed and clipping", Bare, {"precision": "16-mixed", "gradient_clip_val": 1.0}, 47),
        ("typical", Logging, {}, 16),
        # Ten of these take the window's snapshot, which is only needed with preemption signals.
        ("two of a window", Bare, {"accumulate_grad_batches": 2}, 28),
        ("two of a window, no signals", Bare, {"accumulate_grad_batches": 2, "preemption_signals": None}, 17),
    ],
)
def test_python_calls_of_a_step(
    tmp_path: Path, what: str, kind: type[Bare], options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # H-01
    # The bar is drawn by the clock, so a loaded machine would count more calls.
    monkeypatch.setattr(progress_bar, "_now", repeat(0.0).__next__)
    accumulate = options.get("accumulate_grad_batches", 1)

    def ours(steps: int) -> None:
        more: dict[str, Any] = {}
        if what == "typical":
            callbacks = [ProgressBar(stream=Terminal()), Checkpoint(every_n_train_steps=1000)]
            more = {"callbacks": callbacks, "logger": CSVLogger(tmp_path), "enable_progress_bar": True}
        trainer = fit(tmp_path, max_steps=steps, num_sanity_val_steps=0, **options, **more)
        trainer.fit(kind(), _loader(), _loader() if kind is Validating else None)
        assert trainer.global_step == steps

    ours(3)
    raw = calls_a_step(partial(_hand_written, accumulate=accumulate))
    over = calls_a_step(ours) - raw
    print(f"{what}: {over:.2f} Python calls a step over the raw loop's {raw:.1f}")
    assert raw > 79  # check that calls are counted at all: 100 with those of zero_grad
    assert 0 < over <= most


def test_python_calls_of_a_validation_batch(tmp_path: Path) -> None:  # H-01
    module = Validating()

    def ours(batches: int) -> None:
        fit(tmp_path, limit_val_batches=batches).validate(module, _loader(), verbose=False)

    def by_hand(batches: int) -> None:
        with torch.no_grad():
            for batch_idx, batch in zip(range(batches), _loader(), strict=False):
                module.validation_step(batch, batch_idx)

    ours(3)
    assert calls_a_step(ours) - calls_a_step(by_hand) <= 6
