"""Saving and loading with AdamW: a GPT with 100 M parameters against the disk and other frameworks; small tensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.by_engine import Trained, train_by_engine
from benchmarks.checkpoint_rounds import COPY, Found, compare, compare_small
from benchmarks.checkpoint_ways import Disk, Ours, Pickle, Slower
from benchmarks.nets import GPT
from benchmarks.slopes import spread
from benchmarks.system_memory import growth
from drivetrain.testing import run_distributed

TARGETS = [
    ("save", "save", Disk.name, Ours, "0.75"),
    ("save, without `fast`", "save", Disk.name, Slower, ""),
    ("read", "read", Disk.name, Ours, "0.8"),
    ("read, without `fast`", "read", Disk.name, Slower, ""),
    ("read, nothing cached", "read from the disk", Disk.name, Ours, ""),
    ("read, nothing cached, without `fast`", "read from the disk", Disk.name, Slower, ""),
    ("load into net and optimizer", "load", Disk.name, Ours, ""),
    ("stall of an asynchronous save", "stall", COPY, Ours, "0.83"),
]
"""What the row is called, what it times, against whom, which of ours, and the rate to reach."""

SMALL = 40_000
SMALL_TARGETS = [
    ("save", "save", Pickle.name, Ours, "0.83"),
    ("read", "read", Pickle.name, Ours, ""),
    ("load into net and optimizer", "load", Pickle.name, Ours, ""),
]
"""The same for small tensors: within 1.2 of what torch.save and fsync take."""


class Scattered(nn.Module):
    """A network of many parameters with 32 numbers each; its loss is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(32) for _ in range(SMALL))

    def forward(self, text: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def gpt() -> GPT:
    """A GPT of 100 million parameters."""
    return GPT(width=768, depth=12, heads=12, vocabulary=10_000)


class Measured(Trained):
    """A network that is measured after its first step, when its optimizer has moments."""

    def __init__(self, measure: Callable[[Trained], Any], net: nn.Module) -> None:
        super().__init__(net)
        self.measure = measure

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.found = self.measure(self)


def measured(strategy: str, measure: Callable[[Trained], Any], net: Callable[[], nn.Module] = gpt) -> Any:
    """Runs on one rank: return what ``measure`` returns."""
    module = Measured(measure, net())
    train_by_engine(strategy, 1, module)
    return module.found


def peak_of_a_save(module: Trained) -> int:
    """Runs on one of several ranks: return by how many bytes this process grows during a save."""
    trainer, grown = module.trainer, 0
    folder = Path(trainer.strategy.control.broadcast_object(tempfile.mkdtemp()))
    for name in ("first", "second"):  # imports on the way must not be counted
        grown = growth(partial(trainer.save_checkpoint, folder / name))
    shutil.rmtree(folder, ignore_errors=True)
    return grown


def table(rounds: int) -> list[str]:
    """Return the lines of the tables; each process has one thread."""
    spread_out = max(run_distributed(measured, 2, "fsdp", peak_of_a_save, timeout=600.0))
    found = run_distributed(measured, 1, "single_device", partial(compare, rounds), timeout=7200.0)[0]
    small = run_distributed(measured, 1, "single_device", partial(compare_small, rounds), Scattered, timeout=7200.0)[0]
    net = gpt()
    block = sum(parameter.nbytes for parameter in net.blocks[0].parameters())
    root = sum(parameter.nbytes for parameter in net.parameters()) - len(net.blocks) * block
    return [
        f"{_mb(found.nbytes)} MB of weights and moments; {rounds} rounds, median (minimum to maximum).",
        "",
        *_rates(found, TARGETS),
        "",
        f"A save takes {_mb(found.savers[Ours.name].peak)} MB of memory besides, and under FSDP on two processes "
        f"{_mb(spread_out)} MB on the one that takes more. Of FSDP's units a block has {_mb(block)} MB, the root with "
        f"embedding and head {_mb(root)} MB.",
        "",
        *_beside_others(found),
        "",
        f"{SMALL:,} parameters of 32 numbers with their moments and steps, {4 * SMALL:,} tensors and "
        f"{_mb(small.nbytes)} MB, against `torch.save` and fsync:",
        "",
        *_rates(small, SMALL_TARGETS),
    ]


def _rates(found: Found, targets: Sequence[tuple[str, str, str, type[Ours], str]]) -> list[str]:
    lines = ["| | theirs, ms | ours, ms | ours as a rate of theirs | at least |", "|---|---|---|---|---|"]
    for label, what, against, ours, target in targets:
        theirs, mine = found.times[what][against], found.times[what][ours.name]
        rates = [one / other for one, other in zip(theirs, mine, strict=True)]
        lines.append(_row(label, _ms(theirs), _ms(mine), spread(rates, 2), target))
    return lines


def _beside_others(found: Found) -> list[str]:
    titles = ["", "save, ms", "load, ms", "stall, ms", "memory of a save, MB", "syncs", "checks"]
    lines = [_row(*titles), "|---" * len(titles) + "|"]
    for name, saver in found.savers.items():
        times = [_ms(found.times[what].get(name, [])) for what in ("save", "load", "stall")]
        lines.append(_row(name, *times, _mb(saver.peak), _yes(saver.syncs), _yes(saver.checks)))
    return [*lines, *(_row(name, "not installed", *[""] * (len(titles) - 2)) for name in found.missing)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: Sequence[float]) -> str:
    return spread([1e3 * value for value in seconds], 0) if seconds else "none"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _yes(true: bool) -> str:
    return "yes" if true else "no"
