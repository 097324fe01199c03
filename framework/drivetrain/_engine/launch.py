"""Starting a run: in this process, in those that are there, or in ones that are started for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain._distributed.failure import RankFailedError
from drivetrain._engine.error_reporting import print_in_a_line, told_by_its_own_rank
from drivetrain._engine.requirements import check_requirements, warn_of_unused_loader
from drivetrain._engine.run_state import RunState
from drivetrain._engine.session import Session
from drivetrain._engine.signals import as_asked, awaited_signals
from drivetrain._engine.stage_loaders import Given
from drivetrain._engine.topology import Topology, environment_of, find_topology, stands_alone, topology_of_first
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import Launcher, Work, World, choose_launcher, named_launcher, suggested_threads
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import resolve_precision
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._engine.remote_result import Outcome

logger = logging.getLogger("drivetrain")

DEFAULT_MAX_EPOCHS = 1000


class Request(NamedTuple):
    """What the caller wants run.

    Attributes:
        trainer: whose settings hold.
        stage: "fit", "validate", "test" or "predict".
        module: what is run.
        given: the loaders or the data module.
        ckpt_path: what to start from, or None.
        return_predictions: keep what ``predict_step`` returns.
        allow: what may differ from the run that it goes on with.
        trial: nobody keeps what it trains.
    """

    trainer: RunState
    stage: str
    module: TrainModule
    given: Given
    ckpt_path: str | None
    return_predictions: bool = True
    allow: tuple[str, ...] = ()
    trial: bool = False


def launch(request: Request) -> Any:
    """Run what is asked for, starting processes first where they are missing; returns what the stage returns."""
    trainer = request.trainer
    check_requirements(request.stage, request.module, request.given)
    environment = environment_of(trainer.environment)
    setting = _launcher_setting(trainer)
    launcher = named_launcher(setting)
    if launcher is not None and launcher.places_devices and stands_alone(environment):
        devices = launcher.devices(trainer.accelerator, trainer.devices)
        place = topology_of_first(devices, trainer.num_nodes, trainer.chosen_strategy)
    else:
        devices = resolve_devices(trainer.accelerator, trainer.devices)
        with told_by_its_own_rank():
            place = find_topology(environment, devices, trainer.num_nodes, trainer.chosen_strategy)
    if not place.missing:
        return _run_as_a_rank(request, place)
    launcher = choose_launcher(launcher or setting, place.placement.local_world_size)
    work = _WorkOfRun(request, place, devices.type)
    launcher.run(work, place.placement, address=place.address, port=place.port)
    if not work.done:
        raise ConfigurationError(
            f"{type(launcher).__name__}.run returned without having had the run done.",
            "nothing was trained.",
            "call work.here(world) or work.elsewhere(call).",
        )
    return work.result


def _run_as_a_rank(request: Request, place: Topology) -> Any:
    with told_by_its_own_rank(place.placement.rank):
        return run_here(request, place)


def run_here(request: Request, place: Topology) -> Any:
    """Run what is asked for in this process, which has its place."""
    trainer, stage = request.trainer, request.stage
    if place.world is not None and place.placement.world_size > 1:
        place.world.wait_for_all()
    device = resolve_devices(trainer.accelerator, trainer.devices).of(place.placement.local_rank)
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(place.placement.world_size)
    strategy = trainer.chosen_strategy
    synchronises = asks_for_sync_batchnorm(trainer, strategy, device)
    strategy.bind(place.placement, device, resolve_precision(trainer.precision_setting, device), place.store)
    if stage == "fit" and trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        trainer.max_epochs = DEFAULT_MAX_EPOCHS
        if strategy.rank == 0:
            logger.warning("Nothing limits the run: it trains for max_epochs=%d.", DEFAULT_MAX_EPOCHS)
    if strategy.rank == 0:
        warn_of_unused_loader(stage, request.module, request.given)
    session = Session(*request, strategy, place, None if trainer.session is None else trainer.session.folder)
    if stage != "fit":
        session.progress = trainer.progress  # evaluating what was trained does not undo the count of it
    trainer.session = session
    trainer.state = {"fit": "fitting", "validate": "validating", "test": "testing", "predict": "predicting"}[stage]
    threads = torch.get_num_threads()
    if place.world is not None and place.world.is_caller and "OMP_NUM_THREADS" not in os.environ:
        # The processes started beside this one take their part of the cores; it keeps to its own.
        torch.set_num_threads(min(threads, suggested_threads(place.placement.local_world_size)))
    before = strategy.sync_batchnorm
    strategy.sync_batchnorm |= synchronises
    try:
        result = session.execute()
    except BaseException as error:
        trainer.state = "interrupted"
        if place.world is not None and isinstance(error, SystemExit) and isinstance(error.code, int):
            place.world.signal_exit_code = error.code
        if session.last_line is not None:
            print_in_a_line(error, session.last_line)
        raise
    finally:
        torch.set_num_threads(threads)
        strategy.sync_batchnorm = before  # the object may be the user's, and serve another `Fit` next
    trainer.state = "finished"
    return result


def _launcher_setting(trainer: RunState) -> str | Launcher:
    own: Launcher | None = None if trainer.chosen_strategy is None else trainer.chosen_strategy.launcher
    return own or trainer.launcher


def asks_for_sync_batchnorm(trainer: RunState, strategy: Strategy, device: torch.device) -> bool:
    """Whether the run is to normalise over all ranks.

    Raises:
        ConfigurationError: the strategy or the device cannot.
    """
    if not trainer.sync_batchnorm:
        return False
    if not (strategy.single_process or strategy.supports_sync_batchnorm):
        raise ConfigurationError(
            f"sync_batchnorm=True with strategy={strategy.name!r}.",
            "it would go on normalising over each rank's own samples.",
            "use strategy='ddp', or normalise with GroupNorm or LayerNorm.",
        )
    if device.type == "cpu":
        raise ConfigurationError(
            "sync_batchnorm=True on the CPU.",
            "torch's SyncBatchNorm needs an accelerator.",
            "drop sync_batchnorm, or normalise with GroupNorm or LayerNorm.",
        )
    return True


# In processes started for the run


class _WorkOfRun(Work):
    """A run whose processes have yet to be started.

    Args:
        request: what is run.
        place: where the first process of this node stands among them.
        device: the kind of device that each computes on.
    """

    def __init__(self, request: Request, place: Topology, device: str) -> None:
        self._request = request
        self._place = place
        self.device = device
        self.done = False
        self.result: Any = None
        fitting = request.stage == "fit"
        self.signals = awaited_signals(request.trainer.preemption_signals, os.environ) if fitting else ()

    def here(self, world: World) -> Any:
        store = world.store("runs")
        place = replace(self._place, placement=world.placement, store=store, world=world, missing=False)
        self.result = _run_as_a_rank(self._request, place)
        self.done = True
        return self.result

    def elsewhere(self, call: Callable[..., Any]) -> Any:
        trainer = self._request.trainer
        if not self._request.trial:
            _refuse_shards(trainer, self._request.module)
        try:
            outcome = call(_worker, *self._request)
        except (SystemExit, KeyboardInterrupt):
            trainer.state = "interrupted"
            raise
        except RankFailedError as error:
            left = as_asked(error, self.signals)
            if left is error:
                raise
            trainer.state = "interrupted"
            raise left from error
        from drivetrain._engine.remote_result import Outcome  # for runs in other processes alone

        if not isinstance(outcome, Outcome):
            raise ConfigurationError(
                f"What a launcher gave to work.elsewhere returned a {type(outcome).__name__}.",
                "it is to call the function on every rank, and return what the function returned on rank 0.",
                "return that object as it came.",
            )
        _take_over(outcome, self._place, self._request)
        self.result, self.done = outcome.result, True
        return self.result


def _refuse_shards(trainer: RunState, module: TrainModule) -> None:
    """Refuse a run whose weights would end as shards in processes that end with it.

    Raises:
        ConfigurationError: they would.
    """
    strategy = trainer.chosen_strategy
    if strategy is not None and strategy.leaves_shards(module):
        raise ConfigurationError(
            f"The parameters of {type(module).__name__} take more than the gather_limit of strategy={strategy.name!r}.",
            "each rank would be left with its part, in a process that was started for the run and ends with it.",
            "raise the strategy's gather_limit, or use launcher='subprocess' or torchrun, whose ranks stay.",
        )


def _take_over(outcome: Outcome, place: Topology, request: Request) -> None:
    """Make the caller's objects what they would be had the run been here."""
    trainer = request.trainer
    if not request.trial:
        outcome.fill(request.module)
    session = Session(*request, _stand_in(trainer, place), place)
    session.progress.load_state_dict(outcome.progress)
    session.progress.cut_short = session.progress.batch_idx > 0
    session.metrics.restore(outcome.metrics)
    session.folder.be(outcome.folder)
    for one, version in zip(trainer.loggers, outcome.versions, strict=False):
        one.adopt(version)
    trainer.session = session
    trainer.state = outcome.state
    for callback, state in zip(trainer.callbacks, outcome.callbacks, strict=True):
        callback.take_over(state)
    if not request.trial:
        for owner in (request.module, request.given.datamodule):
            if owner is not None:
                owner.trainer = trainer


def _stand_in(trainer: RunState, place: Topology) -> Strategy:
    """The strategy as the caller sees it after a run elsewhere: its own, in no run, and as rank 0's was."""
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(place.placement.world_size)
    trainer.chosen_strategy.placement = place.placement
    return trainer.chosen_strategy


def _worker(
    trainer: RunState,
    stage: str,
    module: TrainModule,
    given: Given,
    ckpt_path: str | None,
    return_predictions: bool,
    allow: tuple[str, ...],
    trial: bool,
) -> Outcome:
    """Run on one rank, in a process started for it. A parameter each: an error names what cannot be sent."""
    from drivetrain._engine.layer_transfer import Before  # for runs in other processes alone
    from drivetrain._engine.remote_result import Outcome

    before = Before.of(module)
    if not environment_of(trainer.environment).started_us:
        trainer.environment = "auto"  # what the caller said of itself; this process has been started
    result = launch(Request(trainer, stage, module, given, ckpt_path, return_predictions, allow, trial))
    if not trial:
        _refuse_shards(trainer, module)  # configure_model may have built what makes it so large
    return Outcome.of(trainer, module, result, before, brings_module=not trial)
