"""SavedState: what a checkpoint holds of a run. The owners of the state give it in one loop and load it in one loop.

`SavedState.owners` is the list of what `state.json` and the ranks' documents hold. Weights, optimizers and tensors of
callbacks have files of their own, because ranks write and read them in parts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from functools import cached_property, partial, reduce
from operator import getitem
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._engine.assembly.missing_weights import refuse_missing_weights
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.checkpoints.components import StartsAnew
from drivetrain._engine.checkpoints.rank_local_state import add_own_shards, collect_buffers, load_buffers, set_apart
from drivetrain._engine.ranks.seeding import seed_rank
from drivetrain._format import (
    AveragesRecord,
    CheckpointMetadata,
    CheckpointReader,
    StateToSave,
    Weights,
    run_collectively,
)
from drivetrain._loops.hooks import is_overridden
from drivetrain._module.hyper_parameters import hyper_parameters_argument
from drivetrain._parameters.base_weights import base_checksums, check_base
from drivetrain._parameters.loading_hooks import HookedWeights
from drivetrain._parameters.module_description import ModuleDescription, describe_module
from drivetrain._parameters.optimizer_state import (
    add_later_groups,
    keep_implementation,
    named_optimizer_state,
    regroup_parameters,
)
from drivetrain._parameters.weights_fit import WeightMismatch
from drivetrain._runs.identity import class_path
from drivetrain._runtime.seed import derive_seed
from drivetrain.callback import Callback, HoldsAverages, ReplacesWeights
from drivetrain.checkpoint.averaged_weights import check_averages, evaluated_weights
from drivetrain.data import DataModule
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

T = TypeVar("T")

_RESUME_SEED = 0x616E6577
"""A constant that makes the seeds of a resumed run differ from other seeds that are derived from the same numbers.

