"""Wrong lengths on several ranks: ranks with less data join the others, and rank 0 warns. Row I-04."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import TIGHT, Regression, about, data, failing, global_batches, quiet, train_by_hand, weights
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from captured_warnings import captured_warnings
from drivetrain import Callback
from worlds import on_ranks
from wrong_lengths import Batches


class Uneven(IterableDataset[Any]):
    """Has ``counts[rank]`` batches of four, and a different length."""

    def __init__(self, counts: tuple[int, int], said: tuple[int, int]) -> None:
        self.counts, self.said = counts, said

    def __len__(self) -> int:
        return self.said[dist.get_rank()]

    def __iter__(self) -> Iterator[Any]:
        return iter(part_of(dist.get_rank(), self.counts))


def part_of(rank: int, counts: tuple[int, int]) -> list[Any]:
    x, y = data(64).tensors
    starts = [rank * 32 + 4 * number for number in range(counts[rank])]
    return [(x[start : start + 4], y[start : start + 4]) for start in starts]


class Losing(DataLoader[Any]):
    """On rank 1 it skips its second batch."""

    def __iter__(self) -> Any:
        return (batch for index, batch in enumerate(super().__iter__()) if index != 1 or dist.get_rank() == 0)


class Faithful(DataLoader[Any]):
    """Has its own ``__iter__``, and yields everything it is asked for."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Shared(IterableDataset[Any]):
    """A rank's own part of twenty samples, shared by its workers."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        x, y = data(20).tensors
        own = range(10 * self.rank, 10 * self.rank + 10)
        return ((x[index], y[index]) for index in own[worker.id :: worker.num_workers])


class Measuring(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", batch_size=len(batch[0]))
        self.log("val", self.loss(batch))

    def on_validation_end(self) -> None:
        self.validated.append((self.current_epoch, self.global_step))

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return len(self.net(batch[0]))


def loaders() -> dict[str, Any]:
    return {
        "too little": DataLoader(data(20), batch_sampler=Batches(20, 6)),
        "too much": DataLoader(data(20), batch_sampler=Batches(20, 40)),
        "uneven": DataLoader(Uneven((5, 3), (3, 3)), batch_size=None),
        "one rank": DataLoader(Uneven((5, 3), (5, 5)), batch_size=None),
        "losing": Losing(data(20), 2),
        "faithful": Faithful(data(19), 4),
    }


def _trained(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with captured_warnings() as lines:
        for name, loader in loaders().items():
            lines.clear()
            module = Measuring()
            run = quiet(strategy=strategy, max_epochs=2, val_check_interval=0.5)
            run.fit(module, loader, loaders()[name])
            said = [text for text in lines if "proved wrong" in text]
            values = {key: float(value) for key, value in run.callback_metrics.items()}
            counts = run.global_step, run.samples_seen, sum(quiet(strategy=strategy).predict(module, loader))
            found[name] = (weights(module), counts, values, module.validated, said)
    return found


def _merged(parts: list[list[Any]]) -> list[Any]:
    """Return the combined batches of several ranks, number by number."""
    batches = []
    for number in range(max(map(len, parts))):
        pieces = [part[number] for part in parts if number < len(part)]
        batches.append(tuple(torch.cat([piece[at] for piece in pieces]) for at in range(2)))
    return batches


def _lost() -> list[Any]:
    x, y = data(20).tensors
    parts = [[(x[start : start + 2], y[start : start + 2]) for start in range(2 * rank, 20, 4)] for rank in (0, 1)]
    del parts[1][1]
    return _merged(parts)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_go_through_all_the_data(strategy: str) -> None:
    # I-04
    first, second = on_ranks(_trained, 2, strategy, timeout=120)
    uneven = _merged([part_of(rank, (5, 3)) for rank in (0, 1)])
    expected = {
        "too little": (global_batches(20, 4), 20, ["3 micro-batches per epoch, but 5 were read."]),
        "too much": (global_batches(20, 4), 20, ["20 micro-batches per epoch, but 5 were read."]),
        "uneven": (uneven, 32, ["3 micro-batches per epoch, but 5 were read on rank(s) [0]."]),
        "one rank": (uneven, 32, ["5 micro-batches per epoch, but 3 were read on rank(s) [1]."]),
        "losing": (_lost(), 18, ["5 micro-batches per epoch, but 4 were read on rank(s) [1]."]),
        "faithful": (global_batches(19, 8), 19, []),
    }
    for name, (batches, samples, heard) in expected.items():
        reference = weights(train_by_hand(Regression(), batches * 2))
        for found in (first, second):
            trained, counts, values, validated, _ = found[name]
            torch.testing.assert_close(trained, reference, msg=about(name), **TIGHT)
            assert counts == (2 * len(batches), 2 * samples, samples), name
            assert values["samples"] == samples, name
            if name == "too much":  # the expected half is never reached
                assert validated == [(0, 5), (1, 10)]
        # Once for the training loader, and once for the validation loader; on rank 0 only.
        assert second[name][-1] == []
        texts = first[name][-1]
        assert len(texts) == 2 * len(heard), texts
        for text in texts:
            assert all(part in text for part in heard), text


class Falling(Measuring):
    """Has a learning rate that decays to zero by the estimated end of the run."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SavedAtTheEnd(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.max_steps}")


def _bounded(strategy: str, folder: Path) -> Any:
    """Train with a sampler that promises three micro-batches per rank and has five: limits, a resume, a schedule."""
    counts = []
    for options in ({"limit_train_batches": 4}, {"limit_train_batches": 0.7}, {"max_steps": 3}):
        run = quiet(strategy=strategy, callbacks=SavedAtTheEnd(folder), **options)
        run.fit(Measuring(), loaders()["too little"])
        counts.append((run.global_step, run.current_epoch, run.samples_seen))
    resumed, run = Measuring(), quiet(strategy=strategy)
    run.fit(resumed, loaders()["too little"], ckpt_path=folder / "3")
    counts.append((run.global_step, run.current_epoch, run.samples_seen))
    with failing() as caught:
        quiet(strategy=strategy).fit(Falling(), loaders()["too little"])
    return counts, weights(resumed), caught


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_limits_resumes_and_schedules_with_a_wrong_length(strategy: str, tmp_path: Path) -> None:
    # I-04
    reference = weights(train_by_hand(Regression(), global_batches(20, 4)))
    for counts, trained, caught in on_ranks(_bounded, 2, strategy, tmp_path):
        # 0.7 of the stated length; saved where the length says that the epoch is over, although it is not.
        assert counts == [(4, 1, 16), (2, 1, 8), (3, 1, 12), (5, 1, 20)]
        torch.testing.assert_close(trained, reference, **TIGHT)
        assert caught["type"] == "ConfigurationError"
        assert "ran out after 3 steps" in caught["text"]
        assert "length of 3 micro-batches" in caught["text"]


def _shared(strategy: str) -> Any:
    module, loader = Measuring(), DataLoader(Shared(), 2, num_workers=2)
    run = quiet(strategy=strategy)
    run.fit(module, loader, loader)
    return run.num_training_batches, run.global_step, run.samples_seen, float(run.callback_metrics["samples"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_samples_shared_by_workers_are_used(strategy: str) -> None:
    # I-04: torch's estimate is 5 of 6 micro-batches per rank
    assert on_ranks(_shared, 2, strategy) == [(5, 6, 20, 20.0)] * 2
