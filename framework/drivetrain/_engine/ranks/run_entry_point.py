"""Runs an entry point in this process, among processes that exist already, or in processes started for the run."""

from __future__ import annotations

import logging
import os
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.assembly.strategy_checks import asks_for_sync_batchnorm
from drivetrain._engine.ranks.error_reporting import print_in_one_line
from drivetrain._engine.ranks.run_processes import check_number, find_processes, first_placement, is_standalone
from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.session import Session
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain.environments import resolve_environment
from drivetrain.launchers import (
    LaunchedProcesses,
    Launcher,
    RankFailedError,
    choose_launcher,
    current_processes,
    named_launcher,
    suggested_threads,
)
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import resolve_precision

logger = logging.getLogger("drivetrain")

DEFAULT_MAX_EPOCHS = 1000


def run_entry_point(request: RunRequest) -> Any:
    """Run a stage, after starting processes if needed, and return the stage's result."""
    from drivetrain._engine.assembly.class_checks import check_requirements  # importing Fit does not need it

    trainer = request.trainer
    check_requirements(request)
    if request.ckpt_path is None and _has_meta_parameters(request.module):
        from drivetrain._engine.assembly.missing_weights import (
            refuse_missing_weights,  # only modules without values need it
        )

        refuse_missing_weights(request.module)
    preceding = trainer.run_state
    if isinstance(preceding, RunCore):  # not in a process that was started for this run
        # An evaluation keeps the counters of the preceding fit, or takes those of the checkpoint that it loads.
        counters = None if request.stage == "fit" else copy(preceding.progress)
        request = replace(request, counters=counters, previous_folder=preceding.folder)
    environment = resolve_environment(trainer.environment)
    strategy = trainer.chosen_strategy
    setting: str | Launcher = (strategy.launcher if strategy is not None else None) or trainer.launcher
    launcher, processes = named_launcher(setting), None
    try:
        if launcher is not None and launcher.places_devices and is_standalone(environment):
            devices = launcher.devices(trainer.accelerator, trainer.devices)
            check_number(strategy, len(devices.indices) * trainer.num_nodes)
            placement = first_placement(None, devices, trainer.num_nodes)
        else:
            devices = resolve_devices(trainer.accelerator, trainer.devices)
            processes = find_processes(environment, devices, trainer.num_nodes, strategy)
            if processes is None:
                placement = first_placement(environment, devices, trainer.num_nodes)
        if processes is None:
            launcher = choose_launcher(launcher or setting, placement.local_world_size)
            if type(launcher).launch is not Launcher.launch:
                processes = launcher.launch(placement)
        if processes is not None:
            return run_here(request, processes)
    except RankFailedError as error:
        known, summary = processes or current_processes(), error.failure.one_line_summary()
        rank = 0 if known is None else known.placement.rank
        print_in_one_line(error, f"Rank {rank} ends because another rank failed: {summary}")
        raise
    from drivetrain._engine.ranks.remote_run import run_in_other_processes  # only runs in other processes need it

    assert isinstance(launcher, Launcher)
    return run_in_other_processes(launcher, request, placement, devices.type, run_entry_point)


def run_here(request: RunRequest, processes: LaunchedProcesses) -> Any:
    """Run a stage in this process, which is one of ``processes``."""
    trainer, stage, placement = request.trainer, request.stage, processes.placement
    processes.wait_for_all()
    device = resolve_devices(trainer.accelerator, trainer.devices).of(placement.local_rank)
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(placement.world_size)
    strategy = trainer.chosen_strategy
    uses_sync_batchnorm = asks_for_sync_batchnorm(trainer.sync_batchnorm, strategy, device)
    strategy.bind(placement, device, resolve_precision(trainer.precision_setting, device), processes.store("runs"))
    if stage == "fit" and trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        trainer.max_epochs = DEFAULT_MAX_EPOCHS
        if strategy.rank == 0:
            logger.warning("Nothing limits the run: it trains for max_epochs=%d.", DEFAULT_MAX_EPOCHS)
    session_class = Session
    if trainer.given_profiler is not None:
        from drivetrain._engine.profiled_session import ProfiledSession  # only runs with a profiler need it

        session_class = ProfiledSession
    session = session_class(request, strategy, processes)
    trainer.run_state = session.run
    trainer.state = {"fit": "fitting", "validate": "validating", "test": "testing", "predict": "predicting"}[stage]
    began_on_meta = _has_meta_parameters(request.module)
    threads = torch.get_num_threads()
    launched = current_processes()
    if launched is not None and launched.is_caller and "OMP_NUM_THREADS" not in os.environ:
        # The processes started next to this one use the other cores.
        torch.set_num_threads(min(threads, suggested_threads(placement.local_world_size)))
    sync_batchnorm_before = strategy.sync_batchnorm
    strategy.sync_batchnorm |= uses_sync_batchnorm
    try:
        result = session.execute()
    except BaseException as error:
        trainer.state = "interrupted"
        if launched is not None and isinstance(error, SystemExit) and isinstance(error.code, int):
            launched.signal_exit_code = error.code
        if session.last_line is not None:
            print_in_one_line(error, session.last_line)
        raise
    finally:
        if _has_meta_parameters(request.module):
            from drivetrain._engine.assembly.missing_weights import (
                note_missing_weights,  # only modules without values need it
            )

            written, opened = session.checkpoints.written, session.checkpoints.opened
            note_missing_weights(session.run, written, "" if opened is None else opened.path, began_on_meta)
        torch.set_num_threads(threads)
        strategy.sync_batchnorm = sync_batchnorm_before  # the user may pass the strategy to another `Fit`
    trainer.state = "finished"
    return result


def _has_meta_parameters(module: TrainModule) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
