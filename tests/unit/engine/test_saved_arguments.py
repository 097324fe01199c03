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


def test_a_removed_hyper_parameter_is_named_with_a_fix(tmp_path: Path) -> None:  # J-14
    path = saved(tmp_path, width=3, lr=0.5)
    with pytest.raises(CheckpointError) as caught:
        Renamed.load_from_checkpoint(path)
    assert caught.value.what == f"Renamed does not take 'width', which is among the hyper-parameters of {str(path)!r}."
    assert "__init__ takes breadth, lr" in caught.value.why
    assert "Renamed.load_from_checkpoint(path, ignore='width')" in caught.value.fix
    # The suggested fixes work.
    assert Renamed.load_from_checkpoint(path, ignore="width").hparams == {"breadth": 1, "lr": 0.5}
    assert Renamed.load_from_checkpoint(path, ignore="width", breadth=3).hparams == {"breadth": 3, "lr": 0.5}
    with pytest.raises(CheckpointError, match="Needs does not take 'width'") as caught:
        Needs.load_from_checkpoint(path, ignore="lr")
    assert "ignore='width', breadth=...)" in caught.value.fix
    assert Needs.load_from_checkpoint(path, ignore=("lr", "width"), breadth=3).hparams == {"breadth": 3}


def test_several_removed_ones_and_the_nearest_name(tmp_path: Path) -> None:  # J-14
    path = saved(tmp_path, bredth=3, depth=2)
    with pytest.raises(CheckpointError, match=r"does not take 'bredth', 'depth'.*Did you mean 'breadth'") as caught:
        Renamed.load_from_checkpoint(path)
    assert "ignore=('bredth', 'depth'))" in caught.value.fix
    assert Renamed.load_from_checkpoint(path, ignore=("bredth", "depth", "never saved")).hparams.breadth == 1


def test_unknown_and_missing_overrides_are_not_blamed_on_the_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, breadth=3)
    with pytest.raises(CheckpointError, match=r"does not take 'breath', which was passed.*Did you mean 'breadth'"):
        Renamed.load_from_checkpoint(path, breath=3)
    with pytest.raises(CheckpointError, match="Needs needs 'breadth'"):
        Needs.load_from_checkpoint(path, ignore="breadth")


class Base(Net):
    def __init__(self, width: int, *, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class PassesOn(Base):
    def __init__(self, lr: float, **rest: Any) -> None:
        super().__init__(**rest)


def test_one_that_a_base_class_no_longer_accepts(tmp_path: Path) -> None:  # J-14
    """Python's own error names neither the checkpoint nor a fix."""
    path = saved(tmp_path, lr=0.1, width=3, height=4)
    with pytest.raises(CheckpointError, match="PassesOn does not take 'height', which is among") as caught:
        PassesOn.load_from_checkpoint(path)
    assert "ignore='height'" in caught.value.fix
    assert PassesOn.load_from_checkpoint(path, ignore="height").hparams == {"lr": 0.1, "width": 3, "depth": 1}
    with pytest.raises(CheckpointError, match="PassesOn needs 'width'"):
        PassesOn.load_from_checkpoint(path, ignore=("height", "width"))
    with pytest.raises(CheckpointError, match="does not take 'hight', which was passed"):
        PassesOn.load_from_checkpoint(path, ignore="height", hight=4)


def test_the_name_that_python_suggests_is_not_blamed(tmp_path: Path) -> None:  # J-14
    """Python 3.13 adds the nearest argument to its error."""

    class Suggested(Net):
        def __init__(self, **rest: Any) -> None:
            raise TypeError("Net.__init__() got an unexpected keyword argument 'hight'. Did you mean 'height'?")

    with pytest.raises(CheckpointError, match="Suggested does not take 'hight', which is among"):
        Suggested.load_from_checkpoint(saved(tmp_path, hight=4))


def test_an_error_within_the_class_is_its_own(tmp_path: Path) -> None:
    class Wrong(Net):
        def __init__(self, width: int = 1, **rest: Any) -> None:
            super().__init__()
            torch.nn.Linear(width, 1, height=2)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        Wrong.load_from_checkpoint(saved(tmp_path, width=3, height=2))


class Fixed(Base):
    """Passes fixed arguments to its base class."""

    def __init__(self, lr: float, width: int | None = None) -> None:
        super().__init__(64 if width is None else width)


class FixedNow(Base):
    def __init__(self, lr: float) -> None:
        super().__init__(64)


def test_a_value_that_the_class_passes_to_its_base_is_no_argument(tmp_path: Path) -> None:  # J-14
    """It is among the hyper-parameters nevertheless, since the base class saves its arguments."""
    (tmp_path / "other").mkdir()
    path, other = saved(tmp_path, **FixedNow(0.1).hparams), saved(tmp_path / "other", **Fixed(0.1, 128).hparams)
    assert FixedNow.load_from_checkpoint(path).hparams == {"width": 64, "depth": 1, "lr": 0.1}
    with pytest.raises(CheckpointError, match="FixedNow does not take 'width'"):
        FixedNow.load_from_checkpoint(other)
    assert FixedNow.load_from_checkpoint(other, ignore="width").hparams.width == 64


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
