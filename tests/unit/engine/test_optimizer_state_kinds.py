"""Optimizer state of any kind is saved and resumed, or refused before the second step (Q-03)."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
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


def fit(
    module: TrainModule, *callbacks: Callback, max_epochs: int = 2, precision: str = "32-true", **options: Any
) -> Fit:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    off: dict[str, Any] = dict.fromkeys(names, False)
    off |= {"max_epochs": max_epochs, "seed": 1, "accelerator": "cpu", "precision": precision}
    trainer = Fit(callbacks=list(callbacks), **off)
    # torchao compiles its step, which takes minutes.
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        for layer in module.children():
            layer.reset_parameters()  # type: ignore[operator]
        trainer.fit(module, data(), **options)
    return trainer


def eight_bit(params: Any) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, lr=0.01)


def four_bit(params: Any) -> Any:
    return importlib.import_module("torchao.optim").AdamW4bit(params, lr=0.01)


SUBCLASSES = [
    pytest.param(QuantisedMomentum, False, id="own"),
    pytest.param(QuantisedMomentum, True, id="own, in the background"),
    pytest.param(eight_bit, False, id="AdamW8bit", marks=requires_package("torchao")),
    pytest.param(four_bit, True, id="AdamW4bit", marks=requires_package("torchao")),
]


@pytest.mark.parametrize(("configure", "in_background"), SUBCLASSES)
def test_state_of_a_tensor_subclass_comes_back_as_what_it_was(
    configure: Any, in_background: bool, tmp_path: Path
) -> None:
    # torchao's AdamW8bit trained for an epoch, and the first save ended the run
    whole = Model(configure)
    wanted = fit(whole).optimizers[0]
    fit(Model(configure), Checkpoint(tmp_path, save_async=in_background), max_epochs=1)
    (path,) = (each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    resumed = Model(configure)
    found = fit(resumed, ckpt_path=path).optimizers[0]
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for mine, theirs in zip(found.state.values(), wanted.state.values(), strict=True):
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}
    assert any(hasattr(value, "__tensor_flatten__") for value in found.state[resumed.wide.weight].values())


class Keeping(torch.optim.SGD):
    """Keeps a value in the state of its parameters, and counts what it finds."""

    def __init__(self, params: Any, make: Callable[[], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", self.make())


KEPT: dict[str, Callable[[], Any]] = {
    "int": lambda: 3,
    "float": lambda: 0.5,
    "none": lambda: None,
    "bool": lambda: True,
    "str": lambda: "warm",
    "nested": lambda: {"a": [1, {"b": (2.0, None)}], 3: "three"},
    "a NumPy float64": lambda: numpy.float64(0.25),
    "a scalar tensor": lambda: torch.tensor(3),
    "a list of tensors": lambda: [torch.ones(2), torch.zeros(3)],
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "a Counter": lambda: Counter("aab"),
    "a subclass in a dict": lambda: {"m": [Quantised.of(torch.arange(5.0))]},
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


@pytest.mark.parametrize("kind", KEPT)
def test_values_of_many_kinds_are_kept(kind: str, tmp_path: Path) -> None:
    #
    make = KEPT[kind]
    fit(Model(lambda params: Keeping(params, make)), Checkpoint(tmp_path), max_epochs=1)
    (path,) = (each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    module = Model(lambda params: Keeping(params, lambda: "not restored"))
    (optimizer,) = fit(module, ckpt_path=path).optimizers
    assert plain(optimizer.state[module.wide.weight]["kept"]) == plain(make())


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_state_of_a_higher_precision_than_the_weights_is_not_rounded(precision: str, tmp_path: Path) -> None:
    # torch converts state to the dtype of its parameter
    make = partial(torch.full, (3,), 1 / 3)
    fit(Model(lambda params: Keeping(params, make)), Checkpoint(tmp_path), max_epochs=1, precision=precision)
    (path,) = (each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    module = Model(lambda params: Keeping(params, make))
    (optimizer,) = fit(module, ckpt_path=path, precision=precision).optimizers
    kept = optimizer.state[module.wide.weight]["kept"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept, make())


def test_state_of_the_weights_precision_follows_them_to_another(tmp_path: Path) -> None:
    # torch's optimizers need their moments in the dtype of the weights
    fit(Model(lambda params: torch.optim.Adam(params)), Checkpoint(tmp_path), max_epochs=1)
    (path,) = (each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    module = Model(lambda params: torch.optim.Adam(params))
    (optimizer,) = fit(module, ckpt_path=path, precision="bf16-true").optimizers
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a NumPy scalar of another type": (lambda: numpy.float32(0.25), "float32"),
    "a dtype": (lambda: torch.bfloat16, "dtype"),
    "a set": (lambda: {1, 2}, "set"),
    "an object": (lambda: object(), "object"),
    "a complex number": (lambda: 1j, "complex"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), r"torch\.sparse_coo"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), r"torch\.complex128"),
    "a subclass that cannot be taken apart": (lambda: WithoutFlatten.of(torch.ones(4)), "WithoutFlatten"),
    "a list of objects": (lambda: [1, [object()]], "object"),
}


class Steps(Callback):
    seen = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = trainer.global_step


@pytest.mark.parametrize("kind", REFUSED)
def test_other_values_are_refused_before_the_second_step(kind: str, tmp_path: Path) -> None:
    # the first save, an epoch or a day later, ended the run
    make, said = REFUSED[kind]
    steps = Steps()
    with pytest.raises(CheckpointError, match=said) as refused:
        fit(Model(lambda params: Keeping(params, make)), Checkpoint(tmp_path), steps)
    assert steps.seen == 1
    assert "ptimizer" in str(refused.value)
    assert "0" in str(refused.value)
    assert "wide.weight/kept" in str(refused.value)


def test_an_optimizer_that_steps_later_is_checked_after_its_own_first_step(tmp_path: Path) -> None:
    #
    class Turns(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()[batch_idx // 2 % 2]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            first, second = torch.optim.Adam(self.wide.parameters()), Keeping(self.head.parameters(), object)
            return [first, second]

    steps = Steps()
    with pytest.raises(CheckpointError, match=r"Optimizer 1: .*head\.weight/kept"):
        fit(Turns(lambda params: None), Checkpoint(tmp_path), steps)
    assert steps.seen == 3


class Counting(Callback):
    def __init__(self) -> None:
        self.at: list[int] = []
        self.trainer: Any = None

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.at.append(trainer.global_step)


@pytest.mark.parametrize(("callbacks", "wanted"), [((), []), (("resumable",), [0, 1, 4])])
def test_the_dry_run_is_repeated_once_and_only_where_checkpoints_are_written(
    callbacks: tuple[str, ...], wanted: list[int], tmp_path: Path
) -> None:
    #
    counting = Counting()
    saving = [Checkpoint(tmp_path) for _ in callbacks]
    trainer = fit(Model(lambda params: torch.optim.Adam(params)), counting, *saving, max_epochs=1)
    assert counting.at == wanted
    assert trainer.session is not None
    assert trainer.session.checkpoints.requests.waiting == []


def test_the_dry_run_waits_for_a_window_with_a_step(tmp_path: Path) -> None:
    # with a loss of None there is no step, and no state yet
    class Late(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx < 2 else super().training_step(batch, batch_idx)

    steps = Steps()
    with pytest.raises(CheckpointError, match="wide\\.weight/kept"):
        fit(Late(lambda params: Keeping(params, object)), Checkpoint(tmp_path), steps)
    assert steps.seen == 1


def saved_quantised(tmp_path: Path) -> Path:
    fit(Model(QuantisedMomentum), Checkpoint(tmp_path), max_epochs=1)
    (path,) = (each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    return path


def test_reading_imports_no_class_that_the_checkpoint_names(tmp_path: Path) -> None:
    #
    path = saved_quantised(tmp_path)
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


@pytest.mark.parametrize(
    "content",
    [
        [],
        ["torch.Tensor", {}, None, [1], [1]],
        ["os.path", {}, None, [1], [1]],
        ["quantised_optimizer.Quantised", [], None, [1], [1]],
        ["quantised_optimizer.Quantised", {}, None, [1], [1]],
        ["quantised_optimizer.Quantised", {}, None, [-1], [1]],
        ["quantised_optimizer.Quantised", {}, {"$dtype": "nn"}, [1], [1]],
        ["torch.distributed.tensor.DTensor", {}, None, [1], [1]],
    ],
    ids=str,
)
def test_a_malformed_subclass_is_a_checkpoint_error(content: Any, tmp_path: Path) -> None:
    #
    from drivetrain.checkpoint._format import documents
    from drivetrain.checkpoint._format.checkpoint_reader import _read_tensors

    with pytest.raises((CheckpointError, ValueError, AttributeError)):
        _read_tensors(documents.decode({"$subclass": content}, dict[str, Any]().__getitem__), {}, 1)


def test_weights_of_a_subclass_are_refused_before_the_first_step(tmp_path: Path) -> None:
    # weights stay readable by other libraries, which know no subclass
    module = Model(lambda params: torch.optim.SGD(module.head.parameters(), lr=0.1))
    module.wide.register_buffer("table", Quantised.of(torch.ones(4)))
    steps = Steps()
    with pytest.raises(CheckpointError, match=r"wide\.table.*Quantised"):
        fit(module, Checkpoint(tmp_path), steps)
    assert steps.seen == 0


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer whose groups it shares, until the optimizer loads a state, which replaces its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.param_groups = inner, inner.defaults, inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class WrappingProperly(Wrapping):
    param_groups = property(lambda self: self.inner.param_groups, lambda self, value: None)


@pytest.mark.parametrize("kind", [Wrapping, WrappingProperly])
def test_a_wrapper_that_keeps_its_groups_when_it_loads_is_refused(tmp_path: Path, kind: type[Wrapping]) -> None:
    # the schedule of a resumed run would not reach the optimizer within the wrapper
    def configure(params: Any) -> Any:
        optimizer = kind(torch.optim.SGD(params, lr=0.1, momentum=0.9))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    fit(Model(configure), Checkpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    whole, resumed = Model(configure), Model(configure)
    fit(whole, max_epochs=3)
    if kind is Wrapping:
        with pytest.raises(CheckpointError, match=r"Wrapping\.load_state_dict leaves the learning rate at 0\.1"):
            fit(resumed, max_epochs=3, ckpt_path=tmp_path / "epoch=1")
    else:
        fit(resumed, max_epochs=3, ckpt_path=tmp_path / "epoch=1")
        assert torch.equal(whole.head.weight, resumed.head.weight)
