"""Every precision equals, bit for bit, the corresponding training loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from drivetrain.precision import Precision, resolve_precision
from drivetrain.testing import requires_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, requires_cuda()])]
STEPS = 12


class Trace(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    weights: list[Tensor]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def batches(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator)
        yield x.to(device), (3 * x[:, :3]).to(device)


def by_hand(
    device: str,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None,
) -> Trace:
    module = build().to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5)
    trace = Trace([], [], [])
    for x, y in batches(device):
        optimizer.zero_grad()
        with context():
            loss = mse_loss(module(x.to(dtype)), y.to(dtype))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        trace.losses.append(loss.detach())
    trace.weights.extend(p.detach() for p in module.parameters())
    return trace


def by_precision(precision: Precision, device: str, clip: float | None = None) -> Trace:
    with precision.module_init_context():
        module = build_in_float32()
    module = precision.convert_module(module.to(device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5)
    trace = Trace([], [], [])
    for batch in batches(device):
        optimizer.zero_grad()
        x, y = precision.convert_batch(batch)
        with precision.forward_context():
            loss = mse_loss(module(x), y)
        precision.backward(loss)
        precision.unscale(optimizer)
        if clip is not None:
            trace.norms.append(precision.clip_gradients([optimizer], clip))
        precision.step(optimizer)
        precision.update()
        trace.losses.append(loss.detach())
    trace.weights.extend(p.detach() for p in module.parameters())
    return trace


def build_in_float32() -> nn.Module:
    # The same start for every dtype, since half precision draws other random numbers than float32.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def reference(name: str, device: str, clip: float | None) -> Trace:
    if name == "bf16-mixed":
        return by_hand(device, lambda: torch.autocast(device, torch.bfloat16), clip=clip)
    if name == "16-mixed":
        scaler = torch.amp.GradScaler(device)
        return by_hand(device, lambda: torch.autocast(device, torch.float16), scaler=scaler, clip=clip)
    dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    return by_hand(device, dtype=dtypes.get(name, torch.float32), clip=clip)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", ["64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_a_run_equals_the_loop_written_by_hand(name: str, clip: float | None, device: str) -> None:
    # B-01, B-05: one process; loss, norm and weights of every step, clipping active
    expected = reference(name, device, clip)
    actual = by_precision(resolve_precision(name, torch.device(device)), device, clip)
    for ours, theirs in zip((*actual.losses, *actual.weights), (*expected.losses, *expected.weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for ours, theirs in zip(actual.norms, expected.norms, strict=True):
        # fp16 overflows in its first steps, until the scale fits; both norms are infinite or NaN then.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert clip is not None
    assert clip is None or any(norm > clip for norm in actual.norms)


def test_new_tensors_in_the_forward_have_the_dtype_and_the_default_comes_back() -> None:
    #
    precision = resolve_precision("bf16-true", torch.device("cpu"))
    with precision.forward_context():
        assert torch.zeros(1).dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), precision.forward_context():
        _ = 1 / 0
    assert torch.get_default_dtype() is torch.float32
    with precision.forward_context(), precision.module_init_context():
        pass
    assert torch.get_default_dtype() is torch.float32


def test_conversion_reaches_floating_point_only_and_keeps_ties() -> None:
    # B-07
    module = nn.Module()
    module.first = nn.Embedding(4, 4)
    module.last = nn.Linear(4, 4)
    module.last.weight = module.first.weight
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("mean", torch.zeros(3))
    precision = resolve_precision("bf16-true", torch.device("cpu"))
    assert precision.convert_module(module) is module
    assert module.last.weight is module.first.weight
    assert module.first.weight.dtype is module.mean.dtype is torch.bfloat16
    assert module.phase.dtype is torch.complex64
    assert module.count.dtype is torch.int64
    batch: dict[str, Any] = {
        "x": torch.ones(2),
        "y": [torch.arange(2), "text"],
        "z": (torch.ones(1, dtype=torch.float64), 3),
    }
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
    precision = resolve_precision(name, torch.device("cpu"))
    precision.convert_module(module)
    assert module[0].weight.dtype is torch.float32
    assert module[1].weight is module[0].weight
    assert module[2].weight.dtype is torch.bfloat16
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-6)
    before = module[0].weight.detach().clone()
    for _ in range(20):  # fp16 halves its scale in the first of them
        optimizer.zero_grad()
        with precision.forward_context():
            loss = module(torch.ones(1, 2)).float().sum()
        precision.backward(loss)
        precision.step(optimizer)
        precision.update()
    assert not torch.equal(before, module[0].weight)  # bf16 weights would not move by so little
