"""Runs under `TORCH_CUDA_SANITIZER=1`, which raises an error if two streams access the same memory unordered.

In a rehearsal the emulation's own race detector is used instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda.devices import DEVICE, emulated, on_ranks
from benchmarks.cuda.loops import Job, Trained, by_engine, by_hand, gpt
from benchmarks.cuda.nets import TINY
from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from drivetrain import Fit
from drivetrain.callbacks import Checkpoint

COLUMNS = ["Strategy", "run", "found"]
BY_HAND = "by hand"
PLANTED = "a race that was planted"
STEPS = 6


class Augmented(Trained):
    """Modifies batches after they were copied to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].clone()]


class Evaluated(Trained):
    """Validates, and logs values."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation", self.loss_of(self.net, batch), sync_dist=True)


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    outcome = Outcome(COLUMNS)
    (found,) = on_ranks(_looked_at, piece.ranks, rehearse, piece.name, timeout=piece.seconds)
    for name, said in found.items():
        outcome.rows.append([f"`{piece.name}`", name, " ".join(said.split())[:300] or "nothing"])
        outcome.figures[name] = said
        if name == PLANTED:
            if not said:
                outcome.failures.append("the race that was planted was not found: nobody looks")
        elif said and name != BY_HAND:
            where = "; the loop by hand is told the same kind of thing" if found[BY_HAND] else ""
            outcome.failures.append(f"{name}: {said[-1500:]}{where}")
    if rehearse:
        outcome.not_shown.append("torch's sanitizer: what the emulation found stands in the table")
    return outcome


def _looked_at(strategy: str) -> dict[str, str]:
    """Runs on one rank: return the error found in each run, or ""."""
    job = Job(gpt(TINY), strategy=strategy)
    runs: dict[str, Callable[[], Any]] = {
        BY_HAND: lambda: by_hand(job, STEPS),
        "batches copied ahead": lambda: by_engine(job, STEPS),
        "bf16-mixed, clipped, windows of two": lambda: by_engine(
            Job(job.work, "bf16-mixed", strategy), STEPS, gradient_clip_val=0.5, accumulate_grad_batches=2
        ),
        "a hook on batches": lambda: by_engine(job, STEPS, kind=Augmented),
        "validation, values logged": lambda: _evaluated(job),
        "an asynchronous save": lambda: _saved(job),
        PLANTED: _race,
    }
    return {name: _found_in(run) for name, run in runs.items()}


def _found_in(run: Callable[[], Any]) -> str:
    gpu = emulated()
    if gpu is not None:
        gpu.forget()
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if gpu is not None and (gpu.races or gpu.frees_in_use):
        return gpu.report()
    return ""


def _race() -> None:
    """Read on one stream while another stream writes."""
    written = torch.ones(4, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        read = written + 1
    torch.cuda.synchronize()
    del read


def _evaluated(job: Job) -> None:
    loader = job.loader(STEPS, None, whole=True)
    _fit(job, max_epochs=2).fit(Evaluated(job), loader, loader)


def _saved(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        callback = Checkpoint(folder, save_async=True, every_n_train_steps=2)
        loader = job.loader(STEPS, None, whole=True)
        _fit(job, callbacks=[callback], enable_checkpointing=True, default_root_dir=folder).fit(Trained(job), loader)


def _fit(job: Job, **settings: Any) -> Fit:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"max_epochs": 1, **quiet, **settings}
    return Fit(accelerator=DEVICE, devices=1, strategy=job.strategy, **options)
