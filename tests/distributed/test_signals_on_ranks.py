"""A signal to one rank ends all ranks within two seconds and one micro-batch, wherever the run is. Q-06."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import FEATURES, STRATEGIES, data, quiet
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import PredictionWriter
from drivetrain.data import read_predictions
from drivetrain.testing import run_distributed

FAST = 40  # micro-batches before the signal, which take about a millisecond each
SLOW = 0.8  # seconds of each micro-batch from the signal on
MOST = 3  # the micro-batches that begin within two seconds of the signal, and one more
ENV = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
LEFT = (128 + signal.SIGUSR1, "interrupted")


class Slowing(TrainModule):
    """Is fast until rank 1 is signalled in ``stage``, then slow. Counts the micro-batches that begin after the signal."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 1)
        self.stage = stage
        self.after = 0

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        if stage == self.stage and batch_idx >= FAST:
            self.after += 1
            if batch_idx == FAST and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(SLOW)
        return self.net(batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.run_step("fit", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.run_step("validate", batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.run_step("test", batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.run_step("predict", batch, batch_idx).expand(len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EndingHooks(Callback):
    """Records the hooks that are called as a run ends, and the number of predicted micro-batches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.predicted = 0

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.calls.append(f"on_exception({exception!r})")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.calls.append("teardown")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self.calls.append("on_test_end")

    def on_predict_batch_end(self, trainer: Any, module: Any, *arguments: Any, **options: Any) -> None:
        self.predicted += 1


def loader(samples: int = 140) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=1)


def run_until_left(run: Any, entry: str, *given: Any, **options: Any) -> tuple[Any, str]:
    code: Any = None
    try:
        getattr(run, entry)(*given, **options)
    except SystemExit as error:
        code = error.code
    return code, run.state


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fit", "validate", {"limit_train_batches": 2}),
    ("predict", "predict", {}),
    ("fit", "fit", {}),
    ("fit", "fit", {"accumulate_grad_batches": 64}),
    ("validate", "validate", {}),
    ("test", "test", {}),
]


def _slowing(name: str, cases: list[Any]) -> list[Any]:
    found = []
    for entry, stage, options in cases:
        module, hooks = Slowing(stage), EndingHooks()
        run = quiet(strategy=STRATEGIES[name](), callbacks=hooks, **options)
        loaders = (loader(), loader()) if entry == "fit" else (loader(),)
        found.append((run_until_left(run, entry, module, *loaders), module.after, hooks.calls))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 3"])
def test_a_signal_is_heard_when_fast_micro_batches_become_slow(name: str) -> None:
    cases = CASES if name == "ddp" else CASES[:2]
    by_rank = run_distributed(_slowing, 2, name, cases, process_group=None, env=ENV, timeout=150)
    for case, first, second in zip(cases, *by_rank, strict=True):
        for ended, after, calls in (first, second):
            assert ended == LEFT, case
            assert 1 <= after <= MOST, (case, after)
            assert calls == [f"on_exception(SystemExit({LEFT[0]}))", "teardown"], case
        assert first[1] == second[1], case  # the ranks leave after the same micro-batch


class Apart(Slowing):
    """Rank 0 is many micro-batches ahead of rank 1 when one of them is signalled, or has no data left.

    Args:
        signalled: the rank that is signalled.
        far: the number of fast micro-batches of rank 0.
    """

    def __init__(self, signalled: int, far: int) -> None:
        super().__init__("none")
        self.signalled, self.far = signalled, far

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        self.after += 1
        if self.global_rank and batch_idx == 2:
            time.sleep(1)  # rank 0 gets ahead
            os.kill(int(os.environ["RANK_PIDS"].split()[self.signalled]), signal.SIGUSR1)
        if batch_idx >= (2 if self.global_rank else self.far):
            time.sleep(SLOW)
        return super().run_step(stage, batch, batch_idx)


APART = [("validate", 1, 40), ("predict", 0, 40), ("test", 1, 1000)]


def _apart() -> list[Any]:
    dist.init_process_group("gloo")
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    dist.destroy_process_group()
    os.environ["RANK_PIDS"] = " ".join(map(str, pids))
    found = []
    for entry, signalled, far in APART:
        module = Apart(signalled, far)
        found.append((run_until_left(quiet(strategy="ddp"), entry, module, loader()), module.after))
    return found


def test_ranks_that_are_many_micro_batches_apart_leave_together() -> None:
    ahead, behind = run_distributed(_apart, 2, process_group=None, env=ENV, timeout=120)
    for case, first, second in zip(APART, ahead, behind, strict=True):
        assert first[0] == second[0] == LEFT, case
        assert second[1] <= 2 + MOST, (case, second)
        assert first[1] >= min(case[2], 70), (case, first)


class Paired(Slowing):
    """Ranks 1 and 2 meet in each micro-batch, in a process group of their own. Rank 0 is far ahead of them."""

    def on_validation_start(self) -> None:
        self.pair = dist.new_group([1, 2], backend="gloo")

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        self.after += 1
        if self.global_rank:
            dist.all_reduce(torch.ones(1), group=self.pair)
        if self.global_rank == 1:
            time.sleep(0.05)  # rank 2 is in the next collective meanwhile
        if self.global_rank == 0 and batch_idx == FAST:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.net(batch[0]).square().mean()


def _paired() -> Any:
    module = Paired("validate")
    return run_until_left(quiet(strategy="ddp"), "validate", module, loader(210)), module.after


def test_ranks_with_collectives_of_their_own_leave_after_the_same_micro_batch() -> None:
    _, first, second = run_distributed(_paired, 3, process_group=None, env=ENV, timeout=60)
    assert first == second
    assert first[0] == LEFT


def _predict(folder: Path, name: str) -> list[Any]:
    found: list[Any] = []
    for stage in ("predict", "none"):  # the second run is not signalled
        torch.manual_seed(0)
        hooks = EndingHooks()
        run = quiet(strategy=STRATEGIES[name](), callbacks=[PredictionWriter(folder / name), hooks])
        ended = run_until_left(run, "predict", Slowing(stage), loader(), return_predictions=False)
        found.append((ended, hooks.predicted))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_prediction_that_was_preempted_is_resumed(tmp_path: Path, name: str) -> None:
    found = run_distributed(_predict, 2, tmp_path, name, process_group=None, env=ENV)
    for (left, before), (ended, after) in found:
        assert (left, ended) == (LEFT, (None, "finished"))
        assert FAST < before <= FAST + MOST
        assert before + after == 70  # nothing is predicted twice
    assert len(read_predictions(tmp_path / name)) == 140
