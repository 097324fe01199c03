"""`RunContext` declares what hooks may read and call, and `Fit` implements each member."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_case import Tiny, fit, loader

from drivetrain import Callback, Fit, RunContext, TrainModule
from drivetrain._metrics import MetricStore

READS = {name for name, member in vars(RunContext).items() if isinstance(member, property)}
CALLS = {name for name, member in vars(RunContext).items() if inspect.isfunction(member) and name[0] != "_"}
ATTRIBUTES = set(RunContext.__annotations__)

CONTRACT = {
    *{"current_epoch", "global_step", "micro_batches", "samples_seen", "state", "should_stop", "settings"},
    *{"callback_metrics", "logged_metrics", "progress_bar_metrics", "logger", "loggers", "default_root_dir"},
    *{"strategy", "precision", "world_size", "global_rank", "local_rank", "node_rank", "is_global_zero"},
    *{"num_training_batches", "estimated_stepping_batches", "optimizers", "lr_schedulers"},
    *{"callbacks", "checkpoint_callback", "save_checkpoint"},
}
"""The members that `Fit` has during a run."""

NOT_IN_A_RUN = {"fit", "validate", "test", "predict"}
THE_ENGINES = {
    "chosen_strategy",
    "given_profiler",
    "launcher",
    "precision_setting",
    "progress",
    "resolved_strategy",
    "session",
}


def code_of(owner: type, name: str) -> Callable[..., Any]:
    member: Any = inspect.getattr_static(owner, name)
    code: Any = member.fget if isinstance(member, property) else member
    return code


def test_the_protocol_declares_the_documented_members() -> None:
    assert not CONTRACT - READS - CALLS - ATTRIBUTES


def test_fit_has_every_member_and_no_other() -> None:
    assert set(vars(Fit())) | READS | CALLS >= ATTRIBUTES
    own = {name for name in {*dir(Fit), *vars(Fit())} if not name.startswith("_")}
    assert own - READS - CALLS - ATTRIBUTES == NOT_IN_A_RUN | THE_ENGINES
    assert own >= ATTRIBUTES


@pytest.mark.parametrize("name", sorted(READS | CALLS))
def test_members_of_fit_have_the_same_arguments_and_docstring(name: str) -> None:
    theirs, ours = code_of(RunContext, name), code_of(Fit, name)
    assert ours is not theirs  # the protocol's method has no body
    if name in READS:
        setters = [inspect.getattr_static(owner, name).fset is not None for owner in (RunContext, Fit)]
        assert setters[0] == setters[1]
    else:
        told, taken = inspect.signature(theirs).parameters.values(), inspect.signature(ours).parameters.values()
        assert [(one.name, one.kind) for one in told] == [(one.name, one.kind) for one in taken]
        for one, other in zip(told, taken, strict=True):
            assert callable(one.default) or one.default == other.default
    # Each member is documented in one place, which help() and editors show for both.
    assert ours.__doc__ is None
    assert theirs.__doc__
    assert inspect.getdoc(inspect.getattr_static(Fit, name)) == inspect.getdoc(inspect.getattr_static(RunContext, name))


def test_log_has_the_arguments_of_the_store() -> None:
    from drivetrain.run_context import Records

    told, taken = inspect.signature(Records.record), inspect.signature(MetricStore.record)
    assert list(told.parameters) == list(taken.parameters)


class Reads(Callback):
    """Reads every member during a run."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        self.values = {name: getattr(trainer, name) for name in READS | ATTRIBUTES}
        assert module.trainer is trainer
        assert self.values["batch_idx"] == batch_idx + 1


def test_every_member_is_available_in_a_hook(tmp_path: Path) -> None:
    reads = Reads()
    trainer = fit(tmp_path, callbacks=[reads], max_steps=3)
    trainer.fit(Tiny(), loader())
    assert reads.values.keys() == READS | ATTRIBUTES
    assert reads.values["global_step"] == trainer.global_step == 3
    assert reads.values["state"] == "fitting"
    assert reads.values["num_training_batches"] == 4
    assert reads.values["strategy"] is trainer.strategy
