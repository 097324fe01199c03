"""A fixed set of drawn programs, past findings, and a check that the comparison can fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cpu_kernels import FP16
from fuzz.search import script, search
from oracle.check import check, judge
from oracle.compare import differences
from oracle.interpreter import interpret
from oracle.program import (
    Average,
    Data,
    Evaluation,
    Log,
    Net,
    Optimizer,
    Program,
    Resume,
    Scheduler,
    Stop,
    Turn,
    Validation,
)

COUNT, SEED = 60, 16

ddp, fsdp = (partial(Program, strategy=strategy, ranks=2) for strategy in ("ddp", "fsdp"))
static_graph = partial(Program, strategy="ddp_static_graph", ranks=2)
FOUR = Data(samples=4, batch=1)
EPOCH_LOSS = Log(on_step=False, on_epoch=True)
MOMENTUM = (Optimizer("momentum"),)


def of_epoch(where: str, what: str, reduce_fx: str = "mean") -> Log:
    return Log(where, what, on_step=False, on_epoch=True, reduce_fx=reduce_fx)


EXAMPLES: dict[str, Program] = {
    "I-01: a value of the ranks that have data, logged in the hook that ends the epoch": ddp(
        ranks=3,
        data=Data("sharded", samples=12, batch=1, workers=2, fewest_on_rank_0=True),
        logs=(Log("on_train_batch_start", what="number", sync_dist=True),),
        stop=Stop("skip", at=2),
    ),
    "I-01: a scalar of NumPy's": Program(logs=(of_epoch("on_train_batch_end", "numpy"),)),
    "I-02: a forward after a step under autocast": Program(precision="bf16-mixed", data=FOUR, manual=(Turn(), Turn())),
    "I-04: samples that workers share, fewer on one rank than on the other": fsdp(
        data=Data("sharded", samples=14, workers=2),
        logs=(of_epoch("validation_step", "loss"),),
        validation=Validation(kind="sharded", samples=10, workers=2),
    ),
    "I-04: a schedule that goes by a length that is too short": ddp(
        data=Data("batch_sampler", samples=9, length_error=-2), schedulers=(Scheduler("linear", interval="step"),)
    ),
    "I-04, I-07: a rank that joins in validation, whose batch was taken to pieces before": fsdp(
        data=Data(consumes_batch=True), validation=Validation(kind="iterable", samples=9, batch=1, length_error=2)
    ),
    "I-05: a run without a step is asked to stop": Program(
        data=Data(samples=9), missing_loss="always", stop=Stop("should_stop", hook="on_train_batch_end", at=0)
    ),
    "I-16: a correlation goes on on fewer ranks": ddp(
        data=Data(samples=12, shuffle=True),
        logs=(of_epoch("training_step", "pearson"),),
        resume=Resume("on_train_batch_end", at=1),
    ),
    "saved after the epoch's validation, resumed on fewer ranks": ddp(
        validation=Validation(), resume=Resume("on_validation_end")
    ),
    "H-03: a step's value to be reduced, in an epoch without a step": ddp(
        precision="16-mixed", data=FOUR, logs=(EPOCH_LOSS, Log(sync_dist=True))
    ),
    "D-03: layers of configure_model in another dtype than the precision's": fsdp(
        precision="64-true", data=FOUR, configure_model=True
    ),
    "I-02: attention with dropout in manual optimization": Program(
        strategy="ddp",
        precision="bf16-mixed",
        net=Net(family="transformer", dropout=0.3),
        data=FOUR,
        optimizers=MOMENTUM,
        manual=(Turn(repeats=2),),
        epochs=2,
    ),
    "SAM beside a buffer that changes": ddp(net=Net(buffer="in_place"), data=FOUR, optimizers=(Optimizer("sam"),)),
    "an epoch's end is logged, and the run goes on on more ranks": Program(
        data=FOUR, epochs=2, logs=(of_epoch("on_train_epoch_end", "number"),), resume=Resume(ranks=2, strategy="ddp")
    ),
    "a static graph's buffers, accumulated and resumed": static_graph(
        net=Net(buffer="in_place"),
        data=Data(batch=1),
        epochs=2,
        accumulate=2,
        resume=Resume(ranks=2, strategy="ddp_static_graph"),
    ),
    "F-02: buffers that ranks have apart, and the run goes on": ddp(
        net=Net(buffer="in_place"), resume=Resume("on_train_batch_end", ranks=2, strategy="ddp"), broadcast=False
    ),
    "H-03: an epoch's start is logged, and the run goes on within it on more ranks": Program(
        data=FOUR,
        logs=(of_epoch("on_train_epoch_start", "number"),),
        resume=Resume("on_train_batch_end", ranks=2, strategy="ddp"),
    ),
    "three ranks in half precision under ZeRO 2": Program(
        "deepspeed_stage_2", 3, precision="bf16-mixed", data=Data("reused", 12, 1), optimizers=MOMENTUM, seed=1
    ),
    **{
        f"Q-04: a resume {told} other parameters in the optimizer": Program(
            optimizers=(Optimizer("adamw"),), epochs=2, resume=Resume(changed="members", allow=allow)
        )
        for told, allow in (("with", False), ("that may have", True))
    },
    **{
        f"Q-01: a checkpoint of a run with averages, by {by}": Program(
            epochs=2, average=Average(), evaluation=Evaluation(by, "on_train_epoch_end")
        )
        for by in ("validate", "test", "load")
    },
    "Q-04: one of two optimizers starts anew, on two ranks with shards": Program(
        optimizers=(Optimizer("adamw", of="body"), Optimizer("adamw", of="head")),
        epochs=2,
        resume=Resume(ranks=2, strategy="fsdp", changed="class", allow=True),
    ),
    "a rank's own buffer is logged after the rank has joined": ddp(
        net=Net(buffer="reassigned"),
        data=Data("iterable", samples=12),
        epochs=2,
        logs=(Log("on_train_batch_start", what="buffer", on_epoch=True),),
    ),
    "F-02: a key that all ranks log again after a resume on more ranks": fsdp(
        data=Data("sampler", samples=4, batch=1),
        epochs=3,
        logs=(of_epoch("on_train_epoch_end", "number"),),
        resume=Resume(ranks=3, strategy="ddp"),
    ),
    "S-04: a value of the sanity check on a rank without samples": ddp(
        data=FOUR,
        schedulers=(Scheduler("plateau"),),
        epochs=2,
        logs=(of_epoch("validation_step", "loss"),),
        validation=Validation(samples=1, batch=1, every_n_epochs=2, sanity=1),
    ),
}
"""By what was wrong, or what the engine or the loop had overlooked."""

if FP16:
    EXAMPLES |= {
        "F-02: step values of a resumed run that were not reduced yet, on fewer ranks": fsdp(
            precision="16-mixed",
            data=FOUR,
            logs=(EPOCH_LOSS, Log(on_epoch=True, sync_dist=True)),
            validation=Validation(samples=1, batch=1),
            resume=Resume("on_validation_end"),
        ),
        "F-02: step values that were logged since the last flush before a save": ddp(
            precision="16-mixed",
            data=Data("reused", fewest_on_rank_0=True),
            logs=(EPOCH_LOSS, EPOCH_LOSS, Log(sync_dist=True)),
            resume=Resume("on_train_batch_end", at=2, ranks=2, strategy="ddp"),
        ),
        "F-12: a run in fp16 that goes on without ZeRO": Program(
            strategy="deepspeed_stage_1",
            ranks=2,
            precision="16-mixed",
            data=FOUR,
            epochs=2,
            validation=Validation(samples=1, batch=1),
            resume=Resume(),
        ),
    }


def test_a_fixed_set_of_programs_equals_the_loop() -> None:
    one = search(COUNT, SEED)
    assert one is None, script(*one)


@pytest.mark.parametrize("program", [pytest.param(one, id=name) for name, one in EXAMPLES.items()])
def test_past_findings_are_fixed(program: Program) -> None:
    check(program)


def test_a_printed_script_rebuilds_its_program() -> None:
    program = Program(ranks=2, strategy="ddp", net=Net(dropout=0.3), logs=(Log(what="number"), Log()))
    names: dict[str, object] = {}
    exec(compile(script(program, 'it said """no"""').split("if __name__")[0], "script", "exec"), names)
    assert names["PROGRAM"] == program


def test_the_comparison_detects_another_program() -> None:
    program = Program(net=Net(dropout=0.3), epochs=2, logs=(Log(),))
    expected = interpret(program)
    assert judge(program).found == []
    for other in (
        replace(program, seed=1),
        replace(program, net=Net(dropout=0.31)),
        replace(program, accumulate=2),
        replace(program, epochs=1),
    ):
        assert differences(program, expected, [interpret(other)])
    bias = expected.weights["head.bias"]
    for changed in (bias + 1e-3, bias.to(torch.float64)):
        doctored = replace(expected, weights={**expected.weights, "head.bias": changed})
        assert differences(program, expected, [doctored])
