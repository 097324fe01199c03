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
    """Runs its layers again in the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = checkpoint(self.net, batch[0], use_reentrant=False)
        return functional.mse_loss(predicted, batch[1])


def on_one_device(kind: type[Regression] = Regression, **settings: Any) -> Regression:
    module = kind()
    quiet(strategy="single_device", precision=toy(), **settings).fit(module, loader(64, 8))
    return module


def test_one_device_equals_the_hand_written_loop() -> None:
    module = on_one_device()
    assert torch.allclose(weights(module), by_hand(1, ranks=1), atol=1e-6)
    plain = Regression()
    quiet(strategy="single_device").fit(plain, loader(64, 8))
    assert not torch.allclose(weights(module), weights(plain), atol=1e-3)  # rounding has an effect
    outputs = quiet(strategy="single_device", precision=toy()).predict(Predicting(module), loader(64, 8))
    assert outputs is not None
    expected = [forward_by_hand(module.net, x).detach() for x, _ in global_batches(64, 8)]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(outputs, expected, strict=True))


class Predicting(Regression):
    def __init__(self, trained: Regression) -> None:
        super().__init__()
        self.net = trained.net

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def test_recomputed_layers_are_rounded_in_the_same_way() -> None:
    assert torch.equal(weights(on_one_device(Recomputing)), weights(on_one_device()))


def test_one_device_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    whole = on_one_device(max_epochs=2, callbacks=Saver(path))
    resumed = Regression()
    fit = quiet(strategy="single_device", precision=toy(), max_epochs=2)
    fit.fit(resumed, loader(64, 8), ckpt_path=path)
    assert fit.global_step == 16
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.allclose(weights(whole), by_hand(2, ranks=1), atol=1e-6)


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


# Strategies refuse precision methods that they cannot call


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
    for strategy, refused in ((DDPStrategy(), True), (DDPStrategy(comm_hook="bf16"), False)):
        strategy.bind(Placement(world_size=2, local_world_size=2), CPU, ReducedInHalf())
        if refused:
            with pytest.raises(ConfigurationError, match=r"'ReducedInHalf' reduces gradients in torch.bfloat16"):
                strategy.check(Regression())
        else:
            strategy.check(Regression())
    alone = DDPStrategy()
    alone.bind(Placement(), CPU, ReducedInHalf())
    alone.check(Regression())


# Methods that are not overridden are left out of the loop


def test_overridden_methods_are_called() -> None:
    class Own(Precision):
        def forward_context(self) -> Any:
            return super().forward_context()

        def convert_batch(self, batch: Any) -> Any:
            return batch

        def update(self) -> None:
            pass

    class Quiet(Own):
        name = "quiet"
        has_forward_context = False

    own, quiet_one, plain = Own(), Quiet(), Precision()
    assert (own.name, own.has_forward_context, own.converts_batch, own.scales_loss) == ("Own", True, True, True)
    assert (quiet_one.name, quiet_one.has_forward_context, quiet_one.scales_loss) == ("quiet", False, True)
    assert (plain.name, plain.has_forward_context, plain.converts_batch, plain.scales_loss) == (
        "32-true",
        False,
        False,
        False,
    )
    flags = {
        name: (one.has_forward_context, one.converts_batch, one.scales_loss)
        for name in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
        for one in [resolve_precision(name, CPU)]
    }
    assert flags == {
        "32-true": (False, False, False),
        "bf16-mixed": (True, False, False),
        "16-mixed": (True, False, True),
        "bf16-true": (True, True, False),
        "64-true": (True, True, False),
    }
