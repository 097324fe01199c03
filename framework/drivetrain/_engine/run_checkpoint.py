"""RunCheckpoint: collects the state of a run that a checkpoint stores, and loads a checkpoint's state into a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._engine.checkpoint_compatibility import check_optimizers_fit, check_weights_fit
from drivetrain._engine.missing_weights import refuse_missing_weights
from drivetrain._engine.optimizer_settings import add_later_groups, keep_implementation
from drivetrain._engine.rank_local_buffers import collect_rank_local_buffers, load_rank_local_buffers
from drivetrain._engine.rank_local_optimizer_state import add_own_shards, set_apart
from drivetrain._engine.resume_compatibility import StartsAnew
from drivetrain._engine.run_parts import CheckpointParts, RunCore, RunData, SaveHistory
from drivetrain._engine.saved_state_schema import reporting_malformed
from drivetrain._engine.seeding import seed_rank
from drivetrain._loops.validation import renumber_validation
from drivetrain._runtime.seed import derive_seed
from drivetrain.callback import Callback
from drivetrain.checkpoint._base_weights import base_checksums, check_base
from drivetrain.checkpoint._format import (
    AveragesRecord,
    CheckpointMetadata,
    CheckpointReader,
    StateToSave,
    Weights,
    run_collectively,
)
from drivetrain.checkpoint._loading_hooks import HookedWeights, layer_versions
from drivetrain.checkpoint._pretrained import pretrained_models
from drivetrain.checkpoint._tied_names import tied_names
from drivetrain.checkpoint.averaged_weights import evaluated_weights
from drivetrain.errors import ConfigurationError, listed
from drivetrain.module._hyper_parameters import hyper_parameters_argument
from drivetrain.strategies._optimizer_state import named_optimizer_state, regroup_parameters

logger = logging.getLogger("drivetrain")

_RESUME_SEED = 0x616E6577
"""A constant that makes the seeds of a resumed run differ from other seeds that are derived from the same numbers.

