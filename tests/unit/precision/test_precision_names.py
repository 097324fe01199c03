"""Names of precisions: shorthands, errors, the line of dtypes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.precision import (
    DoublePrecision,
    FullPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    resolve_precision,
)
from drivetrain.precision.resolve import PrecisionName, canonical_name
from drivetrain.strategies.registry import StrategyName, known_strategies

CPU = torch.device("cpu")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


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
def test_every_name_and_shorthand(settings: list[Any], name: str, kind: type[Precision]) -> None:
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
        (True, "cpu", "is a bool"),
        (None, "cpu", "is a NoneType"),
        (torch.float16, "cpu", "is a dtype"),
        (DoublePrecision(), "mps", "no float64"),
        (MixedPrecision("bf16-mixed", "cuda"), "cpu", "is for device type 'cuda', but the run is on cpu"),
        ("bf16-mixed", "meta", "PyTorch has no autocast"),
        # torch would warn and run in float32
        pytest.param("bf16-mixed", "cuda", "no CUDA device is available", marks=WITHOUT_CUDA),
        pytest.param("16-mixed", "cuda", "no CUDA device is available", marks=WITHOUT_CUDA),
    ],
)
def test_an_unknown_precision_or_one_that_the_device_lacks_is_refused(setting: Any, device: str, match: str) -> None:
    # A-06, G-06
    with pytest.raises(ConfigurationError, match=match):
        resolve_precision(setting, torch.device(device))


@pytest.mark.parametrize(
    ("kind", "arguments", "match"),
    [
        (HalfPrecision, ["bf16"], "Did you mean 'bf16-true'"),
        (MixedPrecision, ["32-true", "cpu"], r"MixedPrecision\('32-true'\)"),
        (MixedPrecision, ["bf16-mixed", "cpu", torch.amp.GradScaler("cpu")], "needs no scaling"),
    ],
)
def test_constructors_refuse_other_names(kind: Any, arguments: list[Any], match: str) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=match):
        kind(*arguments)


@pytest.mark.parametrize("name", ["64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_the_stated_dtypes_are_those_of_a_step(name: str) -> None:
    line = "Precision bf16-mixed: parameters float32, compute bfloat16, gradient reduction float32, outputs bfloat16"
    assert resolve_precision("bf16", CPU).describe() == line
    precision = resolve_precision(name, CPU)
    with precision.module_init_context():
        module = precision.convert_module(torch.nn.Linear(3, 2))
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
    ours = {name for name, point in known_strategies().items() if point.value.startswith("drivetrain_strategies.")}
    assert set(get_args(StrategyName)) == {"auto", *ours}
