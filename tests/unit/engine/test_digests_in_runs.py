"""``Checkpoint(digest="sha256")`` in runs; `tests/unit/checkpoint/test_digests.py` has the files."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_case import Regression, fit, regression

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify


def fail() -> None:
    raise RuntimeError("enough")


def be_preempted() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "error", "save_async"),
    [(fail, RuntimeError, False), (fail, RuntimeError, True), (be_preempted, SystemExit, False)],
)
def test_a_checkpoint_callback_writes_digests(tmp_path: Path, end: Any, error: Any, save_async: bool) -> None:  # J-11
    """Including those written before a preempted exit and after a failure."""

    class Ends(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 5:
                end()
            return super().training_step(batch, batch_idx)

    options: dict[str, Any] = {"digest": "sha256", "save_async": save_async, "save_top_k": -1}
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=2, save_on_exception=True, **options)
    with pytest.raises(error):
        fit(tmp_path, callbacks=saver).fit(Ends(), regression(400))
    paths = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert len(paths) >= 3
    for path in paths:
        files = load(path).manifest.files
        assert {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in files} == {
            name: record.sha256 for name, record in files.items()
        }
        assert verify(path) == []
