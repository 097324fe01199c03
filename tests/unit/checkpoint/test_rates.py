"""Counts the work of saving and loading: each byte is summed, written and verified once (F-17).

`make bench ARGS=checkpoint` measures the rates themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Fit, TrainModule
from drivetrain.checkpoint import load

# Private: the work is counted where it is done.
from drivetrain.checkpoint._format import checksums, tensor_reader
from drivetrain.checkpoint._format.eager_file import EagerFile

NUMBERS = ("model.safetensors", "optimizer-0.safetensors")


class Net(TrainModule):
    """9 MiB of weights, more than one checksum block, and twice as much optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(1536, 1536)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def fit() -> Fit:
    fit = Fit(max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    fit.fit(Net(), [torch.ones(1, 1536)])
    return fit


def _counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int]) -> list[int]:
    """Record the calls of ``owner.name`` without changing its behavior."""
    seen: list[int] = []
    work = getattr(owner, name)

    def counted(*args: Any) -> Any:
        seen.append(size(*args))
        return work(*args)

    monkeypatch.setattr(owner, name, counted)
    return seen


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_a_save_sums_and_writes_each_byte_once(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = _counting(monkeypatch, checksums, "crc32", lambda content, *_: len(content))
    written = _counting(monkeypatch, os, "writev", lambda _, contents: sum(map(len, contents)))
    synced = _counting(monkeypatch, os, "fsync", lambda descriptor: descriptor)
    fit.save_checkpoint(tmp_path / "c")
    sizes = _sizes(tmp_path / "c")
    assert sum(written) == sum(sizes.values())
    assert sum(summed) == sum(sizes.values()) - sizes["manifest.json"]
    # Every file, the temporary folder before its rename, the parent folder, and the run's record.
    assert len(synced) == len(sizes) + 3


def test_a_read_reads_and_checks_each_byte_once(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit.save_checkpoint(tmp_path / "c")
    checked = _counting(monkeypatch, tensor_reader, "crc32", len)
    read = _counting(monkeypatch, os, "preadv", lambda _, memories, begin: sum(map(len, memories)))
    checkpoint = load(tmp_path / "c")
    sources = [
        source
        for part in checkpoint.manifest.parts()
        if set(part.tensors) & set(NUMBERS)
        for source in checkpoint.tensors(part).values()
    ]
    first = [source.read() for source in sources]
    assert sum(read) == sum(checked) == sum(_sizes(tmp_path / "c")[name] for name in NUMBERS)
    again = [source.read() for source in sources]
    # J-10: memory of its own, not a map of the file, which others may truncate
    assert not {one.data_ptr() for one in first} & {one.data_ptr() for one in again}


@pytest.mark.parametrize("short", [False, True])
def test_more_contents_than_one_call_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    if short:  # a disk that writes 700 bytes per call, as a nearly full one may
        real = os.writev
        monkeypatch.setattr(os, "writev", lambda descriptor, contents: real(descriptor, [b"".join(contents)[:700]]))
    contents = [b"", b"a" * 1000, b"", b"bc", *(bytes([number % 256]) for number in range(5000)), b""]
    with EagerFile(tmp_path / "f") as file:
        file.writelines(contents)
        file.write(b"end")
    assert (tmp_path / "f").read_bytes() == b"".join(contents) + b"end"
