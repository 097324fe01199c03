"""The traceback of a refusal shows the user's lines, each once (I-17)."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression

from drivetrain import CheckpointError, ConfigurationError, Fit


def _frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the file and function of each frame, outermost first."""
    return [(Path(one.filename).name, one.name) for one in traceback.extract_tb(error.__traceback__)]


def test_a_refusal_at_construction_shows_only_the_call() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fit(max_epochs=1.5)  # type: ignore[arg-type]
    assert len(_frames(caught.value)) == 2


def test_a_refusal_before_the_run_shows_only_the_call(tmp_path: Path) -> None:
    trainer = fit(tmp_path, strategy="ddp", devices=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Tiny(), [])
    assert [name for _, name in _frames(caught.value)] == [
        "test_a_refusal_before_the_run_shows_only_the_call",
        "fit",
        "_launch",
    ]


def test_frames_of_user_code_are_kept(tmp_path: Path) -> None:
    def logs(module: Any) -> None:
        module.log("note", "no number")

    class Logs(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logs(self)

    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(Logs(), loader())
    names = [name for _, name in _frames(caught.value)]
    assert names[-2:] == ["training_step", "logs"]
    assert len(names) == 5
    assert "Where: rank 0, epoch 0" in "".join(traceback.format_exception(caught.value))


def test_other_errors_keep_their_frames(tmp_path: Path) -> None:
    class Fails(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("a mistake of the module's own")

    with pytest.raises(ValueError, match="own") as caught:
        fit(tmp_path).fit(Fails(), loader())
    assert ("session.py", "execute") in _frames(caught.value)


def test_mismatched_weights_are_reported_once(tmp_path: Path) -> None:
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

    trainer = fit(tmp_path)
    trainer.fit(Regression(), regression())
    trainer.save_checkpoint(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"more\.weight") as caught:
        fit(tmp_path, max_epochs=2).fit(
            Wider(), regression(), ckpt_path=str(tmp_path / "saved"), allow=("module", "optimizer")
        )
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("do not fit") == 1
    frames = _frames(caught.value)
    assert frames.count(("collective_errors.py", "run_collectively")) == 1
