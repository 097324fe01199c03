"""`RunContext` declares what hooks may read and call, and `Fit` implements each member."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_case import Tiny, fit, loader
from small_modules import calling

from drivetrain import Fit, RunContext

READS = {name for name, member in vars(RunContext).items() if isinstance(member, property)}
CALLS = {name for name, member in vars(RunContext).items() if inspect.isfunction(member) and name[0] != "_"}
ATTRIBUTES = set(RunContext.__annotations__)


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


def test_every_member_is_available_in_a_hook(tmp_path: Path) -> None:
    values: dict[str, Any] = {}

    def read(trainer: Any) -> None:
        values.update({name: getattr(trainer, name) for name in READS | ATTRIBUTES})

    trainer = fit(tmp_path, callbacks=calling("on_train_batch_end", read), max_steps=3)
    trainer.fit(Tiny(), loader())
    assert values["global_step"] == values["batch_idx"] == trainer.global_step == 3
    assert values["state"] == "fitting"
    assert values["num_training_batches"] == 4
    assert values["strategy"] is trainer.strategy
