"""Runs on two ranks equal a plain loop, which `tests/oracle` interprets from the same description."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oracle.check import check
from oracle.program import Data, Log, Net, Optimizer, Program, Resume, Turn, Validation

LEAST_ON_RANK_0 = Data(kind="iterable", samples=14, fewest_on_rank_0=True)
REASSIGNED = Program(net=Net(buffer="reassigned"), data=LEAST_ON_RANK_0)
TOKENS = Program(data=Data(samples=37), token_weighted=True, net=Net(family="gru"))
LOGGED = (Log(what="metric", on_epoch=True), Log(on_epoch=True), Log(what="number", sync_dist=True))
VALIDATED = (Log("validation_step", on_step=False, on_epoch=True),)
EPOCH_SUM = (Log(what="number", on_step=False, on_epoch=True, reduce_fx="sum"),)
LARGE = tuple(Log(what="large", on_step=False, on_epoch=True, reduce_fx=fold) for fold in ("sum", "max", "mean"))
ONE_ELEMENT = (Log(what="parameter", on_epoch=True),)


def wrong_length(error: int) -> Program:
    data = Data(kind="batch_sampler", samples=20, length_error=error)
    return Program(data=data, epochs=2, logs=EPOCH_SUM)


def validated(buffer: str, interval: int = 1, sanity: int = 0) -> Program:
    """A net with a running mean that each rank has of its own samples, validated on samples that ranks cannot share."""
    validation = Validation(samples=5, batch=1, interval=interval, sanity=sanity, draws=True)
    return Program(net=Net(buffer=buffer, dropout=0.3), validation=validation, logs=VALIDATED, broadcast=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(Program(data=Data("iterable", samples=14)), id="B-04 streams of unequal length"),
        pytest.param(Program(data=LEAST_ON_RANK_0, accumulate=3, epochs=2), id="B-02 B-04 least on rank 0, windows"),
        pytest.param(replace(TOKENS, accumulate=3), id="B-03 B-21 token-weighted windows"),
        pytest.param(
            Program(data=Data(samples=11), optimizers=(Optimizer("lbfgs"),), accumulate=3), id="B-16 LBFGS on windows"
        ),
        pytest.param(Program(data=Data(samples=15), epochs=3, logs=LOGGED), id="B-12 B-14 logged by step and epoch"),
        pytest.param(Program(data=Data(samples=6), logs=LARGE), id="I-01 large integers"),
        pytest.param(Program(adds_to_loss=True, logs=(Log(on_epoch=True),)), id="I-01 a loss that changes later"),
        pytest.param(Program(net=Net(scale=True), logs=ONE_ELEMENT), id="I-01 a parameter of one element"),
        pytest.param(REASSIGNED, id="I-07 buffers that are reassigned"),
        pytest.param(replace(REASSIGNED, manual=(Turn(),)), id="I-07 buffers that are reassigned, by hand"),
        pytest.param(wrong_length(-2), id="I-04 too short a length"),
        pytest.param(wrong_length(6), id="I-04 too long a length"),
        pytest.param(
            Program(data=Data(kind="sharded", samples=20, workers=2), logs=EPOCH_SUM), id="I-04 shared by workers"
        ),
        pytest.param(validated("in_place"), id="I-13 buffers written to"),
        pytest.param(validated("reassigned"), id="I-13 buffers replaced"),
        pytest.param(validated("in_place", interval=2, sanity=1), id="I-13 a sanity check"),
    ],
)
def test_a_run_on_ranks_equals_the_plain_loop(strategy: str, program: Program) -> None:
    assert not check(replace(program, strategy=strategy, ranks=2)), "the engine refused the program"


@pytest.mark.parametrize(
    ("hook", "at"), [("on_before_optimizer_step", 0), ("on_before_optimizer_step", 1), ("on_train_batch_end", 2)]
)
@pytest.mark.parametrize("fewest_on_rank_0", [True, False])
def test_a_rank_whose_part_has_ended_joins_after_a_resume(hook: str, at: int, fewest_on_rank_0: bool) -> None:  # S-02
    data = Data(kind="stateful", samples=14, length_error=None, fewest_on_rank_0=fewest_on_rank_0)
    resume = Resume(hook, at, 2, "ddp")
    assert not check(Program("ddp", 2, data=data, accumulate=2, epochs=2, resume=resume))
