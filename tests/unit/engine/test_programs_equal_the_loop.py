"""Runs of one process equal a plain loop, which `tests/oracle` interprets from the same description."""

from __future__ import annotations

import pytest

from oracle.check import check
from oracle.program import Data, Log, Net, Optimizer, Program, Resume, Scheduler, Stop, Turn, Validation

TWO = (Optimizer(of="body"), Optimizer("adamw", of="head"))
UNEVEN = Data(samples=11)
"""The last batch is smaller, and with a window of four so is the last window."""
EPOCH_MEAN = (Log(on_step=False, on_epoch=True),)


def lbfgs(accumulate: int, clip: float | None = None) -> Program:
    # In double precision: clipped gradients mislead its estimate of curvature, and rounding would be amplified.
    optimizers = (Optimizer("lbfgs"),)
    return Program(precision="64-true", data=UNEVEN, optimizers=optimizers, accumulate=accumulate, clip=clip)


def taking_turns(precision: str) -> Program:
    turns = (Turn(clips=1, toggles=True), Turn(optimizer=1, toggles=True))
    stop = Stop("max_steps", at=3)
    return Program(precision=precision, optimizers=TWO, manual=turns, stop=stop, logs=EPOCH_MEAN)


def saved_in(hook: str, at: int, accumulate: int = 1, manual: tuple[Turn, ...] = ()) -> Program:
    """A net with running statistics that draws random numbers, saved and resumed."""
    return Program(
        net=Net(norm="batch", dropout=0.3),
        data=Data(samples=20, shuffle=True),
        optimizers=(Optimizer("adamw"),),
        manual=manual,
        accumulate=accumulate,
        epochs=2,
        logs=EPOCH_MEAN,
        resume=Resume(hook, at),
    )


def with_a_position(accumulate: int, at: int) -> Program:
    """A loader with a state_dict, which starts again at its end, saved and resumed."""
    data = Data("stateful", samples=11, batch=1, length_error=None)
    resume = Resume("on_train_batch_end", at)
    return Program(data=data, accumulate=accumulate, epochs=2, validation=Validation(), resume=resume)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(Program(data=UNEVEN, accumulate=4, epochs=2), id="B-02 B-03 uneven windows"),
        pytest.param(Program(data=UNEVEN, clip=0.02, clip_by="value"), id="B-05 clipped by value"),
        pytest.param(Program(data=UNEVEN, precision="16-true", clip=0.02), id="B-01 B-05 16-true"),
        pytest.param(Program(data=UNEVEN, optimizers=TWO, clip=0.02), id="B-05 B-17 two optimizers, clipped together"),
        pytest.param(
            Program(data=UNEVEN, accumulate=2, epochs=2, schedulers=(Scheduler(interval="step", frequency=2),)),
            id="B-09 a scheduler of every second step",
        ),
        pytest.param(
            Program(net=Net(unused=True), optimizers=(Optimizer("adamw"),)), id="B-08 a parameter without gradient"
        ),
        pytest.param(lbfgs(1), id="B-16 LBFGS"),
        pytest.param(lbfgs(3), id="B-16 LBFGS on windows"),
        pytest.param(lbfgs(3, clip=0.1), id="B-16 LBFGS with clipping"),
        pytest.param(taking_turns("32-true"), id="B-13 optimizers that take turns"),
        pytest.param(taking_turns("16-mixed"), id="B-15 optimizers that take turns in fp16"),
        pytest.param(
            Program(precision="16-mixed", manual=(Turn(repeats=2, clips=2),)), id="I-02 B-15 clipped twice in fp16"
        ),
        pytest.param(saved_in("on_before_backward", 2, accumulate=2), id="S-01 saved before a backward"),
        pytest.param(saved_in("on_after_backward", 2, manual=(Turn(),)), id="S-01 saved by hand after a backward"),
        *(
            pytest.param(with_a_position(window, at), id=f"F-02 windows of {window}, saved after {at + 1}")
            for window, at in [(3, 8), (3, 10), (3, 13), (4, 7), (4, 10), (4, 14)]
        ),
        pytest.param(saved_in("on_before_optimizer_step", 1, accumulate=2), id="S-01 saved before a step"),
    ],
)
def test_a_run_equals_the_plain_loop(program: Program) -> None:  # B-02, B-03
    assert not check(program), "the engine refused the program"
