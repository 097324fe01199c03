"""The bytes that a rank of a sharded run holds, from construction to the end of the first step."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import Regression, loader, quiet
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

WIDTH, DEPTH = 128, 4
UNIT = 2 * WIDTH * WIDTH * 4
WHOLE = DEPTH * UNIT
SHARD = UNIT // 2  # what one of two ranks holds of a block
SMALL = UNIT // 4  # the rest: norms, activations of a small batch, states of generators
GATHERED = SHARD + UNIT + UNIT // 2  # a shard, and the gathered block with its casts to half precision
HALF = torch.bfloat16


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation created or received within the context, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0  # the largest number of live bytes after any operation, since it was set to 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        """Return the live bytes; resized storages, as in FSDP's gathered parameters, count with their current size."""
        alive = {key: storage for key, one in self._storages.items() if (storage := one()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local shards
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten((args, kwargs, result))[0]:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)  # the number of a freed one may be used again
        self.peak = max(self.peak, self.now())
        return result


class Block(nn.Module):
    """Two matrices around a residual, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tall(Regression):
    """Blocks that `configure_model` builds, and initialises in a loop; matrices may be frozen, in a dtype or later."""

    def __init__(self, depth: int = DEPTH, frozen: Any = None) -> None:
        super().__init__()
        self.net = None
        self.depth, self.frozen = depth, frozen

    def configure_model(self) -> None:
        self.net = nn.Sequential(*(Block() for _ in range(self.depth)))
        for name, parameter in self.net.named_parameters():
            nn.init.normal_(parameter, std=0.01)
            if isinstance(self.frozen, torch.dtype) and "norm" not in name:
                parameter.requires_grad_(False).data = parameter.data.to(self.frozen)

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            if self.frozen == "later" and "norm" not in name:
                parameter.requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0].repeat(1, WIDTH // 4)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


WATCHED = {
    "on_train_start": "built",
    "on_before_backward": "forward",
    "on_after_backward": "backward",
    "on_train_batch_end": "end",
    "on_validation_start": "evaluation's start",
    "on_validation_batch_end": "evaluation",
}


def _watched(options: dict[str, Any], module: Any = None, **settings: Any) -> dict[str, int]:
    """Return the live bytes when each point was first reached, and the peaks (``peak ...``) before the points."""
    found: dict[str, int] = {}

    def note(point: str, *_: Any) -> None:
        gc.collect()  # garbage that merely awaits collection does not count
        found.setdefault(point, live.now())
        found[f"peak {point}"] = max(live.peak, found.get(f"peak {point}", 0))
        live.peak = 0

    with LiveBytes() as live:
        watch = LambdaCallback(**{hook: partial(note, point) for hook, point in WATCHED.items()})
        strategy = FSDPStrategy(wrap=[Block], gather_limit=0, **options)
        fit = quiet(**{"strategy": strategy, "callbacks": watch, "limit_train_batches": 1, **settings})
        module = Tall() if module is None else module
        fit.fit(module, loader(16, 4), loader(8, 4))
    assert not any("forward" in child.__dict__ for child in module.modules())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_needs_more_than_its_shards_and_a_few_units(ranks: int) -> None:
    # D-01, D-03: during construction, one whole unit and the shard that is cut from it
    part = WHOLE // ranks
    for found in on_ranks(_watched, ranks, {}):
        assert found["built"] <= part + SMALL
        assert found["peak built"] <= part + UNIT + UNIT // ranks + SMALL
        # A unit's shards, as received and as laid out; the previous unit is freed when this one exists.
        assert found["peak forward"] <= part + 3.5 * UNIT
        assert found["peak backward"] <= 2 * part + 4 * UNIT
        # Parameters, gradients, and AdamW's two moments; AdamW needs space for another parameter or two.
        assert found["peak end"] <= 4 * part + 2.5 * UNIT
        assert found["end"] <= 4 * part + UNIT


def test_with_storage_every_rank_builds_the_whole() -> None:
    # Shows that the test above measures a real effect.
    for found in on_ranks(_watched, 2, {"meta": False}):
        assert found["peak built"] > WHOLE
        assert found["built"] <= WHOLE // 2 + SMALL


@pytest.mark.parametrize(
    ("ranks", "options", "kept"),
    [
        (4, {}, 1 / 4),
        (4, {"reshard_after_forward": False}, 1 / 4 + 1),
        (4, {"sharding": "grad_op"}, 1 / 4 + 1),
        (4, {"sharding": "hybrid", "shard_size": 2}, 1 / 2),
        # within a window: shards, whole gradients that were not exchanged yet, and, if kept, whole parameters
        (2, {"reshard_after_backward": True}, 1.5),
        (2, {"reshard_after_backward": False}, 2.5),
    ],
    ids=str,
)
def test_memory_after_a_forward_or_a_backward(ranks: int, options: dict[str, Any], kept: float) -> None:
    # D-08: shards, and none or all of every unit; the last unit stays for the backward that follows
    point, parts = ("backward", 2) if "reshard_after_backward" in options else ("forward", 1)
    watched = partial(_watched, accumulate_grad_batches=parts, limit_train_batches=parts)
    for found in on_ranks(watched, ranks, options):
        assert kept * WHOLE <= found[point] <= kept * WHOLE + 2.5 * UNIT


def _by_depth(precision: str, options: dict[str, Any], frozen: Any = None) -> dict[str, float]:
    """Return what each further block adds to the live bytes at each point."""
    shallow, deep = (_watched(options, Tall(depth, frozen), precision=precision) for depth in (2, 4))
    return {point: (deep[point] - shallow[point]) / 2 for point in shallow}


@pytest.mark.parametrize(
    ("precision", "options", "frozen", "kept"),
    [
        ("bf16-mixed", {}, None, SHARD),
        ("16-mixed", {"activation_checkpointing": [Block]}, None, SHARD),
        ("bf16-mixed", {"sharding": "grad_op"}, None, GATHERED),
        ("bf16-mixed", {"sharding": "grad_op"}, torch.float32, GATHERED),
        ("bf16-mixed", {}, torch.float32, SHARD),
        ("bf16-mixed", {}, "later", SHARD),
        ("bf16-mixed", {}, HALF, SHARD // 2),
    ],
    ids=str,
)
def test_a_further_block_costs_its_shards_and_its_activations(
    precision: str, options: dict[str, Any], frozen: Any, kept: int
) -> None:
    # D-01, D-07, I-03: without casts of its weights, UNIT / 2, which autocast's cache would keep until the end of the
    # forward, and products until their backward; gathered weights keep their casts. Autocast caches no casts of weights
    # frozen in float32, so each product saves its own, which is freed like those of trainable weights.
    for more in on_ranks(_by_depth, 2, precision, options, frozen):
        assert kept <= more["forward"] <= kept + SMALL
        if frozen is None and kept == SHARD:
            assert more["peak forward"] <= SHARD + SMALL
            assert more["peak backward"] <= 2 * SHARD + SMALL
            assert more["peak evaluation"] <= 4 * SHARD + SMALL  # gradients stay until the next step, and moments
