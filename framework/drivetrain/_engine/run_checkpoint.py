"""What a checkpoint holds of a run, and how a run goes on from one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._engine.checkpoint_compatibility import check_optimizers_fit, check_weights_fit
from drivetrain._engine.rank_local_buffers import own_buffers, take_own_buffers
from drivetrain._engine.saved_state_schema import check_groups, check_rank_state, taking
from drivetrain._engine.seeding import seed_rank
from drivetrain._engine.session_state import SessionState
from drivetrain._loops.validation import renumbered
from drivetrain._runtime.seed import derive_seed
from drivetrain.callback import Callback
from drivetrain.checkpoint._base_weights import base_sums, check_base
from drivetrain.checkpoint._format import Checkpoint, Contents, Facts, agreed
from drivetrain.checkpoint._pretrained import pretrained_models
from drivetrain.checkpoint._tied_names import tied_names
from drivetrain.errors import listed
from drivetrain.module._hyper_parameters import hyper_parameters_argument
from drivetrain.strategies._optimizer_state import named_optimizer_state, regrouped

logger = logging.getLogger("drivetrain")

_ANEW = 0x616E6577
"""Tells the seeds of a run that goes on among other ranks from others derived from the same numbers."""


class RunCheckpoint:
    """What a checkpoint holds of a run.

    Args:
        run: the run.
    """

    def __init__(self, run: SessionState) -> None:
        self._run = run
        self._module = run.module
        self._strategy = run.strategy

    # Saving

    def contents(self, weights_only: bool, trainable_only: bool = False, rehearsing: bool = False) -> Contents:
        """Return what this rank has of the checkpoint; calls the hooks that add to it.

        Args:
            weights_only: leave out what a run needs to go on.
            trainable_only: leave out parameters that have never trained. Collective then.
            rehearsing: nothing will be written: a hook that fails so early may not fail when it counts.
        """
        run, strategy, module = self._run, self._strategy, self._module
        hyper_parameters, left_out = run.left_out.take_out(module.hparams, tell=strategy.rank == 0)
        datamodule = run.given.datamodule
        of_data = {} if datamodule is None else run.left_out.take_out(datamodule.hparams, tell=strategy.rank == 0)[0]
        contents = Contents(
            weights=self._weights(),
            aliases=tied_names(module),
            facts=Facts(
                strategy=type(strategy).__name__,
                precision=strategy.precision.name,
                progress=run.progress.state_dict(),
                hyper_parameters=hyper_parameters,
                left_out=tuple(left_out),
                argument=hyper_parameters_argument(module),
                data_hyper_parameters=of_data,
                data_argument="" if datamodule is None else hyper_parameters_argument(datamodule),
                weights_only=weights_only,
                pretrained=pretrained_models(module),
            ),
        )
        if not weights_only:
            contents.state = self._state(rehearsing)
            contents.rank_state = self._rank_state(contents.weights)
            contents.optimizers = [
                strategy.optimizer_state(index) if self._running else named_optimizer_state(module, optimizer)
                for index, optimizer in enumerate(run.optimizers)
            ]
            contents.callbacks = self._callback_tensors(rehearsing)
        if trainable_only:
            self._leave_out_base(contents)
        return contents

    def _leave_out_base(self, contents: Contents) -> None:
        """Let checksums stand for the parameters that have never trained."""
        run, weights = self._run, contents.weights
        run.note_trained()
        parameters = self._strategy.named_parameters() if self._running else dict(self._module.named_parameters())
        run.trained |= {name for name, one in parameters.items() if one.requires_grad}
        for state in contents.optimizers:  # what was frozen again between two looks
            run.trained |= {name for name, values in state["state"].items() if values}
        base = {name for name in parameters if name in weights and name not in run.trained}
        if unknown := base - run.base.keys():
            control = self._strategy.control if self._running else LocalControl()
            run.base |= base_sums({name: self.shard_of(weights[name]) for name in sorted(unknown)}, control)
        tied = contents.aliases
        base |= {name for name, first in tied.items() if first in base}
        contents.weights = {name: value for name, value in weights.items() if name not in base}
        contents.aliases = {name: first for name, first in tied.items() if name not in base}
        contents.facts = replace(contents.facts, base={name: run.base[tied.get(name, name)] for name in sorted(base)})

    def _weights(self) -> dict[str, Any]:
        if not self._running:
            return dict(self._module.state_dict())
        weights, opening = self._strategy.model_state(), self._run.opening
        if opening is None:
            return weights
        return weights | {name: value for name, value in opening.buffers.items() if name in weights}

    def shard_of(self, value: Any) -> Any:
        """Return what this rank holds of a value."""
        held = self._strategy.shard_of(value)
        # A DTensor that the strategy knows nothing of: the user's own tensor parallelism.
        return held.full_tensor() if isinstance(held, torch.Tensor) and hasattr(held, "full_tensor") else held

    @property
    def _running(self) -> bool:
        return self._strategy.module is not None

    def _state(self, rehearsing: bool) -> dict[str, Any]:
        """What all ranks have alike."""
        run, trainer, datamodule = self._run, self._run.trainer, self._run.given.datamodule
        with _forgiven(rehearsing):
            own: dict[str, Any] = {}
            self._module.on_save_checkpoint(own)
        callbacks = {}
        for key, callback in self._keyed():
            state: Any = {}
            extra: dict[str, Any] = {}
            with _forgiven(rehearsing):
                callback.on_save_checkpoint(trainer, self._module, extra)
                state = callback.state_dict()
            callbacks[key] = {"state": state, "extra": extra}
        of_data: Any = {}
        with _forgiven(rehearsing):
            of_data = {} if datamodule is None else datamodule.state_dict()
        schedulers: list[Any] = []
        with _forgiven(rehearsing):
            schedulers = [config.scheduler.state_dict() for config in run.schedulers]
        return {
            "module": own,
            "datamodule": of_data,
            "callbacks": callbacks,
            "schedulers": schedulers,
            "precision": self._strategy.precision.state_dict(),
            "frozen": self._frozen(),
            "trained": self._frozen_again(),
            "made_of": run.made_of,
            "loop": {} if run.loop is None else run.loop.state_dict(),
            "data": run.data_state(),
        }

    def _callback_tensors(self, rehearsing: bool) -> dict[str, Mapping[str, Any]]:
        if not self._running:
            return {}  # what was spread over the ranks is gone with them
        found: dict[str, Mapping[str, Any]] = {}
        for key, callback in self._keyed():
            with _forgiven(rehearsing):
                tensors = callback.save_tensors(self._run.trainer, self._module)
                if tensors:
                    found[key] = tensors
        return found

    def _frozen(self) -> list[str]:
        """The names of what does not train."""
        if self._running and self._run.stage == "fit":
            return self._run.trainables.frozen()
        return [name for name, one in self._module.named_parameters() if not one.requires_grad]

    def _frozen_again(self) -> list[str]:
        """The names of what does not train, and has."""
        trained = self._run.note_trained()
        return [name for name in self._frozen() if name in trained]

    def _rank_state(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """What is this rank's own."""
        run = self._run
        buffers = self._own_buffers(weights) if self._running else {}
        if run.opening is not None and run.opening.in_force:
            return {**run.opening.rank_state(), "buffers": buffers}
        source = None if run.data is None else run.data.train
        return {
            "draws": run.draws.state(run.progress.batch_idx),
            "metrics": run.metrics.state_dict(),
            "source": None if source is None else source.state_dict(),
            "buffers": buffers,
        }

    def _own_buffers(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        opening = self._run.opening
        aside = self._run.buffers.values() | ({} if opening is None else dict(opening.buffers))
        return own_buffers(self._module, weights, aside, self._strategy.control)

    # Loading

    def regroup(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the groups that the saved ones had: some may have been added within that run. Collective.

        Their settings come with their state.
        """
        if len(checkpoint.manifest.optimizers) != len(optimizers):
            return  # refused, with both numbers, where state is loaded
        saved = self._agreed(
            checkpoint, lambda: [checkpoint.optimizer_groups(index) for index in range(len(optimizers))]
        )
        named = self._strategy.named_parameters()
        for number, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
            dropped = regrouped(optimizer, groups, named)
            if dropped and self._strategy.rank == 0:
                logger.warning(
                    "Optimizer %d holds %d parameter(s) that are in no group of it in %r: %s. They are left out, as "
                    "there; optimizer.add_param_group adds them.",
                    number,
                    len(dropped),
                    checkpoint.path,
                    listed(dropped),
                )

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint's weights and nothing else.

        Raises:
            CheckpointError: it is damaged, or does not fit; nothing is changed then.
        """
        self._check_base(checkpoint)
        self._load_weights(checkpoint, self._agreed(checkpoint, lambda: self._read_weights(checkpoint)))

    def load(self, checkpoint: Checkpoint, back: bool = False, anew: Collection[str] = ()) -> None:
        """Take everything that the run goes on from.

        Args:
            checkpoint: of this run or another.
            back: the run is under way: what trains, and in which groups, goes back as well.
            anew: what is not the saved run's, and begins anew: some of "optimizer", "scheduler" and "data".

        Raises:
            CheckpointError: it is damaged, or does not fit; nothing is changed then.
        """
        run, strategy = self._run, self._strategy

        def read() -> tuple[Any, ...]:
            optimizers = None if "optimizer" in anew else len(run.optimizers)
            check_optimizers_fit(checkpoint, optimizers, None if "scheduler" in anew else len(run.schedulers))
            weights = self._read_weights(checkpoint)
            states = [
                checkpoint.optimizer_state(index, strategy.optimizer_regions(index)) for index in range(optimizers or 0)
            ]
            for index, saved in enumerate(states):
                check_groups(checkpoint, index, run.optimizers[index], saved)
            state = checkpoint.state()
            ranks = self._read_rank_states(checkpoint, state["data"])
            with taking(checkpoint, "the ranks' documents", "metrics"):
                run.metrics.check_states([one["metrics"] for one in ranks])
            return weights, states, state, ranks, self._read_callback_tensors(checkpoint)

        # All that is needed is read and checked, on every rank, before anything changes.
        self._check_base(checkpoint)
        weights, states, state, ranks, tensors = self._agreed(checkpoint, read)
        if back and state.get("frozen") is not None:
            run.trainables.keep_frozen(state["frozen"], None)
            self.regroup(checkpoint, run.optimizers)
            run.trainables.touched = True
        run.trained |= set(state.get("trained") or ())
        self._load_weights(checkpoint, weights)
        for index, optimizer_state in enumerate(states):
            with taking(checkpoint, f"the state of optimizer {index}", "state"):
                strategy.load_optimizer_state(optimizer_state, index)
        if "scheduler" not in anew:
            for number, scheduler_state in enumerate(state["schedulers"]):
                with taking(checkpoint, "the run's state", f"schedulers/{number}"):
                    run.schedulers[number].scheduler.load_state_dict(scheduler_state)
        with taking(checkpoint, "the run's state", "precision"):
            strategy.precision.load_state_dict(state["precision"])
        run.progress.load_state_dict(checkpoint.progress)
        if "data" in anew:
            self._begin_epoch_anew()
        else:
            with taking(checkpoint, "the ranks' documents", "source"):
                self._go_on(state, ranks)
        self._load_into_hooks(checkpoint, state, tensors)

    def _load_weights(self, checkpoint: Checkpoint, weights: dict[str, Any]) -> None:
        base = checkpoint.manifest.facts.base
        if base:  # as they are, they are what it was trained on
            own: Mapping[str, Any] = self._strategy.model_state()
            weights = {**{name: self._strategy.shard_of(own[name]) for name in base}, **weights}
        self._strategy.load_model_state(weights)

    def _go_on(self, state: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Come back to the place in the data, with every generator, or as near to it as another dealing allows."""
        run, progress, data = self._run, self._run.progress, state["data"]
        assert run.data is not None
        if run.reload is not None:
            run.reload(progress.epoch)
        source = run.data.train
        assert source is not None
        before = progress.batch_idx
        alike = run.cursor.load_state_dict(data, source, progress, run.reload is not None and before == 0)
        if state["loop"] and run.loop is not None:
            validation = state["loop"]["validation"]
            if validation is not None and not alike:
                validation = renumbered(validation, before, progress.batch_idx)
            run.loop.load_state_dict({**state["loop"], "validation": validation})
        if alike:
            (own,) = ranks
            run.draws.resume(own["draws"])
            take_own_buffers(self._module, own.get("buffers", {}))
            if progress.batch_idx:
                source.load_state_dict(own["source"])
        else:
            seed = derive_seed(_ANEW, data["seed"], progress.epoch, progress.epoch_samples)
            seed_rank(seed, self._strategy.data_rank)
        run.metrics.load_state_dict([one["metrics"] for one in ranks], self._strategy.device)

    def _begin_epoch_anew(self) -> None:
        """Go on with the epoch under way from the beginning of other data."""
        run, progress = self._run, self._run.progress
        progress.batch_idx = progress.epoch_samples = 0
        seed_rank(derive_seed(_ANEW, run.seed, progress.epoch, 0), self._strategy.data_rank)

    def _load_into_hooks(
        self, checkpoint: Checkpoint, state: dict[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        run = self._run
        self._module.on_load_checkpoint(state["module"])
        if run.given.datamodule is not None:
            run.given.datamodule.load_state_dict(state["datamodule"])
        for key, callback in self._keyed():
            saved = state["callbacks"].get(key)
            if saved is not None:
                with taking(checkpoint, "the run's state", f"callbacks/{key}"):
                    callback.load_state_dict(saved["state"])
                if key in tensors:
                    callback.load_tensors(run.trainer, self._module, tensors[key])
                callback.on_load_checkpoint(run.trainer, self._module, saved["extra"])

    def _check_base(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of trained weights whose base is another than the module's. Collective."""
        base = checkpoint.manifest.facts.base
        if not base:
            return
        own = self._strategy.model_state()
        held = {name: self.shard_of(own[name]) for name in base if name in own}
        precision = checkpoint.manifest.facts.precision
        check_base(checkpoint.path, base, base_sums(held, self._strategy.control, precision))
        self._run.trained |= set(checkpoint.weights())

    def _read_weights(self, checkpoint: Checkpoint) -> dict[str, Any]:
        strategy, base = self._strategy, checkpoint.manifest.facts.base
        own = {name: value for name, value in strategy.model_state().items() if name not in base}
        strict = self._module.strict_loading
        check_weights_fit(checkpoint, own, type(self._module).__name__, strict)
        weights = checkpoint.weights().staged(strategy.model_regions())
        if strict:
            return weights
        # What it has under no such name stays as it is.
        return {name: weights[name] if name in weights else strategy.shard_of(value) for name, value in own.items()}

    def _read_callback_tensors(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        trainer, module = self._run.trainer, self._module
        saved = checkpoint.manifest.callbacks
        unclaimed = sorted(saved.keys() - {key for key, _ in self._keyed()})
        if unclaimed and self._strategy.rank == 0:
            logger.warning(
                "%r has tensors of %s, which this run has not: they are left out.", checkpoint.path, listed(unclaimed)
            )
        return {
            key: checkpoint.callback_tensors(key).staged(callback.tensor_regions(trainer, module))
            for key, callback in self._keyed()
            if key in saved
        }

    def _read_rank_states(self, checkpoint: Checkpoint, data: dict[str, Any]) -> list[dict[str, Any]]:
        """What the ranks said of themselves whose places this rank takes: one where as many read the data as then."""
        strategy, saved, parts = self._strategy, checkpoint.manifest.world_size, data["world_size"]
        if (saved, parts) == (strategy.world_size, strategy.data_world_size):
            taken = [strategy.rank]
        else:
            alike = saved // parts  # so many ranks read the same part then
            taken = [part * alike for part in range(strategy.data_rank, parts, strategy.data_world_size)]
        states = [checkpoint.rank_state(rank) for rank in taken]
        for rank, state in zip(taken, states, strict=True):
            check_rank_state(checkpoint, rank, state)
        return states

    def _agreed(self, checkpoint: Checkpoint, read: Any) -> Any:
        return agreed(self._strategy.control, f"The checkpoint {checkpoint.path!r} cannot be loaded", read)

    def _keyed(self) -> Iterator[tuple[str, Callback]]:
        """Each callback by its state key; those that do not tell themselves apart are told by their order."""
        count: Counter[str] = Counter()
        for callback in self._run.callbacks:
            key = callback.state_key
            count[key] += 1
            yield key if count[key] == 1 else f"{key}#{count[key]}", callback


@contextmanager
def _forgiven(rehearsing: bool) -> Iterator[None]:
    """Let go of what a user's hook raises in a rehearsal: what it looks for may not be there before training."""
    try:
        yield
    except Exception:
        if not rehearsing:
            raise
        logger.debug("A hook that saves failed in the rehearsal before training.", exc_info=True)
