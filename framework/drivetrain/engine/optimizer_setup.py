"""Optimizers, schedulers and what trains: set up once the strategy holds the module."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from drivetrain.loops.manual_step import OptimizerHandle
from drivetrain.loops.optimizers import SchedulerConfig, check_optimizers, read_optimizers

if TYPE_CHECKING:
    from drivetrain.engine.session import Session

logger = logging.getLogger("drivetrain")


def set_up_optimizers(session: Session) -> None:
    """Ask the module for its optimizers, and hand them to the strategy; a run that goes on has its groups again."""
    module, strategy, trainables = session.module, session.strategy, session.trainables
    with strategy.optimizer_init_context():
        optimizers, session.schedulers = read_optimizers(module.configure_optimizers())
    strategy.adopt_parameters(optimizers)
    session.checkpoints.regroup(optimizers)
    check_optimizers(module, optimizers, session.schedulers, module.automatic_optimization)
    trainables.tell_unheld(optimizers)
    before = trainables.present()
    session.optimizers = strategy.setup_optimizers(optimizers)
    trainables.set_aside(before)
    session.schedulers += [SchedulerConfig(scheduler, "step") for scheduler in strategy.schedulers]
    trainables.begin(session.optimizers, session.schedulers)
    if not session.optimizers:
        logger.warning("configure_optimizers returned None: nothing will be trained.")
    before_step = () if module.automatic_optimization else session.hooks.on_before_optimizer_step
    session.handles = [OptimizerHandle(optimizer, strategy, before_step) for optimizer in session.optimizers]
