"""Runs on two ranks equal a plain loop, which `tests/oracle` interprets from the same description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_nets import trained_in_plain_torch
from small_runs import FEATURES, TIGHT, Regression, each, loader, seeded, trained

from drivetrain_strategies import DeepSpeedStrategy
from oracle.check import check
from oracle.optimizers import Optimistic
from oracle.program import Data, Evaluation, Log, Net, Optimizer, Program, Resume, Turn, Validation, Write
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

LEAST_ON_RANK_0 = Data(kind="iterable", samples=14, fewest_on_rank_0=True)
REASSIGNED = Program(net=Net(buffer="reassigned"), data=LEAST_ON_RANK_0)
BUFFERED = Program(net=Net(buffer="in_place"), data=Data(samples=13), broadcast=True)
REUSED = Program(data=Data("reused", samples=14), epochs=2)
TOKENS = Program(data=Data(samples=37), token_weighted=True, net=Net(family="gru"))
LOGGED = (Log(what="metric", on_epoch=True), Log(on_epoch=True), Log(what="number", sync_dist=True))
VALIDATED = (Log("validation_step", on_step=False, on_epoch=True),)
EPOCH_SUM = (Log(what="number", on_step=False, on_epoch=True, reduce_fx="sum"),)
LARGE = tuple(Log(what="large", on_step=False, on_epoch=True, reduce_fx=fold) for fold in ("sum", "max", "mean"))
TWELVE, SIXTEEN = Data(samples=12), Data(samples=16)
IN_TURN = Program(optimizers=(Optimizer(of="body"), Optimizer("momentum", of="head")), data=TWELVE)
SAM = Program(optimizers=(Optimizer("sam"),), data=TWELVE)


def wrong_length(error: int) -> Program:
    data = Data(kind="batch_sampler", samples=20, length_error=error)
    validation = Validation(kind="batch_sampler", samples=10, length_error=error)
    return Program(data=data, epochs=2, validation=validation, logs=(*EPOCH_SUM, *VALIDATED))


def validated(buffer: str, interval: int = 1, sanity: int = 0) -> Program:
    """A net with a running mean that each rank has of its own samples, validated on samples that ranks cannot share."""
    validation = Validation(samples=5, batch=1, interval=interval, sanity=sanity, draws=True)
    return Program(net=Net(buffer=buffer, dropout=0.3), validation=validation, logs=VALIDATED, broadcast=False)


def by_hand(program: Program, *turns: Turn, precision: str = "32-true") -> Program:
    return replace(program, manual=turns, precision=precision)


RUNS = {
    "B-04 streams of unequal length": Program(data=Data("iterable", samples=14)),
    "B-02 B-04 least on rank 0, windows": Program(data=LEAST_ON_RANK_0, accumulate=3, epochs=2),
    "B-03 B-21 token-weighted windows": replace(TOKENS, accumulate=3),
    "B-16 LBFGS on windows": Program(data=Data(samples=11), optimizers=(Optimizer("lbfgs"),), accumulate=3),
    "B-12 B-14 logged by step and epoch": Program(data=Data(samples=15), epochs=3, logs=LOGGED),
    "I-01 large integers": Program(data=Data(samples=6), logs=LARGE),
    "I-01 a loss that changes later": Program(adds_to_loss=True, logs=(Log(on_epoch=True),)),
    "I-01 a parameter of one element": Program(net=Net(scale=True), logs=(Log(what="parameter", on_epoch=True),)),
    "I-07 buffers that are reassigned": REASSIGNED,
    "I-07 buffers that are reassigned, by hand": by_hand(REASSIGNED, Turn()),
    "I-02 C-03 buffers by hand": by_hand(BUFFERED, Turn()),
    "I-02 C-03 buffers by hand, apart": by_hand(replace(BUFFERED, broadcast=False), Turn()),
    "I-07 batches taken apart": Program(data=Data(kind="stateful", samples=14, consumes_batch=True)),
    "I-09 reused memory": REUSED,
    "I-09 reused memory, windows": replace(REUSED, accumulate=3),
    "I-09 reused memory, token-weighted windows": replace(TOKENS, data=REUSED.data, accumulate=3),
    "I-09 reused memory, least on rank 0": replace(REUSED, data=replace(REUSED.data, fewest_on_rank_0=True)),
    "I-04 too short a length": wrong_length(-2),
    "I-04 unequal parts of a wrong length": Program(data=replace(LEAST_ON_RANK_0, length_error=-2), epochs=2),
    "I-04 too long a length": wrong_length(6),
    "I-04 shared by workers": Program(data=Data(kind="sharded", samples=20, workers=2), logs=EPOCH_SUM),
    "I-13 buffers written to": validated("in_place"),
    "I-13 buffers replaced": validated("reassigned"),
    "I-13 F-02 saved in a validation": replace(validated("in_place"), resume=Resume("on_validation_end", 0, 2, "ddp")),
    "I-13 a sanity check": validated("in_place", interval=2, sanity=1),
    "I-02 B-13 optimizers in turn": by_hand(IN_TURN, Turn(1, toggles=True), Turn(toggles=True)),
    "I-02 without toggles, bf16": by_hand(IN_TURN, Turn(1), Turn(), precision="bf16-mixed"),
    "I-02 B-15 several steps, clipped twice, fp16": by_hand(
        IN_TURN, Turn(1, repeats=3, clips=2, toggles=True), Turn(toggles=True), precision="16-mixed"
    ),
    # fp16 does not support closures, because every evaluation may overflow separately.
    "I-06 B-16 LBFGS by hand": by_hand(Program(optimizers=(Optimizer("lbfgs"),), data=TWELVE), Turn(closure=True)),
    "I-06 SAM, bf16": replace(SAM, precision="bf16-mixed"),
    "I-06 SAM by hand, bf16": by_hand(SAM, Turn(closure=True), precision="bf16-mixed"),
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("program", RUNS.values(), ids=RUNS)
def test_a_run_on_ranks_equals_the_plain_loop(strategy: str, program: Program) -> None:  # B-02
    assert not check(replace(program, strategy=strategy, ranks=2)), "the engine refused the program"


@pytest.mark.parametrize(
    ("hook", "at"), [("on_before_optimizer_step", 0), ("on_before_optimizer_step", 1), ("on_train_batch_end", 2)]
)
@pytest.mark.parametrize("fewest_on_rank_0", [True, False])
def test_a_rank_whose_part_has_ended_joins_after_a_resume(hook: str, at: int, fewest_on_rank_0: bool) -> None:  # S-02
    data = Data(kind="stateful", samples=14, length_error=None, fewest_on_rank_0=fewest_on_rank_0)
    resume = Resume(hook, at, 2, "ddp")
    assert not check(Program("ddp", 2, data=data, accumulate=2, epochs=2, resume=resume))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_save_within_a_step_resumes_exactly(strategy: str) -> None:  # S-01
    net = Net(norm="batch" if strategy != "deepspeed_stage_2" else "layer")
    resume = Resume("on_after_backward", 2, 2, strategy)
    assert not check(Program(strategy, 2, net=net, data=Data(samples=24), resume=resume))


ADAM = Program(ranks=2, optimizers=(Optimizer("adamw", split=True),), epochs=2, data=TWELVE)


@pytest.mark.parametrize(
    ("before", "after"),
    [("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", "deepspeed_stage_2"), ("deepspeed_stage_3", "fsdp")],
)
@pytest.mark.parametrize(
    ("changed", "allow"), [("amsgrad", False), ("groups", False), ("lr", False), ("groups", True), ("lr", True)]
)
def test_resumed_settings_are_compared_alike(before: str, after: str, changed: str, allow: bool) -> None:
    resume = Resume(ranks=2, strategy=after, changed=changed, allow=allow)
    refused = check(replace(ADAM, strategy=before, resume=resume))
    assert refused == resume.refused


WRITES = {
    "weights, bf16": Program(writes=Write("data", at=1), precision="bf16-mixed"),
    "assigned weights": Program(writes=Write("assigned", at=1)),
    "weights after the last step": Program(writes=Write("data", at=3)),
    "saved weights": Program(writes=Write("data", at=1), evaluation=Evaluation("validate", "on_train_batch_end", 1)),
}


ZERO = [f"deepspeed_stage_{stage}" for stage in (1, 2, 3)]
OFFLOADED = ["deepspeed_stage_2_offload", "deepspeed_stage_3_offload"]
WRITTEN = [
    *((strategy, name) for name in WRITES for strategy in ZERO),
    *((strategy, "assigned weights") for strategy in OFFLOADED),
]


@pytest.mark.parametrize(("strategy", "name"), WRITTEN)
def test_what_a_hook_writes_takes_effect_under_zero(strategy: str, name: str) -> None:  # S-09
    assert not check(replace(WRITES[name], strategy=strategy, ranks=2, data=SIXTEEN))


OPTIMISTIC, WITH_CLOSURE = Program(optimizers=(Optimizer("optimistic"),)), (Optimizer("optimistic", closure=True),)
SAM_SUM = Program(optimizers=(Optimizer("sam_sum"),))
KEPT = {
    "accumulated": replace(OPTIMISTIC, accumulate=2),
    # In bf16 DeepSpeed writes every window's gradients into the same buffers.
    "accumulated, bf16": replace(OPTIMISTIC, accumulate=2, precision="bf16-mixed"),
    "clipped": replace(OPTIMISTIC, clip=0.3),
    "manual": Program(optimizers=(Optimizer("heun"),), manual=(Turn(repeats=2),)),
    "closure": Program(optimizers=WITH_CLOSURE),
    "closure, accumulated": Program(optimizers=WITH_CLOSURE, accumulate=2),
    "sam": SAM_SUM,
    "manual sam": by_hand(SAM_SUM, Turn(closure=True)),
}
"""Optimizers that keep references to gradients: what they kept stays as it was."""


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_static_graph", "fsdp", *ZERO])
@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT)
def test_a_kept_gradient_does_not_change(strategy: str, program: Program) -> None:
    if program.manual and strategy == "ddp_static_graph":
        pytest.skip("a static graph is refused in manual optimization")
    if strategy in ZERO and (program.takes_closure or any(turn.closure for turn in program.manual)):
        pytest.skip("DeepSpeed's engine steps without a closure")
    ranks = 1 if strategy == "single_device" else 2
    assert not check(replace(program, strategy=strategy, ranks=ranks, data=TWELVE))


class OneParameter(Regression):
    """Keeps the gradient of a single parameter, which a strategy need not copy to flatten it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: torch.nn.Linear(FEATURES, 1, bias=False))

    def configure_optimizers(self) -> Any:
        return Optimistic(self.parameters(), lr=0.1)


def _train_one_parameter(strategy: Any) -> torch.Tensor:
    if isinstance(strategy, dict):
        strategy = DeepSpeedStrategy(**strategy, config={"zero_allow_untested_optimizer": True})
    return trained(OneParameter(), loader(24, 4), strategy=strategy)


def test_a_kept_gradient_of_one_parameter_and_of_offloaded_state_does_not_change() -> None:
    cases: list[Any] = ["ddp", "fsdp", *({"stage": stage} for stage in (1, 2, 3))]
    # DeepSpeed writes every window's gradients into the same buffers here, too.
    cases += [{"stage": stage, "offload_optimizer": "cpu"} for stage in (1, 2, 3)]
    expected = trained_in_plain_torch(OneParameter(), 24)
    for found in on_ranks(each, 2, _train_one_parameter, *((case,) for case in cases), timeout=120):
        for case, actual in zip(cases, found, strict=True):
            torch.testing.assert_close(actual, expected, **TIGHT, msg=str(case))
