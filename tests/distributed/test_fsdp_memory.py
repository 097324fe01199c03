"""The bytes that a rank of a sharded run holds, from construction to the end of the first step: D-01, D-03, D-08."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from small_runs import Regression, loader, quiet
from torch import nn

from drivetrain import Callback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

WIDTH, DEPTH = 128, 8
UNIT = WIDTH * (WIDTH + 1) * 4
WHOLE = DEPTH * UNIT
SMALL = UNIT // 4
"""The rest: activations, batches, states of generators."""


class Block(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Tall(Regression):
    """Blocks that `configure_model` builds, and initialises in a loop at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        self.net = nn.Sequential(*(Block() for _ in range(DEPTH)))
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0].repeat(1, WIDTH // 4)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Watch(Callback):
    """Records the peak (``peak ...``) before each point of the first micro-batch, and the live bytes at the point."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.found: dict[str, int] = {}

    def _note(self, point: str) -> None:
        gc.collect()  # garbage that merely awaits collection does not count
        self.found.setdefault(point, self.live.now())
        self.found.setdefault(f"peak {point}", self.live.peak)
        self.live.restart()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._note("built")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._note("forward")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._note("backward")

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._note("end")


def _watched(options: dict[str, Any], micro_batches: int = 1) -> dict[str, int]:
    with LiveBytes() as live:
        watch = Watch(live)
        strategy = FSDPStrategy(wrap=[Block], gather_limit=0, **options)
        fit = quiet(strategy=strategy, callbacks=watch, accumulate_grad_batches=2, limit_train_batches=micro_batches)
        fit.fit(Tall(), loader(32, 4))
    return watch.found


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_needs_more_than_its_shards_and_a_few_units(ranks: int) -> None:
    # D-01, D-03: during construction, one whole unit and the shard that is cut from it
    part = WHOLE // ranks
    for found in on_ranks(_watched, ranks, {}):
        assert found["built"] <= part + SMALL
        assert found["peak built"] <= part + UNIT + UNIT // ranks + SMALL
        # A unit's shards, as received and as laid out; the previous unit is freed when this one exists.
        assert found["peak forward"] <= part + 4 * UNIT
        assert found["peak backward"] <= 2 * part + 4 * UNIT
        # Parameters, gradients, and AdamW's two moments; AdamW needs space for another parameter or two.
        assert found["peak end"] <= 4 * part + 4 * UNIT
        assert found["end"] <= 4 * part + UNIT


def test_with_storage_every_rank_builds_the_whole() -> None:
    # Shows that the test above measures a real effect.
    for found in on_ranks(_watched, 2, {"meta": False}):
        assert found["peak built"] > WHOLE
        assert found["built"] <= WHOLE // 2 + SMALL


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"reshard_after_forward": True}, 1 / 4),
        ({"reshard_after_forward": False}, 1 / 4 + 1),
        ({"sharding": "grad_op"}, 1 / 4 + 1),
        ({"sharding": "hybrid", "shard_size": 2}, 1 / 2),
    ],
    ids=str,
)
def test_memory_between_forward_and_backward(options: dict[str, Any], kept: float) -> None:
    # D-08: shards, and none or all of every unit; the last unit stays for the backward that follows
    for found in on_ranks(_watched, 4, options):
        assert kept * WHOLE <= found["forward"] <= kept * WHOLE + 4 * UNIT


@pytest.mark.parametrize(("reshard", "kept"), [(True, 1.5), (False, 2.5)])
def test_memory_within_a_window(reshard: bool, kept: float) -> None:
    # D-08: shards, whole gradients that were not exchanged yet, and whole parameters that need not be gathered again
    for found in on_ranks(_watched, 2, {"reshard_after_backward": reshard}, 2):
        assert kept * WHOLE <= found["backward"] <= kept * WHOLE + 3 * UNIT
