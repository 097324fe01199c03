"""What a new user does: a script on one process, and on two that it starts itself."""

from __future__ import annotations

import pytest
import torch
from scripts import Run, run_cases
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError, Fit, TrainModule

MODULE = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Fit, TrainModule

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        return (self.line(batch[0]) - 1).square().mean()
    def validation_step(self, batch):
        self.log("loss", self.training_step(batch))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = DataLoader(TensorDataset(torch.linspace(0, 1, 24)[:, None]), 4)
fit = Fit(strategy="ddp", devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
          enable_model_summary=False)
"""


SCRIPT = """
if CASE == "a call on rank 0 alone":
    fit.fit(Line(), loader)
    if fit.is_global_zero:
        fit.validate(Line(), loader)
    sys.exit()
if CASE == "fails before its run":
    if fit.global_rank == 1:
        raise KeyError("before the run")
    fit.fit(Line(), loader)

if fit.is_global_zero:
    print("before")
fit.print("also before")
module = Line()
fit.fit(module, loader, loader)
fit.validate(module, loader, verbose=False)
fit.print("after", fit.global_step, fit.current_epoch, fit.samples_seen)

class Slow(Line):
    def on_train_epoch_end(self):
        time.sleep(2.5 * (self.global_rank == 0))
fit.fit(Slow(), loader, loader)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return the output of runs and a validation, the last of which waits for a rank, and of two failing scripts."""
    cases = ("ran", "a call on rank 0 alone", "fails before its run")
    return run_cases(tmp_path_factory.mktemp("runs"), SCRIPT, cases, head=MODULE, limit=120)


def test_prints_of_rank_0_around_the_run_appear_once(runs: dict[str, Run]) -> None:
    ran = runs["ran"]
    assert ran.code == 0, ran.errors
    assert ran.out.splitlines() == ["before", "also before", "after 6 2 48"]


def test_waiting_for_another_rank_is_silent(runs: dict[str, Run]) -> None:
    lines = runs["ran"].errors.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Precision 32-true", "The run ended", "The run ended"], lines


def test_a_call_on_rank_0_alone_after_the_others_have_left_is_refused(runs: dict[str, Run]) -> None:  # G-04
    done = runs["a call on rank 0 alone"]
    assert done.code != 0
    assert "rank 1 has already left the script" in done.errors


def test_a_script_that_fails_on_one_rank_before_its_run_ends_on_all(runs: dict[str, Run]) -> None:  # G-01
    done = runs["fails before its run"]
    assert done.code != 0
    assert "KeyError: 'before the run'" in done.errors
    assert "Rank 1 ended with exit code 1" in done.errors or "Rank 1 failed with KeyError" in done.errors


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


DATA = TensorDataset(torch.ones(8, 1))


def fit() -> Fit:
    return Fit(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_a_module_that_cannot_train_is_refused(name: str) -> None:  # G-06
    lacking = type("Lacking", (Line,), {name: getattr(TrainModule, name)})
    with pytest.raises(ConfigurationError, match=f"Lacking has no {name}"):
        fit().fit(lacking(), DataLoader(DATA, 4))


@pytest.mark.parametrize("loaders", [DATA, [DATA], {"a": DATA}], ids=["alone", "list", "dict"])
def test_a_data_set_in_place_of_a_loader_is_refused(loaders: object) -> None:
    with pytest.raises(ConfigurationError, match="TensorDataset, which is a data set"):
        fit().fit(Line(), loaders)


def test_a_validation_loader_without_a_validation_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fit().fit(Line(), DataLoader(DATA, 4), DataLoader(DATA, 4))
    assert "Line has no validation_step: nothing is validated" in caplog.text


def test_an_unknown_precision_is_refused_at_construction() -> None:  # G-06
    with pytest.raises(ConfigurationError, match="bf16-mixed"):
        Fit(precision="bf16-mixd")
