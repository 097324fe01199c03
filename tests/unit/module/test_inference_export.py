"""A trained module as an ONNX file and as a program of torch.export. Row L-08."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")
preload(*DEEPSPEED)


class Net(TrainModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
        self.example_input_array = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
        y = self.net(x)
        return y if scale is None else y * scale

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def inputs(samples: int) -> Any:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))


def quiet(**settings: Any) -> Fit:
    return Fit(accelerator="cpu", max_epochs=1, barebones=True, **settings)


def trained() -> tuple[Net, Fit]:
    fit, module = quiet(), Net()
    fit.fit(module, torch.utils.data.DataLoader(inputs(16), batch_size=8))
    return module, fit


def in_onnxruntime(model: Any, *arrays: torch.Tensor) -> torch.Tensor:
    session = ort.InferenceSession(model)
    names = [one.name for one in session.get_inputs()]
    (answer,) = session.run(None, {name: array.numpy() for name, array in zip(names, arrays, strict=True)})
    return torch.from_numpy(answer)


def in_eval(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    flags = [child.training for child in module.modules()]
    with torch.no_grad():
        answer = module.eval()(*args, **kwargs)
    for child, flag in zip(module.modules(), flags, strict=True):
        child.training = flag
    return answer


def test_a_trained_module_computes_the_same_in_onnxruntime(tmp_path: Path) -> None:  # L-08
    module, fit = trained()
    module.net[1].eval()  # a mode of its own
    modes = [child.training for child in module.modules()]
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.get_rng_state()
    module.to_onnx(tmp_path / "new" / "net.onnx", dynamic_shapes=({0: "batch"},))
    assert os.listdir(tmp_path / "new") == ["net.onnx"]
    for samples in (1, 3, 7):
        x = inputs(samples)
        torch.testing.assert_close(in_onnxruntime(tmp_path / "new" / "net.onnx", x), in_eval(module, x))
    assert [child.training for child in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())

    fit.save_checkpoint(tmp_path / "c")
    memory = io.BytesIO()
    Net.load_from_checkpoint(tmp_path / "c").to_onnx(memory, input_sample={"x": inputs(2), "scale": torch.ones(2)})
    answer = in_onnxruntime(memory.getvalue(), inputs(2), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(answer, in_eval(module, inputs(2), torch.tensor([1.0, 3.0])))


def test_large_weights_lie_beside_the_file_and_an_open_file_is_written(tmp_path: Path) -> None:  # L-08
    module, x = Net(width=600).eval(), inputs(3)
    for _ in range(2):  # the second time over the first
        module.to_onnx(str(tmp_path / "net.onnx"), x, external_data=True)
    with open(tmp_path / "open.onnx", "wb") as file:
        module.to_onnx(file)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.data", "open.onnx"]
    for name in ("net.onnx", "open.onnx"):
        torch.testing.assert_close(in_onnxruntime(tmp_path / name, x), in_eval(module, x))


def test_an_exported_program_survives_a_file(tmp_path: Path) -> None:  # L-08
    module, _ = trained()
    program = module.export(dynamic_shapes={"x": {0: "batch"}})
    torch.export.save(program, tmp_path / "net.pt2")
    again = torch.export.load(tmp_path / "net.pt2").module()
    for samples in (1, 6):
        assert torch.equal(again(inputs(samples)), in_eval(module, inputs(samples)))
    assert module.training
    named = module.export((inputs(2), torch.ones(2)))
    assert torch.equal(named.module()(inputs(2), torch.ones(2)), in_eval(module, inputs(2)))


class NoForward(Net):
    forward = nn.Module.forward


class Hollow(Net):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def without_example() -> Net:
    module = Net()
    module.example_input_array = None
    return module


def without_packages() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        Net().to_onnx()


def vary_features() -> None:
    Net().to_onnx(io.BytesIO(), dynamic_shapes={"x": {0: "batch", 1: "features"}})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: NoForward().to_onnx(), "NoForward has no forward"),
        (lambda: without_example().export(), "set self.example_input_array"),
        (lambda: Hollow().export(), "are on the meta device"),
        (lambda: Net().to_onnx(dynamo=False), "omit dynamo"),
        (lambda: Net().to_torchscript("net.pt"), r"use export\(\)"),
        (without_packages, "pip install onnx onnxscript"),
        (vary_features, "omit the size from dynamic_shapes"),
    ],
)
def test_an_export_that_cannot_be_is_refused_by_name(call: Callable[[], Any], named: str) -> None:  # L-08
    with pytest.raises(ConfigurationError, match=named):
        call()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:  # L-08
    (tmp_path / "net.onnx").mkdir()
    for place in (tmp_path / "net.onnx", f"{tmp_path}/", "", 3, b"net.onnx", "memory://served/net.onnx"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            Net().to_onnx(place)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        Net().to_onnx(tmp_path / "file" / "net.onnx")
    assert sorted(os.listdir(tmp_path)) == ["file", "net.onnx"]


class Exporting(Callback):
    """Exports after each epoch, and records the refusal."""

    refusal = ""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        try:
            answer = module.export().module()(inputs(3))
            assert torch.equal(answer, in_eval(module, inputs(3)))
        except ConfigurationError as error:
            self.refusal = str(error)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


def _within_and_after(strategy: str) -> tuple[str, bool]:
    exporting, module = Exporting(), Net()
    fit = quiet(strategy=STRATEGIES[strategy](), devices=2, callbacks=[exporting])
    fit.fit(module, torch.utils.data.DataLoader(inputs(16), batch_size=4))
    return exporting.refusal, torch.equal(module.export().module()(inputs(3)), in_eval(module, inputs(3)))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_export_within_a_sharded_run_is_refused(strategy: str) -> None:  # L-08
    sharded = strategy != "ddp"
    for refusal, is_equal in on_ranks(_within_and_after, 2, strategy, process_group=None, timeout=120):
        assert is_equal
        assert ("this rank holds shards of " in refusal) == sharded
        assert ("Net.load_from_checkpoint(path).export(" in refusal) == sharded
