"""What a program logs, recorded by hand: plain lists, and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.nets import Model, Parts
from oracle.outcome import Outcome, key_of, value_of
from oracle.program import Log, Program


@dataclass
class Call:
    """One call of ``log``, on one rank."""

    rank: int
    value: float
    weight: float


class LoggedValues:
    def __init__(self, program: Program, outcome: Outcome, net: Model) -> None:
        self.net = net
        self.logs = list(enumerate(program.logs))
        self.every = program.log_every
        self.outcome = outcome
        self.stage = "train"
        self.calls: dict[str, list[Call]] = {}
        self.last: dict[str, dict[int, float]] = {}
        self.fresh: dict[str, set[int]] = {}
        self.results: dict[str, float] = {}
        self.seen: dict[str, list[tuple[int, Parts]]] = {}
        self.began = False
        self.validated = False

    def begin(self, stage: str) -> None:
        """Begin an epoch: discard the values that the stage has collected."""
        self.stage = stage
        first, self.began = not self.began, True
        if stage == "train" and first:
            return  # values logged in on_train_start belong to the first epoch
        for number, log in self.logs:
            if stage_of(log) == stage:
                self.calls.pop(key_of(log, number), None)
                self.seen.pop(key_of(log, number), None)

    def log(
        self, where: str, rank: int, loss: Tensor | None, at: int, parts: Parts | None, samples: int | None = None
    ) -> None:
        """Log, on one rank, all values that the program logs at this place."""
        for number, log in self.logs:
            if log.where != where:
                continue
            key = key_of(log, number)
            if log.what in ("metric", "pearson"):
                self.calls.setdefault(key, [])
                if parts is not None:
                    self.seen.setdefault(key, []).append((rank, parts))
                continue
            value = value_of(log, self.net, loss, at)
            value = value.detach().double().item() if isinstance(value, Tensor) else float(value)
            weight = float(len(parts[2])) if parts is not None else 1.0 if samples is None else float(samples)
            weight = weight if log.batch_size is None else float(log.batch_size)
            self.calls.setdefault(key, []).append(Call(rank, value, weight))
            if log.on_step:
                self.last.setdefault(key, {})[rank] = value
                self.fresh.setdefault(key, set()).add(rank)

    def of_stage(self) -> list[tuple[str, Log]]:
        return [(key_of(log, number), log) for number, log in self.logs if stage_of(log) == self.stage]

    def after_step(self, steps: int) -> None:
        if self.every and steps % self.every == 0:
            self.outcome.flushes.append((steps, self.steps()))

    def steps(self) -> dict[str, float]:
        """Return the step values since the last call: rank 0's, or reduced over all ranks."""
        values = {}
        for key, log in self.of_stage():
            if not log.on_step or key not in self.fresh:
                continue
            by_rank = self.last[key]
            if log.sync_dist:
                came = [by_rank[rank] for rank in sorted(self.fresh[key])]
                self.last[key] = dict.fromkeys(by_rank, combined(log, came, [1.0] * len(came)))
            if log.sync_dist or 0 in self.fresh[key]:
                values[key + ("_step" if log.on_epoch else "")] = self.last[key].get(0, math.nan)
        for key, _ in self.of_stage():
            self.fresh.pop(key, None)
        return values

    def reduced(self) -> dict[str, float]:
        values = {}
        for key, log in self.of_stage():
            if not log.on_epoch or key not in self.calls:
                continue
            name = key + ("_epoch" if log.on_step else "")
            if log.what in ("metric", "pearson"):
                values[name] = metric(log, self.seen.get(key, []))
                continue
            calls = [one for one in self.calls[key] if log.sync_dist is not False or one.rank == 0]
            if calls:
                values[name] = combined(log, [one.value for one in calls], [one.weight for one in calls])
        self.results.update(values)
        return values

    def end(self, steps: int) -> None:
        self.outcome.flushes.append((steps, {**self.steps(), **self.reduced()}))
        self.validated = self.validated or self.stage == "validate"

    def monitored(self) -> float | None:
        """Return the value that a plateau scheduler monitors; None if it was read before."""
        fresh, self.validated = self.validated, False
        if not fresh:
            return None
        number, log = next((number, log) for number, log in self.logs if log.where == "validation_step")
        return self.results[key_of(log, number) + ("_epoch" if log.on_step else "")]

    def metrics(self) -> dict[str, float]:
        """Return all values, under every name that is unambiguous."""
        values = dict(self.results)
        for number, log in self.logs:
            key = key_of(log, number)
            if log.on_step and 0 in self.last.get(key, {}):
                values[key + ("_step" if log.on_epoch else "")] = self.last[key][0]
        return values


def stage_of(log: Log) -> str:
    return "validate" if "validation" in log.where else "train"


def combined(log: Log, values: list[float], weights: list[float]) -> float:
    if log.reduce_fx == "mean":
        if not math.fsum(weights):
            return math.nan
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)
    reduces: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
    if any(map(math.isnan, values)):  # Python's max and min ignore a nan that does not come first
        return math.nan
    return reduces[log.reduce_fx](values)


def metric(log: Log, seen: list[tuple[int, Parts]]) -> float:
    if log.what == "metric":
        return float(torch.cat([parts[2] for _, parts in seen]).double().mean())
    if all(len(parts[0]) == 1 for _, parts in seen) and len({rank for rank, _ in seen}) == len(seen):
        return math.nan  # torchmetrics considers the variance zero if no rank has two samples
    x = torch.cat([parts[0][:, 0] for _, parts in seen]).double()
    y = torch.cat([parts[1][:, 0] for _, parts in seen]).double()
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])