The seeds are used if the data is split over the ranks differently than before, or is read from the start of the epoch.
"""


class RunCheckpoint:
    """Collects and loads the contents of a checkpoint.

    Args:
        core: the parts of the run that every stage has.
        data: the run's data.
        parts: the parts of a fit that a checkpoint stores.
        memory: state that the run's checkpoints share.
    """

    def __init__(self, core: RunCore, data: RunData, parts: CheckpointParts, memory: SaveHistory) -> None:
        self._core = core
        self._data = data
        self._memory = memory
        self._optimization = parts.optimization
        self._snapshot = parts.stopping.snapshot
        self._trainables = parts.trainables
        self._loop = parts.loop
        self._module = core.module
        self._strategy = core.strategy

    # Saving

    def contents(self, weights_only: bool, trainable_only: bool = False, dry_run: bool = False) -> StateToSave:
        """Call the hooks that add state to a checkpoint, and return this rank's part of the checkpoint.

        Args:
            weights_only: leave out the state that only a resumed run needs.
            trainable_only: store only checksums of parameters that have never trained. The call is then collective.
            dry_run: whether nothing will be written. Errors of hooks are then ignored, since what hooks need may not
                exist yet.
        """
        core, strategy, module = self._core, self._strategy, self._module
        hyper_parameters, left_out = core.secrets.take_out(module.hparams, warn=strategy.rank == 0)
        datamodule = core.datamodule
        data_hyper_parameters: Any = {}
        if datamodule is not None:
            data_hyper_parameters, _ = core.secrets.take_out(datamodule.hparams, warn=strategy.rank == 0)
        replaced = self._replaced_weights(dry_run)
        contents = StateToSave(
            weights=self._weights(replaced),
            aliases=tied_names(module),
            metadata=CheckpointMetadata(
                strategy=type(strategy).__name__,
                precision=strategy.precision.name,
                progress=core.progress.state_dict(),
                hyper_parameters=hyper_parameters,
                left_out=tuple(left_out),
                argument=hyper_parameters_argument(module),
                data_hyper_parameters=data_hyper_parameters,
                data_argument="" if datamodule is None else hyper_parameters_argument(datamodule),
                weights_only=weights_only,
                pretrained=pretrained_models(module),
                layer_versions=layer_versions(module),
            ),
        )
        if not weights_only:
            contents.state = self._state(dry_run)
            contents.rank_state = self._rank_state(contents.weights, replaced)
            contents.optimizers = [
                strategy.optimizer_state(index) if self._running else named_optimizer_state(module, optimizer)
                for index, optimizer in enumerate(self._optimization.optimizers)
            ]
            control = strategy.control if self._running and strategy.shards_parameters else None
            flattened, own = set_apart(contents.optimizers, self.shard_of, control)
            contents.state["flattened_optimizer_state"], contents.rank_state["optimizer_shards"] = flattened, own
        contents.callbacks, averages = self._callback_tensors(dry_run, weights_only, contents.weights)
        contents.metadata = replace(contents.metadata, averages=averages)
        if trainable_only:
            self._leave_out_base(contents)
        return contents

    def _leave_out_base(self, contents: StateToSave) -> None:
        """Replace parameters that have never trained by their checksums."""
        memory, weights = self._memory, contents.weights
        self._update_trained()
        parameters = self._strategy.named_parameters() if self._running else dict(self._module.named_parameters())
        memory.trained |= {name for name, parameter in parameters.items() if parameter.requires_grad}
        for state in contents.optimizers:  # parameters that have trained and were frozen since the last save
            memory.trained |= {name for name, values in state["state"].items() if values}
        base = {name for name in parameters if name in weights and name not in memory.trained}
        if unknown := base - memory.base.keys():
            control = self._strategy.control if self._running else LocalControl()
            memory.base |= base_checksums({name: self.shard_of(weights[name]) for name in sorted(unknown)}, control)
        tied = contents.aliases
        base |= {name for name, first in tied.items() if first in base}
        contents.weights = {name: value for name, value in weights.items() if name not in base}
        contents.aliases = {name: first for name, first in tied.items() if name not in base}
        contents.metadata = replace(
            contents.metadata, base={name: memory.base[tied.get(name, name)] for name in sorted(base)}
        )

    def _weights(self, replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trained weights.

        Args:
            replaced: the trained values of the weights that callbacks have replaced in the module.
        """
        if not self._running:
            refuse_missing_weights(self._module)
            return dict(self._module.state_dict())
        weights, snapshot = self._strategy.model_state(), self._snapshot
        trained = {**replaced, **({} if snapshot is None else snapshot.buffers)}
        return weights | {name: value for name, value in trained.items() if name in weights}

    def _replaced_weights(self, dry_run: bool) -> dict[str, Any]:
        """Return the trained values of the weights that callbacks have replaced in the module."""
        replaced: dict[str, Any] = {}
        for callback in self._core.callbacks if self._running else ():
            with _ignoring_errors(dry_run):
                replaced |= callback.trained_weights(self._core.trainer, self._module)
        return replaced

    def shard_of(self, value: Any) -> Any:
        """Return this rank's part of a value."""
        shard = self._strategy.shard_of(value)
        # A DTensor that is unknown to the strategy comes from the user's own tensor parallelism.
        return shard.full_tensor() if isinstance(shard, torch.Tensor) and hasattr(shard, "full_tensor") else shard

    @property
    def _running(self) -> bool:
        return self._strategy.module is not None

    def _state(self, dry_run: bool) -> dict[str, Any]:
        """Return the state that is the same on all ranks."""
        trainer, datamodule = self._core.trainer, self._core.datamodule
        with _ignoring_errors(dry_run):
            module_state: dict[str, Any] = {}
            self._module.on_save_checkpoint(module_state)
        callbacks = {}
        for key, callback in self._callbacks_by_key():
            state: Any = {}
            extra: dict[str, Any] = {}
            with _ignoring_errors(dry_run):
                callback.on_save_checkpoint(trainer, self._module, extra)
                state = callback.state_dict()
            callbacks[key] = {"state": state, "extra": extra}
        data_state: Any = {}
        with _ignoring_errors(dry_run):
            data_state = {} if datamodule is None else datamodule.state_dict()
        schedulers: list[Any] = []
        with _ignoring_errors(dry_run):
            schedulers = [config.scheduler.state_dict() for config in self._optimization.schedulers]
        return {
            "module": module_state,
            "datamodule": data_state,
            "callbacks": callbacks,
            "schedulers": schedulers,
            "precision": self._strategy.precision.state_dict(),
            "frozen": self._frozen(),
            "trained": self._frozen_again(),
            "components": self._memory.components,
            "loop": {} if self._loop is None else self._loop.state_dict(),
            "data": self._data.state_dict(),
        }

    def _callback_tensors(
        self, dry_run: bool, only_averages: bool, weights: Mapping[str, Any]
    ) -> tuple[dict[str, Mapping[str, Any]], AveragesRecord | None]:
        """Return the tensors of callbacks by key, and which of them are averages of the weights."""
        found: dict[str, Mapping[str, Any]] = {}
        averages: AveragesRecord | None = None
        if not self._running:
            return found, averages  # sharded tensors may no longer exist after the run
        for key, callback in self._callbacks_by_key():
            with _ignoring_errors(dry_run):
                evaluated = callback.evaluates_averages
                tensors = (
                    {}
                    if only_averages and evaluated is None
                    else callback.save_tensors(self._core.trainer, self._module)
                )
                if tensors:
                    found[key] = tensors
                    if evaluated is not None:
                        _check_averages(callback, evaluated, tensors, weights)
                        if averages is None or evaluated > averages.evaluated:
                            averages = AveragesRecord(key, evaluated)
        return found, averages

    def _frozen(self) -> list[str]:
        """Return the names of frozen parameters."""
        if self._running and self._trainables is not None:
            return self._trainables.frozen()
        return [name for name, parameter in self._module.named_parameters() if not parameter.requires_grad]

    def _frozen_again(self) -> list[str]:
        """Return the names of frozen parameters that have trained before."""
        trained = self._update_trained()
        return [name for name in self._frozen() if name in trained]

    def _update_trained(self) -> set[str]:
        """Add the parameters that train now to the names of parameters that have trained; return all these names."""
        if self._trainables is not None:
            self._memory.trained |= self._trainables.trained
        return self._memory.trained

    def _rank_state(self, weights: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that differs between ranks."""
        core, data, snapshot = self._core, self._data, self._snapshot
        buffers = self._own_buffers(weights, replaced) if self._running else {}
        if snapshot is not None and snapshot.is_active:
            return {**snapshot.rank_state(), "buffers": buffers}
        source = None if data.stage_data is None else data.stage_data.train
        return {
            "rng_states": data.rng_replay.state(core.progress.batch_idx),
            "metrics": core.metrics.state_dict(),
            "source": None if source is None else source.state_dict(),
            "buffers": buffers,
        }

    def _own_buffers(self, weights: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
        snapshot = self._snapshot
        overrides = {
            **replaced,
            **self._core.buffers.values(replaced),
            **({} if snapshot is None else snapshot.buffers),
        }
        return collect_rank_local_buffers(self._module, weights, overrides, self._strategy.control)

    # Loading

    def regroup(self, checkpoint: CheckpointReader, optimizers: Sequence[Optimizer], anew: StartsAnew) -> None:
        """Restore the saved parameter groups, some of which may have been added during the saved run. Collective.

        The groups' settings, such as the learning rates, are loaded later by `load`. An optimizer that starts anew
        keeps its groups, and gets those that were added during the saved run.
        """
        if len(checkpoint.manifest.optimizers) != len(optimizers):
            return  # `load` reports this error
        saved = self._read_collectively(
            checkpoint, lambda: [checkpoint.optimizer_settings(index) for index in range(len(optimizers))]
        )
        named = self._strategy.named_parameters()
        configured = (checkpoint.state().get("components") or {}).get("optimizer_groups")
        for number, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
            if anew.optimizer(number):
                if configured is not None and len(configured) == len(optimizers):
                    add_later_groups(optimizer, configured[number], groups, named)
                continue
            dropped = regroup_parameters(optimizer, [group["params"] for group in groups], named)
            if dropped and self._strategy.rank == 0:
                logger.warning(
                    "Optimizer %d holds %d parameter(s) that none of its groups in %r holds: %s. They are left out, as "
                    "in the saved run. To add them, call optimizer.add_param_group.",
                    number,
                    len(dropped),
                    checkpoint.path,
                    listed(dropped),
                )

    def load_weights(self, checkpoint: CheckpointReader, averaged: bool | None) -> None:
        """Load a checkpoint's weights and nothing else, for an evaluation. Collective.

        Args:
            checkpoint: a checkpoint of any run.
            averaged: whether to load the averages; None loads the weights that the run evaluated with.

        Raises:
            CheckpointError: the checkpoint is damaged, does not fit, or lacks the averages; nothing was changed.
        """

        def read() -> dict[str, Any]:
            return self._read_weights(checkpoint, evaluated_weights(checkpoint, averaged, self._strategy.rank == 0))

        self._check_base(checkpoint)
        self._load_weights(checkpoint, self._read_collectively(checkpoint, read))

    def load(self, checkpoint: CheckpointReader, anew: StartsAnew, rolling_back: bool = False) -> None:
        """Load everything that a resumed run needs.

        Args:
            checkpoint: a checkpoint of this run or another.
            anew: the parts whose state is not loaded, because it does not fit.
            rolling_back: whether this run returns to one of its checkpoints. The frozen parameters and the parameter
                groups are then restored too.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit; nothing was changed. Malformed values whose
                checksums match may raise it later.
        """
        core, strategy, optimization = self._core, self._strategy, self._optimization
        optimizers = {
            index: optimizer for index, optimizer in enumerate(optimization.optimizers) if not anew.optimizer(index)
        }
        schedulers = {
            number: config.scheduler
            for number, config in enumerate(optimization.schedulers)
            if not anew.scheduler(config.scheduler, optimization.optimizers)
        }

        def read() -> tuple[Any, ...]:
            check_optimizers_fit(
                checkpoint,
                None if anew.optimizers is None else len(optimization.optimizers),
                None if not schedulers and optimization.schedulers else len(optimization.schedulers),
            )
            weights = self._read_weights(checkpoint, checkpoint.weights())
            states = {
                index: checkpoint.optimizer_state(index, strategy.optimizer_regions(index)) for index in optimizers
            }
            dtypes = {name: source.dtype for name, source in checkpoint.weights().sources().items()}
            for index, saved in states.items():
                saved["weight_dtypes"] = dtypes
                keep_implementation(optimizers[index], saved)
            state = checkpoint.state()
            ranks = self._read_rank_states(checkpoint, state["data"])
            with reporting_malformed(checkpoint, "the ranks' documents", "optimizer_shards"):
                for index, saved in states.items():
                    if (state.get("flattened_optimizer_state") or {}).get(str(index), {}).get("per_rank"):
                        own = ranks[0]["optimizer_shards"][str(index)]
                        add_own_shards(checkpoint.path, saved, own, strategy.optimizer_regions(index))
            with reporting_malformed(checkpoint, "the ranks' documents", "metrics"):
                core.metrics.check_states([rank_state["metrics"] for rank_state in ranks])
            return weights, states, state, ranks, self._read_callback_tensors(checkpoint)

        # Every rank reads and checks everything before anything changes.
        self._check_base(checkpoint)
        weights, states, state, ranks, tensors = self._read_collectively(checkpoint, read)
        if rolling_back and state.get("frozen") is not None:
            assert self._trainables is not None
            self._trainables.freeze_as_saved(state["frozen"], None)
            self.regroup(checkpoint, optimization.optimizers, anew)
            self._trainables.note_new_parameters()
        self._memory.trained |= set(state.get("trained") or ())
        self._load_weights(checkpoint, weights)
        for index, optimizer_state in states.items():
            with reporting_malformed(checkpoint, f"the state of optimizer {index}", "state"):
                strategy.load_optimizer_state(optimizer_state, index)
        for number, scheduler in schedulers.items():
            with reporting_malformed(checkpoint, "the run's state", f"schedulers/{number}"):
                scheduler.load_state_dict(state["schedulers"][number])
        with reporting_malformed(checkpoint, "the run's state", "precision"):
            strategy.precision.load_state_dict(state["precision"])
        core.progress.load_state_dict(checkpoint.progress)
        if anew.data:
            self._restart_epoch()
        else:
            with reporting_malformed(checkpoint, "the ranks' documents", "source"):
                self._restore_position(state, ranks)
        self._load_into_hooks(checkpoint, state, tensors)

    def _load_weights(self, checkpoint: CheckpointReader, weights: dict[str, Any]) -> None:
        base = checkpoint.manifest.metadata.base
        if base:  # `_check_base` has found that the module has the same values
            own: Mapping[str, Any] = self._strategy.model_state()
            weights = {**{name: self._strategy.shard_of(own[name]) for name in base}, **weights}
        self._strategy.load_model_state(weights)

    def _restore_position(self, state: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Restore the position in the data and the random generators, exactly only if the data is split as before.

        The caller reports built-in errors as those of a malformed state.
        """
        data, progress, saved = self._data, self._core.progress, state["data"]
        if data.reload is not None:
            data.reload(progress.epoch)
        source = data.train
        before = progress.batch_idx
        same_split = data.epoch_position.load_state_dict(
            saved, source, progress, data.reload is not None and before == 0
        )
        if state["loop"] and self._loop is not None:
            validation = state["loop"]["validation"]
            if validation is not None:
                validation = {name: int(validation[name]) for name in ("ran_at", "next_at")}
                if not same_split:
                    validation = renumber_validation(validation, before, progress.batch_idx)
            self._loop.load_state_dict({**state["loop"], "validation": validation})
        if same_split:
            (own,) = ranks
            data.rng_replay.resume(own["rng_states"])
            load_rank_local_buffers(self._module, own.get("buffers", {}))
            # At the end of the data, the next epoch starts at its beginning, whatever state a loader has there.
            if progress.batch_idx and not (state["loop"] or {}).get("data_is_over"):
                source.load_state_dict(own["source"])
        else:
            seed = derive_seed(_RESUME_SEED, saved["seed"], progress.epoch, progress.epoch_samples)
            seed_rank(seed, self._strategy.data_rank)
        self._core.metrics.load_state_dict([rank_state["metrics"] for rank_state in ranks], self._strategy.device)

    def _restart_epoch(self) -> None:
        """Restart the current epoch from the beginning, because the data differs from that of the saved run."""
        progress = self._core.progress
        progress.batch_idx = progress.epoch_samples = 0
        seed_rank(derive_seed(_RESUME_SEED, self._data.seed, progress.epoch, 0), self._strategy.data_rank)

    def _load_into_hooks(
        self, checkpoint: CheckpointReader, state: dict[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        trainer, datamodule = self._core.trainer, self._core.datamodule
        self._module.on_load_checkpoint(state["module"])
        if datamodule is not None:
            datamodule.load_state_dict(state["datamodule"])
        for key, callback in self._callbacks_by_key():
            saved = state["callbacks"].get(key)
            if saved is not None:
                with reporting_malformed(checkpoint, "the run's state", f"callbacks/{key}"):
                    callback.load_state_dict(saved["state"])
                    extra = saved["extra"]
                if key in tensors:
                    callback.load_tensors(trainer, self._module, tensors[key])
                callback.on_load_checkpoint(trainer, self._module, extra)

    def _check_base(self, checkpoint: CheckpointReader) -> None:
        """Refuse a ``trainable_only`` checkpoint whose base weights differ from the module's. Collective."""
        base = checkpoint.manifest.metadata.base
        if not base:
            return
        own = self._strategy.model_state()
        shards = {name: self.shard_of(own[name]) for name in base if name in own}
        precision = checkpoint.manifest.metadata.precision
        check_base(checkpoint.path, base, base_checksums(shards, self._strategy.control, precision))
        self._memory.trained |= set(checkpoint.weights())

    def _read_weights(self, checkpoint: CheckpointReader, saved: Weights) -> dict[str, Any]:
        strategy, base = self._strategy, checkpoint.manifest.metadata.base
        own = {name: value for name, value in strategy.model_state().items() if name not in base}
        strict = self._module.strict_loading
        hooked = HookedWeights.of(self._module, saved, checkpoint.manifest.metadata.layer_versions, own)
        saved = saved.with_hooked(hooked.values, hooked.replaced)
        own |= {name: value for name, value in hooked.values.items() if name in own}
        check_weights_fit(checkpoint.path, saved, own, type(self._module).__name__, strict)
        weights = saved.staged(strategy.model_regions())
        if strict:
            return weights
        # Parameters that the checkpoint lacks keep their values.
        return {name: weights[name] if name in weights else strategy.shard_of(value) for name, value in own.items()}

    def _read_callback_tensors(self, checkpoint: CheckpointReader) -> dict[str, dict[str, Any]]:
        saved = checkpoint.manifest.callbacks
        unclaimed = sorted(saved.keys() - {key for key, _ in self._callbacks_by_key()})
        if unclaimed and self._strategy.rank == 0:
            logger.warning(
                "%r has tensors of callbacks that this run does not have: %s. The tensors are ignored.",
                checkpoint.path,
                listed(unclaimed),
            )
        regions = self._strategy.model_regions()
        return {
            key: checkpoint.callback_tensors(key).staged(regions) for key, _ in self._callbacks_by_key() if key in saved
        }

    def _read_rank_states(self, checkpoint: CheckpointReader, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the saved states of the ranks whose work this rank takes over: one if the number of ranks is equal."""
        strategy, saved, parts = self._strategy, checkpoint.manifest.world_size, data["world_size"]
        if (saved, parts) == (strategy.world_size, strategy.data_world_size):
            ranks = [strategy.rank]
        else:
            ranks_per_part = saved // parts  # ranks that read the same part of the data
            ranks = [part * ranks_per_part for part in range(strategy.data_rank, parts, strategy.data_world_size)]
        return [checkpoint.rank_state(rank) for rank in ranks]

    def _read_collectively(self, checkpoint: CheckpointReader, read: Any) -> Any:
        return run_collectively(self._strategy.control, f"The checkpoint {checkpoint.path!r} cannot be loaded", read)

    def _callbacks_by_key(self) -> Iterator[tuple[str, Callback]]:
        """Yield each callback with its state key. A number is appended to a key that occurs more than once."""
        count: Counter[str] = Counter()
        for callback in self._core.callbacks:
            key = callback.state_key
            count[key] += 1
            yield key if count[key] == 1 else f"{key}#{count[key]}", callback


@contextmanager
def _ignoring_errors(dry_run: bool) -> Iterator[None]:
    """Ignore errors of a user's hook in a dry run, because objects that the hook needs may not exist yet."""
    try:
        yield
    except Exception:
        if not dry_run:
            raise
        logger.debug("A hook that saves failed in the dry run before training.", exc_info=True)


def _check_averages(callback: Callback, evaluated: Any, tensors: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check what a callback says about its averages, before a checkpoint records it.

    Raises:
        ConfigurationError: the answer is not a boolean, or no tensor has the name of a weight.
    """
    name = type(callback).__name__
    if not isinstance(evaluated, bool):
        raise ConfigurationError(
            f"{name}.evaluates_averages = {evaluated!r}.",
            "a checkpoint records whether the run evaluates with the averages.",
            "write a property that returns True, False, or None without averages.",
        )
    if tensors.keys().isdisjoint(weights):
        raise ConfigurationError(
            f"{name}.evaluates_averages = {evaluated}, and none of the names of its save_tensors is that of a weight: "
            f"{listed(sorted(tensors))}.",
            "the checkpoint would be evaluated without the averages.",
            "return the averages under the names in state_dict of the module, or return None from evaluates_averages.",
        )
