"""Wrong lengths on several ranks: ranks with less data join the others, and rank 0 warns. Row I-04.

Weights of a run with a wrong length, and samples that workers share, are in test_programs_on_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import TIGHT, Regression, data, global_batches, quiet, refusal, train_by_hand, weights
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from captured_warnings import captured_warnings
from drivetrain import Callback
from worlds import on_ranks
from wrong_lengths import Batches


class Uneven(IterableDataset[Any]):
    """Has 5 batches of four on rank 0 and 3 on rank 1, and states another length on both."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(global_batches(64, 4)[: (5, 3)[dist.get_rank()]])


class SkipsABatch(DataLoader[Any]):
    """On rank 1 it skips its second batch."""

    def __iter__(self) -> Any:
        return (batch for index, batch in enumerate(super().__iter__()) if index != 1 or dist.get_rank() == 0)


class OwnIterator(DataLoader[Any]):
    """Has its own ``__iter__``, and yields everything it is asked for."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Measuring(Regression):
    """Counts the samples of validations and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", batch_size=len(batch[0]))

    def on_validation_end(self) -> None:
        self.validated.append((self.current_epoch, self.global_step))

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return len(self.net(batch[0]))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "too much": lambda: DataLoader(data(20), batch_sampler=Batches(20, 40)),
    "uneven": lambda: DataLoader(Uneven(3), batch_size=None),
    "one rank": lambda: DataLoader(Uneven(5), batch_size=None),
    "skips a batch": lambda: SkipsABatch(data(20), 2),
    "own iterator": lambda: OwnIterator(data(19), 4),
}
# Steps and samples of an epoch, and the warning.
EXPECTED = {
    "too much": (5, 20, ["20 micro-batches per epoch, but 5 were read."]),
    "uneven": (5, 32, ["3 micro-batches per epoch, but 5 were read on rank(s) [0]."]),
    "one rank": (5, 32, ["5 micro-batches per epoch, but 3 were read on rank(s) [1]."]),
    "skips a batch": (5, 18, ["5 micro-batches per epoch, but 4 were read on rank(s) [1]."]),
    "own iterator": (3, 19, []),
}


def _trained(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with captured_warnings() as lines:
        for name, build in LOADERS.items():
            lines.clear()
            module, run = Measuring(), quiet(strategy=strategy, max_epochs=2, val_check_interval=0.5)
            run.fit(module, build(), build())
            warned = [text for text in lines if "proved wrong" in text]
            predicted = sum(quiet(strategy=strategy).predict(module, build()))
            counts = run.global_step, run.samples_seen, predicted, float(run.callback_metrics["samples"])
            found[name] = (counts, module.validated, warned)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_go_through_all_the_data(strategy: str) -> None:  # I-04
    first, second = on_ranks(_trained, 2, strategy, timeout=120)
    for name, (steps, samples, warning) in EXPECTED.items():
        assert first[name][0] == second[name][0] == (2 * steps, 2 * samples, samples, samples), name
        # Once for the training loader, and once for the validation loader; on rank 0 only.
        assert second[name][2] == []
        assert len(first[name][2]) == 2 * len(warning), name
        assert all(part in text for text in first[name][2] for part in warning), first[name][2]
    assert first["too much"][1] == second["too much"][1] == [(0, 5), (1, 10)]  # the expected half is never reached


class Falling(Measuring):
    """Has a learning rate that decays to zero by the estimated end of the run."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SavesAtTheEnd(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.max_steps}")


def too_short() -> DataLoader[Any]:
    """States three micro-batches per rank and has five."""
    return DataLoader(data(20), batch_sampler=Batches(20, 6))


def _bounded(strategy: str, folder: Path) -> Any:
    counts, path = [], folder / "3"
    for options in ({"limit_train_batches": 4}, {"limit_train_batches": 0.7}, {"max_steps": 3}, {}):
        module, run = Measuring(), quiet(strategy=strategy, callbacks=SavesAtTheEnd(folder), **options)
        run.fit(module, too_short(), ckpt_path=None if options else path)
        counts.append((run.global_step, run.current_epoch, run.samples_seen))
    return counts, weights(module), refusal(Falling(), too_short(), strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_limits_resumes_and_schedules_with_a_wrong_length(strategy: str, tmp_path: Path) -> None:
    # I-04
    reference = weights(train_by_hand(Regression(), global_batches(20, 4)))
    for counts, trained, refused in on_ranks(_bounded, 2, strategy, tmp_path):
        # 0.7 of the stated length; saved where the length says that the epoch is over, although it is not.
        assert counts == [(4, 1, 16), (2, 1, 8), (3, 1, 12), (5, 1, 20)]
        torch.testing.assert_close(trained, reference, **TIGHT)
        assert refused.startswith("ConfigurationError")
        assert "ran out after 3 steps" in refused
        assert "length of 3 micro-batches" in refused
