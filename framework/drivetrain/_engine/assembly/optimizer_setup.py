"""Sets up optimizers and schedulers, once the strategy has set up the module."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.checkpoints.components import class_name, describe_groups, describe_schedulers
from drivetrain._engine.ranks.rank_facts import optimizer_facts
from drivetrain._loops.configured_optimizers import (
    check_optimizers,
    declared_elementwise,
    needs_engine_closure,
    parse_optimizers,
)
from drivetrain._loops.optimizer_handle import OptimizerHandle
from drivetrain._run_state import Optimization, SchedulerConfig

if TYPE_CHECKING:
    from drivetrain._engine.checkpoints.resumed_run import ResumedRun

logger = logging.getLogger("drivetrain")


def set_up_optimizers(run: RunCore, resumed: ResumedRun | None) -> Optimization:
    """Call ``configure_optimizers`` and hand the optimizers to the strategy.

    Args:
        run: the run. Its components receive the classes of optimizers and schedulers, and the groups.
        resumed: the run that is resumed, whose optimizers and parameter groups the fit has to have.
    """
    module, strategy, trainables = run.module, run.strategy, run.trainables
    assert trainables is not None
    with strategy.optimizer_init_context():
        configured = module.configure_optimizers()
    optimizers, configs = parse_optimizers(configured)
    schedulers = [config.scheduler for config in configs]
    if strategy.world_size > 1:  # reading a learning rate that is a tensor waits for the device
        check_ranks_agree(strategy.control, optimizer_facts(optimizers, schedulers))
    automatic = module.automatic_optimization
    closure = needs_engine_closure(configured, optimizers, automatic)
    strategy.elementwise_optimizers = declared_elementwise(configured)
    strategy.adopt_parameters(optimizers)
    run.components |= {
        "optimizers": [class_name(optimizer) for optimizer in optimizers],
        "schedulers": [class_name(scheduler) for scheduler in schedulers],
        "optimizer_groups": describe_groups(optimizers, strategy.named_parameters()),
        "scheduler_settings": describe_schedulers(schedulers),
        "frozen_parameters": trainables.frozen(),
    }
    if resumed is not None:
        resumed.regroup(optimizers)
    check_optimizers(module, optimizers, configs, automatic, closure)
    if strategy.rank == 0:
        _warn_of_unused_keys(configs, automatic)
    trainables.warn_of_unoptimized(optimizers)
    before = trainables.current_state()
    optimizers = strategy.setup_optimizers(optimizers)
    if strategy.world_size > 1:
        strategy.broadcast_module(module)
    trainables.accept_strategy_changes(before)
    configs += [SchedulerConfig(scheduler, "step") for scheduler in strategy.schedulers]
    if run.request.trial:  # a trial either sets the learning rate itself or does not depend on it
        configs = []
    trainables.begin(optimizers, configs)
    if not optimizers:
        logger.warning("configure_optimizers returned None: nothing will be trained.")
    handles = [
        OptimizerHandle(optimizer, strategy, run.callbacks.hooks, automatic=automatic, closure=closure)
        for optimizer in optimizers
    ]
    return Optimization(optimizers, configs, handles, closure)


def _warn_of_unused_keys(schedulers: Sequence[SchedulerConfig], automatic: bool) -> None:
    """Warn of keys that were given with a scheduler and have no effect."""
    for config in schedulers:
        kind = type(config.scheduler).__name__
        if not automatic and config != SchedulerConfig(config.scheduler, name=config.name):
            logger.warning(
                "configure_optimizers: interval, frequency and monitor of %s are ignored in manual optimization, where "
                "training_step steps the scheduler by self.lr_schedulers().step().",
                kind,
            )
        elif automatic and config.monitor is not None and not config.reduce_on_plateau:
            logger.warning(
                "configure_optimizers: 'monitor': %r is ignored with %s, whose step takes no value. If its step does "
                "take the value, return 'reduce_on_plateau': True as well.",
                config.monitor,
                kind,
            )
