"""Names and dtypes of precisions, and what a precision converts; ``tests/parity`` compares its numbers with a loop."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, get_args

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.precision import DoublePrecision, FullPrecision, HalfPrecision, MixedPrecision, resolve_precision
from drivetrain.precision.resolve import PrecisionName, canonical_name
from drivetrain.strategies.registry import StrategyName

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "name", "kind"),
    [
        (["64-true", 64, "64"], "64-true", DoublePrecision),
        (["32-true", 32, "32"], "32-true", FullPrecision),
        (["bf16-mixed", "bf16"], "bf16-mixed", MixedPrecision),
        (["16-mixed", "16", 16], "16-mixed", MixedPrecision),
        (["bf16-true"], "bf16-true", HalfPrecision),
        (["16-true"], "16-true", HalfPrecision),
    ],
)
def test_every_name_and_shorthand(settings: list[Any], name: str, kind: Any) -> None:
    for setting in settings:
        precision = resolve_precision(setting, CPU)
        assert (type(precision), precision.name) == (kind, name)
        assert resolve_precision(precision, CPU) is precision


@pytest.mark.parametrize(
    ("setting", "device", "match"),
    [
        ("bf16-mix", "cpu", "Did you mean 'bf16-mixed'"),
        ("fp16-mixed", "cpu", "Did you mean '16-mixed'"),
        ("fp16", "cpu", "Did you mean '16'"),
        ("bfloat16", "cpu", "Did you mean 'bf16'"),
        (8, "cpu", "precision=8 is unknown"),
        (True, "cpu", "precision=True is unknown"),
        (torch.float16, "cpu", "precision=torch.float16 is unknown"),
        (MixedPrecision("bf16-mixed", "cuda"), "cpu", "is for device type 'cuda', but the run is on cpu"),
    ],
)
def test_an_unknown_precision_or_one_that_the_device_lacks_is_refused(setting: Any, device: str, match: str) -> None:
    # A-06, G-06
    with pytest.raises(ConfigurationError, match=match):
        resolve_precision(setting, torch.device(device))


def test_constructors_refuse_other_names() -> None:  # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'bf16-true'"):
        HalfPrecision("bf16")
    with pytest.raises(ConfigurationError, match=r"MixedPrecision\('32-true'\)"):
        MixedPrecision("32-true", "cpu")
    with pytest.raises(ConfigurationError, match="needs no scaling"):
        MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("name", ["64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_the_stated_dtypes_are_those_of_a_step(name: str) -> None:
    line = "Precision bf16-mixed: parameters float32, compute bfloat16, gradient reduction float32, outputs bfloat16"
    assert resolve_precision("bf16", CPU).describe() == line
    precision = resolve_precision(name, CPU)
    with precision.module_init_context():
        module = precision.convert_module(nn.Linear(3, 2))
    with precision.forward_context():
        output = module(precision.convert_batch(torch.ones(1, 3)))
    assert module.weight.dtype is precision.param_dtype
    assert output.dtype is precision.output_dtype
    precision.backward(output.float().sum())
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is precision.reduce_dtype
    assert precision.has_forward_context is (type(precision.forward_context()).__name__ != "nullcontext")


def test_literal_types_list_all_names() -> None:  # I-10
    for name in get_args(PrecisionName):
        assert canonical_name(name)
    assert {str(name) for name in get_args(PrecisionName)} >= {"64-true", "32-true", "bf16-mixed", "16-mixed"}
    points = entry_points(group="drivetrain.strategies")
    ours = {point.name for point in points if point.value.startswith("drivetrain_strategies.")}
    assert set(get_args(StrategyName)) == {"auto", *ours}


def test_new_tensors_in_the_forward_have_the_dtype_and_the_default_comes_back() -> None:
    precision = resolve_precision("bf16-true", CPU)
    with precision.forward_context():
        assert torch.zeros(1).dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), precision.forward_context():
        _ = 1 / 0
    assert torch.get_default_dtype() is torch.float32
    with precision.forward_context(), precision.module_init_context():
        pass
    assert torch.get_default_dtype() is torch.float32


def test_conversion_reaches_floating_point_only_and_keeps_ties() -> None:  # B-07
    module = nn.Module()
    module.first = nn.Embedding(4, 4)
    module.last = nn.Linear(4, 4)
    module.last.weight = module.first.weight
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("mean", torch.zeros(3))
    precision = resolve_precision("bf16-true", CPU)
    assert precision.convert_module(module) is module
    assert module.last.weight is module.first.weight
    assert module.first.weight.dtype is module.mean.dtype is torch.bfloat16
    assert module.phase.dtype is torch.complex64
    assert module.count.dtype is torch.int64
    batch: Any = {"x": torch.ones(2), "y": [torch.arange(2), "text"], "z": (torch.ones(1, dtype=torch.float64), 3)}
    converted = precision.convert_batch(batch)
    assert converted["x"].dtype is converted["z"][0].dtype is torch.bfloat16
    assert converted["y"][0].dtype is torch.int64
    assert converted["y"][1] == "text"
    assert batch["x"].dtype is torch.float32


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_has_float32_master_weights(name: str) -> None:
    # B-01: a module in half precision gets them; frozen weights keep their memory
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    module[1].weight = module[0].weight
    module[2].requires_grad_(False)
    precision = resolve_precision(name, CPU)
    precision.convert_module(module)
    assert module[0].weight.dtype is torch.float32
    assert module[1].weight is module[0].weight
    assert module[2].weight.dtype is torch.bfloat16


def test_weights_frozen_in_bfloat16_give_the_same_bits_as_in_float32() -> None:  # D-01
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        base, head, x = nn.Linear(4, 8).requires_grad_(False).to(dtype), nn.Linear(8, 1), torch.randn(4, 4)
        precision = resolve_precision("bf16-mixed", CPU)
        module = precision.convert_module(nn.Sequential(base, nn.Tanh(), head))
        with precision.forward_context():
            output = module(x)
        precision.backward(output.float().square().mean())
        assert base.weight.dtype is dtype
        found.append([output, head.weight.grad, head.bias.grad])
    torch.testing.assert_close(*found, rtol=0, atol=0)
