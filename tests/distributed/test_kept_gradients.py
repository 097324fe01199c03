"""Optimizers that keep references to gradients: what they kept stays as it was, under every strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import (
    FEATURES,
    TIGHT,
    Regression,
    each,
    global_batches,
    loader,
    seeded,
    train_by_hand,
    trained,
    weights,
)

from drivetrain_strategies import DeepSpeedStrategy
from oracle.check import check
from oracle.optimizers import Optimistic
from oracle.program import Data, Optimizer, Program, Turn
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

DATA = Data(samples=12)
OPTIMISTIC, SAM_SUM = (Optimizer("optimistic"),), (Optimizer("sam_sum"),)
ELEMENT_WISE = {
    "plain": Program(optimizers=OPTIMISTIC),
    "accumulated": Program(optimizers=OPTIMISTIC, accumulate=2),
    "clipped": Program(optimizers=OPTIMISTIC, clip=0.3),
    "manual": Program(optimizers=(Optimizer("heun"),), manual=(Turn(repeats=2),)),
}
"""DeepSpeed's engine steps them without a closure."""

PROGRAMS = {
    **ELEMENT_WISE,
    "closure": Program(optimizers=(Optimizer("optimistic", closure=True),)),
    "closure, accumulated": Program(optimizers=(Optimizer("optimistic", closure=True),), accumulate=2),
    "sam": Program(optimizers=SAM_SUM),
    "manual sam": Program(optimizers=SAM_SUM, manual=(Turn(closure=True),)),
}


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_static_graph", "fsdp"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_kept_gradient_does_not_change(strategy: str, program: Program) -> None:
    if program.manual and strategy == "ddp_static_graph":
        pytest.skip("a static graph is refused in manual optimization")
    assert not check(replace(program, strategy=strategy, ranks=1 if strategy == "single_device" else 2, data=DATA))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("program", ELEMENT_WISE.values(), ids=ELEMENT_WISE)
def test_a_kept_gradient_does_not_change_under_zero(program: Program, stage: int) -> None:
    assert not check(replace(program, strategy=f"deepspeed_stage_{stage}", ranks=2, data=DATA))
    if not program.manual:  # DeepSpeed writes every window's gradients into the same buffers in bf16 at stage 1.
        half = replace(program, precision="bf16-mixed")
        assert not check(replace(half, strategy=f"deepspeed_stage_{stage}", ranks=2, data=DATA))


class KeepsGradients(Regression):
    def configure_optimizers(self) -> Any:
        return Optimistic(self.parameters(), lr=0.1)


class OneParameter(KeepsGradients):
    """Has a single parameter, whose gradient a strategy need not copy to flatten it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: torch.nn.Linear(FEATURES, 1, bias=False))


def _train(kind: type[Regression], strategy: Any) -> torch.Tensor:
    if isinstance(strategy, dict):
        strategy = DeepSpeedStrategy(**strategy, config={"zero_allow_untested_optimizer": True})
    return trained(kind(), loader(48, 4), strategy=strategy)


def test_a_kept_gradient_of_one_parameter_and_of_offloaded_state_does_not_change() -> None:
    cases: list[Any] = [(OneParameter, strategy) for strategy in ("ddp", "fsdp", *({"stage": at} for at in (1, 2, 3)))]
    for stage in (1, 2, 3):  # DeepSpeed writes every window's gradients into the same buffers here, too.
        cases += [(kind, {"stage": stage, "offload_optimizer": "cpu"}) for kind in (KeepsGradients, OneParameter)]
    for found in on_ranks(each, 2, _train, *cases, process_group=None, timeout=120):
        for (kind, strategy), actual in zip(cases, found, strict=True):
            expected = weights(train_by_hand(kind(), global_batches(48, 8)))
            torch.testing.assert_close(actual, expected, **TIGHT, msg=str(strategy))
