"""Checkpoints that an earlier version wrote (``older/``, by ``older_run.py``): a run still resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from older_run import KINDS, SAVED_AT, run
from safetensors.torch import load_file

from drivetrain.checkpoint import load, verify
from worlds import on_ranks

OLDER = Path(__file__).parent / "older"
DROPOUT: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
"""Sums over two ranks may differ in order between processors; dropout masks are bit-identical."""


def _resumed(kind: str) -> Any:
    return run(kind, start=OLDER / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_is_read_and_resumed_with_the_same_results(kind: str) -> None:
    # F-01
    checkpoint = load(OLDER / kind)
    assert verify(OLDER / kind) == []
    assert checkpoint.progress["global_step"] == SAVED_AT
    assert checkpoint.hyper_parameters == {"width": 4}
    assert {"last.weight", "net.0.weight", "steps"} <= set(checkpoint.weights())
    assert checkpoint.optimizer_state()["param_groups"][0]["weight_decay"] == 0.1
    ended = load_file(OLDER / "ended.safetensors")
    expected = {name.partition("/")[2]: value for name, value in ended.items() if name.startswith(f"{kind}/")}
    weights, seen, global_step = _resumed(kind) if KINDS[kind] == 1 else on_ranks(_resumed, KINDS[kind], kind)[0]
    assert global_step == 8
    assert seen == (0, 1, 2, 3, 0, 1, 2, 3)
    torch.testing.assert_close(weights, expected, **DROPOUT)
