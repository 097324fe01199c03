"""What the engine costs one rank as the world grows, on torch's fake process group, where collectives cost nothing."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.calls import python_calls_a_step
from benchmarks.fake_world import FakeDDP, fake_world, keep
from benchmarks.nets import checksum
from benchmarks.slopes import over, spread
from drivetrain import Fit, TrainModule

SIZES = (1, 8, 64, 512, 4096)
SHORT, LONG = 1, 401
BATCH = 8


class Ones(Dataset[torch.Tensor]):
    """A data set of equal samples: the work is the same in any order."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8)


class Small(TrainModule):
    """A linear layer, whose step is short compared with the engine's overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def by_hand(size: int, steps: int) -> float:
    torch.manual_seed(0)
    module = Small()
    model = DistributedDataParallel(module.net)
    model.register_comm_hook(None, keep)
    optimizer = module.configure_optimizers()
    # Only this rank's part: `DistributedSampler` would shuffle the whole data set on every rank.
    for batch in DataLoader(Ones(steps * BATCH), batch_size=BATCH):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return checksum(module)


def by_engine(size: int, steps: int) -> float:
    torch.manual_seed(0)
    module = Small()
    loader = DataLoader(Ones(steps * BATCH * size), batch_size=BATCH, shuffle=True)
    strategy = FakeDDP(comm_hook=keep)
    Fit(strategy=strategy, accelerator="cpu", devices=size, max_epochs=1, barebones=True, seed=0).fit(module, loader)
    return checksum(module)


LOOPS: dict[str, Callable[[int, int], float]] = {"by hand": by_hand, "engine": by_engine}


def table(rounds: int) -> list[str]:
    """Return the lines of the table, measured with one thread. All sizes take turns in each round."""
    torch.set_num_threads(1)
    starts: dict[tuple[int, str], list[float]] = defaultdict(list)
    steps: dict[tuple[int, str], list[float]] = defaultdict(list)
    calls = {}
    for number in range(rounds):
        for size in SIZES:
            with fake_world(size):
                for name, loop in LOOPS.items():
                    if number == 0:
                        calls[size, name] = python_calls_a_step(lambda count, loop=loop, size=size: loop(size, count))  # type: ignore[misc]
                    start, few = _timed(loop, size, SHORT)
                    whole, _ = _timed(loop, size, LONG)
                    starts[size, name].append(start * 1e3)
                    steps[size, name].append((whole - start) / (LONG - SHORT) * 1e6)
                    if name != "by hand" and few != by_hand(size, SHORT):
                        raise SystemExit("The loops did different work.")
    lines = [
        f"{rounds} rounds, slopes between {SHORT} and {LONG} steps, in processor time; median (minimum to maximum).",
        "",
        "| Ranks | step by hand, us | engine, us | over, us | calls over | start by hand, ms | engine, ms | over, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        hand, engine = steps[size, "by hand"], steps[size, "engine"]
        row = [f"{size:,}", *(spread(values, 0) for values in (hand, engine, over(engine, hand)))]
        row.append(f"{calls[size, 'engine'] - calls[size, 'by hand']:.1f}")
        row += [spread(starts[size, name], 1) for name in LOOPS]
        row.append(spread(over(starts[size, "engine"], starts[size, "by hand"]), 1))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _timed(loop: Callable[[int, int], float], size: int, steps: int) -> tuple[float, float]:
    gc.collect()
    begun = time.process_time()
    value = loop(size, steps)
    return time.process_time() - begun, value
