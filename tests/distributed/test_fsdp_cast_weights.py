"""Half-precision casts of sharded weights, by autocast or by a policy: the bits of results, and traffic."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import trained_on_shards
from small_runs import Regression, Saver, global_batches, seeded
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.traffic import a_step
from drivetrain.checkpoint import load
from worlds import on_ranks

HALF, MOMENTS = torch.bfloat16, ("exp_avg", "exp_avg_sq")


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


class Twice(nn.Module):
    """Runs its blocks twice, the second time in reverse order."""

    def __init__(self, block: type[nn.Module], stem: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.stem = stem(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return self.head(x)


STEMMED = partial(Twice, stem=nn.Linear)
"""The blocks' inputs come from a product, so they are in half precision."""


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


class Reused(Regression):
    def __init__(self, block: type[nn.Module], kind: Callable[[Any], nn.Module], manual: bool = False) -> None:
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


PLAIN = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
GATHERS_HALF = MixedPrecisionPolicy(HALF, torch.float32, cast_forward_inputs=False)
SAMPLES = 32


def _sharded_by_hand(module: Reused, options: dict[str, Any], window: int) -> list[torch.Tensor]:
    # Written by hand: the reference is a loop over torch's own fully_shard.
    net: Any = module.net
    policy = options.get("mixed_precision", PLAIN)
    for unit in net.blocks:
        if "activation_checkpointing" in options:
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
        fully_shard(unit, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    for child in net.modules():
        if isinstance(child, FSDPModule):
            child.set_force_sum_reduction_for_comms(True)  # gloo does not support PREMUL_SUM
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(global_batches(SAMPLES, 4)[dist.get_rank() :: dist.get_world_size()]):
        last = (index + 1) % window == 0
        net.set_requires_gradient_sync(last)
        with torch.autocast("cpu", HALF):
            loss = module.loss(batch)
        (loss / window).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in net.parameters()]


def _by_hand_and_by_fit(block: Any, kind: Any, options: dict[str, Any], window: int, manual: bool) -> list[bool]:
    expected = _sharded_by_hand(Reused(block, kind), options, window)
    module = Reused(block, kind, manual)
    trained_on_shards(module, options, SAMPLES, precision="bf16-mixed", accumulate_grad_batches=window)
    return [torch.equal(one, other) for one, other in zip(module.parameters(), expected, strict=True)]


@pytest.mark.parametrize(
    ("block", "kind", "options", "window", "manual"),
    [
        # Weights that are used twice in a block, or in two calls of it, share a cast, as in plain torch.
        pytest.param(Reusing, Twice, {}, 2, False, id="trainable"),
        pytest.param(Reusing, Twice, {"activation_checkpointing": [Reusing]}, 1, True, id="checkpointed, manual"),
        # A checkpointing of the module's own counts saved tensors, and sees the operations.
        pytest.param(Reusing, PairwiseCheckpointed, {"wrap": [Reusing]}, 1, False, id="own checkpointing"),
        # Autocast keeps one cast of a weight, in the dtype of its first use.
        pytest.param(OtherDtype, Twice, {"wrap": [OtherDtype]}, 1, False, id="own autocast"),
        # The cast of a frozen weight that a product needs in backward is made again.
        pytest.param(Adapted, Twice, {}, 2, False, id="frozen"),
        pytest.param(Adapted, Twice, {"activation_checkpointing": [Adapted]}, 1, False, id="frozen, checkpointed"),
        pytest.param(Adapted, PairwiseCheckpointed, {"wrap": [Adapted]}, 1, False, id="frozen, own checkpointing"),
        # torch.func refuses hooks on saved tensors, and a copy uses its own weights.
        pytest.param(Differentiating, Twice, {"wrap": [Differentiating]}, 1, False, id="torch.func and a copy"),
        pytest.param(Reusing, STEMMED, {"mixed_precision": GATHERS_HALF}, 2, False, id="gathered in half precision"),
        pytest.param(
            *(Reusing, STEMMED, {"mixed_precision": GATHERS_HALF, "activation_checkpointing": [Reusing]}, 1, False),
            id="gathered in half precision, checkpointed",
        ),
    ],
)
def test_bits_equal_fully_shard_under_autocast(block: Any, kind: Any, options: Any, window: int, manual: bool) -> None:
    # B-08, D-01, D-07, D-08, D-09
    for same in on_ranks(_by_hand_and_by_fit, 2, block, kind, options, window, manual):
        assert all(same), same


