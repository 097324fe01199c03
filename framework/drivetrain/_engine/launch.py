"""Launches a run in this process, among processes that exist already, or in processes started for the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.failure import RankFailedError
from drivetrain._engine.error_reporting import peer_failures_in_one_line, print_in_one_line
from drivetrain._engine.requirements import check_requirements, warn_of_unused_loader
from drivetrain._engine.run_parts import RunCore, RunRequest
from drivetrain._engine.session import Session
from drivetrain._engine.signals import as_interruption, handled_signals
from drivetrain._engine.stage_loaders import DataArguments
from drivetrain._engine.topology import Topology, find_topology, first_rank_topology, is_standalone, resolve_environment
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import LaunchedProcesses, Launcher, Work, choose_launcher, named_launcher, suggested_threads
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import resolve_precision
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._engine.remote_result import RemoteResult
    from drivetrain._engine.run_folder import RunFolder
    from drivetrain._run_state import Progress

logger = logging.getLogger("drivetrain")

DEFAULT_MAX_EPOCHS = 1000


def launch(request: RunRequest) -> Any:
    """Run a stage, after starting processes if needed, and return the stage's result."""
    trainer = request.trainer
    check_requirements(request.stage, request.module, request.given)
    if request.ckpt_path is None and _has_meta_parameters(request.module):
        from drivetrain._engine.missing_weights import refuse_missing_weights  # only modules without values need it

        refuse_missing_weights(request.module)
    preceding = trainer.run_state
    if isinstance(preceding, RunCore):  # not in a process that was started for this run
        # An evaluation keeps the counters of the preceding fit, or takes those of the checkpoint that it loads.
        counters = None if request.stage == "fit" else copy(preceding.progress)
        request = replace(request, counters=counters, previous_folder=preceding.folder)
    environment = resolve_environment(trainer.environment)
    launcher_or_name = _launcher_setting(trainer)
    launcher = named_launcher(launcher_or_name)
    if launcher is not None and launcher.places_devices and is_standalone(environment):
        devices = launcher.devices(trainer.accelerator, trainer.devices)
        topology = first_rank_topology(devices, trainer.num_nodes, trainer.chosen_strategy)
    else:
        devices = resolve_devices(trainer.accelerator, trainer.devices)
        with peer_failures_in_one_line():
            topology = find_topology(environment, devices, trainer.num_nodes, trainer.chosen_strategy)
    if not topology.missing:
        return _run_as_rank(request, topology)
    launcher = choose_launcher(launcher or launcher_or_name, topology.placement.local_world_size)
    work = _WorkOfRun(request, topology, devices.type)
    launcher.run(work, topology.placement, address=topology.address, port=topology.port)
    if not work.done:
        raise ConfigurationError(
            f"{type(launcher).__name__}.run returned without executing the run.",
            "nothing was trained.",
            "call work.run_in_this_process(world) or work.run_in_other_processes(call) in the launcher's run method.",
        )
    return work.result


def _run_as_rank(request: RunRequest, topology: Topology) -> Any:
    with peer_failures_in_one_line(topology.placement.rank):
        return run_here(request, topology)


def run_here(request: RunRequest, topology: Topology) -> Any:
    """Run a stage in this process, whose rank and world size are known."""
    trainer, stage = request.trainer, request.stage
    if topology.world is not None and topology.placement.world_size > 1:
        topology.world.wait_for_all()
    device = resolve_devices(trainer.accelerator, trainer.devices).of(topology.placement.local_rank)
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(topology.placement.world_size)
    strategy = trainer.chosen_strategy
    uses_sync_batchnorm = asks_for_sync_batchnorm(trainer, strategy, device)
    strategy.bind(topology.placement, device, resolve_precision(trainer.precision_setting, device), topology.store)
    if stage == "fit" and trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        trainer.max_epochs = DEFAULT_MAX_EPOCHS
        if strategy.rank == 0:
            logger.warning("Nothing limits the run: it trains for max_epochs=%d.", DEFAULT_MAX_EPOCHS)
    if strategy.rank == 0:
        warn_of_unused_loader(stage, request.module, request.given)
    session_class = Session
    if trainer.profiles:
        from drivetrain._engine.profiled_session import ProfiledSession  # only runs with a profiler need it

        session_class = ProfiledSession
    session = session_class(request, strategy, topology)
    trainer.run_state = session.core
    trainer.state = {"fit": "fitting", "validate": "validating", "test": "testing", "predict": "predicting"}[stage]
    began_on_meta = _has_meta_parameters(request.module)
    threads = torch.get_num_threads()
    if topology.world is not None and topology.world.is_caller and "OMP_NUM_THREADS" not in os.environ:
        # The processes started next to this one use the other cores.
        torch.set_num_threads(min(threads, suggested_threads(topology.placement.local_world_size)))
    sync_batchnorm_before = strategy.sync_batchnorm
    strategy.sync_batchnorm |= uses_sync_batchnorm
    try:
        result = session.execute()
    except BaseException as error:
        trainer.state = "interrupted"
        if topology.world is not None and isinstance(error, SystemExit) and isinstance(error.code, int):
            topology.world.signal_exit_code = error.code
        if session.last_line is not None:
            print_in_one_line(error, session.last_line)
        raise
    finally:
        if _has_meta_parameters(request.module):
            from drivetrain._engine.missing_weights import note_missing_weights  # only modules without values need it

            written, opened = session.checkpoints.written, session.checkpoints.opened
            note_missing_weights(session.core, written, "" if opened is None else opened.path, began_on_meta)
        torch.set_num_threads(threads)
        strategy.sync_batchnorm = sync_batchnorm_before  # the user may pass the strategy to another `Fit`
    trainer.state = "finished"
    return result


