"""What a step costs in one process, over the loop that its user would have written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.nets import checksum
from benchmarks.slopes import cells, time_loops
from drivetrain import Fit, TrainModule

SHORT, LONG = 200, 1000
BATCH = 8

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 1),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)),
}


class Timed(TrainModule):
    """The raw loop's model, driven by the engine."""

    def __init__(self, net: nn.Module, logged: int) -> None:
        super().__init__()
        self.net = net
        self.names = [f"value_{number}" for number in range(logged)]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        for name in self.names:
            self.log(name, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(steps * BATCH, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)


def raw(build: Callable[[], nn.Module], steps: int) -> float:
    torch.manual_seed(0)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs, targets in loader(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return checksum(net)


def engine(build: Callable[[], nn.Module], logged: int, steps: int) -> float:
    torch.manual_seed(0)
    module = Timed(build(), logged)
    Fit(max_epochs=1, barebones=True, accelerator="cpu").fit(module, loader(steps))
    return checksum(module.net)


def table(rounds: int) -> list[str]:
    """The table's lines; one thread."""
    torch.set_num_threads(1)
    lines = [
        f"{rounds} rounds, slopes between {SHORT} and {LONG} steps; median (minimum to maximum).",
        "",
        "| Net | Loop | us a step | ratio | processor, us | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, build in NETS.items():
        loops = {
            "raw": partial(raw, build),
            "bare": partial(engine, build, 0),
            "one logged value": partial(engine, build, 1),
            "five logged values": partial(engine, build, 5),
        }
        slopes = time_loops(loops, SHORT, LONG, rounds)
        for label, slope in slopes.items():
            lines.append(f"| {' | '.join([name, label, *cells(slope, slopes['raw'], 1e-6, 1)])} |")
    return lines
