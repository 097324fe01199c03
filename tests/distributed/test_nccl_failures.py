"""A rank fails under NCCL while the others wait in a kernel: G-01, G-07. The runs themselves need two GPUs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import Regression, loader, quiet, refusal

from drivetrain._distributed.watchdog import Watchdog
from drivetrain.testing import requires_cuda
from worlds import on_ranks


class Raising(Regression):
    """Fails on rank 1, while rank 0 waits for the result of a reduction."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        torch.cuda.synchronize()


def _runs(strategy: str) -> tuple[str, bool, bool, int]:
    began = time.monotonic()
    error = refusal(Raising(), loader(64, 4), strategy=strategy, accelerator="cuda", devices=2)
    soon = time.monotonic() - began < 60  # including its communicators; a collective's timeout is half an hour
    group, fit = dist.is_initialized(), quiet(strategy=strategy, accelerator="cuda", devices=2)
    fit.fit(Regression(), loader(64, 4))
    return error, soon, group, fit.global_step


@pytest.mark.cuda
@requires_cuda(2)
def test_ranks_waiting_in_a_kernel_learn_of_a_failure() -> None:  # G-01, G-07
    for strategy in ("ddp", "fsdp"):
        first, second = on_ranks(_runs, 2, strategy, process_group=None)
        assert second == ("ValueError: boom", True, False, 8)
        assert first[1:] == (True, False, 8)
        assert first[0].startswith("RankFailedError: Rank 1 failed with ValueError: boom")


def test_a_reported_failure_reaches_the_watching_thread() -> None:  # G-01
    store, heard = dist.HashStore(), threading.Event()  # type: ignore[attr-defined]
    watchdog = Watchdog(store, 0, on_failure=heard.set)
    try:
        assert not heard.wait(0.7)  # one poll
        store.add("failures", 1)
        assert heard.wait(10)
    finally:
        watchdog.end()
