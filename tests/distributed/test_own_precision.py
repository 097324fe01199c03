"""A third-party precision, the float8 example of the docs, trains under every strategy that supports one. K-03,
K-02.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Regression, Saver, global_batches, loader, quiet, same_on_two_ranks, train_by_hand, weights
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drivetrain import ConfigurationError, Precision
from drivetrain.environments import Placement
from drivetrain.precision import MixedPrecision, resolve_precision
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy
from drivetrain_strategies.fsdp._precision import mixed_precision_policy

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def toy() -> Precision:
    """Build the example of the docs, from its own code."""
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ToyFloat8" in one)
    names: dict[str, Any] = {"torch": torch, "Precision": Precision}
    exec(block.partition("\nmodule = ")[0], names)
    made: Precision = names["ToyFloat8"]()
    return made


class Rounding(torch.autograd.Function):
    """Rounds by hand: to float8 by a scale and back; the gradient is unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max().clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def forward_by_hand(net: Any, x: torch.Tensor) -> torch.Tensor:
    first, _, last = net
    for layer in (first, last):
        x = Rounding.apply(x) @ Rounding.apply(layer.weight).T + layer.bias
        x = x.tanh() if layer is first else x
    return x


def by_hand(epochs: int, ranks: int) -> torch.Tensor:
    """Train in plain PyTorch: each rank's part of a batch of 8 separately, since each has its own scale."""
    module = Regression()
    batches = [part for _ in range(epochs) for part in global_batches(64, 8 // ranks)]

    def step(part: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(forward_by_hand(module.net, part[0]), part[1])

    return weights(train_by_hand(module, batches, window=ranks, step=step))


class Recomputing(Regression):
    """Runs its layers again in the backward, and predicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = checkpoint(self.net, batch[0], use_reentrant=False)
        return functional.mse_loss(predicted, batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def test_one_device_equals_the_hand_written_loop_also_with_recomputed_layers() -> None:
    plain, module, recomputed = Regression(), Regression(), Recomputing()
    for one, precision in ((plain, "32-true"), (module, toy()), (recomputed, toy())):
        quiet(strategy="single_device", precision=precision).fit(one, loader(64, 8))
    assert torch.allclose(weights(module), by_hand(1, ranks=1), atol=1e-6)
    assert torch.equal(weights(recomputed), weights(module))
    assert not torch.allclose(weights(module), weights(plain), atol=1e-3)  # rounding has an effect
    outputs = quiet(strategy="single_device", precision=toy()).predict(recomputed, loader(64, 8))
    expected = [forward_by_hand(module.net, x).detach() for x, _ in global_batches(64, 8)]
    assert torch.allclose(torch.cat(outputs), torch.cat(expected), atol=1e-6)


def on_two_ranks(strategy: str, path: str) -> dict[str, torch.Tensor]:
    whole, resumed = Regression(), Regression()
    quiet(strategy=strategy, precision=toy(), max_epochs=2, callbacks=Saver(path)).fit(whole, loader(64, 4))
    quiet(strategy=strategy, precision=toy(), max_epochs=2).fit(resumed, loader(64, 4), ckpt_path=path)
    return {"whole": weights(whole), "resumed": weights(resumed)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_equal_the_hand_written_loop_and_resume(strategy: str, tmp_path: Path) -> None:
    found = same_on_two_ranks(partial(on_two_ranks, strategy, str(tmp_path / "saved")))
    assert torch.allclose(found["whole"], by_hand(2, ranks=2), atol=1e-6)
    assert torch.equal(found["resumed"], found["whole"])


class Unnamed(Precision):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(2 * loss)


class Doubled(MixedPrecision):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(2 * loss)


@pytest.mark.parametrize(
    ("precision", "called"),
    [
        (toy(), "'float8-toy', a ToyFloat8"),
        (Unnamed(), "'Unnamed', a Unnamed"),
        (Doubled("bf16-mixed", CPU), "Doubled"),
    ],
)
def test_deepspeed_refuses_methods_that_its_engine_would_not_call(precision: Precision, called: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{called}, under DeepSpeed"):
        DeepSpeedStrategy().bind(Placement(), CPU, precision)


def test_deepspeed_accepts_built_in_precisions_as_objects() -> None:
    strategy = DeepSpeedStrategy()
    for name in ("32-true", "bf16-mixed"):
        strategy.bind(Placement(), CPU, resolve_precision(name, CPU))
        assert strategy.precision.name == name
    strategy.bind(Placement(), CPU, Precision())
    assert not strategy.precision.has_forward_context


class ReducedInHalf(Precision):
    reduce_dtype = torch.bfloat16


def test_a_reduction_dtype_of_a_precision_is_used() -> None:
    assert mixed_precision_policy(ReducedInHalf()).reduce_dtype is torch.bfloat16
    two = Placement(world_size=2, local_world_size=2)
    with_hook, alone, refused = DDPStrategy(comm_hook="bf16"), DDPStrategy(), DDPStrategy()
    for strategy, placement in ((with_hook, two), (alone, Placement()), (refused, two)):
        strategy.bind(placement, CPU, ReducedInHalf())
    with_hook.check(Regression())
    alone.check(Regression())
    with pytest.raises(ConfigurationError, match=r"'ReducedInHalf' reduces gradients in torch.bfloat16"):
        refused.check(Regression())


class Overridden(Precision):
    def forward_context(self) -> Any:
        return super().forward_context()

    def convert_batch(self, batch: Any) -> Any:
        return batch

    def update(self) -> None:
        pass


class WithoutContext(Overridden):
    name = "quiet"
    has_forward_context = False


@pytest.mark.parametrize(
    ("precision", "name", "has_context", "converts", "scales"),
    [
        (Overridden(), "Overridden", True, True, True),
        (WithoutContext(), "quiet", False, True, True),
        (Precision(), "32-true", False, False, False),
        (resolve_precision("bf16-mixed", CPU), "bf16-mixed", True, False, False),
        (resolve_precision("16-mixed", CPU), "16-mixed", True, False, True),
        (resolve_precision("bf16-true", CPU), "bf16-true", True, True, False),
    ],
)
def test_methods_that_are_not_overridden_are_left_out_of_the_loop(
    precision: Precision, name: str, has_context: bool, converts: bool, scales: bool
) -> None:
    assert precision.name == name
    assert precision.has_forward_context is has_context
    assert precision.converts_batch is converts
    assert precision.scales_loss is scales
