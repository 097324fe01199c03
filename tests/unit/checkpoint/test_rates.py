"""Counts the work of saving and loading: each byte is summed, written and verified once (F-17).

`make bench ARGS=checkpoint` measures the rates themselves.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import equal

from drivetrain import Fit, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import load
from drivetrain.checkpoint._format import Contents, Sizes, checksums, save, tensor_reader
from drivetrain.checkpoint._format.eager_file import EagerFile
from drivetrain.checkpoint._format.file_writer import FileWriter
from drivetrain.checkpoint._format.tensor_file import DTYPES, NAMES
from drivetrain.strategies import load_named_optimizer_state, named_optimizer_state

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


class _SlowDisk:
    """A sink that blocks until it is released."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.called, self.ready = threading.Event(), threading.Event()

    def writelines(self, contents: Sequence[Any]) -> None:
        self.calls.append([bytes(content) for content in contents])
        self.called.set()
        assert self.ready.wait(30)


def test_what_waits_for_the_disk_is_written_together() -> None:
    disk = _SlowDisk()
    writer = FileWriter(disk)
    contents = [bytes([number]) * number for number in range(20)]
    writer.write(b"header")
    assert disk.called.wait(30)
    for content in contents:
        writer.write(content, borrowed=True)
    disk.ready.set()
    record = writer.record()
    writer.close()
    assert disk.calls == [[b"header"], contents]
    assert record.size == len(b"header") + sum(map(len, contents))


@pytest.fixture
def _short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that writes 700 bytes per call, as a nearly full one may."""
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, contents: real(descriptor, [b"".join(contents)[:700]]))


@pytest.mark.usefixtures("_short_writes")
def test_what_a_call_leaves_is_written_by_the_next(tmp_path: Path) -> None:
    contents = [b"", b"a" * 1000, b"", b"bc", *(bytes([number % 256]) for number in range(3000)), b""]
    with EagerFile(tmp_path / "f") as file:
        file.writelines(contents)
        file.write(b"end")
    assert (tmp_path / "f").read_bytes() == b"".join(contents) + b"end"


def test_more_contents_than_one_call_takes(tmp_path: Path) -> None:
    contents = [bytes([number % 256]) for number in range(5000)]
    with EagerFile(tmp_path / "f") as file:
        file.writelines(contents)
    assert (tmp_path / "f").read_bytes() == b"".join(contents)


def _many_small(count: int) -> dict[str, torch.Tensor]:
    """Tensors of every dtype, including strided, conjugated and empty ones, with a large one between them."""
    found: dict[str, torch.Tensor] = {}
    for number in range(count):
        dtype = list(DTYPES.values())[number % len(DTYPES)]
        values = (torch.arange(2 * (number % 7)) + number % 90).to(dtype).view(2, -1)
        found[f'part."{number}"'] = values.t() if number % 3 else values.conj()
        if number == count // 2:
            found["large"] = torch.arange(300_000.0)
    return found


def _file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the same tensors encoded as the safetensors format specifies, one by one."""
    places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        values = bytes(tensor.resolve_conj().contiguous().flatten().view(torch.uint8).numpy())
        offsets = [len(content), len(content) + len(values)]
        places[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        content += values
    header = json.dumps(places, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % 64)
    return len(header).to_bytes(8, "little") + header + content


def test_small_tensors_are_written_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _many_small(4000)
    written = _counting(monkeypatch, FileWriter, "write", lambda _, content, *borrowed: len(content))
    save(str(tmp_path / "c"), Contents(tensors), LocalControl())
    expected = _file_of(tensors)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == expected
    # The header, the tensors before the large one, the large one itself, and those after it.
    assert len(written) == 4
    assert sum(written) == len(expected)
    assert written[2] == tensors["large"].nbytes
    found = load(tmp_path / "c").weights().staged()
    assert all(equal(found[name], tensor.resolve_conj()) for name, tensor in tensors.items())


def test_what_is_copied_to_be_written_together_is_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{number}": torch.full((1024,), float(number)) for number in range(2000)}
    written = _counting(monkeypatch, FileWriter, "write", lambda _, content, *borrowed: len(content))
    save(str(tmp_path / "c"), Contents(tensors), LocalControl(), sizes=Sizes(piece=2**17))
    assert max(written[1:]) == 2**17
    assert len(written) == 1 + -(-2000 * 4096 // 2**17)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == _file_of(tensors)


def test_a_large_tensor_is_written_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{number}": torch.full((2**15,), float(number)) for number in range(20)}
    borrowed = _counting(monkeypatch, FileWriter, "write", lambda _, content, borrowed=False: borrowed)
    save(str(tmp_path / "c"), Contents(tensors), LocalControl())
    assert borrowed == [False, *[True] * 20]


def test_a_value_is_not_looked_for_among_all_parameters() -> None:
    """PyTorch's `load_state_dict` looks up the parameter group of each value."""
    module = torch.nn.ParameterList(torch.ones(2) for _ in range(6))
    groups: list[dict[str, Any]] = [{"params": module[:2], "lr": 0.1}, {"params": module[2:]}]
    optimizer = torch.optim.Adam(groups)
    module[3].grad = torch.ones(2)
    optimizer.step()
    saved = named_optimizer_state(module, optimizer)
    given: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = [{"params": module[:2], "lr": 0.1}, {"params": module[2:]}]
    other = torch.optim.Adam(others)
    other.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    load_named_optimizer_state(module, other, saved)
    assert [group["params"] for group in given[0]["param_groups"]] == [range(2), range(2, 6)]
    assert all(equal(one, other.state[module[3]][key]) for key, one in optimizer.state[module[3]].items())
    assert [group["params"] for group in other.param_groups] == [list(module[:2]), list(module[2:])]


def test_an_optimizers_state_is_read_without_the_weights(fit: Fit, tmp_path: Path) -> None:
    fit.save_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").unlink()
    assert load(tmp_path / "c").optimizer_state()["state"]["body.bias"]["step"] == 1
