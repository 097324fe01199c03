"""How often the host waits for the device in steady-state steps, as counted by `torch.cuda.set_sync_debug_mode`.

Waits that torch does not see are not counted: those in libraries, waits for events, and pinning of pages.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.by_engine import train_by_engine
from benchmarks.cuda.devices import DEVICE, on_ranks
from benchmarks.cuda.loops import Job, Trained, by_engine, by_hand, fused_adamw, gpt, plain_adamw
from benchmarks.cuda.nets import TINY
from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from benchmarks.deepspeed_by_hand import STAGES, train_by_deepspeed, zero
from benchmarks.nets import BATCH
from drivetrain.callbacks import LossSpikeGuard, NonFiniteGuard, ProgressBar, ThroughputMonitor

COLUMNS = ["Strategy", "switched on", "waits by hand", "waits of the engine", "may wait", "why"]
FIRST, LAST, STEPS = 6, 26, 30
"""Between the batches of these steps it is counted: DDP has rebuilt its buckets by then, and nothing ends yet."""
STEADY = LAST - FIRST


class Way(NamedTuple):
    """A configuration, and how often it may wait in the counted steps, with the reason."""

    name: str
    settings: dict[str, Any]
    may: int = 0
    why: str = ""
    by_hand: bool = False  # the hand-written loop waits too


class LoggingEachStep(Trained):
    """Logs a value in each step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


FP16 = "once a step: whether it was skipped. torch's scaler asks too, save where a fused optimizer answers for itself"
FEW = [
    Way("nothing", {}, by_hand=True),
    Way("clipping", {"gradient_clip_val": 0.5}),
    Way("16-mixed", {"precision": "16-mixed"}, STEADY, FP16, by_hand=True),
]
WAYS = [
    *FEW,
    Way("16-mixed, not fused", {"precision": "16-mixed", "optimizer": plain_adamw}, STEADY, FP16, by_hand=True),
    Way("bf16-mixed", {"precision": "bf16-mixed"}, by_hand=True),
    Way("windows of two, clipped", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    Way("one value logged in each step", {"kind": LoggingEachStep}),
    Way(
        "a CSV file, a row every 5 steps",
        {"kind": LoggingEachStep, "logger": "csv", "log_every_n_steps": 5},
        STEADY // 5,
        "one packed copy for each row",
    ),
    Way("progress bar", {"kind": LoggingEachStep, "callbacks": ProgressBar}),
    Way("guards", {"callbacks": lambda: [ThroughputMonitor(), NonFiniteGuard()]}),
    Way("a guard of losses", {"callbacks": LossSpikeGuard}, STEADY // 10, "it looks at the losses every ten steps"),
]


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    outcome = Outcome(COLUMNS)
    (found,) = on_ranks(_counted, piece.ranks, rehearse, piece.name, timeout=piece.seconds)
    ways = {way.name: way for way in WAYS}
    if piece.name in STAGES:
        ways["nothing"] = ways["nothing"]._replace(why="as many as DeepSpeed by hand")
    for name, hand, engine in found:
        way = ways[name]
        counts = [None if each is None else sum(each.values()) for each in (hand, engine)]
        may = max(way.may, counts[0] or 0)
        shown = ["" if each is None else str(each) for each in counts]
        why = way.why or ("as many as by hand" if may else "")
        outcome.rows.append([f"`{piece.name}`", way.name, *shown, str(may), why])
        outcome.figures[way.name] = {"by hand": hand and dict(hand), "engine": dict(engine)}
        if sum(engine.values()) > may:
            places = "; ".join(f"{times} at {place}" for place, times in engine.most_common(5))
            outcome.failures.append(
                f"{way.name}: {sum(engine.values())} waits in {STEADY} steps, {may} may be: {places}"
            )
    outcome.notes.append(f"counted in {STEADY} steps after {FIRST}")
    return outcome


def _counted(strategy: str) -> list[tuple[str, Counter[str] | None, Counter[str]]]:
    """Runs on one rank: for each configuration, where the hand-written loop waits, if there is one, and where the
    engine does.
    """
    found: list[tuple[str, Counter[str] | None, Counter[str]]] = []
    hand: Counter[str] | None
    if strategy in STAGES:
        os.environ["DS_ACCELERATOR"] = DEVICE
        hand = _waits(lambda data: train_by_deepspeed(STAGES[strategy], STEPS, data=data, device=DEVICE), BATCH)
        train = partial(train_by_engine, zero(strategy), STEPS, accelerator=DEVICE)
        found.append((FEW[0].name, hand, _waits(lambda data: train(data=data), BATCH)))
        return found
    for way in WAYS if strategy == "single_device" else FEW:
        settings = dict(way.settings)
        work = dataclasses.replace(gpt(TINY), optimizer=settings.pop("optimizer", fused_adamw))
        job = Job(work, settings.pop("precision", "32-true"), strategy)
        hand = _waits(partial(by_hand, job, STEPS), TINY.batch) if way.by_hand else None
        engine = _waits(partial(_by_engine, job, settings=settings), TINY.batch)
        found.append((way.name, hand, engine))
    return found


def _by_engine(job: Job, data: Callable[[Tensor], Dataset[Any]], settings: dict[str, Any]) -> float:
    if not {"kind", "callbacks"} & settings.keys():
        return by_engine(job, STEPS, data, **settings)
    callbacks = settings.pop("callbacks", list)()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "barebones": False}
    quiet |= {"enable_progress_bar": False, "callbacks": callbacks}
    with tempfile.TemporaryDirectory() as folder:
        return by_engine(job, STEPS, data, **{**quiet, "default_root_dir": folder, **settings})


def _waits(run: Callable[[Any], float], batch: int) -> Counter[str]:
    """Return the lines of code at which the host waits between the batches."""
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            run(lambda tensor: _Watched(tensor, FIRST * batch, LAST * batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return places


class _Watched(Dataset[tuple[Tensor]]):
    """Switches counting on and off when two given samples are read."""

    def __init__(self, tensor: Tensor, first: int, last: int) -> None:
        self._tensor, self._modes = tensor, {first: "warn", last: "default"}

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if index in self._modes:
            torch.cuda.set_sync_debug_mode(self._modes[index])
        return (self._tensor[index],)

    def __len__(self) -> int:
        return len(self._tensor)


def _place() -> str:
    """Return the innermost line that is neither in torch nor in this file."""
    frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
    inner = [frame for frame in frames if not frame.filename.endswith(("syncs_part.py", "warnings.py"))]
    chosen = (inner or frames)[-1]
    return f"{'/'.join(chosen.filename.split('/')[-3:])}:{chosen.lineno} {chosen.line}"
