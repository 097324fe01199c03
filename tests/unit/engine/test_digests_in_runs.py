"""``Checkpoint(digest="sha256")`` in runs; `tests/unit/checkpoint/test_digests.py` has the files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from engine_case import fit, regression
from small_modules import calling, linear

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import verify


@pytest.mark.parametrize(("error", "save_async"), [(RuntimeError, True), (SystemExit, False)])
def test_a_checkpoint_callback_writes_digests(tmp_path: Path, error: Any, save_async: bool) -> None:  # J-11
    """Including those written before a preempted exit and after a failure."""

    def end(trainer: Any) -> None:
        if trainer.global_step == 5:
            if error is SystemExit:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise RuntimeError("enough")

    options: dict[str, Any] = {"digest": "sha256", "save_async": save_async, "save_top_k": -1}
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=2, save_on_exception=True, **options)
    with pytest.raises(error):
        fit(tmp_path, callbacks=[saver, calling("on_train_batch_start", end)]).fit(linear(), regression(400))
    paths = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert len(paths) >= 3
    assert [verify(path, digest="sha256") for path in paths] == [[]] * len(paths)
