"""A trained module as an ONNX file and as a program of torch.export. Row L-08."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback, ConfigurationError, Fit, TrainModule
from drivetrain.testing import requires_package
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

pytestmark = [requires_package("onnxscript"), requires_package("onnxruntime")]
preload(*DEEPSPEED)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
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


def trained(**settings: Any) -> tuple[Net, Fit]:
    fit, module = Fit(accelerator="cpu", max_epochs=1, barebones=True, **settings), Net()
    fit.fit(module, torch.utils.data.DataLoader(inputs(8), batch_size=4))
    return module, fit


def in_onnxruntime(model: Any, *arrays: torch.Tensor) -> torch.Tensor:
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

    session = onnxruntime.InferenceSession(model)
    names = [one.name for one in session.get_inputs()]
    (answer,) = session.run(None, {name: array.numpy() for name, array in zip(names, arrays, strict=True)})
    return torch.from_numpy(answer)


def in_evaluation(module: nn.Module, *args: Any) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(module).eval()(*args)


def test_a_trained_module_computes_the_same_in_onnxruntime(tmp_path: Path) -> None:  # L-08
    module, fit = trained()
    module.net[1].eval()  # a mode of its own
    modes = [child.training for child in module.modules()]
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.get_rng_state()
    path = tmp_path / "new" / "net.onnx"
    module.to_onnx(path, dynamic_shapes=({0: "batch"},))
    assert os.listdir(tmp_path / "new") == ["net.onnx"]
    for samples in (1, 7):
        x = inputs(samples)
        torch.testing.assert_close(in_onnxruntime(path, x), in_evaluation(module, x))
    assert [child.training for child in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    fit.save_checkpoint(tmp_path / "c")
    memory = io.BytesIO()
    Net.load_from_checkpoint(tmp_path / "c").to_onnx(memory, input_sample={"x": inputs(2), "scale": torch.ones(2)})
    answer = in_onnxruntime(memory.getvalue(), inputs(2), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(answer, in_evaluation(module, inputs(2), torch.tensor([1.0, 3.0])))


def test_external_weights_are_beside_the_file(tmp_path: Path) -> None:  # L-08
    module, x, path = Net().eval(), inputs(3), tmp_path / "net.onnx"
    module.net.append(nn.Linear(2, 1000))
    path.write_text("replaced")
    module.to_onnx(str(path), x, external_data=True)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.data"]
    torch.testing.assert_close(in_onnxruntime(path, x), in_evaluation(module, x))


def test_an_exported_program_can_be_saved_and_loaded(tmp_path: Path) -> None:  # L-08
    module, _ = trained()
    torch.export.save(module.export(dynamic_shapes={"x": {0: "batch"}}), tmp_path / "net.pt2")
    again = torch.export.load(tmp_path / "net.pt2").module()
    for samples in (1, 6):
        assert torch.equal(again(inputs(samples)), in_evaluation(module, inputs(samples)))
    assert module.training
    scaled = module.export((inputs(2), torch.ones(2))).module()
    assert torch.equal(scaled(inputs(2), torch.ones(2)), in_evaluation(module, inputs(2)))


def test_an_impossible_export_is_refused() -> None:  # L-08
    without_example = Net()
    without_example.example_input_array = None
    exports: dict[str, Callable[[], Any]] = {
        "does not hold the whole of": Net().to("meta").export,
        r"set self\.example_input_array": without_example.export,
    }
    for message, export in exports.items():
        with pytest.raises(ConfigurationError, match=message):
            export()


class ExportingCallback(Callback):
    refusal = ""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        try:
            assert torch.equal(module.export().module()(inputs(3)), in_evaluation(module, inputs(3)))
        except ConfigurationError as error:
            self.refusal = str(error)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


def _export_within_and_after(strategy: str) -> tuple[str, bool]:
    exporting = ExportingCallback()
    module, _ = trained(strategy=STRATEGIES[strategy](), devices=2, callbacks=[exporting])
    return exporting.refusal, torch.equal(module.export().module()(inputs(3)), in_evaluation(module, inputs(3)))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_export_within_a_sharded_run_is_refused(strategy: str) -> None:  # L-08
    for refusal, is_equal in on_ranks(_export_within_and_after, 2, strategy, process_group=None, timeout=120):
        assert is_equal
        for part in ("does not hold the whole of ", "Net.load_from_checkpoint(path).export("):
            assert (part in refusal) == (strategy != "ddp")
