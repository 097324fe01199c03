"""Autocast's casts of sharded weights: how many bytes a rank holds, and that results are bit for bit equal."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from small_runs import Regression, each, global_batches, loader, quiet, seeded
from test_fsdp_memory import Watch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain import Callback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

HALF = torch.bfloat16
WIDTH = 128
UNIT = 2 * WIDTH * WIDTH * 4
SHARD = UNIT // 2
"""What a rank holds of a block, of two."""
REST = UNIT // 4
"""Of one block, at most: a norm, and the activations of a small batch."""


class Block(nn.Module):
    """Two matrices around a residual, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(Regression):
    """A number of blocks; their matrices may be frozen, in a given dtype, and each may have a trainable vector."""

    def __init__(self, depth: int, frozen: torch.dtype | None = None) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(*(Block() for _ in range(depth))))
        for name, parameter in self.net.named_parameters():
            if frozen is not None and "norm" not in name:
                parameter.requires_grad_(False).data = parameter.data.to(frozen)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0].repeat(1, WIDTH // 4)).square().mean()


class PeakOfEvaluation(Watch):
    """Also records the peak of live bytes within a validation."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.live.restart()

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.found["peak evaluation"] = self.live.peak


def _held(depth: int, precision: str, options: dict[str, Any], frozen: torch.dtype | None) -> dict[str, int]:
    with LiveBytes() as live:
        watch = PeakOfEvaluation(live)
        strategy = FSDPStrategy(wrap=[Block], **options)
        fit = quiet(strategy=strategy, callbacks=watch, max_steps=1, precision=precision)
        module = Deep(depth, frozen)
        module.validation_step = lambda batch, batch_idx: module.loss(batch)  # type: ignore[method-assign, misc]
        fit.fit(module, loader(8, 4), loader(8, 4))
    return watch.found


def _by_depth(precision: str, options: dict[str, Any], frozen: torch.dtype | None = None) -> dict[str, float]:
    """Return what each further block adds to the live bytes at each point."""
    shallow, deep = (_held(depth, precision, options, frozen) for depth in (2, 6))
    return {point: (deep[point] - shallow[point]) / 4 for point in shallow}


CHECKPOINTED = {"activation_checkpointing": [Block]}


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16-mixed", {}),
        ("bf16-mixed", CHECKPOINTED),
        ("bf16-mixed", {"mixed_precision": MixedPrecisionPolicy(HALF, torch.float32, cast_forward_inputs=False)}),
        ("16-mixed", {}),
    ],
    ids=str,
)
def test_a_further_block_costs_its_shards_and_its_activations(precision: str, options: dict[str, Any]) -> None:
    # D-01, D-07: without casts of its weights, UNIT / 2, which autocast's cache would keep until the end of the
    # forward, and products until their backward
    for more in on_ranks(_by_depth, 2, precision, options):
        assert SHARD <= more["forward"] <= SHARD + REST
        assert more["peak forward"] <= SHARD + REST
        assert more["peak backward"] <= 2 * SHARD + REST
        assert more["peak evaluation"] <= 2 * SHARD + REST  # gradients stay until the next step


def test_gathered_weights_keep_their_casts() -> None:
    # Shows that the test above measures a real effect; and nothing is cast twice if nothing is dropped.
    for more in on_ranks(_by_depth, 2, "bf16-mixed", {"sharding": "grad_op"}):
        assert more["forward"] >= SHARD + UNIT + UNIT // 2


@pytest.mark.parametrize(
    ("dtype", "options", "kept"),
    [
        (torch.float32, {}, SHARD),
        (torch.float32, CHECKPOINTED, SHARD),
        (torch.float32, {"sharding": "grad_op"}, SHARD + UNIT + UNIT // 2),
        (HALF, {}, SHARD // 2),
    ],
    ids=str,
)
def test_memory_of_frozen_weights(dtype: torch.dtype, options: dict[str, Any], kept: int) -> None:
    # D-07: autocast caches no casts of weights frozen in float32, so each product saves its own, which is freed like
    # those of trainable weights; weights frozen in bf16 need no cast.
    for more in on_ranks(_by_depth, 2, "bf16-mixed", options, dtype):
        assert kept <= more["forward"] <= kept + REST


class Freezing(Deep):
    """Freezes its matrices after the first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        for block in self.net:
            for layer in (block.up, block.down):
                layer.weight.requires_grad_(False)


class AfterForward(Callback):
    """Records the live bytes after each forward."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.found: list[int] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.found.append(self.live.now())


def _freezing(depth: int) -> list[int]:
    with LiveBytes() as live:
        after = AfterForward(live)
        module = Freezing(depth)
        quiet(strategy=FSDPStrategy(wrap=[Block]), callbacks=after, precision="bf16-mixed").fit(module, loader(16, 4))
    assert not any("forward" in child.__dict__ for child in module.modules())
    return after.found


def test_memory_of_weights_that_are_frozen_later() -> None:
    # D-07, I-03
    for shallow, deep in on_ranks(each, 2, _freezing, (2,), (6,)):
        _, frozen = [(more - fewer) / 4 for fewer, more in zip(shallow, deep, strict=True)]
        assert SHARD <= frozen <= SHARD + REST


# Equal bits


class Reusing(nn.Module):
    """Uses one matrix twice, another one directly, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.twice(torch.tanh(self.twice(self.norm(x))))
        x = x + self.conv(x.view(-1, 2, 4)).flatten(1)
        return x + self.once(x) * self.once.weight.mean()  # also used in float32


class OtherDtype(Reusing):
    """Computes in a dtype of its own, regardless of the precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().forward(x)


class Twice(nn.Module):
    """Runs its blocks twice, the second time in reverse order."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return self.head(x)


def _saves_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class PairwiseCheckpointed(Twice):
    """Recomputes its blocks two at a time, with a checkpointing of its own that keeps products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _saves_products)
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(lambda x, *pair: reduce(lambda x, block: block(x), pair, x), x, *pair, **options)
        return self.head(x)


class Adapted(Reusing):
    """Trains the norm and a bias; the matrices are frozen, and one of them multiplies three-dimensional inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" in name or name == "twice.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.once(x.view(-1, 2, 8)).view(x.shape))


