"""fp16, fused optimizers, `torch.compile` and CUDA graphs: weights equal to the hand-written loop, and the cost of a
step.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.cuda.devices import devices, full_precision
from benchmarks.cuda.loops import Job, Trained, by_engine, by_hand, gpt, plain_adamw, small
from benchmarks.cuda.nets import TINY, Shape
from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from benchmarks.slopes import Slopes, ratios, spread, time_loops
from drivetrain import Fit

COLUMNS = ["Variant", "precision", "ms a step by hand", "engine", "over by hand", "weights apart, relatively"]
MEDIUM = Shape(width=512, depth=6, heads=8, length=512, batch=8)
SHALLOW = dataclasses.replace(MEDIUM, depth=2)
"""What is compiled anew in each run had better be short."""
NEAR = {"32-true": 1e-4, "16-mixed": 5e-2, "bf16-mixed": 5e-2}
"""How far, relatively, the weights' checksums may lie."""


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    outcome = Outcome(COLUMNS)
    with devices(count, rehearse):
        full_precision()
        for title, job in _jobs(piece.name, rehearse):
            slopes, apart = _timed(job, 1 if rehearse else 3) if job.compile is None else _timed_compiled(job, rehearse)
            hand, engine = (slopes[name] for name in ("by hand", "engine"))
            cells = [spread([1e3 * value for value in one.wall], 3) for one in (hand, engine)]
            outcome.rows.append(
                [title, job.precision, *cells, spread(ratios(engine.wall, hand.wall), 3), f"{apart:.1e}"]
            )
            outcome.figures[title] = {"by hand": hand.wall, "engine": engine.wall, "apart": apart}
            if not apart <= NEAR[job.precision]:
                outcome.failures.append(f"{title}: the weights' checksums lie {apart:.1e} apart")
        if piece.name == "cuda-graphs":
            _epoch_mean(rehearse, outcome)
    if rehearse and piece.name in ("compile", "cuda-graphs"):
        outcome.not_shown.append(
            "code for a device that Inductor makes, and CUDA graphs: torch.compile ran with backend='eager'"
        )
    return outcome


def _jobs(name: str, rehearse: bool) -> list[tuple[str, Job]]:
    work = gpt(TINY, 2, 4) if rehearse else gpt(MEDIUM, 5, 45)
    plain = dataclasses.replace(work, optimizer=plain_adamw)
    if name == "fp16":
        return [("fp16, fused AdamW", Job(work, "16-mixed")), ("fp16, AdamW", Job(plain, "16-mixed"))]
    if name == "fused":
        few: dict[str, Any] = {"optimizer": _fused_sgd}
        return [
            ("fused AdamW", Job(work, "bf16-mixed")),
            ("AdamW", Job(plain, "bf16-mixed")),
            ("fused SGD on `mlp`", Job(dataclasses.replace(small("mlp", rehearse), **few))),
        ]
    if name == "compile":
        return [("torch.compile", _compiled({}, rehearse))]
    return [("CUDA graphs, mode='reduce-overhead'", _compiled({"mode": "reduce-overhead"}, rehearse))]


def _compiled(options: dict[str, Any], rehearse: bool) -> Job:
    work = gpt(TINY, 2, 6) if rehearse else gpt(SHALLOW, 10, 60)
    return Job(work, "bf16-mixed", compile={"backend": "eager"} if rehearse else options)


def _timed(job: Job, rounds: int) -> tuple[dict[str, Slopes], float]:
    """Return the slopes of both loops, and the difference of their weights' checksums."""
    seen: list[float] = []

    def note(steps: int, sums: Mapping[str, float]) -> None:
        seen.append(abs(sums["engine"] - sums["by hand"]) / max(abs(sums["by hand"]), 1e-9))

    loops = {"by hand": partial(by_hand, job), "engine": partial(by_engine, job)}
    for loop in loops.values():
        loop(job.work.short)  # already compiled
    gc.collect()
    return time_loops(loops, job.work.short, job.work.long, rounds, compare=note), max(seen)


def _timed_compiled(job: Job, rehearse: bool) -> tuple[dict[str, Slopes], float]:
    """Return the same for loops that compile in each run: the clock is read from step `short` to the last step."""
    slopes, apart = {"by hand": Slopes(), "engine": Slopes()}, 0.0
    for _ in range(1 if rehearse else 2):
        sums = {}
        for name, loop in (("by hand", by_hand), ("engine", by_engine)):
            _forget_graphs(rehearse)
            gc.collect()
            clock = _Clock(job.work.short * job.work.batch, (job.work.long - 1) * job.work.batch)
            sums[name] = loop(job, job.work.long, clock.data)
            seconds = clock.times[1] - clock.times[0]
            slopes[name].wall.append(seconds / (job.work.long - 1 - job.work.short))
        apart = max(apart, abs(sums["engine"] - sums["by hand"]) / max(abs(sums["by hand"]), 1e-9))
    return slopes, apart


def _forget_graphs(rehearse: bool) -> None:
    """Reset the compiler and free memory that CUDA graphs hold; otherwise its recompile limit is soon reached."""
    if not rehearse:  # it requires the allocator of a CUDA build
        torch._dynamo.reset()


class _Clock:
    """Reads the clock when two given samples are read, after synchronizing the device."""

    def __init__(self, *samples: int) -> None:
        self.samples = samples
        self.times: list[float] = []

    def data(self, tensor: Tensor) -> Dataset[tuple[Tensor]]:
        return _Watched(self, tensor)


class _Watched(Dataset[tuple[Tensor]]):
    def __init__(self, clock: _Clock, tensor: Tensor) -> None:
        self._clock, self._tensor = clock, tensor

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if index in self._clock.samples:
            torch.cuda.synchronize()
            self._clock.times.append(time.perf_counter())
        return (self._tensor[index],)

    def __len__(self) -> int:
        return len(self._tensor)


class Logging(Trained):
    """Logs its loss, whose tensor a CUDA graph overwrites at its next replay, and keeps its value."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _epoch_mean(rehearse: bool, outcome: Outcome) -> None:
    """Check that the epoch's mean is over each step's loss, rather than the last one repeated."""
    _forget_graphs(rehearse)
    job = _compiled({"mode": "reduce-overhead"}, rehearse)
    module = Logging(job)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    fit = Fit(accelerator="cuda", devices=1, precision=job.precision, max_epochs=1, log_every_n_steps=50, **quiet)
    fit.fit(module, job.loader(12, None, whole=False))
    logged, mean = float(fit.callback_metrics["loss_epoch"]), statistics.fmean(map(float, module.losses))
    outcome.figures["mean of the logged losses"] = {"logged": logged, "kept": mean}
    if not abs(logged - mean) <= 1e-4 * abs(mean):
        outcome.failures.append(f"the mean of the losses that were logged is {logged}, of those kept {mean}")


def _fused_sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