The seeds are used if the data is split over the ranks differently than before, or is read from the start of the epoch.
"""


class Scope(Enum):
    """Whose state a checkpoint holds of an owner, and which ranks load it."""

    ALL = "rank 0's, which all ranks load"
    RANK = "each rank's own, which it loads if the data is split over the ranks as in the saved run"
    MERGED = "each rank's own; a rank loads a list of those of the ranks whose data it reads"


class Owner(NamedTuple):
    """A part of a run with state.

    Attributes:
        path: the keys of its state in the document.
        scope: whose state a checkpoint holds.
        save: returns the state.
        load: restores what ``save`` returned.
        is_hook: whether ``load`` is the user's code, whose errors are raised as they are.
    """

    path: tuple[str, ...]
    scope: Scope
    save: Callable[[], Any]
    load: Callable[[Any], object]
    is_hook: bool = False

    def put(self, document: dict[str, Any], value: Any) -> None:
        """Add the state to a document."""
        *groups, key = self.path
        for group in groups:
            document = document.setdefault(group, {})
        document[key] = value

    def restore(self, checkpoint: CheckpointReader, state: Any, ranks: Sequence[Any]) -> None:
        """Load the state from the run's document, or from the documents of the ranks whose work this rank takes over.

        Raises:
            CheckpointError: the state does not have the form that ``save`` returns.
        """
        key, documents = "/".join(self.path), [state] if self.scope is Scope.ALL else ranks
        with checkpoint.reading(key):
            found = [reduce(getitem, self.path, document) for document in documents]
            saved = found if self.scope is Scope.MERGED else found[0]
        with nullcontext() if self.is_hook else checkpoint.reading(key):
            self.load(saved)


class SavedState:
    """Collects the contents of a checkpoint from a run, and loads them into a run.

    Args:
        core: the run, as far as it has been set up.
    """

    def __init__(self, core: RunCore) -> None:
        self._core = core
        self._trainer = core.trainer
        self._module = core.module
        self._strategy = core.strategy
        self._trained: set[str] = set()  # parameters that are known to have trained, besides those of `Trainables`
        self._base: dict[str, str] = {}  # checksums of parameters that have never trained
        self.module_class = class_path(type(core.module))  # by which later runs recognize the checkpoints

    @cached_property
    def owners(self) -> list[Owner]:
        """The owners of the run's state, in the order in which they load it. They are known once the run is set up."""
        trainer, module, datamodule = self._trainer, self._module, self._core.datamodule
        owners = self._position_owners
        for number, config in enumerate(self._core.optimization.schedulers):
            path, scheduler = ("schedulers", str(number)), config.scheduler
            owners.append(Owner(path, Scope.ALL, scheduler.state_dict, scheduler.load_state_dict))
        precision = self._strategy.precision
        save = _own_method("state_dict", precision, Precision)
        owners.append(Owner(("precision",), Scope.ALL, save, precision.load_state_dict))
        save = _filled_by("on_save_checkpoint", module, TrainModule)
        owners.append(Owner(("module",), Scope.ALL, save, module.on_load_checkpoint, is_hook=True))
        if datamodule is not None:
            save = _own_method("state_dict", datamodule, DataModule)
            owners.append(Owner(("datamodule",), Scope.ALL, save, datamodule.load_state_dict, is_hook=True))
        for key, callback in self._callbacks.items():
            save = callback.state_dict if callback._saved_attributes else _own_method("state_dict", callback, Callback)
            owners.append(Owner(("callbacks", key), Scope.ALL, save, callback.load_state_dict))
            save = _filled_by("on_save_checkpoint", callback, Callback, trainer, module)
            load_hook = partial(callback.on_load_checkpoint, trainer, module)
            owners.append(Owner(("callback_hooks", key), Scope.ALL, save, load_hook, is_hook=True))
        return owners

    @property
    def _position_owners(self) -> list[Owner]:
        """The owners of what belongs to the position in an epoch. Another data set starts the epoch anew."""
        data, loop, metrics, progress = self._core.data, self._core.loop, self._core.metrics, self._core.progress
        every, rng_states = Scope.ALL, data.rng_replay
        owners = [Owner(("data",), every, data.state_dict, partial(data.load_state_dict, progress=progress))]
        if loop is not None:
            owners.append(Owner(("loop",), every, loop.state_dict, loop.load_state_dict))
        save: Callable[[], Any] = lambda: rng_states.state(progress.batch_idx)  # noqa: E731
        owners.append(Owner(("rng_states",), Scope.RANK, save, rng_states.resume))
        if data.trains:  # the loaders may be replaced later
            save, load = lambda: data.train.state_dict(), lambda state: data.train.load_state_dict(state)
            owners.append(Owner(("source",), Scope.RANK, save, load))
        load_metrics = partial(metrics.load_state_dict, device=self._strategy.device)
        return [*owners, Owner(("metrics",), Scope.MERGED, metrics.state_dict, load_metrics)]

    @cached_property
    def _callbacks(self) -> dict[str, Callback]:
        """The callbacks by state key. A number is appended to a key that occurs more than once."""
        callbacks: dict[str, Callback] = {}
        count: Counter[str] = Counter()
        for callback in self._core.callbacks:
            key = callback.state_key
            count[key] += 1
            callbacks[key if count[key] == 1 else f"{key}#{count[key]}"] = callback
        return callbacks

    @cached_property
    def _savers_of_tensors(self) -> dict[str, Callback]:
        """The callbacks that save tensors, by state key."""
        return {key: each for key, each in self._callbacks.items() if is_overridden("save_tensors", each, Callback)}

    # Saving

    def collect(self, weights_only: bool, trainable_only: bool = False, rehearsing: bool = False) -> StateToSave:
        """Return this rank's part of a checkpoint. Collective.

        Args:
            weights_only: leave out the state that only a resumed run needs.
            trainable_only: store only checksums of parameters that have never trained.
            rehearsing: whether nothing will be written. Errors of hooks are then ignored, since what hooks need may not
                exist yet.
        """
        module, is_running = self._module, self._strategy.module is not None
        if is_running:
            replaced: dict[str, Any] = {}  # the trained values of weights that callbacks have replaced in the module
            for callback in self._callbacks.values():
                if isinstance(callback, ReplacesWeights):
                    with _ignoring_errors(rehearsing):
                        replaced |= callback.trained_weights(self._trainer, module)
            weights = self._strategy.model_state()
            trained = {**replaced, **self._earlier_buffers}
            weights |= {name: value for name, value in trained.items() if name in weights}
            tensors, averages = self._callback_tensors(rehearsing, weights_only, weights)
        else:  # the module has the whole weights, and sharded tensors of callbacks may no longer exist
            refuse_missing_weights(module)
            replaced, weights, tensors, averages = {}, dict(module.state_dict()), {}, None
        description = describe_module(module)
        metadata = replace(self._metadata(description), weights_only=weights_only, averages=averages)
        contents = StateToSave(weights, metadata, description.tied, callbacks=tensors)
        if not weights_only:
            contents.rank_state = {"buffers": self._own_buffers(weights, replaced) if is_running else {}}
            self._collect_state(contents, is_running, rehearsing)
        if trainable_only:
            self._leave_out_base(contents, is_running)
        return contents

    def _collect_state(self, contents: StateToSave, is_running: bool, rehearsing: bool) -> None:
        """Add the state that only a resumed run needs."""
        core, strategy, snapshot, own = self._core, self._strategy, self._core.snapshot, contents.rank_state
        contents.state = state = {"components": core.components, "callbacks": {}}
        if core.trainables is not None:
            state["trainables"] = core.trainables.state_dict()
        earlier = snapshot.rank_state if snapshot is not None and snapshot.is_active else {}
        for owner in self.owners:
            is_shared = owner.scope is Scope.ALL
            with _ignoring_errors(rehearsing and is_shared):
                owner.put(state if is_shared else own, earlier.get(owner.path, owner.save)())
        contents.optimizers = [
            strategy.optimizer_state(index) if is_running else named_optimizer_state(self._module, optimizer)
            for index, optimizer in enumerate(core.optimization.optimizers)
        ]
        control = strategy.control if is_running and strategy.shards_parameters else None
        entries = [entry for saved in contents.optimizers for entry in saved["state"].values()]
        kinds = {type(value) for entry in entries for value in entry.values()} - {torch.Tensor}
        if control is not None or any(issubclass(kind, torch.Tensor) for kind in kinds):
            flattened = set_apart(contents.optimizers, self.shards_of, control)
        else:
            flattened = {}, {}
        state["flattened_optimizer_state"], own["optimizer_shards"] = flattened

    def _metadata(self, description: ModuleDescription) -> CheckpointMetadata:
        core, strategy, module, datamodule = self._core, self._strategy, self._module, self._core.datamodule
        hyper_parameters, left_out = core.secrets.take_out(module.hparams, warn=strategy.rank == 0)
        data_hyper_parameters: Any = {}
        if datamodule is not None:
            data_hyper_parameters, _ = core.secrets.take_out(datamodule.hparams, warn=strategy.rank == 0)
        return CheckpointMetadata(
            strategy=type(strategy).__name__,
            precision=strategy.precision.name,
            progress=core.progress.state_dict(),
            hyper_parameters=hyper_parameters,
            left_out=tuple(left_out),
            argument=hyper_parameters_argument(module),
            data_hyper_parameters=data_hyper_parameters,
            data_argument="" if datamodule is None else hyper_parameters_argument(datamodule),
            pretrained=description.pretrained,
            layer_versions=description.layer_versions,
        )

    @property
    def _earlier_buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers at the start of a window that is saved instead of the current state."""
        snapshot = self._core.snapshot
        return snapshot.buffers if snapshot is not None and snapshot.is_active else {}

    def _own_buffers(self, weights: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's buffers that differ from rank 0's, which `weights` holds. Collective."""
        buffers, control = self._core.buffers, self._strategy.control
        if control.world_size == 1:
            return {}
        overrides = {**replaced, **({} if buffers is None else buffers.values(replaced)), **self._earlier_buffers}
        return collect_buffers(self._module, weights, overrides, control)

    def _callback_tensors(
        self, rehearsing: bool, only_averages: bool, weights: Mapping[str, Any]
    ) -> tuple[dict[str, Mapping[str, Any]], AveragesRecord | None]:
        """Return the tensors of callbacks by key, and which of them are averages of the weights."""
        found: dict[str, Mapping[str, Any]] = {}
        averages: AveragesRecord | None = None
        for key, callback in self._savers_of_tensors.items():
            with _ignoring_errors(rehearsing):
                evaluated = callback.evaluates_averages if isinstance(callback, HoldsAverages) else None
                left_out = only_averages and evaluated is None
                tensors = {} if left_out else callback.save_tensors(self._trainer, self._module)
                if tensors:
                    found[key] = tensors
                    if evaluated is not None:
                        check_averages(type(callback).__name__, tensors, weights)
                        if averages is None or evaluated > averages.evaluated:
                            averages = AveragesRecord(key, evaluated)
        return found, averages

    def _leave_out_base(self, contents: StateToSave, is_running: bool) -> None:
        """Replace parameters that have never trained by their checksums. Collective."""
        weights, tied, trained = contents.weights, contents.aliases, self._trained
        if self._core.trainables is not None:
            trained |= self._core.trainables.trained
        parameters = self._strategy.named_parameters() if is_running else dict(self._module.named_parameters())
        trained |= {name for name, parameter in parameters.items() if parameter.requires_grad}
        base = {name for name in parameters if name in weights and name not in trained}
        if unknown := base - self._base.keys():
            control = self._strategy.control if is_running else LocalControl()
            self._base |= base_checksums(self.shards_of({name: weights[name] for name in sorted(unknown)}), control)
        base |= {name for name, first in tied.items() if first in base}
        contents.weights = {name: value for name, value in weights.items() if name not in base}
        contents.aliases = {name: first for name, first in tied.items() if name not in base}
        checksums = {name: self._base[tied.get(name, name)] for name in sorted(base)}
        contents.metadata = replace(contents.metadata, base=checksums)

    def shards_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of values."""
        strategy = self._strategy
        if type(strategy).shard_of is Strategy.shard_of:  # the strategy shards nothing
            shards = dict(values)
        else:
            shards = {name: strategy.shard_of(value) for name, value in values.items()}
        for name, shard in shards.items():
            if isinstance(shard, torch.Tensor) and hasattr(shard, "full_tensor"):
                # A DTensor that is unknown to the strategy comes from the user's own tensor parallelism.
                shards[name] = shard.full_tensor()
        return shards

    # Loading

    def load(self, checkpoint: CheckpointReader, anew: StartsAnew) -> None:
        """Load everything that a run needs to go on from a checkpoint, of this run or of another. Collective.

        Args:
            checkpoint: the checkpoint.
            anew: the parts whose state is not loaded, because it does not fit.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit; nothing was changed. Malformed values whose
                checksums match may raise it later.
        """
        core, strategy, data = self._core, self._strategy, self._core.data
        optimizers, progress = core.optimization.optimizers, core.progress
        # Every rank reads and checks everything before anything changes.
        self._check_base(checkpoint)
        saved = self._read_collectively(checkpoint, lambda: self._read(checkpoint, anew))
        if core.trainables is not None:
            with checkpoint.reading("trainables"):
                core.trainables.load_state_dict(saved.state["trainables"])
        for index, state in saved.optimizers.items():
            self._regroup(optimizers[index], state["param_groups"])
        self._load_weights(checkpoint, saved.weights)
        for index, state in saved.optimizers.items():
            with checkpoint.reading(f"optimizer {index}"):
                strategy.load_optimizer_state(state, index)
        progress.load_state_dict(checkpoint.progress)
        position = data.epoch_position
        if anew.data:
            progress.batch_idx = progress.epoch_samples = 0
            position.is_split_as_saved = False
        skipped = self._skipped(saved.state, anew)
        for owner in self.owners:
            if owner.path not in skipped and (owner.scope is not Scope.RANK or position.is_split_as_saved):
                owner.restore(checkpoint, saved.state, saved.ranks)
        if position.is_split_as_saved:
            with checkpoint.reading("buffers"):
                load_buffers(self._module, saved.ranks[0]["buffers"])
        else:
            seed_rank(derive_seed(_RESUME_SEED, data.seed, progress.epoch, progress.epoch_samples), strategy.data_rank)
        for key, tensors in saved.tensors.items():
            self._callbacks[key].load_tensors(self._trainer, self._module, tensors)

    def _skipped(self, state: dict[str, Any], anew: StartsAnew) -> set[tuple[str, ...]]:
        """Return the paths of the owners that do not load their state."""
        optimization = self._core.optimization
        skipped: set[tuple[str, ...]] = {
            ("schedulers", str(number))
            for number, config in enumerate(optimization.schedulers)
            if anew.scheduler(config.scheduler, optimization.optimizers)
        }
        for group in ("callbacks", "callback_hooks"):  # the saved run may have had other callbacks
            skipped |= {(group, key) for key in self._callbacks if key not in (state.get(group) or ())}
        if "datamodule" not in state:  # the saved run had loaders
            skipped.add(("datamodule",))
        if anew.data:
            skipped |= {owner.path for owner in self._position_owners}
        # Where the data or its limit ends, the next epoch starts at its beginning, whatever state a loader has there.
        batch_idx, limit = self._core.progress.batch_idx, self._core.data.training.limit
        at_limit = limit is not None and batch_idx >= limit
        if batch_idx == 0 or at_limit or (state.get("loop") or {}).get("data_is_over"):
            skipped.add(("source",))
        return skipped

    def load_weights(self, checkpoint: CheckpointReader, averaged: bool | None) -> None:
        """Load a checkpoint's weights and counters and nothing else, for an evaluation; close it. Collective.

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
        self._core.progress.load_state_dict(checkpoint.progress)
        self._core.progress.cut_short = False
        checkpoint.close()

    def regroup(self, checkpoint: CheckpointReader, optimizers: Sequence[Optimizer], anew: StartsAnew) -> None:
        """Give new optimizers the saved parameter groups, some of which were added during the saved run. Collective.

        The groups' settings, such as the learning rates, are loaded later by `load`. An optimizer that starts anew
        keeps its groups, and gets those that were added during the saved run.
        """
        if len(checkpoint.manifest.optimizers) != len(optimizers):
            return  # all start anew, since `compare` has found the difference
        saved = self._read_collectively(
            checkpoint, lambda: [checkpoint.optimizer_settings(index) for index in range(len(optimizers))]
        )
        configured = checkpoint.state()["components"]["optimizer_groups"]
        for index, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
            if not anew.optimizer(index):
                self._regroup(optimizer, groups)
            elif len(configured) == len(optimizers):
                add_later_groups(optimizer, configured[index], groups, self._strategy.named_parameters())

    def _regroup(self, optimizer: Optimizer, groups: Sequence[Any]) -> None:
        names = [group["params"] for group in groups]
        regroup_parameters(optimizer, names, self._strategy.named_parameters())

    def _load_weights(self, checkpoint: CheckpointReader, weights: dict[str, Any]) -> None:
        base = checkpoint.manifest.metadata.base
        if base:  # `_check_base` has found that the module has the same values
            own: Mapping[str, Any] = self._strategy.model_state()
            weights = {**{name: self._strategy.shard_of(own[name]) for name in base}, **weights}
        self._strategy.load_model_state(weights)

    # Reading, which changes nothing

    def _read_collectively(self, checkpoint: CheckpointReader, read: Callable[[], T]) -> T:
        return run_collectively(self._strategy.control, f"The checkpoint {checkpoint.path!r} cannot be loaded", read)

    def _read(self, checkpoint: CheckpointReader, anew: StartsAnew) -> _Saved:
        """Read what this rank loads, and check that it fits."""
        strategy, optimization = self._strategy, self._core.optimization
        state = checkpoint.state()
        weights = self._read_weights(checkpoint, checkpoint.weights())
        ranks = self._read_rank_states(checkpoint, state["data"]["world_size"])
        dtypes = {name: source.dtype for name, source in checkpoint.weights().sources().items()}
        optimizers: dict[int, dict[str, Any]] = {}
        for index, optimizer in enumerate(optimization.optimizers):
            if anew.optimizer(index):
                continue
            optimizers[index] = saved = checkpoint.optimizer_state(index, strategy.optimizer_regions(index))
            saved["weight_dtypes"] = dtypes
            keep_implementation(optimizer, saved)
            with checkpoint.reading("optimizer_shards"):
                if (state.get("flattened_optimizer_state") or {}).get(str(index), {}).get("per_rank"):
                    own = ranks[0]["optimizer_shards"][str(index)]
                    add_own_shards(checkpoint.path, saved, own, strategy.optimizer_regions(index))
        with checkpoint.reading("metrics"):
            self._core.metrics.check_states([rank_state["metrics"] for rank_state in ranks])
        return _Saved(state, ranks, weights, optimizers, self._read_callback_tensors(checkpoint))

    def _check_base(self, checkpoint: CheckpointReader) -> None:
        """Refuse a ``trainable_only`` checkpoint whose base weights differ from the module's. Collective."""
        base = checkpoint.manifest.metadata.base
        if not base:
            return
        own = self._strategy.model_state()
        shards = self.shards_of({name: own[name] for name in base if name in own})
        precision = checkpoint.manifest.metadata.precision
        check_base(checkpoint.path, base, base_checksums(shards, self._strategy.control, precision))
        self._trained |= set(checkpoint.weights())

    def _read_weights(self, checkpoint: CheckpointReader, saved: Weights) -> dict[str, Any]:
        strategy, base = self._strategy, checkpoint.manifest.metadata.base
        own = {name: value for name, value in strategy.model_state().items() if name not in base}
        strict = self._module.strict_loading
        hooked = HookedWeights.of(self._module, saved, checkpoint.manifest.metadata.layer_versions, own)
        saved = saved.with_hooked(hooked.values, hooked.replaced)
        own |= {name: value for name, value in hooked.values.items() if name in own}
        WeightMismatch.compare(own, {name: saved.stored(name) for name in saved}).raise_or_warn(
            f"The weights of {checkpoint.path!r}",
            type(self._module).__name__,
            strict,
            remedy="set strict_loading = False in the module, or use load_from_checkpoint(path, strict=False),",
        )
        weights = saved.staged(strategy.model_regions())
        if strict:
            return weights
        # Parameters that the checkpoint lacks keep their values.
        return {name: weights[name] if name in weights else strategy.shard_of(value) for name, value in own.items()}

    def _read_callback_tensors(self, checkpoint: CheckpointReader) -> dict[str, dict[str, Any]]:
        saved, regions = checkpoint.manifest.callbacks, self._strategy.model_regions()
        return {key: checkpoint.callback_tensors(key).staged(regions) for key in self._callbacks if key in saved}

    def _read_rank_states(self, checkpoint: CheckpointReader, parts: int) -> list[dict[str, Any]]:
        """Return the saved states of the ranks whose work this rank takes over: one if the number of ranks is equal.

        Args:
            checkpoint: the checkpoint.
            parts: the number of parts into which the data of the saved run was split.
        """
        strategy, saved = self._strategy, checkpoint.manifest.world_size
        if (saved, parts) == (strategy.world_size, strategy.data_world_size):
            ranks = [strategy.rank]
        else:
            ranks_per_part = saved // parts  # ranks that read the same part of the data
            ranks = [part * ranks_per_part for part in range(strategy.data_rank, parts, strategy.data_world_size)]
        return [checkpoint.rank_state(rank) for rank in ranks]


