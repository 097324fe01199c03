"""DeepSpeedStrategy on two ranks: rows E-01, E-05, E-09, E-13, and B-02, B-03 under ZeRO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_nets import Block, DeepRegression
from small_runs import (
    SHARD_EVERYTHING,
    TIGHT,
    global_batches,
    loader,
    same_on_two_ranks,
    train_by_hand,
    trained,
    weights,
)

from drivetrain_strategies import DeepSpeedStrategy
from oracle.check import check
from oracle.program import Data, Net, Program

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1, offload": {"stage": 1, "offload_optimizer": "cpu"},
    "stage 2, offload": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 2, small buckets": {"stage": 2, "reduce_bucket_size": 100, "allgather_bucket_size": 100},
    "stage 2, overlapped": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False},
    "stage 2, checkpointed": {"stage": 2, "activation_checkpointing": [Block]},
    "stage 3, small parameters whole": {"stage": 3},
    "stage 3, nothing whole": SHARD_EVERYTHING,
    "stage 3, offload": {**SHARD_EVERYTHING, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "stage 3, small groups": {**SHARD_EVERYTHING, "sub_group_size": 100, "reduce_bucket_size": 100},
    "stage 3, no prefetch": {**SHARD_EVERYTHING, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
    "stage 3, checkpointed": {**SHARD_EVERYTHING, "activation_checkpointing": [Block]},
    "stage 3, leaf modules": {**SHARD_EVERYTHING, "leaf_modules": [Block]},
}


class MixedOutputs(DeepRegression):
    """Has outputs of every kind: DeepSpeed's module hooks traverse all inputs and outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "number": 3.0, "nothing": None, "batch": batch}

    def validation_step(self, batch: Any, batch_idx: int) -> float:
        return 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert (outputs["number"], outputs["nothing"]) == (3.0, None)


def _runs() -> dict[str, torch.Tensor]:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    return {
        name: trained(MixedOutputs(), loader(40, 4), loader(8, 4), strategy=DeepSpeedStrategy(**options), **settings)
        for name, options in OPTIONS.items()
    }


def test_every_setting_gives_the_same_results_with_outputs_of_every_kind() -> None:
    # C-05, E-01, E-05, E-13, B-02: 5 micro-batches in windows of two, the last one short
    expected = weights(train_by_hand(DeepRegression(), global_batches(40, 8), window=2, epochs=2))
    for name, actual in same_on_two_ranks(_runs).items():
        torch.testing.assert_close(actual, expected, **TIGHT, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        # SGD shows wrong gradient scales: Adam would compensate for them. Last windows are short.
        pytest.param(Program(data=Data(samples=20)), id="windows of one"),
        pytest.param(Program(data=Data(samples=20), accumulate=2), id="windows of two"),
        pytest.param(Program(data=Data(samples=20), accumulate=4), id="windows of four"),
        pytest.param(
            Program(data=Data(samples=20), accumulate=2, token_weighted=True, net=Net(family="gru")), id="weighted"
        ),
    ],
)
def test_gradients_are_divided_once(stage: int, program: Program) -> None:  # E-01, E-09, B-02, B-03
    assert not check(replace(program, strategy=f"deepspeed_stage_{stage}", ranks=2))
