"""The plain checkpoint: everything a run needs to go on, in one directory that rank 0 writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.checkpoint.gathering import gathered
from drivetrain.checkpoint_files import CheckpointFiles, read_files, untied, write_files
from drivetrain.errors import CheckpointError
from drivetrain.module import TrainModule
from drivetrain.optimizer_state import named_optimizer_state
from drivetrain.strategy import Strategy


class PlainCheckpoint:
    """Saves and loads a run.

    Args:
        trainer: handed to the callbacks' hooks.
        module: whose weights, hyper-parameters and hooks.
        strategy: gives and takes the states of module and optimizers.
        callbacks: whose states.
        progress: the counters.
        optimizers: of the run, which the strategy has let go of once it is over.
        schedulers: the learning-rate schedulers' configurations.
    """

    def __init__(
        self,
        trainer: Any,
        module: TrainModule,
        strategy: Strategy,
        callbacks: Sequence[Callback],
        progress: Any,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._strategy = strategy
        self._callbacks = callbacks
        self._progress = progress
        self._optimizers = optimizers
        self._schedulers = schedulers

    def save(self, path: str, weights_only: bool = False) -> None:
        """Write a checkpoint. Every rank calls it and its hooks; rank 0 writes.

        Raises:
            CheckpointError: on every rank, where it could not be written.
        """
        strategy, module = self._strategy, self._module
        state = strategy.model_state() if strategy.module is not None else dict(module.state_dict())
        first = strategy.rank == 0
        weights, aliases = untied(gathered(state, first))
        manifest: dict[str, Any] = {
            "progress": self._progress.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "weights_only": weights_only,
            "torch": torch.__version__,
        }
        if not weights_only:
            own: dict[str, Any] = {}
            module.on_save_checkpoint(own)
            manifest["module"] = own
            manifest["callbacks"] = {}
            for key, callback in self._keyed():
                extra: dict[str, Any] = {}
                callback.on_save_checkpoint(self._trainer, module, extra)
                manifest["callbacks"][key] = {"state": callback.state_dict(), "extra": extra}
            if strategy.module is not None:
                manifest["optimizers"] = [strategy.optimizer_state(index) for index in range(len(self._optimizers))]
            else:
                manifest["optimizers"] = [named_optimizer_state(module, one) for one in self._optimizers]
            manifest["schedulers"] = [config.scheduler.state_dict() for config in self._schedulers]
            manifest["precision"] = strategy.precision.state_dict()
        # What hooks put in may be spread over the ranks too: an average of sharded weights, say.
        manifest = gathered(manifest, first)
        problem = None
        if first:
            try:
                write_files(path, CheckpointFiles(weights, aliases, manifest))
            except CheckpointError as error:
                problem = list(error.args)
        problem = strategy.control.from_rank_0(problem)
        if problem is not None:
            raise CheckpointError(*problem)

    def load(self, path: str, weights_only: bool = False) -> None:
        """Take a checkpoint's weights and, unless told otherwise, everything else that the run goes on from.

        Raises:
            CheckpointError: it is not whole, or does not fit.
        """
        if path in ("last", "best", "auto"):
            raise CheckpointError(
                f"ckpt_path={path!r} is not known yet.",
                "it chooses among what a Checkpoint callback saved, which comes with the checkpoint format.",
                "pass the path that save_checkpoint was given.",
            )
        files = read_files(path)
        manifest = files.manifest
        if manifest["weights_only"] and not weights_only:
            raise CheckpointError(
                f"{path!r} holds weights only.",
                "a run cannot go on without its optimizer's state and its progress.",
                "load the weights with load_from_checkpoint, or take a whole checkpoint.",
            )
        self._strategy.load_model_state(files.all_weights())
        if weights_only:
            return
        for index, state in enumerate(manifest["optimizers"]):
            self._strategy.load_optimizer_state(state, index)
        for config, state in zip(self._schedulers, manifest["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        self._strategy.precision.load_state_dict(manifest["precision"])
        self._progress.load_state_dict(manifest["progress"])
        self._module.on_load_checkpoint(manifest["module"])
        for key, callback in self._keyed():
            saved = manifest["callbacks"].get(key)
            if saved is not None:
                callback.load_state_dict(saved["state"])
                callback.on_load_checkpoint(self._trainer, self._module, saved["extra"])

    def _keyed(self) -> Iterator[tuple[str, Callback]]:
        """Each callback by its state key; those that do not tell themselves apart are told by their order."""
        count: Counter[str] = Counter()
        for callback in self._callbacks:
            key = callback.state_key
            count[key] += 1
            yield key if count[key] == 1 else f"{key}#{count[key]}", callback
