"""Steps that omit parameters which other steps use, under DDP: reported before a wrong step is made."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from small_runs import FEATURES, Regression, failing, loader, quiet, seeded, weights
from torch import nn

from drivetrain_strategies import DDPStrategy
from worlds import on_ranks

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "static graph": {"static_graph": True}}

LEFT_OUT: dict[str, tuple[int, tuple[int, ...], int]] = {
    "the epoch's last step, on one rank": (3, (1,), 1),
    "the run's last step, on one rank": (7, (0,), 1),
    "the run's last step": (7, (0, 1), 1),
    "a step between": (2, (0, 1), 1),
    "the micro-batch that synchronises": (5, (0, 1), 2),
}
"""The micro-batch, counted over two epochs of four, that leaves a layer out; on which ranks; the window."""


class Branching(Regression):
    """A layer is skipped in one micro-batch, on some ranks."""

    def __init__(self, at: int, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.spare = seeded(lambda: nn.Linear(FEATURES, 1))
        self.at, self.ranks, self.seen = at, ranks, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, x = self.loss(batch), batch[0]
        left_out = self.seen == self.at and self.global_rank in self.ranks
        self.seen += 1
        return loss if left_out else loss + self.spare(x).square().mean()


def _left_out() -> dict[tuple[str, str], tuple[dict[str, str], int, float, torch.Tensor]]:
    found = {}
    for kind, options in KINDS.items():
        for name, (at, ranks, window) in LEFT_OUT.items():
            module, began = Branching(at, ranks), time.monotonic()
            strategy = DDPStrategy(timeout=timedelta(seconds=20), **options)
            fit = quiet(strategy=strategy, max_epochs=2, accumulate_grad_batches=window)
            with failing() as error:
                fit.fit(module, loader(32, 4))
            found[kind, name] = error, fit.global_step, time.monotonic() - began, weights(module)
    return found


def test_a_step_that_omits_a_parameter_is_refused_before_it_is_made() -> None:  # C-01, C-04
    ranks = on_ranks(_left_out, 2, process_group=None, timeout=120)
    for kind, name in ranks[0]:
        at, on, window = LEFT_OUT[name]
        for rank, found in enumerate(ranks):
            error, steps, seconds, left = found[kind, name]
            assert error["type"] == ("ConfigurationError" if rank in on else "RankFailedError"), (kind, name, error)
            assert "2 trainable parameter(s) got no gradient: 'spare.weight', 'spare.bias'." in error["text"]
            assert steps == at // window, (kind, name)
            assert seconds < 10, (kind, name)
            assert torch.equal(left, ranks[0][kind, name][3]), (kind, name)
            # Only the fix for this kind of run is suggested.
            assert "find_unused_parameters=True" in error["text"]
            assert ("use DDPStrategy(static_graph=True)" in error["text"]) == (kind == "plain"), (kind, error)
