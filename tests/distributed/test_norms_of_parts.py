"""``grad_norm`` gives the norms of whole gradients where each rank holds a part (Q-11)."""

from __future__ import annotations

from typing import Any

import torch
from small_runs import Regression, loader, quiet

from drivetrain import grad_norm
from worlds import on_ranks


class Measuring(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [{name: float(norm) for name, norm in grad_norm(self, order).items()} for order in (1, 2, "inf")]


def _norms(strategy: str) -> list[dict[str, float]]:
    module = Measuring()
    quiet(strategy=strategy, max_steps=1).fit(module, loader(8, 4 if strategy == "fsdp" else 8))
    return module.norms


def test_parts_of_gradients_may_be_empty() -> None:
    expected = _norms("auto")  # a bias of one value leaves all ranks but one without a part of it
    for norms in on_ranks(_norms, 2, "fsdp"):
        for found, wanted in zip(norms, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
