"""The work of saving and loading: each byte is summed, written and verified once (F-17).

`make bench ARGS=checkpoint` measures the rates themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import OneLayer, quiet

# Private: the work is counted where it is done.
from drivetrain._format import file_writer, tensor_reader
from drivetrain._format.pinned_copies import pinned_copies
from drivetrain._storage.local_folder import WritebackFile
from drivetrain.checkpoint import load
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda

NUMBERS = ("model.safetensors", "optimizer-0.safetensors")


def test_a_save_and_a_load_process_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F-17
    def counting(owner: Any, name: str, size: Callable[..., int]) -> list[int]:
        seen: list[int] = []
        work = getattr(owner, name)

        def counted(*args: Any) -> Any:
            seen.append(size(*args))
            return work(*args)

        monkeypatch.setattr(owner, name, counted)
        return seen

    fit = quiet(max_steps=1, default_root_dir=tmp_path / "runs")
    fit.fit(OneLayer(1536, 1536), [torch.ones(1, 1536)])  # more than one block of checksums
    summed = counting(file_writer, "crc32", lambda content, *_: len(content))
    written = counting(os, "writev", lambda _, contents: sum(map(len, contents)))
    synced = counting(os, "fsync", lambda descriptor: descriptor)
    fit.save_checkpoint(tmp_path / "c")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "c").iterdir()}
    record = next((tmp_path / "runs").rglob("run.json")).stat().st_size
    assert sum(written) == sum(sizes.values()) + record
    assert sum(summed) == sum(sizes.values()) - sizes["manifest.json"]
    # Every file, the temporary folder before its rename, the parent folder, and the run's record.
    assert len(synced) == len(sizes) + 3

    checked = counting(tensor_reader, "crc32", len)
    read = counting(os, "preadv", lambda _, memories, begin: sum(map(len, memories)))
    checkpoint = load(tmp_path / "c")
    parts = [part for part in checkpoint.manifest.parts() if set(part.tensors) & set(NUMBERS)]
    sources = [source for part in parts for source in checkpoint.tensors(part).values()]
    first = [source.read() for source in sources]
    assert sum(read) - sizes["manifest.json"] == sum(checked) == sum(sizes[name] for name in NUMBERS)
    again = [source.read() for source in sources]
    # J-10: memory of its own, not a map of the file, which others may truncate
    assert not {one.data_ptr() for one in first} & {one.data_ptr() for one in again}


@pytest.mark.parametrize("short", [False, True])
def test_more_contents_than_one_call_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    if short:  # a disk that writes 700 bytes per call, as a nearly full one may
        real = os.writev
        monkeypatch.setattr(os, "writev", lambda descriptor, contents: real(descriptor, [b"".join(contents)[:700]]))
    contents = [b"", b"a" * 1000, b"", b"bc", *(bytes([number % 256]) for number in range(5000)), b""]
    with WritebackFile(tmp_path / "f") as file:
        file.writelines(contents)
        file.write(b"end")
    assert (tmp_path / "f").read_bytes() == b"".join(contents) + b"end"


def _copied(gpu: EmulatedCuda) -> list[Any]:
    tensors = [
        *(torch.randn(3, 5), torch.arange(7), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 4)),
        *(torch.tensor([True, False, True]), torch.randn(2, dtype=torch.complex64), torch.nn.Parameter(torch.randn(9))),
    ]
    tensors = [tensor.to("cuda") for tensor in tensors] + [torch.randn(4, 6, device="cuda").t()]
    gpu.forget()
    copies = pinned_copies(tensors)
    blocking = [copy.blocking for copy in gpu.copies]
    torch.cuda.synchronize()
    torch.testing.assert_close(copies, [tensor.detach().cpu() for tensor in tensors], rtol=0, atol=0)
    return [blocking, [copy.is_pinned() for copy in copies if copy.numel()]]


@requires_emulated_cuda()
def test_copies_for_a_save_in_the_background_are_pinned_and_do_not_block() -> None:  # O-02
    blocking, pinned = on_emulated_cuda(_copied).returned
    assert blocking == [False] * 7
    assert pinned == [True] * 7
