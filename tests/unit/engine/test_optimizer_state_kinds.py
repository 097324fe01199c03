"""Optimizer state of any kind is saved and resumed, or refused before the second step (Q-03)."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_case import QUIET
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.testing import requires_package
from quantised_optimizer import Quantised, QuantisedMomentum, WithoutFlatten

WIDTH = 64


class Model(TrainModule):
    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.wide(batch[0]).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(16, WIDTH, generator=generator)), batch_size=4)


def fit(module: TrainModule, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Fit:
    trainer = Fit(callbacks=list(callbacks), **{**QUIET, "max_epochs": 2, "accelerator": "cpu", **options})
    # torchao compiles its step, which takes minutes.
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        for layer in module.children():
            layer.reset_parameters()  # type: ignore[operator]
        trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer


def saved(folder: Path, module: TrainModule, precision: str = "32-true", **options: Any) -> Path:
    """Train for an epoch, and return the checkpoint."""
    fit(module, Checkpoint(folder, **options), max_epochs=1, precision=precision)
    (path,) = (each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())
    return path


def torchao(name: str) -> Any:
    return lambda params: getattr(importlib.import_module("torchao.optim"), name)(params, lr=0.01)


SUBCLASSES = [
    pytest.param(QuantisedMomentum, True, id="own, in the background"),
    pytest.param(torchao("AdamW8bit"), False, id="AdamW8bit", marks=requires_package("torchao")),
    pytest.param(torchao("AdamW4bit"), True, id="AdamW4bit", marks=requires_package("torchao")),
]


@pytest.mark.parametrize(("configure", "save_async"), SUBCLASSES)
def test_state_of_a_tensor_subclass_comes_back_as_what_it_was(configure: Any, save_async: bool, tmp_path: Path) -> None:
    #
    whole, resumed = Model(configure), Model(configure)
    wanted = fit(whole).optimizers[0]
    path = saved(tmp_path, Model(configure), save_async=save_async)
    found = fit(resumed, ckpt_path=path).optimizers[0]
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    for mine, theirs in zip(found.state.values(), wanted.state.values(), strict=True):
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}
    assert any(hasattr(value, "__tensor_flatten__") for value in found.state[resumed.wide.weight].values())


class Keeping(torch.optim.SGD):
    def __init__(self, params: Any, values: dict[str, Any]) -> None:
        super().__init__(params, lr=0.1)
        self.values = values

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {**self.values, **self.state[parameter]}


KEPT: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "none": None,
    "bool": True,
    "str": "warm",
    "dtype": torch.bfloat16,
    "nested": {"a": [1, {"b": (2.0, None)}], 3: "three"},
    "a NumPy float64": numpy.float64(0.25),
    "a scalar tensor": torch.tensor(3),
    "a list of tensors": [torch.ones(2), torch.zeros(3)],
    "of a higher precision than the weights": torch.full((3,), 1 / 3),
    "complex64": torch.ones(2, dtype=torch.complex64),
    "a Counter": Counter("aab"),
    "a subclass in a dict": {"m": [Quantised.of(torch.arange(5.0))]},
}


def plain(value: Any) -> Any:
    """Return a value in a form that can be compared by ==."""
    if isinstance(value, Quantised):
        return type(value), value.dequantise().tolist()
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [type(value), *map(plain, value)] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_values_of_many_kinds_are_kept_as_they_are(precision: str, tmp_path: Path) -> None:
    path = saved(tmp_path, Model(lambda params: Keeping(params, KEPT)), precision)
    module = Model(lambda params: Keeping(params, dict.fromkeys(KEPT, "not restored")))
    (optimizer,) = fit(module, ckpt_path=path, precision=precision).optimizers
    found = optimizer.state[module.wide.weight]
    assert {kind: plain(found[kind]) for kind in KEPT} == plain(KEPT)


def test_state_of_the_weights_precision_follows_them_to_another(tmp_path: Path) -> None:
    # torch's optimizers need their moments in the dtype of the weights
    path = saved(tmp_path, Model(torch.optim.Adam))
    (optimizer,) = fit(Model(torch.optim.Adam), ckpt_path=path, precision="bf16-true").optimizers
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


REFUSED: list[tuple[Any, str]] = [
    (numpy.float32(0.25), "float32"),
    ({1, 2}, "set"),
    (object(), "object"),
    ([1, [object()]], "object"),
    (1j, "complex"),
    (torch.eye(2).to_sparse(), r"torch\.sparse_coo"),
    (torch.ones(2, dtype=torch.complex128), r"torch\.complex128"),
    (WithoutFlatten.of(torch.ones(4)), "WithoutFlatten"),
]


def refused(module: TrainModule, folder: Path, error: str) -> tuple[int, str]:
    """Return the steps that a run made until it was refused, and the message."""
    steps = [0]
    counting = calling("on_train_batch_end", lambda trainer: steps.append(trainer.global_step))
    with pytest.raises(CheckpointError, match=error) as caught:
        fit(module, Checkpoint(folder), counting)
    return steps[-1], str(caught.value)


@pytest.mark.parametrize(("value", "error"), REFUSED, ids=[str(type(value)) for value, _ in REFUSED])
def test_other_values_are_refused_before_the_second_step(value: Any, error: str, tmp_path: Path) -> None:
    steps, text = refused(Model(lambda params: Keeping(params, {"kept": value})), tmp_path, error)
    assert steps == 1
    assert "ptimizer" in text
    assert "wide.weight/kept" in text


def test_an_optimizer_that_steps_later_is_checked_after_its_own_first_step(tmp_path: Path) -> None:
    class Turns(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()[batch_idx // 2 % 2]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.wide.parameters()), Keeping(self.head.parameters(), {"kept": object()})]

    assert refused(Turns(lambda params: None), tmp_path, r"Optimizer 1: .*head\.weight/kept")[0] == 3


@pytest.mark.parametrize(("saves", "steps"), [(False, []), (True, [0, 1, 4])])
def test_state_is_checked_twice_where_checkpoints_are_written(saves: bool, steps: list[int], tmp_path: Path) -> None:
    # on_save_checkpoint is called before the first step and after it, and when the epoch is saved
    found: list[int] = []
    counting = calling("on_save_checkpoint", lambda trainer: found.append(trainer.global_step))
    saving = [Checkpoint(tmp_path)] if saves else []
    fit(Model(torch.optim.Adam), counting, *saving, max_epochs=1)
    assert found == steps


def test_reading_imports_no_class_that_the_checkpoint_names(tmp_path: Path) -> None:
    path = saved(tmp_path, Model(QuantisedMomentum))
    script = (
        "import sys; from drivetrain.checkpoint import load, verify\n"
        f"checkpoint = load({str(path)!r})\n"
        f"assert verify({str(path)!r}) == []\n"
        "try: checkpoint.optimizer_state()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "assert 'quantised_optimizer' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "CheckpointError" in done.stdout
    assert "quantised_optimizer.Quantised, which is not imported" in done.stdout
    state = load(path).optimizer_state()["state"]["wide.weight"]
    assert isinstance(state["momentum"], Quantised)


@pytest.mark.parametrize("name", ["torch.Tensor", "os.path", "torch.distributed.tensor.DTensor"])
def test_a_class_that_wraps_no_tensors_is_a_checkpoint_error(name: str) -> None:
    # Q-03; private: no public function writes such a checkpoint
    from drivetrain._format import documents
    from drivetrain._format.checkpoint_reader import _read_tensors

    document = documents.decode({"$subclass": [name, {}, None, [1], [1]]}, dict[str, Any]().__getitem__)
    with pytest.raises(CheckpointError):
        _read_tensors(document, {}, 1)


def test_weights_of_a_subclass_are_refused_before_the_first_step(tmp_path: Path) -> None:
    # weights stay readable by other libraries, which know no subclass
    module = Model(lambda params: torch.optim.SGD(module.head.parameters(), lr=0.1))
    module.wide.register_buffer("table", Quantised.of(torch.ones(4)))
    assert refused(module, tmp_path, r"wide\.table.*Quantised")[0] == 0


class Wrapping(torch.optim.SGD):
    """Keeps its groups when it loads a state, as a wrapper does whose inner optimizer replaces its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        groups = self.param_groups
        super().load_state_dict(state_dict)
        self.param_groups = groups


def test_a_wrapper_that_keeps_its_groups_when_it_loads_is_refused(tmp_path: Path) -> None:
    # the schedule of a resumed run would not reach the optimizer within the wrapper
    def configure(params: Any) -> Any:
        optimizer = Wrapping(params, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    path = saved(tmp_path, Model(configure))
    with pytest.raises(CheckpointError, match=r"Wrapping\.load_state_dict leaves the learning rate at 0\.1"):
        fit(Model(configure), max_epochs=3, ckpt_path=path)
