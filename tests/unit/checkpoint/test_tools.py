"""The command line: show, verify, consolidate and convert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import equal, flip, written
from safetensors.torch import load_file, load_model
from torch import nn

from drivetrain import CheckpointError, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import consolidate, convert, load, show, verify
from drivetrain.checkpoint.__main__ import main
from drivetrain.checkpoint._format import Contents, Sizes, save

LOCAL = LocalControl()


class Tied(TrainModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight


class TestConsolidate:
    def test_many_files_become_one(self, tmp_path: Path) -> None:
        # F-10
        module = Tied()
        state = {name: value for name, value in module.state_dict().items() if name != "last.weight"}
        save(
            str(tmp_path / "c"), Contents(state, aliases={"last.weight": "first.weight"}), LOCAL, sizes=Sizes(large=50)
        )
        assert len(load(tmp_path / "c").manifest.weights.tensors) > 2
        for out in (tmp_path / "new" / "one.safetensors", tmp_path / "folder", f"memory://{tmp_path.name}"):
            path = consolidate(tmp_path / "c", out)
            assert path.endswith("one.safetensors" if str(out).endswith("s") else "model.safetensors")
        assert equal(
            dict(sorted(load_file(tmp_path / "folder" / "model.safetensors").items())), dict(sorted(state.items()))
        )
        again = Tied()
        load_model(again, tmp_path / "new" / "one.safetensors")
        assert again.last.weight is again.first.weight
        assert torch.equal(again.first.weight, module.first.weight)

    def test_of_a_damaged_one_nothing_is_left(self, tmp_path: Path) -> None:
        written(tmp_path / "c")
        flip(tmp_path / "c" / "model.safetensors", -1)
        with pytest.raises(CheckpointError, match="was altered"):
            consolidate(tmp_path / "c", tmp_path / "out")
        assert os.listdir(tmp_path / "out") == []


class TestShow:
    def test_what_it_says(self, tmp_path: Path) -> None:
        text = show(written(tmp_path / "c"))
        for part in ("a full checkpoint", "DDPStrategy on 1 rank(s), bf16-mixed", "step=5, epoch=1", "width=3"):
            assert part in text
        rows = [line.split() for line in text.splitlines()]
        assert ["layer.weight", "F32", "2x3", "model.safetensors"] in rows
        assert ["head.weight", "F32", "2x3", "tied", "to", "layer.weight"] in rows


class TestCommandLine:
    def test_as_a_program(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "drivetrain.checkpoint", "show", written(tmp_path / "c")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "layer.weight" in done.stdout

    def test_verify(self, tmp_path: Path, capsys: Any) -> None:
        path = written(tmp_path / "c")
        assert main(["verify", path]) == 0
        assert "is intact" in capsys.readouterr().out
        flip(tmp_path / "c" / "state.json", 3)
        assert main(["verify", path]) == 1
        assert "state.json was altered" in capsys.readouterr().out

    def test_consolidate_and_convert(self, tmp_path: Path) -> None:
        path = written(tmp_path / "c")
        assert main(["consolidate", path, str(tmp_path / "out")]) == 0
        assert main(["convert", str(tmp_path / "out" / "model.safetensors"), str(tmp_path / "again")]) == 0
        assert "layer.weight" in load(tmp_path / "again").weights()

    def test_what_cannot_be_done(self, tmp_path: Path, capsys: Any) -> None:
        assert main(["show", str(tmp_path / "none")]) == 2
        assert "There is no checkpoint" in capsys.readouterr().err


# Files of other libraries


class Planted:
    """Runs code when it is unpickled, as a planted pickle would."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


class OrderedOnly:
    """A class that readers do not know."""

    def __init__(self, size: int) -> None:
        self.size = size


def lightning(path: Path, **more: Any) -> dict[str, torch.Tensor]:
    """What Lightning's Trainer writes."""
    module = Tied(4)
    document = {
        "epoch": 1,
        "global_step": 8,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "callbacks": {},
        "optimizer_states": [torch.optim.AdamW(module.parameters()).state_dict()],
        "hyper_parameters": {"width": 4},
        **more,
    }
    torch.save(document, path)
    return dict(module.state_dict())


