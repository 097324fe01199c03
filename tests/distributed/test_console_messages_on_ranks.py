"""A message about a run of several ranks is logged once, on rank 0, whichever rank caused it. Row I-17."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from small_runs import Regression, loader, quiet

from captured_warnings import captured_warnings
from drivetrain import Callback
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
