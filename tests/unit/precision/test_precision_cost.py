"""What a precision costs in Python calls over a raw loop (H-01)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.precision import Precision, resolve_precision

X = torch.ones(2, 4)


def calls_of(step: Callable[[], None]) -> int:
    """Python functions entered in one step, once everything lazy has happened."""
    entered = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    for _ in range(5):
        step()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entered


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def raw() -> Callable[[], None]:
    module, optimizer = build()

    def step() -> None:
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()

    return step


def with_precision(precision: Precision, clip: float | None) -> Callable[[], None]:
    module, optimizer = build()

    def step() -> None:
        optimizer.zero_grad()
        if precision.has_forward_context:
            with precision.forward_context():
                loss = module(X).sum()
        else:
            loss = module(X).sum()
        precision.backward(loss)
        if precision.scales_loss:
            precision.unscale(optimizer)
        if clip is not None:
            precision.clip_gradients([optimizer], clip)
        precision.step(optimizer)
        if precision.scales_loss:
            precision.update()

    return step


@pytest.mark.parametrize(
    ("name", "clip", "bound"),
    [
        ("32-true", None, 2),  # one call each for backward and step, no context
        ("bf16-mixed", None, 10),
        ("16-mixed", None, 38),
        ("32-true", 0.1, 24),
        ("16-mixed", 0.1, 62),
    ],
)
def test_python_calls_over_the_raw_loop(name: str, clip: float | None, bound: int) -> None:
    # H-01: 20 for bf16-mixed, 49 for 16-mixed and 80 with clipping, the engine's own 11 in them
    extra = calls_of(with_precision(resolve_precision(name, torch.device("cpu")), clip)) - calls_of(raw())
    assert extra <= bound