class Differentiating(Adapted):
    """Differentiates a frozen layer with torch.func, and copies the layer to use it with other weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: Any = torch.func.vjp(self.twice, x)[1]
        with torch.no_grad():
            other = deepcopy(self.twice)
            other.weight.mul_(0.5)
        return super().forward(x + product(torch.ones_like(x, dtype=torch.bfloat16))[0] + other(x))


class Reused(Regression):
    def __init__(
        self, manual: bool = False, block: type[nn.Module] = Reusing, kind: Callable[[Any], nn.Module] = Twice
    ) -> None:
        super().__init__()
        self.net = seeded(lambda: kind(block))
        self.automatic_optimization = not manual

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x.repeat(1, 2)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


def shard_by_hand(net: nn.Module, units: Any, policy: MixedPrecisionPolicy) -> None:
    """Shard as a user of plain PyTorch would."""
    for unit in units:
        fully_shard(unit, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support PREMUL_SUM


def train_sharded_by_hand(module: Any, samples: int, window: int = 1) -> list[torch.Tensor]:
    """Train a module sharded by `shard_by_hand` on this rank's batches of 4, under autocast; return the whole
    weights.
    """
    optimizer = module.configure_optimizers()
    mine = global_batches(samples, 4)[dist.get_rank() :: dist.get_world_size()]
    for index, batch in enumerate(mine):
        last = (index + 1) % window == 0
        module.net.set_requires_gradient_sync(last)
        with torch.autocast("cpu", HALF):
            loss = module.loss(batch)
        (loss / window).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in module.parameters()]


PLAIN = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def _both(options: dict[str, Any], window: int, manual: bool, *kinds: Any) -> list[bool]:
    by_hand = Reused(False, *kinds)
    if options and "wrap" not in options:
        for unit in by_hand.net.blocks:
            forward = unit.forward
            unit.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    shard_by_hand(by_hand.net, by_hand.net.blocks, PLAIN)
    expected = train_sharded_by_hand(by_hand, 32, window)
    module = Reused(manual, *kinds)
    strategy = FSDPStrategy(**options)
    accumulated = {} if manual else {"accumulate_grad_batches": window}
    quiet(strategy=strategy, precision="bf16-mixed", **accumulated).fit(module, loader(32, 4))
    return [torch.equal(one, other) for one, other in zip(module.parameters(), expected, strict=True)]


@pytest.mark.parametrize(
    ("options", "window", "manual"),
    [
        ({}, 1, False),
        ({}, 2, False),
        ({}, 1, True),
        ({"activation_checkpointing": [Reusing]}, 1, False),
        ({"activation_checkpointing": [Reusing]}, 1, True),
    ],
    ids=str,
)
def test_the_bits_are_those_of_autocast_alone(options: dict[str, Any], window: int, manual: bool) -> None:
    # D-01, D-07: weights that are used twice in a block, or in two calls of it, share a cast, as in plain torch
    for same in on_ranks(_both, 2, options, window, manual):
        assert all(same), same


@pytest.mark.parametrize(
    ("options", "window", "manual", "kind"),
    [
        ({}, 2, False, Twice),
        ({}, 1, True, Twice),
        ({"activation_checkpointing": [Adapted]}, 1, False, Twice),
        ({"wrap": [Adapted]}, 1, False, PairwiseCheckpointed),
    ],
    ids=str,
)
def test_the_bits_with_frozen_matrices_are_those_of_autocast_alone(
    options: dict[str, Any], window: int, manual: bool, kind: Any
) -> None:
    # D-07: the cast that a product needs in backward is made again
    for same in on_ranks(_both, 2, options, window, manual, Adapted, kind):
        assert all(same), same


def test_frozen_layers_may_be_differentiated_with_torch_func_and_copied() -> None:
    # D-07: torch.func refuses hooks on saved tensors, and a copy uses its own weights
    for same in on_ranks(_both, 2, {"wrap": [Differentiating]}, 1, False, Differentiating):
        assert all(same), same


def test_a_block_may_be_under_an_autocast_of_its_own() -> None:
    # D-01: autocast keeps one cast of a weight, in the dtype of its first use
    for same in on_ranks(_both, 2, {"wrap": [OtherDtype]}, 1, False, OtherDtype):
        assert all(same), same


def test_units_may_be_in_a_checkpointing_of_the_modules_own() -> None:
    # D-01, D-09: it counts saved tensors, and sees the operations
    for same in on_ranks(_both, 2, {"wrap": [Reusing]}, 1, False, Reusing, PairwiseCheckpointed):
        assert all(same), same
