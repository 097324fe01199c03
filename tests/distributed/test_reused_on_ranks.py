"""Loaders that overwrite the previous batch, on two ranks. Row I-09."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from small_runs import FEATURES, Regression, about, data, global_batches, quiet, train_by_hand, weights
from torch.utils.data import DataLoader

from worlds import on_ranks

SIZE = 4


class Own:
    """A rank's own batches, all in the same memory."""

    def __init__(self, counts: tuple[int, int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        buffers = torch.empty(SIZE, FEATURES), torch.empty(SIZE, 1)
        for batch in parts(dist.get_rank(), self.counts):
            for buffer, value in zip(buffers, batch, strict=True):
                buffer.numpy()[:] = value.numpy()
            yield buffers


class Going(Own):
    """Has a state_dict of its position, so batches are not read ahead beyond the window."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is resumed here")


class Collating:
    """Collates into the same tensor every time."""

    def __init__(self) -> None:
        self.buffers = torch.empty(SIZE, FEATURES), torch.empty(SIZE, 1)

    def __call__(self, samples: list[Any]) -> Any:
        pairs = zip(self.buffers, zip(*samples, strict=True), strict=True)
        return tuple(torch.stack(list(values), out=buffer[: len(values)]) for buffer, values in pairs)


class Weighed(Regression):
    def batch_weight(self, batch: Any) -> Any:
        return len(batch[0])


def parts(rank: int, counts: tuple[int, int]) -> list[Any]:
    x, y = data(64).tensors
    starts = range(rank * 32, rank * 32 + counts[rank] * SIZE, SIZE)
    return [(x[start : start + SIZE], y[start : start + SIZE]) for start in starts]


def _reused() -> dict[str, torch.Tensor]:
    found = {}
    for window in (1, 3):
        for kind in (Own, Going):
            module = Regression()
            quiet(strategy="ddp", accumulate_grad_batches=window).fit(module, kind((3, 5)))
            found[f"{kind.__name__}, {window}"] = weights(module)
        for module in (Regression(), Weighed()):
            loader = DataLoader(data(37), batch_size=SIZE, collate_fn=Collating())
            quiet(strategy="ddp", accumulate_grad_batches=window).fit(module, loader)
            found[f"{type(module).__name__}, {window}"] = weights(module)
    return found


def test_loaders_that_reuse_memory_are_correct_on_ranks() -> None:  # I-09
    ranks = on_ranks(_reused, 2, process_group=None)
    for window in (1, 3):
        own = [parts(rank, (3, 5)) for rank in range(2)]
        batches = []
        for start in range(0, 5, window):
            pieces = [batch for part in own for batch in part[start : start + window]]
            batches.append(tuple(torch.cat([piece[position] for piece in pieces]) for position in range(2)))
        streamed = weights(train_by_hand(Regression(), batches))
        dealt = weights(train_by_hand(Regression(), global_batches(37, 2 * SIZE), window))
        for found in ranks:
            for name, reference in (("Own", streamed), ("Going", streamed), ("Regression", dealt), ("Weighed", dealt)):
                case = f"{name}, {window}"
                torch.testing.assert_close(found[case], reference, atol=1e-6, rtol=1e-5, msg=about(case))
