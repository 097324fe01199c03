"""The command line: show, verify, consolidate and convert."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import equal, flip, save_contents, written
from safetensors.torch import load_file, load_model
from torch import nn

from drivetrain import CheckpointError, TrainModule
from drivetrain.checkpoint import consolidate, convert, load, show, verify
from drivetrain.checkpoint.__main__ import main
from drivetrain.checkpoint._format import CheckpointMetadata, Contents, Sizes


class Net(TrainModule):
    """Has tied weights."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight


NAMES = sorted(Net().state_dict())


def one_weight(path: Path, **metadata: Any) -> str:
    return save_contents(path, Contents({"layer.weight": torch.ones(2, 2)}, CheckpointMetadata(**metadata)))


class TestConsolidate:
    def test_many_files_become_one(self, tmp_path: Path) -> None:
        # F-10
        module = Net()
        state = {name: value for name, value in module.state_dict().items() if name != "last.weight"}
        parts = Contents(state, aliases={"last.weight": "first.weight"})
        save_contents(tmp_path / "c", parts, sizes=Sizes(large=50))
        assert len(load(tmp_path / "c").manifest.weights.tensors) > 2
        for out, file in (
            (tmp_path / "new" / "one.safetensors", "one.safetensors"),
            (tmp_path / "v1.5", "v1.5/model.safetensors"),  # a folder, although its name has a dot
            (f"memory://{tmp_path.name}", "model.safetensors"),
        ):
            assert consolidate(tmp_path / "c", out).endswith(file)
            with pytest.raises(CheckpointError, match="exists already"):
                consolidate(tmp_path / "c", out)
        written_file = load_file(tmp_path / "v1.5" / "model.safetensors")
        assert equal(dict(sorted(written_file.items())), dict(sorted(state.items())))
        again = Net()
        load_model(again, tmp_path / "new" / "one.safetensors")
        assert again.last.weight is again.first.weight
        assert torch.equal(again.first.weight, module.first.weight)

    @pytest.mark.parametrize("out", ["out.pt", "out.bin", "new/out.PTH", "memory://consolidated/out.ckpt"])
    def test_a_file_of_another_format_is_refused(self, out: str, tmp_path: Path) -> None:
        # it made a folder called out.pt
        target = out if "://" in out else tmp_path / out
        with pytest.raises(CheckpointError, match=r"out\.(pt|bin|PTH|ckpt)") as caught:
            consolidate(one_weight(tmp_path / "c"), target)
        assert "out.safetensors" in caught.value.fix
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]

    def test_an_adapter_without_its_base_is_refused(self, tmp_path: Path) -> None:
        # it wrote the adapter as if it were the whole model
        path = one_weight(tmp_path / "c", base={"base.weight": "0" * 16}, weights_only=True)
        with pytest.raises(CheckpointError, match=r"lacks 'base\.weight'") as caught:
            consolidate(path, tmp_path / "out")
        assert "load_from_checkpoint" in caught.value.fix
        assert not (tmp_path / "out").exists()


