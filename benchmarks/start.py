"""What start-up costs: import, construction, first step; modules and memory. Each run has a process of its own."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.slopes import over, spread
from benchmarks.system_memory import peak

PHASES = ("import", "construct", "first step")

Mark = Callable[[], None]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=8)


def by_hand(mark: Mark) -> None:
    mark()
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    mark()
    for (batch,) in loader():
        net(batch).mean().backward()
        optimizer.step()
        break
    mark()


def ours(mark: Mark, **options: Any) -> None:
    from drivetrain import Fit, TrainModule

    mark()

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            mark()

    module = Module()
    trainer = Fit(max_steps=1, accelerator="cpu", **options)
    mark()
    trainer.fit(module, loader())


def bare(mark: Mark) -> None:
    ours(mark, barebones=True)


def lightning(mark: Mark) -> None:
    from lightning import LightningModule, Trainer  # type: ignore[import-not-found, unused-ignore]

    mark()

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            mark()

    module = Module()
    trainer = Trainer(max_steps=1, accelerator="cpu", barebones=True)
    mark()
    trainer.fit(module, loader())


def accelerate(mark: Mark) -> None:
    from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]

    mark()
    net = nn.Linear(8, 1)
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), loader())
    mark()
    for (batch,) in batches:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        break
    mark()


WAYS: dict[str, Callable[[Mark], None]] = {
    "by hand": by_hand,
    "drivetrain, bare": bare,
    "drivetrain, defaults": ours,
    "Lightning, bare": lightning,
    "Accelerate": accelerate,
}
NEEDS = {"Lightning, bare": "lightning", "Accelerate": "accelerate"}


def begin(way: str) -> None:
    """Start once, in this fresh process, and print the cost."""
    torch.set_num_threads(1)
    by_hand(lambda: None)  # torch imports a thousand modules in its first step, which no framework is charged for
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    # A full collection of everything torch has imported takes longer than what is timed, and occurs at arbitrary
    # points.
    gc.disable()
    modules, memory = len(sys.modules), peak()
    mark()
    WAYS[way](mark)
    grown = peak() - memory
    pairs = list(itertools.pairwise(marks))[: len(PHASES)]
    phases = [[(late - early) * 1e3 for early, late in zip(*pair, strict=True)] for pair in pairs]
    print(json.dumps({"phases": phases, "modules": len(sys.modules) - modules, "memory": grown / 2**20}))


def _run(way: str, folder: str) -> dict[str, Any]:
    # As with an installed package: bytecode of earlier imports is cached.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode")), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "benchmarks.start", way]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(rounds: int) -> list[str]:
    """Return the lines of the table."""
    ways = [way for way in WAYS if find_spec(NEEDS.get(way, "torch")) is not None]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first run writes the bytecode cache and is not counted
            for way in ways:
                told = _run(way, folder)
                if number:
                    runs[way].append(told)
    lines = [
        f"{rounds} rounds, each run in a process of its own; milliseconds of the processor, median (minimum to "
        "maximum).",
        "",
        f"| Begun | {' | '.join(PHASES)} | the last two over by hand | the same by the clock | modules | memory, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in ways:
        row = [way, *(spread([run["phases"][number][1] for run in runs[way]], 1) for number in range(len(PHASES)))]
        for which in (1, 0):
            mine, hand = (
                [run["phases"][1][which] + run["phases"][2][which] for run in runs[one]] for one in (way, ways[0])
            )
            row.append("" if way == ways[0] else spread(over(mine, hand), 1))
        row += [f"{runs[way][0]['modules']}", spread([run["memory"] for run in runs[way]], 1)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


if __name__ == "__main__":
    begin(sys.argv[1])
