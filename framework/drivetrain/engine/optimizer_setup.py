"""Optimizers, schedulers and what trains: set up once the strategy holds the module."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from drivetrain.loops.manual_step import handles_of
from drivetrain.loops.optimizers import SchedulerConfig, asks_for_closure, check_optimizers, read_optimizers

if TYPE_CHECKING:
    from drivetrain.engine.session import Session

logger = logging.getLogger("drivetrain")


def set_up_optimizers(session: Session) -> None:
    """Ask the module for its optimizers, and hand them to the strategy; a run that goes on has its groups again."""
    module, strategy, trainables = session.module, session.strategy, session.trainables
    with strategy.optimizer_init_context():
        configured = module.configure_optimizers()
    optimizers, session.schedulers = read_optimizers(configured)
    automatic = module.automatic_optimization
    closure = session.closure = asks_for_closure(configured, optimizers, automatic)
    strategy.adopt_parameters(optimizers)
    session.checkpoints.regroup(optimizers)
    check_optimizers(module, optimizers, session.schedulers, automatic, closure)
    trainables.tell_unheld(optimizers)
    before = trainables.present()
    session.optimizers = strategy.setup_optimizers(optimizers)
    trainables.set_aside(before)
    session.schedulers += [SchedulerConfig(scheduler, "step") for scheduler in strategy.schedulers]
    trainables.begin(session.optimizers, session.schedulers)
    if not session.optimizers:
        logger.warning("configure_optimizers returned None: nothing will be trained.")
    session.handles = handles_of(session.optimizers, strategy, session.hooks, automatic, closure)
