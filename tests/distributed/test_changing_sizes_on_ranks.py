"""A data set that grows between epochs, on several ranks: S-03."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import FEATURES, Regression, quiet
from torch.utils.data import DataLoader, Dataset

from drivetrain import DistributedError
from worlds import on_ranks


class Buffer(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index >= self.size:
            raise IndexError(index)
        return torch.full((FEATURES,), float(index)), torch.ones(1)


class Resizing(Regression):
    """Gives training data the size of the epoch, and evaluation data twice that size."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.data, self.evaluated = sizes, Buffer(sizes[0]), Buffer(4)
        self.trained: list[tuple[int, int]] = []
        self.measured: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.data.size = self.sizes[self.current_epoch]
        self.evaluated.size = 2 * self.data.size

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.joining:
            self.trained += [(self.current_epoch, int(row[0])) for row in batch[0]]

    def on_predict_start(self) -> None:
        self.evaluated.size = self.sizes[-1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measured += [int(row[0]) for row in batch[0]]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0]


def _run(sizes_by_rank: list[tuple[int, ...]], strategy: str, evaluate_only: bool) -> Any:
    sizes = sizes_by_rank[dist.get_rank() % len(sizes_by_rank)]
    module = Resizing(sizes)
    evaluated = DataLoader(module.evaluated, 2)
    trainer = quiet(strategy=strategy, max_epochs=len(sizes), accumulate_grad_batches=2)
    try:
        if not evaluate_only:
            trainer.fit(module, DataLoader(module.data, 2, shuffle=True), evaluated)
        outputs = trainer.predict(module, evaluated)
    except DistributedError as error:
        return str(error)
    return module.trained, module.measured, torch.cat(outputs).tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_sample_of_an_epoch_s_size_is_read_once(strategy: str) -> None:  # S-03
    found = on_ranks(_run, 2, [(5, 9, 3)], strategy, False)
    expected = [(epoch, sample) for epoch, size in enumerate((5, 9, 3)) for sample in range(size)]
    assert sorted(found[0][0] + found[1][0]) == expected
    assert sorted(found[0][1] + found[1][1]) == sorted([*range(10), *range(18), *range(6)])
    assert found[0][2] == found[1][2] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("sizes", "evaluate_only", "named"),
    [
        ([(4, 4), (4, 8)], False, "training samples: 4 on rank(s) [0]; 8 on rank(s) [1]"),
        ([(6,), (8,)], True, "predict samples: [6] on rank(s) [0]; [8] on rank(s) [1]"),
    ],
)
def test_ranks_with_different_sizes_are_refused_by_name(sizes: Any, evaluate_only: bool, named: str) -> None:
    # S-03, J-07
    for error in on_ranks(_run, 2, sizes, "ddp", evaluate_only):
        assert named in error
