"""A message about a run of several ranks is logged once, on rank 0, whichever rank caused it. Row I-17."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_runs import Regression, loader, quiet

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain_strategies.ddp import _reducer as reducer
from worlds import on_ranks


class RequestsStop(Callback):
    """Requests a stop on rank 1 only, after its second micro-batch or at the epoch's end."""

    def __init__(self, within: bool) -> None:
        self.within = within

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.within and batch_idx == 1 and dist.get_rank() == 1:
            trainer.request_stop("RequestsStop: a value of rank 1's")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if not self.within and dist.get_rank() == 1:
            trainer.should_stop = True


class NeverSteps(Regression):
    """Uses manual optimization without a step, and has a validation_step without a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def _said() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module, options in (
        ("within", Regression(), {"callbacks": RequestsStop(within=True), "max_epochs": 9}),
        ("between", Regression(), {"callbacks": RequestsStop(within=False), "max_epochs": 9}),
        ("forgets", NeverSteps(), {}),
    ):
        with captured_warnings(logging.INFO) as lines:
            quiet(strategy="ddp", **options).fit(module, loader(200, 2))
        found[name] = [line for line in lines if not line.startswith("Precision")]
    return found


def test_a_message_is_logged_once() -> None:
    # I-17
    first, second = on_ranks(_said, 2)
    for name, reason in (
        ("within", "The run ended: RequestsStop: a value of rank 1's (0 epochs, "),
        ("between", "The run ended: trainer.should_stop was set in RequestsStop.on_train_epoch_end (1 epoch, "),
    ):
        assert sum(line.startswith(reason) for line in first[name]) == 1, first[name]
    for part in ("did not call step() of any", "no validation loader", "The run ended: max_epochs=1 is reached"):
        assert sum(part in line for line in first["forgets"]) == 1, first["forgets"]
    assert second == {"within": [], "between": [], "forgets": []}


class CapturesStderr(Callback):
    """Collects what torch writes to standard error while a manual run is prepared, and during its first backward."""

    said: tuple[str, str] = "", ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        ddp = trainer.strategy.ddp_module
        torch.set_warn_always(True)  # these ranks may have printed it before
        reducer._warning_consumed = False
        try:
            loss = sum(one.sum() for one in module.parameters())
            self.said = (
                _written(lambda: reducer.consume_unused_parameters_warning(ddp)),
                _written(lambda: reducer.expect_backward(ddp, loss)),
            )
        finally:
            torch.set_warn_always(False)


def _written(call: Callable[[], Any]) -> str:
    """Return what ``call`` writes to the file descriptor of standard error."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            call()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def _advised() -> tuple[str, str]:
    listens = CapturesStderr()
    quiet(strategy="ddp", callbacks=listens, limit_val_batches=0).fit(NeverSteps(), loader(8, 2))
    return listens.said


def test_torchs_advice_on_unused_parameters_is_hidden_in_manual_optimization() -> None:
    # I-17
    for told_there, else_it_would in on_ranks(_advised, 2):
        assert told_there == ""
        assert "find_unused_parameters=True was specified" in else_it_would