class TestLightning:
    """F-14"""

    def test_into_a_module(self, tmp_path: Path) -> None:
        state = lightning(tmp_path / "a.ckpt")
        convert(tmp_path / "a.ckpt", tmp_path / "c")
        module = Tied.load_from_checkpoint(tmp_path / "c")
        assert module.last.weight is module.first.weight
        assert equal(dict(module.state_dict()), state)
        checkpoint = load(tmp_path / "c")
        assert checkpoint.weights_only
        assert checkpoint.manifest.aliases == {"last.weight": "first.weight"}

    def test_what_lightning_itself_wrote(self, tmp_path: Path) -> None:
        # By Lightning 2.6.6: two epochs of two batches, StepLR, ModelCheckpoint; a hyper-parameter is nn.ReLU.
        with pytest.warns(UserWarning, match="'activation' cannot be stored as JSON and is left out"):
            convert(Path(__file__).parent / "lightning-2.6.6.ckpt", tmp_path / "c")
        checkpoint = load(tmp_path / "c")
        assert checkpoint.hyper_parameters == {"width": 3, "name": "lit"}
        weights = dict(checkpoint.weights())
        assert {name: tuple(value.shape) for name, value in weights.items()} == {
            "seen": (),
            "net.0.weight": (3, 2),
            "net.0.bias": (3,),
            "net.2.weight": (1, 3),
            "net.2.bias": (1,),
        }
        torch.testing.assert_close(weights["net.0.bias"], torch.tensor([-0.1240502, 0.5156178, -0.135562]))

    def test_averages_and_trained_weights(self, tmp_path: Path) -> None:
        # Lightning's WeightAveraging saves the averages as the state_dict.
        trained = {name: value + 1 for name, value in Tied(4).state_dict().items()}
        averages = lightning(tmp_path / "a.ckpt", current_model_state=trained, averaging_state={"n_averaged": 3})
        for averaged, wanted in ((None, averages), (True, averages), (False, trained)):
            convert(tmp_path / "a.ckpt", tmp_path / "c", averaged=averaged)
            assert torch.equal(load(tmp_path / "c").weights()["first.bias"], wanted["first.bias"])
        lightning(tmp_path / "b.ckpt")
        with pytest.raises(CheckpointError, match="holds no averages"):
            convert(tmp_path / "b.ckpt", tmp_path / "c", averaged=True)
        with pytest.raises(CheckpointError, match="does not exist"):
            convert(tmp_path / "none.ckpt", tmp_path / "c", averaged=True)
        (tmp_path / "folder").mkdir()
        with pytest.raises(CheckpointError, match="of an unknown format"):
            convert(tmp_path / "folder", tmp_path / "c", averaged=True)
        consolidate(tmp_path / "c", tmp_path / "out")
        assert main(["convert", str(tmp_path / "out" / "model.safetensors"), str(tmp_path / "d"), "--averaged"]) == 2
        convert(tmp_path / "b.ckpt", tmp_path / "c", averaged=False)

    def test_weights_of_unknown_classes_are_named(self, tmp_path: Path) -> None:
        lightning(tmp_path / "a.ckpt", state_dict={"w": torch.ones(2), "odd": OrderedOnly(3)})
        with pytest.raises(CheckpointError, match=r"weights that are not plain tensors: odd\."):
            convert(tmp_path / "a.ckpt", tmp_path / "c")

    def test_hyper_parameters_that_are_no_json_are_named(self, tmp_path: Path) -> None:
        lightning(tmp_path / "a.ckpt", hyper_parameters={"width": 4, "dtype": torch.float32})
        with pytest.warns(UserWarning, match="'dtype' cannot be stored as JSON and is left out"):
            convert(tmp_path / "a.ckpt", tmp_path / "c")
        assert load(tmp_path / "c").hyper_parameters == {"width": 4}

    def test_a_planted_pickle_runs_nothing(self, tmp_path: Path) -> None:
        # F-04
        mark = tmp_path / "executed"
        lightning(tmp_path / "a.ckpt", callbacks={"x": Planted(str(mark))})
        with pytest.raises(CheckpointError, match=r"cannot be read safely(.|\n)*can run arbitrary code"):
            convert(tmp_path / "a.ckpt", tmp_path / "c")
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]

    def test_a_plain_state_dict(self, tmp_path: Path) -> None:
        torch.save({f"model.{name}": value for name, value in Tied().state_dict().items()}, tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "c", prefix="model.")
        Tied.load_from_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match="no tensors whose names begin with 'other'"):
            convert(tmp_path / "a.pt", tmp_path / "c", prefix="other")


class TestFolders:
    def test_a_folder_of_an_unknown_kind(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="a folder of an unknown format"):
            convert(tmp_path, tmp_path / "c")
        assert verify(tmp_path / "c") != []
