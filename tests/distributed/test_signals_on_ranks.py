"""A signal to one rank ends all ranks within two seconds and one micro-batch, wherever the run is. Q-06."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, quiet
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import PredictionWriter
from drivetrain.data import read_predictions
from drivetrain.testing import run_distributed
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}
FAST = 40  # micro-batches before the signal, which take about a millisecond each
SLOW = 0.8  # seconds of each micro-batch from the signal on
MOST = 3  # the micro-batches that begin within two seconds of the signal, and one more
ENV = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}


class Slowing(TrainModule):
    """Is fast until rank 1 is signalled, and slow afterwards. Counts the micro-batches that begin after the signal.

    Args:
        stage: the stage in which the signal arrives.
    """

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 1)
        self.stage = stage
        self.after = 0

    def run_step(self, stage: str, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if stage == self.stage and batch_idx >= FAST:
            self.after += 1
            if batch_idx == FAST and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(SLOW)
        return self.net(batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.run_step("fit", batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.run_step("validate", batch, batch_idx))

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.run_step("test", batch, batch_idx))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.run_step("predict", batch, batch_idx).expand(len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Told(Callback):
    """Records the hooks that are called as a run ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.calls.append(f"on_exception({exception!r})")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.calls.append("teardown")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self.calls.append("on_test_end")


def loader(samples: int = 140) -> DataLoader[Any]:
    data: Any = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=1)


def _leave(run: Any, entry: str, *given: Any, **options: Any) -> tuple[Any, str]:
    code: Any = None
    try:
        getattr(run, entry)(*given, **options)
    except SystemExit as error:
        code = error.code
    return code, run.state


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fit", "fit", {}),
    ("fit", "fit", {"accumulate_grad_batches": 64}),
    ("fit", "validate", {"limit_train_batches": 2}),
    ("validate", "validate", {}),
    ("test", "test", {}),
    ("predict", "predict", {}),
]


def _slowing(name: str, cases: list[Any]) -> list[Any]:
    found = []
    for entry, stage, options in cases:
        module, told = Slowing(stage), Told()
        run = quiet(strategy=STRATEGIES[name](), callbacks=told, **options)
        given = (loader(), loader()) if entry == "fit" else (loader(),)
        found.append((*_leave(run, entry, module, *given), module.after, told.calls))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_signal_is_heard_when_fast_micro_batches_become_slow(name: str) -> None:
    cases = CASES if name == "ddp" else [CASES[2], CASES[5]]
    by_rank = run_distributed(_slowing, 2, name, cases, process_group=None, env=ENV, timeout=150)
    for case, *found in zip(cases, *by_rank, strict=True):
        for code, state, after, calls in found:
            assert (code, state) == (128 + signal.SIGUSR1, "interrupted"), case
            assert 1 <= after <= MOST, (case, after)
            assert calls == [f"on_exception(SystemExit({code}))", "teardown"], case
        assert found[0][2] == found[1][2], case  # the ranks leave after the same micro-batch


class Apart(Slowing):
    """Rank 0 is many micro-batches ahead of rank 1 when one of them is signalled, or has no data left.

    Args:
        signalled: the rank that is signalled.
        far: the number of fast micro-batches of rank 0.
    """

    def __init__(self, signalled: int, far: int) -> None:
        super().__init__("none")
        self.signalled = signalled
        self.far = far

    def run_step(self, stage: str, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.after += 1
        if self.global_rank and batch_idx == 2:
            time.sleep(1)  # rank 0 gets ahead
            os.kill(int(os.environ["RANK_PIDS"].split()[self.signalled]), signal.SIGUSR1)
        if batch_idx >= (2 if self.global_rank else self.far):
            time.sleep(SLOW)
        return super().run_step(stage, batch, batch_idx)


def _apart(folder: Path) -> list[Any]:
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / str(rank))
    while not all((folder / str(other)).exists() for other in (0, 1)):
        time.sleep(0.01)
    os.environ["RANK_PIDS"] = " ".join((folder / str(other)).read_text() for other in (0, 1))
    found = []
    for entry, signalled, far in APART:
        module = Apart(signalled, far)
        found.append((*_leave(quiet(strategy="ddp"), entry, module, loader()), module.after))
    return found


APART = [("validate", 1, 40), ("validate", 0, 1000), ("predict", 0, 40), ("predict", 1, 1000), ("test", 1, 1000)]


def test_ranks_that_are_many_micro_batches_apart_leave_together(tmp_path: Path) -> None:
    ahead, behind = run_distributed(_apart, 2, tmp_path, process_group=None, env=ENV, timeout=120)
    for case, first, second in zip(APART, ahead, behind, strict=True):
        assert first[:2] == second[:2] == (128 + signal.SIGUSR1, "interrupted"), case
        assert second[2] <= 2 + MOST, (case, second)
        assert first[2] >= min(case[2], 70), (case, first)


def _predict(folder: Path, name: str) -> list[Any]:
    found: list[Any] = []
    for stage in ("predict", "none"):  # the second run is not signalled
        torch.manual_seed(0)
        module = Slowing(stage)
        run = quiet(strategy=STRATEGIES[name](), callbacks=PredictionWriter(folder / name))
        batches = Batches()
        run.callbacks.append(batches)
        found.append((*_leave(run, "predict", module, loader(), return_predictions=False), batches.count))
    return found


class Batches(Callback):
    """Counts the predicted micro-batches."""

    count = 0

    def on_predict_batch_end(self, trainer: Any, module: Any, *arguments: Any, **options: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_prediction_that_was_preempted_is_resumed(tmp_path: Path, name: str) -> None:
    for (code, _, before), (none, state, after) in run_distributed(
        _predict, 2, tmp_path, name, process_group=None, env=ENV
    ):
        assert (code, none, state) == (128 + signal.SIGUSR1, None, "finished")
        assert FAST < before <= FAST + MOST
        assert before + after == 70  # nothing is predicted twice
    assert len(read_predictions(tmp_path / name)) == 140
