"""The command line: show, verify, consolidate and convert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import equal, flip, resealed, save_contents, written
from safetensors.torch import load_file, load_model
from torch import nn

from drivetrain import CheckpointError, TrainModule
from drivetrain._format import StateToSave, tensor_writer
from drivetrain.checkpoint import consolidate, convert, load, show
from drivetrain.checkpoint.__main__ import main


class Net(TrainModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight


STATE = Net().state_dict()


def test_many_files_are_consolidated_into_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F-10
    state = {name: value for name, value in STATE.items() if name != "last.weight"}
    parts = StateToSave(state, aliases={"last.weight": "first.weight"})
    monkeypatch.setattr(tensor_writer, "LARGE_BYTES", 50)
    save_contents(tmp_path / "c", parts)
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
    assert torch.equal(again.first.weight, STATE["first.weight"])


@pytest.mark.parametrize("out", ["out.pt", "out.bin", "new/out.PTH", "memory://consolidated/out.ckpt"])
def test_another_format_than_that_of_safetensors_is_refused(out: str, tmp_path: Path) -> None:
    path = written(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"out\.(pt|bin|PTH|ckpt)") as caught:
        consolidate(path, out if "://" in out else tmp_path / out)
    assert "out.safetensors" in caught.value.fix
    assert os.listdir(tmp_path) == ["c"]


def test_show_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drivetrain.checkpoint", "show", written(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == show(tmp_path / "c").strip()
    for part in ("a full checkpoint", "DDPStrategy on 1 rank(s), bf16-mixed", "step=5, epoch=1", "width=3"):
        assert part in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["layer.weight", "F32", "2x3", "model.safetensors"] in rows
    assert ["head.weight", "F32", "2x3", "tied", "to", "layer.weight"] in rows


def test_secrets_that_were_left_out_are_named(tmp_path: Path) -> None:  # J-11
    path = written(tmp_path / "c")
    assert "without" not in show(path)
    resealed(tmp_path / "c", lambda document: document.update(left_out=["api_token", "auth.password"]))
    assert load(path).manifest.metadata.left_out == ("api_token", "auth.password")
    assert "without api_token, auth.password" in show(path)


def test_verify_consolidate_convert_and_their_errors(tmp_path: Path, capsys: Any) -> None:
    path, out = written(tmp_path / "c"), str(tmp_path / "out.safetensors")
    assert [main(["consolidate", path, out]) for _ in range(2)] == [0, 2]
    assert "exists already" in capsys.readouterr().err
    assert main(["consolidate", path, out, "--overwrite"]) == 0
    assert main(["convert", out, str(tmp_path / "again")]) == 0
    assert "layer.weight" in load(tmp_path / "again").weights()
    assert main(["convert", out, str(tmp_path / "averages"), "--averaged"]) == 2
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "There is no checkpoint" in capsys.readouterr().err
    assert main(["verify", path]) == 0
    assert "is intact" in capsys.readouterr().out
    flip(tmp_path / "c" / "state.json", 3)
    assert main(["verify", path]) == 1
    assert "state.json was altered" in capsys.readouterr().out


def lightning(path: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Write what Lightning's Trainer writes, and return the weights."""
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


def test_a_module_loads_a_converted_checkpoint_of_lightning(tmp_path: Path) -> None:  # F-14
    state = lightning(tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "c")
    module = Net.load_from_checkpoint(tmp_path / "c")
    assert module.last.weight is module.first.weight
    assert equal(dict(module.state_dict()), state)
    checkpoint = load(tmp_path / "c")
    assert checkpoint.weights_only
    assert checkpoint.hyper_parameters == {"width": 4}
    assert checkpoint.manifest.aliases == {"last.weight": "first.weight"}


def test_a_file_that_lightning_wrote(tmp_path: Path) -> None:
    # F-14. By Lightning 2.6.6: two epochs of two batches, StepLR, ModelCheckpoint; a hyper-parameter is nn.ReLU.
    with pytest.warns(UserWarning, match="'activation' cannot be stored as JSON and is left out"):
        convert(Path(__file__).parent / "lightning-2.6.6.ckpt", tmp_path / "c")
    checkpoint = load(tmp_path / "c")
    assert checkpoint.hyper_parameters == {"width": 3, "name": "lit"}
    weights = dict(checkpoint.weights())
    assert set(weights) == {"seen", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    torch.testing.assert_close(weights["net.0.bias"], torch.tensor([-0.1240502, 0.5156178, -0.135562]))


def test_averages_and_trained_weights_of_lightning(tmp_path: Path) -> None:
    # Lightning's WeightAveraging saves the averages as the state_dict.
    trained = {name: value + 1 for name, value in Net(4).state_dict().items()}
    averages = lightning(tmp_path / "a.ckpt", current_model_state=trained, averaging_state={"n_averaged": 3})
    for averaged, wanted in ((None, averages), (True, averages), (False, trained)):
        convert(tmp_path / "a.ckpt", tmp_path / "c", averaged=averaged)
        assert torch.equal(load(tmp_path / "c").weights()["first.bias"], wanted["first.bias"])
    lightning(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="holds no averages"):
        convert(tmp_path / "b.ckpt", tmp_path / "c", averaged=True)
    convert(tmp_path / "b.ckpt", tmp_path / "c", averaged=False)


class Planted:
    """Runs code when it is unpickled, as a planted pickle would."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


class Unknown:
    """A class that readers do not know."""


def test_sources_without_plain_weights_are_refused_and_run_nothing(tmp_path: Path, caplog: Any) -> None:  # F-04
    executed, source, out = tmp_path / "executed", tmp_path / "source", tmp_path / "out"
    for planted, message in (
        ({"callbacks": {"x": Planted(str(executed))}}, r"cannot be read safely(.|\n)*can run arbitrary code"),
        ({"state_dict": {"w": torch.ones(2), "odd": Unknown()}}, r"weights that are not plain tensors: odd\."),
    ):
        lightning(source, **planted)
        with pytest.raises(CheckpointError, match=message):
            convert(source, out)
    torch.save({"hyper_parameters": {"lr": 1}, "epoch": 3}, source)
    for path, message in (
        (source, r"holds no tensors\."),
        (tmp_path / "none", "does not exist"),
        (tmp_path, "a folder of an unknown format"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(path, out)
    assert os.listdir(tmp_path) == ["source"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("document", "prefix", "names"),
    [
        # what torch's dcp_to_torch_save makes of a folder
        pytest.param({"app": {"model": STATE}, "step": 3}, "", [*STATE], id="app.model."),
        pytest.param({"model": STATE, "epoch": 3}, "", [*STATE], id="model"),
        pytest.param({"model_state_dict": STATE, "epoch": 3}, "", [*STATE], id="model_state_dict"),
        pytest.param({"state_dict": {"model.w": torch.ones(1)}}, "", ["model.w"], id="a module's own prefix"),
        pytest.param({f"model.{name}": value for name, value in STATE.items()}, "model.", [*STATE], id="given prefix"),
    ],
)
def test_the_nesting_of_a_file_is_removed(document: Any, prefix: str, names: Any, tmp_path: Path, caplog: Any) -> None:
    torch.save(document, tmp_path / "a.pt")
    with caplog.at_level("INFO", "drivetrain"):
        convert(tmp_path / "a.pt", tmp_path / "c", prefix=prefix)
    assert ("'app.model.'" in caplog.text) == ("app" in document)
    assert sorted(load(tmp_path / "c").weights()) == sorted(names)
    with pytest.raises(CheckpointError, match="no tensors whose names begin with 'other'"):
        convert(tmp_path / "a.pt", tmp_path / "c", prefix="other")
