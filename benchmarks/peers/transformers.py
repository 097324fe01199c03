"""transformers: its `Trainer`, with a user-defined loss.

Bare disables logging, saving, the progress bar, clipping and the NaN check of each loss, and uses the loader as it is.
The trainer logs the loss itself, here at the interval that other frameworks have by default; further values are added
to its logs. Typical adds its progress bar, a CSV file written by a callback (it has no CSV logger), and saving that is
never due.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import nullcontext
from typing import Any

import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.peers.csv_rows import CSVRows
from benchmarks.work import EVERY, NEVER, Way, Work

transformers.logging.set_verbosity(logging.ERROR)

NOWHERE = tempfile.gettempdir()  # it requires a folder, but writes nothing there


class Ours(Trainer):
    """Uses the loss and the loader of the work."""

    def __init__(self, work: Work, way: Way, steps: int, **options: Any) -> None:
        self._work, self._names, self._loader = work, way.names, work.loader(steps)
        self._last: Tensor | None = None
        net = work.net()
        super().__init__(net, optimizers=(work.optimizer(net), None), train_dataset=self._loader.dataset, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._loader

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = self._work.loss(model, inputs)
        if len(self._names) > 1:
            self._last = loss.detach()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if self._last is not None:
            logs |= {name: self._last.item() for name in self._names[1:]}
        super().log(logs, *args, **options)


class CSV(TrainerCallback):
    def __init__(self, folder: str) -> None:
        self._rows = CSVRows(folder, ["loss"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self._rows.row(state.global_step, {"loss": logs["loss"]})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rows.close()


def train(work: Work, way: Way, steps: int) -> float:
    with on_a_terminal() if way.typical else nullcontext(NOWHERE) as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=work.batch,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="steps" if way.values else "no",
            logging_steps=EVERY,
            logging_nan_inf_filter=way.typical,
            save_strategy="steps" if way.typical else "no",
            save_steps=NEVER,
            disable_tqdm=not way.typical,
            report_to="none",
        )
        trainer = Ours(work, way, steps, args=arguments, callbacks=[CSV(folder)] if way.typical else None)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return checksum(trainer.model)
