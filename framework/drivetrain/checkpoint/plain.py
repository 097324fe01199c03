"""The plain checkpoint: weights, optimizers, schedulers, callbacks and counters of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.checkpoint.ties import tied_names
from drivetrain.checkpoint_format import Contents, Facts, agreed, load, save
from drivetrain.control import LocalControl
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
        """Write a checkpoint. Every rank calls it and its hooks, and writes its share.

        Raises:
            CheckpointError: on every rank, where it could not be written.
        """
        strategy, module = self._strategy, self._module
        running = strategy.module is not None
        contents = Contents(
            weights=strategy.model_state() if running else dict(module.state_dict()),
            aliases=tied_names(module),
            facts=Facts(
                strategy=type(strategy).__name__,
                precision=strategy.precision.name,
                progress=self._progress.state_dict(),
                hyper_parameters=dict(module.hparams),
                weights_only=weights_only,
            ),
        )
        if not weights_only:
            contents.state = self._run_state()
            contents.optimizers = [
                strategy.optimizer_state(index) if running else named_optimizer_state(module, optimizer)
                for index, optimizer in enumerate(self._optimizers)
            ]
        if running:
            save(path, contents, strategy.control, self._shard_of)
        elif strategy.rank == 0:
            # After the run everything is whole on every rank, and nobody is there to write together with.
            save(path, contents, LocalControl())

    def _run_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        self._module.on_save_checkpoint(own)
        callbacks = {}
        for key, callback in self._keyed():
            extra: dict[str, Any] = {}
            callback.on_save_checkpoint(self._trainer, self._module, extra)
            callbacks[key] = {"state": callback.state_dict(), "extra": extra}
        return {
            "module": own,
            "callbacks": callbacks,
            "schedulers": [config.scheduler.state_dict() for config in self._schedulers],
            "precision": self._strategy.precision.state_dict(),
        }

    def _shard_of(self, value: Any) -> Any:
        held = self._strategy.shard_of(value)
        # A DTensor that the strategy knows nothing of: the user's own tensor parallelism.
        return held.full_tensor() if isinstance(held, torch.Tensor) and hasattr(held, "full_tensor") else held

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
        checkpoint = load(path)
        if checkpoint.weights_only and not weights_only:
            raise CheckpointError(
                f"{path!r} holds weights only.",
                "a run cannot go on without its optimizer's state and its progress.",
                "load the weights with load_from_checkpoint, or take a whole checkpoint.",
            )
        strategy, running = self._strategy, self._strategy.module is not None
        regions = strategy.model_regions() if running else {}

        def read() -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
            weights = checkpoint.weights().staged(regions)
            if weights_only:
                return weights, [], {}
            states = [
                checkpoint.optimizer_state(index, strategy.optimizer_regions(index))
                for index in range(len(checkpoint.manifest.optimizers))
            ]
            return weights, states, checkpoint.state()

        # All that is needed is read and checked, on every rank, before anything changes.
        weights, states, state = agreed(strategy.control, f"The checkpoint {path!r} cannot be loaded", read)
        strategy.load_model_state(weights)
        if weights_only:
            return
        for index, optimizer_state in enumerate(states):
            strategy.load_optimizer_state(optimizer_state, index)
        for config, scheduler_state in zip(self._schedulers, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler_state)
        strategy.precision.load_state_dict(state["precision"])
        self._progress.load_state_dict(checkpoint.progress)
        self._module.on_load_checkpoint(state["module"])
        for key, callback in self._keyed():
            saved = state["callbacks"].get(key)
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
