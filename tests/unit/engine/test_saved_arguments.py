"""`load_from_checkpoint` with a class that has changed since the checkpoint was written (J-14)."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import TrainModule

# Private: the classes that wrote these checkpoints do not exist any more.
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import convert
from drivetrain.checkpoint._format import CheckpointMetadata, Contents, save
from drivetrain.errors import CheckpointError


class Net(TrainModule):
    """The layer that all checkpoints here hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)


def saved(path: Path, **hyper_parameters: Any) -> Path:
    """Return a checkpoint of a `Net` built with these arguments."""
    metadata = CheckpointMetadata(hyper_parameters=hyper_parameters, weights_only=True)
    save(str(path / "c"), Contents(Net().state_dict(), metadata), LocalControl())
    return path / "c"


class Renamed(Net):
    def __init__(self, breadth: int = 1, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Needs(Net):
    def __init__(self, breadth: int) -> None:
        super().__init__()
        self.save_hyperparameters()


class Base(Net):
    def __init__(self, width: int, *, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class PassesOn(Base):
    def __init__(self, lr: float, **rest: Any) -> None:
        super().__init__(**rest)


class FixedWidth(Base):
    """Passes a value to its base class, which is among the hyper-parameters of both and no argument of its own."""

    def __init__(self, lr: float) -> None:
        super().__init__(64)


class Suggested(Net):
    """Fails as Python 3.13 does, whose error ends with the nearest argument."""

    def __init__(self, **rest: Any) -> None:
        raise TypeError("Net.__init__() got an unexpected keyword argument 'height'. Did you mean 'width'?")


OLD = {"width": 3, "lr": 0.5}
MISSPELT = {"bredth": 3, "depth": 2}
BASE = {"lr": 0.1, "width": 3, "height": 4}


@pytest.mark.parametrize(
    ("kind", "held", "given", "what", "fix"),
    [
        (
            Renamed,
            OLD,
            {},
            "Renamed does not take 'width', which is among",
            "Renamed.load_from_checkpoint(path, ignore='width')",
        ),
        (Needs, OLD, {"ignore": "lr"}, "Needs does not take 'width'", "ignore='width', breadth=...)"),
        (
            Renamed,
            MISSPELT,
            {},
            "does not take 'bredth', 'depth'.*Did you mean 'breadth'",
            "ignore=('bredth', 'depth'))",
        ),
        (PassesOn, BASE, {}, "PassesOn does not take 'height', which is among", "ignore='height'"),
        (Suggested, BASE, {}, "Suggested does not take 'height', which is among", "ignore='height'"),
        (FixedWidth, {"width": 128, "depth": 1, "lr": 0.1}, {}, "FixedWidth does not take 'width'", "ignore='width'"),
        # Unknown and missing overrides are not blamed on the checkpoint.
        (Renamed, {"breadth": 3}, {"breath": 3}, "not take 'breath', which was passed.*Did you mean 'breadth'", ""),
        (PassesOn, BASE, {"ignore": "height", "hight": 4}, "does not take 'hight', which was passed", ""),
        (Needs, {"breadth": 3}, {"ignore": "breadth"}, "Needs needs 'breadth'", ""),
        (PassesOn, BASE, {"ignore": ("height", "width")}, "PassesOn needs 'width'", ""),
    ],
)
def test_a_hyper_parameter_that_the_class_does_not_take_is_named_with_a_fix(
    tmp_path: Path, kind: type[Net], held: dict[str, Any], given: dict[str, Any], what: str, fix: str
) -> None:  # J-14
    path = saved(tmp_path, **held)
    with pytest.raises(CheckpointError, match=what) as caught:
        kind.load_from_checkpoint(path, **given)
    assert fix in caught.value.fix
    if "which is among" in what:
        assert caught.value.what.endswith(f"which is among the hyper-parameters of {str(path)!r}.")
    if kind is Renamed:
        assert "__init__ takes breadth, lr" in caught.value.why


@pytest.mark.parametrize(
    ("kind", "held", "given", "expected"),
    [
        (Renamed, OLD, {"ignore": "width"}, {"breadth": 1, "lr": 0.5}),
        (Renamed, OLD, {"ignore": "width", "breadth": 3}, {"breadth": 3, "lr": 0.5}),
        (Needs, OLD, {"ignore": ("lr", "width"), "breadth": 3}, {"breadth": 3}),
        (Renamed, MISSPELT, {"ignore": ("bredth", "depth", "never saved")}, {"breadth": 1, "lr": 0.1}),
        (PassesOn, BASE, {"ignore": "height"}, {"lr": 0.1, "width": 3, "depth": 1}),
        (FixedWidth, dict(FixedWidth(0.1).hparams), {}, {"width": 64, "depth": 1, "lr": 0.1}),
        (FixedWidth, {"width": 128, "lr": 0.1}, {"ignore": "width"}, {"width": 64, "depth": 1, "lr": 0.1}),
    ],
)
def test_removed_hyper_parameters_can_be_ignored(
    tmp_path: Path, kind: type[Net], held: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:  # J-14
    assert kind.load_from_checkpoint(saved(tmp_path, **held), **given).hparams == expected


def test_an_error_within_the_class_is_its_own(tmp_path: Path) -> None:
    class Wrong(Net):
        def __init__(self, width: int = 1, **rest: Any) -> None:
            super().__init__()
            torch.nn.Linear(width, 1, height=2)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        Wrong.load_from_checkpoint(saved(tmp_path, width=3, height=2))


def test_a_value_of_a_class_that_is_gone(tmp_path: Path) -> None:  # J-14
    """Lightning's checkpoints may contain one."""
    gone = types.ModuleType("gone")
    exec("class Mode: pass", gone.__dict__)
    sys.modules["gone"] = gone
    try:
        hyper_parameters = {"mode": gone.Mode(), "lr": 0.5}
        torch.save({"state_dict": Net().state_dict(), "hyper_parameters": hyper_parameters}, tmp_path / "l.ckpt")
    finally:
        del sys.modules["gone"]

    class Moded(Net):
        def __init__(self, mode: Any, lr: float) -> None:
            super().__init__()

    with pytest.warns(UserWarning, match="'mode' cannot be stored as JSON and is left out"):
        convert(tmp_path / "l.ckpt", tmp_path / "c")
    with pytest.raises(CheckpointError, match="Moded needs 'mode'") as caught:
        Moded.load_from_checkpoint(tmp_path / "c")
    assert "load_from_checkpoint(path, mode=...)" in caught.value.fix
    assert isinstance(Moded.load_from_checkpoint(tmp_path / "c", mode=1), Moded)