class _Saved(NamedTuple):
    """What `SavedState.load` reads from a checkpoint before it changes anything.

    Attributes:
        state: the run's document.
        ranks: the documents of the ranks whose work this rank takes over.
        weights: the weights that this rank holds.
        optimizers: the states of the optimizers that do not start anew, by index.
        tensors: the tensors of callbacks, by the callback's key.
    """

    state: dict[str, Any]
    ranks: list[dict[str, Any]]
    weights: dict[str, Any]
    optimizers: dict[int, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


def _own_method(name: str, owner: Any, base: type) -> Callable[..., Any]:
    """Return the method that ``owner`` overrides; without one, a function that returns an empty dict, like the base."""
    return getattr(owner, name) if is_overridden(name, owner, base) else dict


def _filled_by(name: str, owner: Any, base: type, *arguments: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the dict to which a hook adds state."""
    if not is_overridden(name, owner, base):
        return dict
    hook = getattr(owner, name)

    def save() -> dict[str, Any]:
        state: dict[str, Any] = {}
        hook(*arguments, state)
        return state

    return save


@contextmanager
def _ignoring_errors(rehearsing: bool) -> Iterator[None]:
    """Ignore errors of owners in a rehearsal, because objects that a user's hook needs may not exist yet."""
    try:
        yield
    except Exception:
        if not rehearsing:
            raise
        logger.debug("A hook that saves failed in the rehearsal before training.", exc_info=True)
