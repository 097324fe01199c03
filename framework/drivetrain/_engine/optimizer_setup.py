"""Optimizers, schedulers and what trains: set up once the strategy holds the module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from drivetrain._engine.handshake import check_ranks_agree, optimizer_facts
from drivetrain._engine.resume_compatibility import class_names
from drivetrain._engine.session_state import SessionState
from drivetrain._loops.configured_optimizers import SchedulerConfig, asks_for_closure, check_optimizers, read_optimizers
from drivetrain._loops.manual_step import handles_of

logger = logging.getLogger("drivetrain")


def set_up_optimizers(run: SessionState, regroup: Callable[[Sequence[Optimizer]], None]) -> None:
    """Ask the module for its optimizers, and hand them to the strategy.

    Args:
        run: gets its optimizers, schedulers and handles.
        regroup: gives optimizers the groups that they had in the run that goes on.
    """
    module, strategy, trainables = run.module, run.strategy, run.trainables
    with strategy.optimizer_init_context():
        configured = module.configure_optimizers()
    optimizers, run.schedulers = read_optimizers(configured)
    schedulers = [config.scheduler for config in run.schedulers]
    if strategy.world_size > 1:  # a rate that is a tensor on a device is waited for
        check_ranks_agree(strategy.control, optimizer_facts(optimizers, schedulers))
    run.made_of |= {"optimizers": class_names(optimizers), "schedulers": class_names(schedulers)}
    automatic = module.automatic_optimization
    closure = run.closure = asks_for_closure(configured, optimizers, automatic)
    strategy.adopt_parameters(optimizers)
    regroup(optimizers)
    check_optimizers(module, optimizers, run.schedulers, automatic, closure)
    if strategy.rank == 0:
        _tell_idle_keys(run.schedulers, automatic)
    trainables.tell_unheld(optimizers)
    before = trainables.present()
    run.optimizers = strategy.setup_optimizers(optimizers)
    if strategy.world_size > 1:
        strategy.broadcast_module(module)
    trainables.set_aside(before)
    run.schedulers += [SchedulerConfig(scheduler, "step") for scheduler in strategy.schedulers]
    if run.trial:  # whoever tries something out sets the learning rate, or does not look at it
        run.schedulers = []
    trainables.begin(run.optimizers, run.schedulers)
    if not run.optimizers:
        logger.warning("configure_optimizers returned None: nothing will be trained.")
    run.handles = handles_of(run.optimizers, strategy, run.hooks, automatic, closure)


def _tell_idle_keys(schedulers: Sequence[SchedulerConfig], automatic: bool) -> None:
    """Say which keys beside a scheduler nobody goes by."""
    for config in schedulers:
        kind = type(config.scheduler).__name__
        if not automatic and config != SchedulerConfig(config.scheduler, name=config.name):
            logger.warning(
                "What configure_optimizers says beside %s about when it steps (interval, frequency, monitor) is not "
                "heeded in manual optimization: training_step steps it, by self.lr_schedulers().step().",
                kind,
            )
        elif automatic and config.monitor is not None and not config.plateau:
            logger.warning(
                "configure_optimizers: 'monitor': %r beside %s, whose step takes no value: it is not heeded. Where it "
                "takes one, return 'reduce_on_plateau': True with it.",
                config.monitor,
                kind,
            )
