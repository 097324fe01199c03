"""consolidate and convert: what they refuse to write, and the nesting of names that they take off."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain import CheckpointError, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import consolidate, convert, load
from drivetrain.checkpoint.__main__ import main
from drivetrain.checkpoint._format import CheckpointMetadata, Contents, save


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def checkpoint(path: Path, **metadata: Any) -> Path:
    save(str(path), Contents({"layer.weight": torch.ones(2, 2)}, CheckpointMetadata(**metadata)), LocalControl())
    return path


class TestConsolidate:
    @pytest.mark.parametrize("out", ["out.pt", "out.bin", "new/out.PTH", "memory://consolidated/out.ckpt"])
    def test_a_file_of_another_format_is_refused(self, out: str, tmp_path: Path) -> None:
        # it made a folder called out.pt
        target = out if "://" in out else tmp_path / out
        with pytest.raises(CheckpointError, match=r"out\.(pt|bin|PTH|ckpt)") as caught:
            consolidate(checkpoint(tmp_path / "c"), target)
        assert "out.safetensors" in caught.value.fix
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]

    def test_a_folder_with_a_dot_is_a_folder(self, tmp_path: Path) -> None:
        assert consolidate(checkpoint(tmp_path / "c"), tmp_path / "v1.5") == str(tmp_path / "v1.5/model.safetensors")

    @pytest.mark.parametrize("out", ["one.safetensors", "folder", "memory://overwritten"])
    def test_a_file_that_exists_is_not_overwritten(self, out: str, tmp_path: Path) -> None:
        # it replaced the file without a word
        target = out if "://" in out else str(tmp_path / out)
        consolidate(checkpoint(tmp_path / "c"), target)
        with pytest.raises(CheckpointError, match="exists already"):
            consolidate(tmp_path / "c", target)

    def test_an_adapter_is_no_model(self, tmp_path: Path) -> None:
        # it wrote the adapter as if it were the whole model
        path = checkpoint(tmp_path / "c", base={"base.weight": "0" * 16}, weights_only=True)
        with pytest.raises(CheckpointError, match=r"lacks 'base\.weight'") as caught:
            consolidate(path, tmp_path / "out")
        assert "load_from_checkpoint" in caught.value.fix
        assert not (tmp_path / "out").exists()

    def test_the_command_reports_it_and_overwrites_if_asked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path, out = str(checkpoint(tmp_path / "c")), str(tmp_path / "out.safetensors")
        assert [main(["consolidate", path, out]) for _ in range(2)] == [0, 2]
        assert "exists already" in capsys.readouterr().err
        assert main(["consolidate", path, out, "--overwrite"]) == 0


def merged(folder: Path, state: dict[str, Any]) -> Path:
    """Return a file of the state, which torch's own command has merged from a folder of DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
        dcp_to_torch_save(folder, folder / "merged.pt")
    return folder / "merged.pt"


def converted(path: Path, tmp_path: Path, **options: Any) -> list[str]:
    convert(path, tmp_path / "c", **options)
    return sorted(load(tmp_path / "c").weights())


PLAIN = ["layer.bias", "layer.weight"]


class TestNesting:
    @pytest.mark.parametrize("nest", [("model",), ("module",), ("app", "model")])
    def test_of_a_merged_dcp_folder_is_taken_off_with_one_line(
        self, nest: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        # the names kept "model.", so that they fitted no module
        state: dict[str, Any] = Net().state_dict()
        for key in reversed(nest):
            state = {key: state}
        with caplog.at_level(logging.INFO, "drivetrain"):
            assert converted(merged(tmp_path / "dcp", {**state, "step": 3}), tmp_path) == PLAIN
        (line,) = [record.getMessage() for record in caplog.records]
        assert repr(".".join(nest) + ".") in line
        Net.load_from_checkpoint(tmp_path / "c")

    def test_names_of_the_module_itself_stay(self, tmp_path: Path) -> None:
        state = {f"model.{name}": value for name, value in Net().state_dict().items()}
        for more in ({}, {"pytorch-lightning_version": "2.6.0"}):
            torch.save({"state_dict": state, **more}, tmp_path / "a.ckpt")
            assert converted(tmp_path / "a.ckpt", tmp_path) == ["model.layer.bias", "model.layer.weight"]

    @pytest.mark.parametrize("nest", ["model", "module", "model_state_dict"])
    def test_of_a_file_is_taken_off(self, nest: str, tmp_path: Path) -> None:
        # "holds no tensors"
        torch.save({nest: Net().state_dict(), "epoch": 3}, tmp_path / "a.pt")
        assert converted(tmp_path / "a.pt", tmp_path) == PLAIN

    def test_the_prefix_of_data_parallel_modules_is_taken_off(self, tmp_path: Path) -> None:
        torch.save({f"module.{name}": value for name, value in Net().state_dict().items()}, tmp_path / "a.pt")
        assert converted(tmp_path / "a.pt", tmp_path) == PLAIN


def test_a_consolidated_file_is_converted_back(tmp_path: Path) -> None:
    path = consolidate(checkpoint(tmp_path / "c"), tmp_path / "one.safetensors")
    convert(path, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").weights()["layer.weight"], load_file(path)["layer.weight"])


def test_a_file_without_tensors_is_refused_without_naming_a_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"hyper_parameters": {"lr": 1}, "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"holds no tensors\."):
        convert(tmp_path / "a.pt", tmp_path / "out")
    assert not caplog.records
