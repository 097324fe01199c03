"""Collective calls of the user: in generated code, which has no file or line of its own, and in steps. K-04, A-08."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from small_runs import Regression, failing, loader, quiet

from drivetrain._distributed.control_group import GroupControl  # its calls are counted
from drivetrain._engine import collective_calls  # a rank that calls alone waits two minutes, which no setting shortens
from worlds import on_ranks

BY_ALL = "gathered.append(module.all_gather(batch_idx).tolist())"
PAIRED = {"a text for each rank", "compiled for each batch"}
OTHER = "module.all_gather(1) if module.global_rank else module.trainer.save_checkpoint('nowhere')"
WAITS_ONE_SECOND = mock.patch.object(collective_calls, "_ARRIVAL_TIMEOUT", timedelta(seconds=1))
ALONE = "batch_idx == 2 and module.trainer.is_global_zero and module.all_gather(1)"


class Generated(Regression):
    """Runs one line of code after each batch, of a file of this name; with ``anew``, it is compiled for each batch."""

    def __init__(self, text: str, file: str, anew: bool = False) -> None:
        super().__init__()
        self.text, self.file, self.anew = text, file, anew
        self.code = compile(text, file, "exec")
        self.gathered: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        code = compile(self.text, self.file, "exec") if self.anew else self.code
        exec(code, {"module": self, "gathered": self.gathered, "batch_idx": batch_idx, "torch": torch})


def _run(text: str, file: str = "<string>", anew: bool = False) -> dict[str, Any]:
    """Train; return what was gathered, what was raised, and the duration."""
    module = Generated(text, file, anew)
    began = time.monotonic()
    with failing() as error:
        quiet(strategy="ddp").fit(module, loader(32, 4))
    return {"gathered": module.gathered, "seconds": time.monotonic() - began, **error}


def _paired_and_alone() -> dict[str, dict[str, Any]]:
    rank = int(os.environ["RANK"])
    with WAITS_ONE_SECOND:
        return {
            "a text for each rank": _run(f"{'pass; ' * rank}{BY_ALL}", f"<cell {rank}>"),
            "compiled for each batch": _run(BY_ALL, anew=True),
            "alone": _run(f"{BY_ALL}; {ALONE}"),
            "alone at the end": _run(f"{BY_ALL}; {ALONE.replace('2', '3')}"),
            "another call": _run(OTHER),
        }


def test_calls_in_generated_code_are_paired_or_refused() -> None:
    for rank, cases in enumerate(on_ranks(_paired_and_alone, 2, process_group=None)):
        for case, found in cases.items():
            if case in PAIRED:
                assert found["type"] == "nothing was raised", (rank, case, found)
                assert found["gathered"] == [[batch, batch] for batch in range(4)], (rank, case)
                assert found["seconds"] < 5, (rank, case)
            else:
                assert found["type"] != "nothing was raised", (rank, case)
                assert found["seconds"] < 15, (rank, case, found)
                assert "rank(s) [1]" in found["text"], (rank, case, found)
                assert "is_global_zero" in found["text"], (rank, case, found)
        assert 'agree on the next call: "all_gather (training batch 3' in cases["alone at the end"]["text"]
        assert "Rank 0 reached all_gather (training batch 2, epoch 0, global step 3)" in cases["alone"]["text"]
        assert 'agree on the next call: "save_checkpoint' in cases["another call"]["text"]


class Contrastive(Regression):
    """Gathers in each ``training_step``, and after it; at one batch, rank 0 gathers or saves once more."""

    def __init__(self, alone_at: int | None = None, saves: bool = False, in_hook: bool = True) -> None:
        super().__init__()
        self.alone_at, self.saves, self.in_hook = alone_at, saves, in_hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.alone_at and self.trainer.is_global_zero:
            self.trainer.save_checkpoint("nowhere") if self.saves else self.all_gather(1)
        self._gather(batch_idx)
        return self.loss(batch)

    def _gather(self, batch_idx: int) -> None:
        assert self.all_gather(batch_idx).tolist() == [batch_idx] * 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.in_hook:
            self._gather(batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._gather(batch_idx)


def _waits(module: Contrastive, *validation: Any, **settings: Any) -> dict[str, Any]:
    """Train in windows of two batches; return the calls that waited for the other ranks, and what was raised."""
    purposes: list[str] = []
    agree = GroupControl.count_flags

    def noted(self: Any, purpose: str, *flags: bool, **options: Any) -> tuple[int, ...]:
        purposes.append(purpose)
        return agree(self, purpose, *flags, **options)

    with mock.patch.object(GroupControl, "agree", noted), failing() as error:
        quiet(strategy="ddp", accumulate_grad_batches=2, **settings).fit(module, loader(32, 4), *validation)
    return {"calls": [text.partition(",")[0] for text in purposes if text.startswith("all_gather")], **error}


def _steps() -> dict[str, dict[str, Any]]:
    with WAITS_ONE_SECOND:
        return {
            "everywhere": _waits(Contrastive(), loader(16, 4)),
            "in the step": _waits(Contrastive(in_hook=False)),
            "compiled": _waits(Contrastive(in_hook=False), compile={"backend": "eager"}),
            "alone": _waits(Contrastive(alone_at=1)),
            "alone, saving": _waits(Contrastive(alone_at=2, saves=True)),
        }


def test_calls_in_steps_wait_only_in_the_first_window() -> None:
    for found in on_ranks(_steps, 2, process_group=None):
        batches = [f"all_gather (training batch {number}" for number in range(4)]
        assert found["in the step"]["calls"] == found["compiled"]["calls"] == batches[:2]
        evaluated = [f"all_gather (evaluation batch {number}" for number in range(2)]
        assert found["everywhere"]["calls"] == [*(batches[0:1] * 2), *(batches[1:2] * 2), *batches[2:], *evaluated]
        for case, one in found.items():
            assert (one["type"] == "nothing was raised") == ("alone" not in case), one
            assert ("is_global_zero" in one["text"]) == ("alone" in case)
