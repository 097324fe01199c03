"""fp16: overflows, several optimizers, one decision per step, and the scale in a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import LambdaCallback
from drivetrain.precision import MixedPrecision
from drivetrain.testing import requires_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, requires_cuda()])]
X = torch.arange(12.0).reshape(4, 3) / 12
INF = float("inf")


class TwoLayers(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, x: Tensor, left: float = 1.0, right: float = 1.0) -> Tensor:
        return left * self.left(x).float().pow(2).mean() + right * self.right(x).float().pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def precision_for(device: str, **options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, init_scale=1024.0, **options))


def adam(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, **options)


def backward(precision: MixedPrecision, module: TwoLayers, device: str = "cpu", **factors: float) -> None:
    with precision.forward_context():
        loss = module(X.to(device), **factors)
    precision.backward(loss)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def weights_and_states(module: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*module.parameters(), *states)]


def step_all(precision: MixedPrecision, optimizers: list[torch.optim.Optimizer]) -> list[bool]:
    stepped = [precision.step(optimizer) for optimizer in optimizers]
    precision.update()
    return stepped


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("options", "factor"), [({}, INF), ({"foreach": True}, float("nan")), ({"fused": True}, INF)])
def test_an_overflow_skips_every_step_and_halves_the_scale_once(device: str, options: Any, factor: float) -> None:
    # B-06 (one process), B-15: clipping over all optimizers makes the others' gradients zero or NaN
    module, precision = TwoLayers().to(device), precision_for(device)
    optimizers = [adam(module.left, **options), adam(module.right, **options)]
    backward(precision, module, device)
    assert step_all(precision, optimizers) == [True, True]
    before = weights_and_states(module, *optimizers)
    module.zero_grad()
    backward(precision, module, device, left=factor)
    for optimizer in optimizers:
        precision.unscale(optimizer)
    precision.clip_gradients(optimizers, 0.1)
    assert step_all(precision, optimizers) == [False, False]
    torch.testing.assert_close(weights_and_states(module, *optimizers), before, rtol=0, atol=0)
    module.zero_grad()
    backward(precision, module, device)
    assert step_all(precision, optimizers) == [True, True]
    assert precision.state_dict()["scale"] == 512.0
    assert any(not torch.equal(*pair) for pair in zip(weights_and_states(module, *optimizers), before, strict=True))


class OperationNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_run_unscales_and_clips_in_one_pass_unless_a_callback_reads_between() -> None:
    # B-05, B-15: with the same gradients and norm, bit for bit
    norms: list[Tensor] = []

    def read(trainer: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        norms.append(torch.nn.utils.get_total_norm(gradients(module)))

    found = []
    for callback in (None, LambdaCallback(on_before_optimizer_step=read)):
        module = TwoLayers()
        settings: dict[str, Any] = {"precision": "16-mixed", "gradient_clip_val": 0.1, "max_steps": 2}
        fit = Fit(accelerator="cpu", callbacks=callback, barebones=True, **settings)
        with OperationNames() as operations:
            fit.fit(module, [X, X])
        assert ("_amp_foreach_non_finite_check_and_unscale_" in operations.names) == (callback is not None)
        found.append([fit.gradient_norm, *module.parameters()])
    assert norms[-1].item() == pytest.approx(float(found[-1][0]), rel=1e-6)  # type: ignore[arg-type]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_host_waits_once_a_step_however_many_optimizers_there_are() -> None:  # B-15, H-01
    module, precision = TwoLayers(), precision_for("cpu")
    optimizers = [adam(module.left), adam(module.right)]
    for optimizer in optimizers:  # AdamW reads its own step counts on the CPU
        optimizer.step = lambda closure=None: None  # type: ignore[assignment]
    with OperationNames() as operations:
        backward(precision, module)
        for optimizer in optimizers:
            precision.unscale(optimizer)
        precision.clip_gradients(optimizers, 0.1)
        assert not {"_local_scalar_dense", "is_nonzero"} & set(operations.names)  # which read a tensor's value
        step_all(precision, optimizers)
    assert operations.names.count("_local_scalar_dense") + operations.names.count("is_nonzero") == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 1e6])
@pytest.mark.parametrize("accumulates", [False, True])
def test_an_optimizer_may_step_several_times_before_the_update(device: str, clip: Any, accumulates: bool) -> None:
    # B-15, I-02: gradients of each backward pass are unscaled once, and so are those that they are added to
    module, precision = TwoLayers().to(device), precision_for(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module(X.to(device)).backward()
    expected = torch.nn.utils.get_total_norm(gradients(module))
    module.zero_grad()
    for number in range(1, 4):
        if not accumulates:
            module.zero_grad()
        backward(precision, module, device)
        for _ in range(2):
            if clip is not None:
                precision.clip_gradients([optimizer], clip)
            assert precision.step(optimizer) is True
        norm = torch.nn.utils.get_total_norm(gradients(module))
        torch.testing.assert_close(norm, expected * (number if accumulates else 1), rtol=5e-3, atol=1e-3)
    precision.update()
    assert precision.state_dict()["_growth_tracker"] == 1


def test_a_step_without_gradients_is_made() -> None:
    module, precision = TwoLayers(), precision_for("cpu")
    optimizer = adam(module)
    precision.unscale(optimizer)  # before the first loss there is no scale yet
    assert step_all(precision, [optimizer]) == [True]
    backward(precision, module)
    module.zero_grad()
    assert step_all(precision, [optimizer]) == [True]
    assert precision.state_dict()["scale"] == 1024.0


def test_the_scale_is_restored_from_a_checkpoint() -> None:  # F-12
    module = TwoLayers()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def train(precision: MixedPrecision, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            module.zero_grad()
            backward(precision, module)
            step_all(precision, [optimizer])
        return precision.state_dict()

    first, second = precision_for("cpu", growth_interval=3), MixedPrecision("16-mixed", "cpu")
    saved = json.loads(json.dumps(train(first, 5)))
    assert (saved["scale"], saved["_growth_tracker"]) == (2048.0, 2)
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    assert train(second, 1) == train(first, 1)
    assert second.state_dict()["scale"] == 4096.0


@pytest.mark.parametrize(
    ("saved", "scale", "steps"),
    [({}, 65536.0, 0), ({"scale": 1024.0, "_growth_tracker": 7}, 1024.0, 7)],
    ids=["another precision", "ZeRO"],
)
def test_a_checkpoint_of_another_precision_is_accepted(saved: Any, scale: float, steps: int) -> None:  # F-12
    precision = MixedPrecision("16-mixed", "cpu")
    precision.load_state_dict(saved)
    state = precision.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == (scale, steps, 2000)
    without_scale = MixedPrecision("bf16-mixed", "cpu")
    without_scale.load_state_dict(state)
    assert without_scale.state_dict() == {}
