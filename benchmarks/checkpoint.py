"""Saving and loading against what the disk gives: safetensors' own files of the same tensors, in the same run.

    python -m benchmarks.checkpoint [--rounds 7] [--folder /tmp]

`save_file` is followed by fsync, as every file of ours is. `load_file` only maps a file, so each byte is touched
afterwards, as a checksum does. Rounds are interleaved and what counts is the median of their ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drivetrain.checkpoint import load
from drivetrain.checkpoint_format import Contents, save, stage
from drivetrain.control import LocalControl

LAYERS, WIDTH, VOCABULARY = 12, 768, 32_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


def gpt() -> dict[str, torch.Tensor]:
    """The parameters of a GPT of about 110 million."""
    shapes = {"embedding.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        for name, shape in {
            "attention.in.weight": (3 * WIDTH, WIDTH),
            "attention.out.weight": (WIDTH, WIDTH),
            "mlp.in.weight": (4 * WIDTH, WIDTH),
            "mlp.out.weight": (WIDTH, 4 * WIDTH),
            "norm.weight": (WIDTH,),
            "norm.bias": (WIDTH,),
        }.items():
            shapes[f"blocks.{layer}.{name}"] = shape
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save_with_library(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    descriptor = os.open(folder / "model.safetensors", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_with_us(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save(str(folder), Contents(tensors), LocalControl())


def load_with_library(folder: Path) -> None:
    for tensor in load_file(folder / "model.safetensors").values():
        tensor.sum()


def load_with_us(folder: Path) -> None:
    load(folder).weights().staged()


def copy(tensors: dict[str, torch.Tensor]) -> None:
    held = [tensor.clone() for tensor in tensors.values()]
    assert len(held) == len(tensors)


def snapshot(tensors: dict[str, torch.Tensor]) -> None:
    staged = stage(Contents(tensors), 0, 1, snapshot=True)
    assert staged.problem is None


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_of(work: Callable[[], None]) -> int:
    """Return by how many bytes this process grows at most while ``work`` runs, pages of mapped files left out."""
    done = threading.Event()
    peaks = [0]

    def anonymous() -> int:
        resident, shared = (int(field) for field in Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - shared) * _PAGE

    before = anonymous()

    def watch() -> None:
        while not done.wait(0.002):
            peaks[0] = max(peaks[0], anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        done.set()
        watching.join()
    return peaks[0]


def table(rounds: int, folder: Path) -> list[str]:
    """Return the lines of the table."""
    tensors = gpt()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    place = Path(tempfile.mkdtemp(dir=folder))
    pairs: dict[str, tuple[list[float], list[float]]] = {"save": ([], []), "load": ([], []), "snapshot": ([], [])}
    try:
        for number in range(rounds):
            theirs, ours = place / f"theirs{number}", place / f"ours{number}"
            # Taking turns, since who comes second finds the disk busy with the first.
            both = [
                (0, partial(save_with_library, tensors, theirs)),
                (1, partial(save_with_us, tensors, ours)),
            ]
            for side, work in both if number % 2 else reversed(both):
                os.sync()
                pairs["save"][side].append(seconds(work))
            load_with_library(theirs)  # both find the file in the disk's cache
            pairs["load"][0].append(seconds(partial(load_with_library, theirs)))
            pairs["load"][1].append(seconds(partial(load_with_us, ours)))
            pairs["snapshot"][0].append(seconds(partial(copy, tensors)))
            pairs["snapshot"][1].append(seconds(partial(snapshot, tensors)))
            shutil.rmtree(theirs)
            shutil.rmtree(ours)
        peak = peak_of(lambda: save_with_us(tensors, place / "peak"))
    finally:
        shutil.rmtree(place)
    names = {
        "save": "`save_file` and fsync",
        "load": "`load_file`, every byte touched",
        "snapshot": "a copy in memory",
    }
    lines = [
        f"{sum(tensor.numel() for tensor in tensors.values()) / 1e6:.0f} M parameters, {nbytes / 1e6:.0f} MB.",
        "",
        "| | against | theirs, GB/s | ours, GB/s | ours / theirs |",
        "|---|---|---|---|---|",
    ]
    for name, (theirs_seconds, ours_seconds) in pairs.items():
        rates = [nbytes / 1e9 / statistics.median(taken) for taken in (theirs_seconds, ours_seconds)]
        ratio = statistics.median(one / other for one, other in zip(theirs_seconds, ours_seconds, strict=True))
        lines.append(f"| {name} | {names[name]} | {rates[0]:.2f} | {rates[1]:.2f} | {ratio:.2f} |")
    largest = max(tensor.nbytes for tensor in tensors.values())
    lines += ["", f"A save takes {peak / 1e6:.0f} MB of memory besides; the largest tensor has {largest / 1e6:.0f} MB."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(table(options.rounds, options.folder)))


if __name__ == "__main__":
    main()
