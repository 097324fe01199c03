"""Evaluates a checkpoint of the program under `Fit`, on one rank."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.utils.data import DataLoader

from drivetrain import CheckpointError, ConfigurationError, Fit
from oracle.data_loaders import Samples, parts_of
from oracle.engine import QUIET, Trained, averaging, quiet_loggers, saved_in, weights_of
from oracle.outcome import Evaluated, Outcome
from oracle.planted_defects import planted
from oracle.program import EVALUATED, Evaluation, Program
from oracle.strategies import strategy_of


class Scored(Trained):
    """The user's module, whose steps of evaluation log the loss alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net.loss(parts_of(batch, False)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def evaluate(program: Program, root: str, plant: str = "") -> Evaluated:
    plan = program.evaluation
    assert plan is not None
    averaged: dict[str, Any] = {} if plan.averaged is None else {"averaged": plan.averaged}
    with quiet_loggers(), warnings.catch_warnings(), planted(plant):
        warnings.simplefilter("ignore")
        try:
            if plan.by == "load":
                outcome = Outcome()
                module = Scored.load_from_checkpoint(saved_in(root), program=program, outcome=outcome, **averaged)
                return Evaluated(weights=weights_of(module))
            return evaluate_under_fit(program, plan, root, averaged)
        except (ConfigurationError, CheckpointError) as error:
            return Evaluated(refused=True, text=str(error))


def evaluate_under_fit(program: Program, plan: Evaluation, root: str, averaged: dict[str, Any]) -> Evaluated:
    module = Scored(program, Outcome())
    trainer = Fit(
        strategy=strategy_of(plan.strategy, program),
        accelerator="cpu",
        precision=program.precision,
        callbacks=[averaging(program.average)] if program.average is not None and plan.callbacks else [],
        logger=False,
        **QUIET,
        seed=program.seed,
    )
    loader = DataLoader(Samples(EVALUATED.data, program.net.on_tokens), EVALUATED.batch)
    run = trainer.test if plan.by == "test" else trainer.validate
    scores = run(module, loader, ckpt_path=saved_in(root), verbose=False, **averaged)
    loss = scores[0]["score"] if scores else math.nan
    # DeepSpeed's engine leaves the parameters rounded to half precision.
    return Evaluated(loss, {} if plan.strategy.startswith("deepspeed") else weights_of(module))
