"""Time a training step against the loop its user would have written: `make bench`.

Rounds are interleaved, and the slope between two numbers of steps is what counts, so that start-up drops out. Both
sides do the same work: a checksum of the trained weights says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def engine(build: Callable[[], nn.Module], steps: int, logged: int) -> float:
    torch.manual_seed(0)
    module = Timed(build(), logged)
    Fit(max_epochs=1, barebones=True, accelerator="cpu").fit(module, loader(steps))
    return checksum(module.net)


def checksum(net: nn.Module) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in net.parameters())


def seconds(run: Callable[[int], float], steps: int) -> tuple[float, float]:
    start = time.perf_counter()
    check = run(steps)
    return time.perf_counter() - start, check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of each")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, one thread, {rounds} rounds, {LONG - SHORT} steps a slope")
    print("| net | loop | us a step: median (min to max) | ratio to raw |")
    print("| --- | --- | --- | --- |")
    for name, build in NETS.items():
        loops: dict[str, Callable[[int], float]] = {
            "raw": lambda steps, build=build: raw(build, steps),
            "bare": lambda steps, build=build: engine(build, steps, 0),
            "one logged value": lambda steps, build=build: engine(build, steps, 1),
            "five logged values": lambda steps, build=build: engine(build, steps, 5),
        }
        slopes: dict[str, list[float]] = {label: [] for label in loops}
        for _ in range(rounds):
            checks = set()
            for label, run in loops.items():
                short, _ = seconds(run, SHORT)
                long, check = seconds(run, LONG)
                checks.add(check)
                slopes[label].append((long - short) / (LONG - SHORT) * 1e6)
            if len(checks) > 1:
                raise SystemExit(f"{name}: the loops did different work, their weights sum to {sorted(checks)}")
        for label, values in slopes.items():
            ratios = [value / base for value, base in zip(values, slopes["raw"], strict=True)]
            print(
                f"| {name} | {label} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) "
                f"| {statistics.median(ratios):.3f} |"
            )


if __name__ == "__main__":
    main()