def _norms() -> nn.Sequential:
    """Build norms of every kind, with inputs in float32 and in half precision."""
    first: list[nn.Module] = [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4)]
    then: list[nn.Module] = [nn.Flatten(), nn.RMSNorm(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)]
    return nn.Sequential(*first, *then, nn.Linear(8, 1))


def _products() -> nn.Sequential:
    """Build products only, in layers that are units."""
    return nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))


class Layers(Regression):
    def __init__(self, build: Callable[[], nn.Sequential]) -> None:
        super().__init__()
        self.net = seeded(build)


def _with_and_without_policy(build: Any, precision: str, dtype: torch.dtype, samples: int) -> list[torch.Tensor]:
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    ways: list[dict[str, Any]] = [{"mixed_precision": policy}, {}]
    return [trained_on_shards(Layers(build), options, samples, precision=precision) for options in ways]


@pytest.mark.parametrize(
    ("build", "precision", "dtype", "samples", "atol"),
    [
        # Autocast rounds the weights of a product after gathering, param_dtype before.
        pytest.param(_products, "bf16-mixed", HALF, 32, 0, id="products in bf16"),
        pytest.param(_products, "16-mixed", torch.float16, 32, 0, id="products in fp16"),
        # Also with inputs in float32: "mixed dtype (CPU): expect parameter to have scalar type of Float".
        pytest.param(_norms, "bf16-mixed", HALF, 8, 1e-2, id="norms"),
    ],
)
def test_gathering_in_half_precision_equals_casting_by_autocast(
    build: Any, precision: str, dtype: torch.dtype, samples: int, atol: float
) -> None:
    for with_it, without in on_ranks(_with_and_without_policy, 2, build, precision, dtype, samples):
        torch.testing.assert_close(with_it, without, atol=atol, rtol=0)


def _saved_and_resumed(path: str) -> list[torch.Tensor]:
    def run(options: dict[str, Any], **settings: Any) -> torch.Tensor:
        return trained_on_shards(Reused(Reusing, STEMMED), options, **{"max_epochs": 2, **settings})

    half: dict[str, Any] = {"mixed_precision": GATHERS_HALF}
    through = run(half, precision="bf16-mixed", callbacks=Saver(path))
    return [through, run(half, precision="bf16-mixed", ckpt_path=path), run({}, ckpt_path=path)]


def test_checkpoints_of_weights_gathered_in_half_precision_are_float32_and_resume(tmp_path: Path) -> None:
    # D-09: not values of bfloat16 stored as float32
    for through, resumed, in_float32 in on_ranks(_saved_and_resumed, 2, str(tmp_path / "c")):
        assert torch.equal(resumed, through)
        torch.testing.assert_close(in_float32, through, atol=3e-2, rtol=0)
    checkpoint = load(tmp_path / "c")
    moments = [state[name] for state in checkpoint.optimizer_state()["state"].values() for name in MOMENTS]
    for values in ([*checkpoint.weights().values()], moments):
        assert {value.dtype for value in values} == {torch.float32}
        assert any(not torch.equal(value, value.to(HALF).float()) for value in values)


def _sent(options: dict[str, Any]) -> Any:
    def run(steps: int) -> None:
        settings: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": steps, "accumulate_grad_batches": 2}
        trained_on_shards(Layers(_products), {"wrap": [nn.Linear], **options}, 96, **settings)

    return a_step(run)


@pytest.mark.parametrize(("options", "itemsize"), [({}, 4), ({"mixed_precision": GATHERS_HALF}, 2)], ids=str)
def test_gathering_takes_half_the_bytes(options: dict[str, Any], itemsize: int) -> None:
    # H-01: in as many collectives; gradients travel in float32 either way. B-02: gradients travel once a window of two.
    layers = [one for one in _products() if isinstance(one, nn.Linear)]
    numbers = sum(parameter.numel() for one in layers for parameter in one.parameters())
    numbers += 9  # the last layer's single row, and its bias, are padded for two ranks
    for collectives, sent in on_ranks(_sent, 2, options):
        assert collectives == {"all-gather": 4 * len(layers), "reduce-scatter": len(layers)}
        assert sent == numbers * (4 * itemsize + 4) / 2
