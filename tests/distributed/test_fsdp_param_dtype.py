"""A policy with a half-precision param_dtype: weights are gathered in it, and stored in float32. D-08."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Regression, loader, quiet, seeded, weights
from test_fsdp_cast_weights import Reused, Reusing, Twice, shard_by_hand, train_sharded_by_hand
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from benchmarks.traffic import a_step
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import load
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

HALF = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)


class Stemmed(Twice):
    """Norms, products and a convolution after a product, whose output is in half precision."""

    def __init__(self) -> None:
        super().__init__(Reusing)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


class Behind(Reused):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Stemmed)


class Products(Regression):
    """Contains only products, in blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)))


class Norms(Regression):
    """Norms of every kind, with inputs in float32 and in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(
            lambda: nn.Sequential(
                nn.LayerNorm(4),
                nn.BatchNorm1d(4),
                nn.Unflatten(1, (4, 1)),
                nn.GroupNorm(2, 4),
                nn.Flatten(),
                nn.RMSNorm(4),
                nn.Linear(4, 8),
                nn.BatchNorm1d(8),
                nn.LayerNorm(8),
                nn.Linear(8, 1),
            )
        )


def _run(module: Regression, precision: str = "bf16-mixed", **options: Any) -> Regression:
    settings = {
        key: options.pop(key) for key in ("max_steps", "callbacks", "accumulate_grad_batches") if key in options
    }
    quiet(strategy=FSDPStrategy(**options), precision=precision, **settings).fit(module, loader(32, 4))
    return module


def _with_and_by_hand(checkpointed: bool, window: int) -> list[bool]:
    by_hand = Behind()
    blocks = by_hand.net.blocks
    if checkpointed:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shard_by_hand(by_hand.net, blocks, POLICY)
    expected = train_sharded_by_hand(by_hand, 32, window)
    options: dict[str, Any] = {"activation_checkpointing": [Reusing]} if checkpointed else {}
    module = _run(Behind(), mixed_precision=POLICY, accumulate_grad_batches=window, **options)
    return [torch.equal(one, other) for one, other in zip(module.parameters(), expected, strict=True)]


@pytest.mark.parametrize(("checkpointed", "window"), [(False, 2), (True, 1)])
def test_param_dtype_equals_hand_written_fully_shard(checkpointed: bool, window: int) -> None:
    # D-08. Written by hand: the reference is a loop over torch's own fully_shard.
    for same in on_ranks(_with_and_by_hand, 2, checkpointed, window):
        assert all(same), same


def _without_and_with(build: Any, precision: str, policy: MixedPrecisionPolicy, steps: int) -> list[torch.Tensor]:
    each_way: tuple[dict[str, Any], ...] = ({}, {"mixed_precision": policy})
    return [weights(_run(build(), precision, max_steps=steps, **options)) for options in each_way]


@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        ("bf16-mixed", POLICY),
        ("16-mixed", MixedPrecisionPolicy(torch.float16, torch.float32, cast_forward_inputs=False)),
    ],
    ids=["bf16", "fp16 with a scaled loss"],
)
def test_products_give_the_same_bits(precision: str, policy: MixedPrecisionPolicy) -> None:
    # Autocast rounds the weights of a product after gathering, param_dtype before; gradients are reduced in float32.
    for without, with_it in on_ranks(_without_and_with, 2, Products, precision, policy, -1):
        assert torch.equal(without, with_it)


def test_other_reads_of_a_weight_see_it_rounded() -> None:
    for without, with_it in on_ranks(_without_and_with, 2, Behind, "bf16-mixed", POLICY, -1):
        assert not torch.equal(without, with_it)
        torch.testing.assert_close(with_it, without, atol=3e-2, rtol=0)


def test_norms_accept_weights_in_half_precision() -> None:
    # Also with inputs in float32: "mixed dtype (CPU): expect parameter to have scalar type of Float".
    for without, with_it in on_ranks(_without_and_with, 2, Norms, "bf16-mixed", POLICY, 1):
        torch.testing.assert_close(with_it, without, atol=1e-2, rtol=0)


def _seen() -> dict[str, set[torch.dtype]]:
    seen: dict[str, set[torch.dtype]] = {"forward": set(), "between": set(), "gradient": set(), "moments": set()}

    class Looking(Products):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen["forward"].add(self.net[0].weight.dtype)  # the root's own parameters, which are gathered here
            seen["targets"] = {batch[1].dtype}
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def look(trainer: Any, module: Any, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        for one in module.parameters():
            seen["between"].add(one.dtype)
            seen["moments"] |= {value.dtype for value in optimizer.state[one].values()}

    def look_at_gradients(trainer: Any, module: Any, *args: Any) -> None:
        seen["gradient"] |= {one.grad.dtype for one in module.parameters()}

    hooks = LambdaCallback(on_train_batch_end=look, on_before_optimizer_step=look_at_gradients)
    _run(Looking(), mixed_precision=POLICY, callbacks=hooks, wrap=lambda name, module: name in ("net.1", "net.2"))
    return seen


def test_only_gathered_parameters_are_in_half_precision() -> None:
    full = {torch.float32}
    expected = {"forward": {HALF}, "between": full, "gradient": full, "moments": full, "targets": full}
    assert on_ranks(_seen, 2) == [expected, expected]


# Traffic


def _sent(options: dict[str, Any]) -> Any:
    def run(steps: int) -> None:
        strategy = FSDPStrategy(wrap=[nn.Linear], **options)
        quiet(strategy=strategy, precision="bf16-mixed", max_steps=steps).fit(Products(), loader(64, 4))

    return a_step(run)


@pytest.mark.parametrize(("options", "itemsize"), [({}, 4), ({"mixed_precision": POLICY}, 2)], ids=str)
def test_gathering_takes_half_the_bytes(options: dict[str, Any], itemsize: int) -> None:
    # H-01: in as many collectives; gradients travel in float32 either way
    layers = [one for one in Products().net if isinstance(one, nn.Linear)]
    numbers = sum(parameter.numel() for one in layers for parameter in one.parameters())
    numbers += 9  # the last layer's single row, and its bias, are padded for two ranks
    for collectives, sent in on_ranks(_sent, 2, options):
        assert collectives == {"all-gather": 2 * len(layers), "reduce-scatter": len(layers)}
        assert sent == numbers * (2 * itemsize + 4) / 2


# Checkpoints


def _saved(path: str) -> Any:
    save = LambdaCallback(
        on_train_batch_end=lambda trainer, module, *_: trainer.global_step == 2 and trainer.save_checkpoint(path)
    )
    through = _run(Behind(), mixed_precision=POLICY, callbacks=save)
    resumed, elsewhere = Behind(), Behind()
    others: list[tuple[Regression, dict[str, Any], str]] = [
        (resumed, {"mixed_precision": POLICY}, "bf16-mixed"),
        (elsewhere, {}, "32-true"),
    ]
    for module, options, precision in others:
        strategy = FSDPStrategy(**options)
        quiet(strategy=strategy, precision=precision).fit(module, loader(32, 4), ckpt_path=path)
    return weights(through), weights(resumed), weights(elsewhere)


def test_checkpoints_hold_float32_and_resume_bit_for_bit(tmp_path: Path) -> None:
    for through, resumed, elsewhere in on_ranks(_saved, 2, str(tmp_path / "saved")):
        assert torch.equal(through, resumed)
        torch.testing.assert_close(elsewhere, through, atol=3e-2, rtol=0)
    state = load(tmp_path / "saved").weights()
    assert {value.dtype for value in state.values()} == {torch.float32}
    # Not bfloat16 values stored as float32
    assert any(not torch.equal(value, value.to(HALF).float()) for value in state.values())