def _has_meta_parameters(module: TrainModule) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _launcher_setting(trainer: RunContext) -> str | Launcher:
    """Return the launcher of the strategy, if there is one, or else the argument ``launcher`` of `Fit`."""
    strategy_launcher: Launcher | None = None if trainer.chosen_strategy is None else trainer.chosen_strategy.launcher
    return strategy_launcher or trainer.launcher


def asks_for_sync_batchnorm(trainer: RunContext, strategy: Strategy, device: torch.device) -> bool:
    """Return whether batch normalization spans all ranks.

    Raises:
        ConfigurationError: the strategy or the device does not support synchronized batch normalization.
    """
    if not trainer.sync_batchnorm:
        return False
    if not (strategy.single_process or strategy.supports_sync_batchnorm):
        raise ConfigurationError(
            f"sync_batchnorm=True with strategy={strategy.name!r}.",
            "each rank would still normalise over its own samples only.",
            "use strategy='ddp', or normalise with GroupNorm or LayerNorm.",
        )
    if device.type == "cpu":
        raise ConfigurationError(
            "sync_batchnorm=True on the CPU.",
            "torch's SyncBatchNorm needs an accelerator.",
            "leave out sync_batchnorm, or normalise with GroupNorm or LayerNorm.",
        )
    return True


# Runs in processes that are started for the run, whose results are copied to the caller's objects


class _WorkOfRun(Work):
    """A run whose processes have not been started yet.

    Args:
        request: the run.
        topology: the place of this node's first process among the run's processes.
        device: the type of the device that each process uses.
    """

    def __init__(self, request: RunRequest, topology: Topology, device: str) -> None:
        self._request = request
        self._topology = topology
        self.device = device
        self.done = False
        self.result: Any = None
        self.signals = handled_signals(request.trainer.preemption_signals, os.environ, request.stage)

    def run_in_this_process(self, world: LaunchedProcesses) -> Any:
        store = world.store("runs")
        topology = replace(self._topology, placement=world.placement, store=store, world=world, missing=False)
        self.result = _run_as_rank(self._request, topology)
        self.done = True
        return self.result

    def run_in_other_processes(self, call: Callable[..., Any]) -> Any:
        trainer = self._request.trainer
        try:
            outcome = call(_worker, *(getattr(self._request, field.name) for field in fields(self._request)))
        except (SystemExit, KeyboardInterrupt):
            trainer.state = "interrupted"
            raise
        except RankFailedError as error:
            interruption = as_interruption(error, self.signals)
            if interruption is error:
                raise
            trainer.state = "interrupted"
            raise interruption from error
        from drivetrain._engine.remote_result import RemoteResult  # only runs in other processes need it

        if not isinstance(outcome, RemoteResult):
            raise ConfigurationError(
                f"The function passed to work.run_in_other_processes returned a {type(outcome).__name__}.",
                "it must call its first argument on every rank, and return the value from rank 0.",
                "return the value from rank 0 unchanged.",
            )
        _apply_result(outcome, self._topology, self._request)
        self.result, self.done = outcome.result, True
        return self.result


def _apply_result(outcome: RemoteResult, topology: Topology, request: RunRequest) -> None:
    """Set the state of the caller's objects to the state that they would have after a run in this process."""
    trainer = request.trainer
    session = Session(request, _strategy_as_rank_0(trainer, topology), topology)
    core = session.core
    core.progress.load_state_dict(outcome.progress)
    core.progress.cut_short = core.progress.batch_idx > 0
    core.metrics.restore(outcome.metrics)
    core.folder.adopt(outcome.folder)
    for logger, version in zip(trainer.loggers, outcome.versions, strict=False):
        logger.adopt(version)
    trainer.run_state = core
    trainer.state = outcome.state
    for callback, state in zip(trainer.callbacks, outcome.callbacks, strict=True):
        callback.load_rank_zero_state(state)
    if not request.trial:
        for owner in (request.module, request.given.datamodule):
            if owner is not None:
                owner.trainer = trainer
        outcome.fill(request.module)  # last, because it may raise an error


def _strategy_as_rank_0(trainer: RunContext, topology: Topology) -> Strategy:
    """Return the caller's strategy, with the placement that rank 0 had in the other processes."""
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(topology.placement.world_size)
    trainer.chosen_strategy.placement = topology.placement
    return trainer.chosen_strategy


def _worker(
    trainer: RunContext,
    stage: str,
    module: TrainModule,
    given: DataArguments,
    ckpt_path: str | None,
    return_predictions: bool,
    allow: tuple[str, ...],
    trial: bool,
    averaged: bool | None,
    counters: Progress | None,
    previous_folder: RunFolder | None,
) -> RemoteResult:
    """Run one rank in a process that was started for the rank.

    The request's fields are separate arguments, so that an error names the field that cannot be pickled.
    """
    from drivetrain._engine.remote_result import RemoteResult  # only runs in other processes need it

    if not resolve_environment(trainer.environment).started_processes:
        trainer.environment = "auto"  # the caller's setting described the caller's process
    options = (return_predictions, allow, trial, averaged, counters, previous_folder)
    result = launch(RunRequest(trainer, stage, module, given, ckpt_path, *options))
    return RemoteResult.of(trainer, module, result, with_module=not trial)