class TestCommandLine:
    def test_show_as_a_program(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "drivetrain.checkpoint", "show", written(tmp_path / "c")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == show(tmp_path / "c").strip()
        for part in ("a full checkpoint", "DDPStrategy on 1 rank(s), bf16-mixed", "step=5, epoch=1", "width=3"):
            assert part in done.stdout
        rows = [line.split() for line in done.stdout.splitlines()]
        assert ["layer.weight", "F32", "2x3", "model.safetensors"] in rows
        assert ["head.weight", "F32", "2x3", "tied", "to", "layer.weight"] in rows

    def test_verify_consolidate_convert_and_their_errors(self, tmp_path: Path, capsys: Any) -> None:
        path, out = written(tmp_path / "c"), str(tmp_path / "out.safetensors")
        assert [main(["consolidate", path, out]) for _ in range(2)] == [0, 2]
        assert "exists already" in capsys.readouterr().err
        assert main(["consolidate", path, out, "--overwrite"]) == 0
        assert main(["convert", out, str(tmp_path / "again")]) == 0
        assert "layer.weight" in load(tmp_path / "again").weights()
        assert main(["show", str(tmp_path / "none")]) == 2
        assert "There is no checkpoint" in capsys.readouterr().err
        assert main(["verify", path]) == 0
        assert "is intact" in capsys.readouterr().out
        flip(tmp_path / "c" / "state.json", 3)
        assert main(["verify", path]) == 1
        assert "state.json was altered" in capsys.readouterr().out


# Files of other libraries


class Planted:
    """Runs code when it is unpickled, as a planted pickle would."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


class Unknown:
    """A class that readers do not know."""


def lightning(path: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Write what Lightning's Trainer writes."""
    module = Net(4)
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

    def test_a_module_loads_a_converted_checkpoint(self, tmp_path: Path) -> None:
        state = lightning(tmp_path / "a.ckpt", hyper_parameters={"width": 4, "dtype": torch.float32})
        with pytest.warns(UserWarning, match="'dtype' cannot be stored as JSON and is left out"):
            convert(tmp_path / "a.ckpt", tmp_path / "c")
        module = Net.load_from_checkpoint(tmp_path / "c")
        assert module.last.weight is module.first.weight
        assert equal(dict(module.state_dict()), state)
        checkpoint = load(tmp_path / "c")
        assert checkpoint.weights_only
        assert checkpoint.hyper_parameters == {"width": 4}
        assert checkpoint.manifest.aliases == {"last.weight": "first.weight"}

    def test_a_file_that_lightning_wrote(self, tmp_path: Path) -> None:
        # By Lightning 2.6.6: two epochs of two batches, StepLR, ModelCheckpoint; a hyper-parameter is nn.ReLU.
        with pytest.warns(UserWarning, match="'activation' cannot be stored as JSON and is left out"):
            convert(Path(__file__).parent / "lightning-2.6.6.ckpt", tmp_path / "c")
        checkpoint = load(tmp_path / "c")
        assert checkpoint.hyper_parameters == {"width": 3, "name": "lit"}
        weights = dict(checkpoint.weights())
        assert set(weights) == {"seen", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
        torch.testing.assert_close(weights["net.0.bias"], torch.tensor([-0.1240502, 0.5156178, -0.135562]))

    def test_averages_and_trained_weights(self, tmp_path: Path) -> None:
        # Lightning's WeightAveraging saves the averages as the state_dict.
        trained = {name: value + 1 for name, value in Net(4).state_dict().items()}
        averages = lightning(tmp_path / "a.ckpt", current_model_state=trained, averaging_state={"n_averaged": 3})
        for averaged, wanted in ((None, averages), (True, averages), (False, trained)):
            convert(tmp_path / "a.ckpt", tmp_path / "c", averaged=averaged)
            assert torch.equal(load(tmp_path / "c").weights()["first.bias"], wanted["first.bias"])
        lightning(tmp_path / "b.ckpt")
        (tmp_path / "folder").mkdir()
        for name, message in (
            ("b.ckpt", "holds no averages"),
            ("none.ckpt", "does not exist"),
            ("folder", "of an unknown format"),
        ):
            with pytest.raises(CheckpointError, match=message):
                convert(tmp_path / name, tmp_path / "c", averaged=True)
        out = consolidate(tmp_path / "c", tmp_path / "out")
        assert main(["convert", out, str(tmp_path / "d"), "--averaged"]) == 2
        convert(tmp_path / "b.ckpt", tmp_path / "c", averaged=False)

    @pytest.mark.parametrize("planted", [True, False])
    def test_a_pickle_of_unknown_classes_runs_nothing(self, planted: bool, tmp_path: Path) -> None:
        # F-04
        if planted:
            lightning(tmp_path / "a.ckpt", callbacks={"x": Planted(str(tmp_path / "executed"))})
            message = r"cannot be read safely(.|\n)*can run arbitrary code"
        else:
            lightning(tmp_path / "a.ckpt", state_dict={"w": torch.ones(2), "odd": Unknown()})
            message = r"weights that are not plain tensors: odd\."
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "a.ckpt", tmp_path / "c")
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


def merged(folder: Path, state: dict[str, Any]) -> Path:
    """Return a file of the state, which torch's own command has merged from a folder of DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
        dcp_to_torch_save(folder, folder / "merged.pt")
    return folder / "merged.pt"


class TestStateDicts:
    @pytest.mark.parametrize("nest", [("model",), ("app", "model")])
    def test_the_nesting_of_a_merged_dcp_folder_is_removed_with_one_line(
        self, nest: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        # the names kept "model.", so that they fitted no module
        state: dict[str, Any] = Net().state_dict()
        for key in reversed(nest):
            state = {key: state}
        with caplog.at_level(logging.INFO, "drivetrain"):
            convert(merged(tmp_path / "dcp", {**state, "step": 3}), tmp_path / "c")
        (line,) = [record.getMessage() for record in caplog.records]
        assert repr(".".join(nest) + ".") in line
        Net.load_from_checkpoint(tmp_path / "c")

    @pytest.mark.parametrize(
        ("document", "names"),
        [
            pytest.param({"model": Net().state_dict(), "epoch": 3}, NAMES, id="model"),
            pytest.param({"model_state_dict": Net().state_dict(), "epoch": 3}, NAMES, id="model_state_dict"),
            pytest.param({f"module.{name}": value for name, value in Net().state_dict().items()}, NAMES, id="DDP"),
            pytest.param({"state_dict": {"model.w": torch.ones(1)}}, ["model.w"], id="a module's own prefix"),
        ],
    )
    def test_the_nesting_of_a_file_is_removed(self, document: Any, names: list[str], tmp_path: Path) -> None:
        torch.save(document, tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "c")
        assert sorted(load(tmp_path / "c").weights()) == names

    def test_a_prefix_can_be_chosen(self, tmp_path: Path) -> None:
        torch.save({f"model.{name}": value for name, value in Net().state_dict().items()}, tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "c", prefix="model.")
        Net.load_from_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match="no tensors whose names begin with 'other'"):
            convert(tmp_path / "a.pt", tmp_path / "c", prefix="other")

    def test_sources_without_weights_are_refused(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        torch.save({"hyper_parameters": {"lr": 1}, "epoch": 3}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"holds no tensors\."):
            convert(tmp_path / "a.pt", tmp_path / "out")
        assert not caplog.records
        with pytest.raises(CheckpointError, match="a folder of an unknown format"):
            convert(tmp_path, tmp_path / "c")
        assert verify(tmp_path / "c") != []
