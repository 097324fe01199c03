"""RunCheckpoints: opens the checkpoint that a run starts from, and writes the checkpoints that the run saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._engine.rank_facts import check_folder_agreement
from drivetrain._engine.run_folder import CKPT_PATH_KEYWORDS, StartDecision
from drivetrain._engine.saved_state_schema import reporting_malformed
from drivetrain._engine.seeding import order_seed
from drivetrain._loops.save_requests import SaveRequests
from drivetrain._loops.stopping import limit_reached
from drivetrain._loops.trainables import freeze_only
from drivetrain.errors import CheckpointError, ConfigurationError, listed

# The code that reads and writes checkpoints is imported on use, because many runs neither read nor write any.
if TYPE_CHECKING:
    from drivetrain._engine.background import BackgroundSaver
    from drivetrain._engine.resume_compatibility import Difference
    from drivetrain._engine.run_checkpoint import RunCheckpoint
    from drivetrain._engine.run_parts import CheckpointParts, RunCore, RunData, SaveHistory
    from drivetrain._loops.trainables import Trainables
    from drivetrain.checkpoint._format import CheckpointMetadata, CheckpointReader

logger = logging.getLogger("drivetrain")


class RunCheckpoints:
    """Opens, loads and writes the checkpoints of one run.

    Args:
        core: the run.
        data: the data of the run.
        memory: the state that all checkpoints of the run share.
        collect_parts: returns the parts of a fit that exist when the function is called.
    """

    def __init__(
        self, core: RunCore, data: RunData, memory: SaveHistory, collect_parts: Callable[[], CheckpointParts]
    ) -> None:
        self._core = core
        self._data = data
        self._memory = memory
        self._collect_parts = collect_parts
        self._path = core.request.ckpt_path
        self._allow = core.request.allow
        self.requests = SaveRequests()
        """Saves and rollbacks deferred to the end of the accumulation window."""
        self._accepted: list[Difference] = []  # the differences from the resumed run that `allow` permits
        self._background: BackgroundSaver | None = None
        # Identifies this run in checkpoint lineages. Only rank 0's value is stored.
        self._lineage_id = os.urandom(8).hex()
        self._ancestors: tuple[tuple[str, int], ...] = ()
        self._parent_checkpoint_id = ""  # the parent of the next checkpoint; "" for none
        self._checkpoints_written = 0
        self._beginning = StartDecision()
        self._searched_folders: list[str] = []
        self.opened: CheckpointReader | None = None
        """The checkpoint that the run starts from, if any."""
        self.already_ended: str | None = None
        """Why the run that "auto" found has nothing left to train; None if the run can train further."""
        self.run_failed = False
        """Whether the run has failed. What is saved afterwards is the state before the step that failed."""
        self._warned_of_no_save = False
        self.written: str | None = None
        """The path of the last checkpoint that this run completed."""

    # Opening and loading the checkpoint that the run starts from, and rolling back

    def choose_start(self) -> None:
        """Choose the run's folder and, for "last", "best" and "auto", the checkpoint to start from. Collective.

        Raises:
            ConfigurationError: the folder cannot be created. The error is raised on every rank.
            StorageError: a folder cannot be listed.
        """
        core = self._core
        self._searched_folders = self._callback_folders()
        needed_by = self._folder_needed_by()
        check_folder_agreement(core.strategy.control, needed_by)
        if needed_by:
            from drivetrain._engine.run_start import begin

            self._beginning = begin(core)

    def _folder_needed_by(self) -> list[str]:
        """Return the class names of the objects that need a folder for the run, and "ckpt_path" if it is given."""
        core, trainer = self._core, self._core.trainer
        profilers = [trainer.profiler] if core.profile_needs_folder else []
        callbacks = [callback for callback in core.callbacks if callback.wants_run_folder]
        argument = [] if self._path is None else ["ckpt_path"]
        return [*(type(user).__name__ for user in (*trainer.loggers, *callbacks, *profilers)), *argument]

    def claim_folder_for_late_callbacks(self) -> None:
        """Choose a folder, if the run has none, for callbacks that were appended in `setup`. Collective."""
        core = self._core
        if core.stage == "fit" and core.folder.path is None:
            from drivetrain._engine.run_start import begin

            self._beginning = begin(core)

    def open(self) -> int:
        """Open the checkpoint that the run starts from, and return the seed of its sample order. Collective.

        Raises:
            CheckpointError: there is no checkpoint, or training cannot resume from it.
        """
        core = self._core
        seed, control, fitting = core.trainer.seed, core.strategy.control, core.stage == "fit"
        path, beginning = self._path, self._beginning
        if path in CKPT_PATH_KEYWORDS:
            from drivetrain._engine.run_location import runs_folder
            from drivetrain._engine.run_start import find_in_folders

            # Rank 0 chooses for all ranks, because a network file system may show the others an older state.
            added_in_setup = [folder for folder in self._callback_folders() if folder not in self._searched_folders]
            path = beginning.path
            if path is None and added_in_setup:
                path = find_in_folders(core, added_in_setup)
            if path is None and self._path != "auto":
                raise CheckpointError(
                    f"ckpt_path={self._path!r}: there is no checkpoint to {'resume from' if fitting else 'evaluate'}.",
                    f"looked in {', '.join([runs_folder(core), *self._callback_folders()])}, for checkpoints "
                    f"saved by runs of {type(core.module).__name__} with the same hyper-parameters.{beginning.skipped}",
                    "pass a path, or ckpt_path='auto', which starts a new run if there is none."
                    if fitting
                    else "pass a path, or ckpt_path='last' for the newest checkpoint; 'best' needs a run with "
                    "Checkpoint(monitor=...).",
                )
        if path is None:
            if fitting:
                core.folder.note_start(None, None, "", beginning.continues_run)
            return order_seed(seed, control)

        from drivetrain._engine.checkpoint_compatibility import check_resumable
        from drivetrain.checkpoint._format import load, run_collectively

        def open_and_check() -> CheckpointReader:
            checkpoint = load(path)
            if fitting:
                check_resumable(checkpoint, seed)
            return checkpoint

        self.opened = run_collectively(control, f"The checkpoint {path!r} cannot be opened", open_and_check)
        assert self.opened is not None
        if fitting:
            metadata = self.opened.manifest.metadata
            self._ancestors, self._parent_checkpoint_id = metadata.lineage, metadata.identifier
            core.folder.note_start(metadata, path, beginning.parent, beginning.continues_run)
        return int(self.opened.state()["data"]["seed"]) if fitting else order_seed(seed, control)

    def check_remaining_training(self) -> None:
        """Check whether the limits of the current settings leave anything to train.

        Raises:
            ConfigurationError: nothing is left to train, and ``ckpt_path`` is a path, "last" or "best".
        """
        if self.opened is None:
            return
        trainer, progress = self._core.trainer, self.opened.progress
        epoch, step = int(progress["epoch"]), int(progress["global_step"])
        reason, remedy = limit_reached(trainer.max_epochs, trainer.max_steps, epoch, step), "raise the limit"
        loop = self.opened.state()["loop"]
        if loop and loop.get("left_after_last_step") and step == trainer.max_steps:
            # The saved run stopped at max_steps, and a validation or the end of the epoch is still to be run.
            reason = limit_reached(trainer.max_epochs, -1, epoch, step)
        if reason is not None and trainer.fast_dev_run:
            remedy = f"leave out fast_dev_run={trainer.fast_dev_run}, which sets this limit"
        elif reason is None and (not loop or loop.get("asked_to_stop") is None):
            reason, remedy = self._stopped_early(epoch, step), "raise the callback's patience or change its threshold"
        if reason is None or self._path == "auto":
            self.already_ended = reason
            return
        raise ConfigurationError(
            f"ckpt_path={self._path!r}: {reason}, so that nothing is left to train.",
            f"{self.opened.path!r} holds {epoch} epoch(s) and {step} optimizer step(s).",
            f"{remedy}, or evaluate the checkpoint with validate or test. With ckpt_path='auto', fit ends "
            "without training and without this error.",
        )

    def _stopped_early(self, epoch: int, step: int) -> str | None:
        """Return why a callback ended the resumed run, or None.

        A callback whose settings have changed since the resumed run has another state key, and is skipped.
        """
        assert self.opened is not None
        trainer, states = self._core.trainer, self.opened.state()["callbacks"]
        if epoch < (trainer.min_epochs or 0) or step < (trainer.min_steps or 0):
            return None
        for callback in self._core.callbacks:
            saved = states.get(callback.state_key)
            with reporting_malformed(self.opened, "the run's state", f"callbacks/{callback.state_key}"):
                reason = None if saved is None else callback.reason_for_ending(saved["state"])
            if reason is not None:
                return f"{type(callback).__name__} has ended the run: {reason}"
        return None

    def check_module_and_data(self) -> None:
        """Compare the module and the data with those of the resumed run. Collective.

        Raises:
            ConfigurationError: the module or the data differ, and ``allow`` does not name the difference.
        """
        core, stage_data = self._core, self._data.loaded
        if core.stage != "fit":
            return
        from drivetrain._engine.resume_compatibility import class_name, data_facts

        metadata = data_facts(stage_data.train, stage_data.loaders)
        self._memory.components |= {"module": class_name(core.module), "data": metadata}
        self._compare()

    def _compare(self) -> None:
        """Compare the components that are set up by now with the components of the resumed run.

        Raises:
            ConfigurationError: components differ, and ``allow`` does not name the difference.
        """
        if self.opened is None:
            return
        from drivetrain._engine.resume_compatibility import refuse_differences

        current = self._memory.components
        if self._data.reload is not None and not self.opened.progress.get("batch_idx"):
            # The next epoch has not begun, so the saved facts describe the loader of the previous epoch.
            current = {name: value for name, value in current.items() if name != "data"}
        found = self._differences(self.opened, current)
        refuse_differences(self.opened.path, found, self._allow)
        accepted = [difference for difference in found if difference.kind in self._allow]
        new = [difference for difference in accepted if difference not in self._accepted]
        if new and self._core.strategy.rank == 0:
            text = "; ".join(f"{difference.saved}, now {difference.now}" for difference in new)
            indices = sorted({each.optimizer for each in new if each.optimizer is not None})
            names = [f"{current['optimizers'][index].rpartition('.')[2]}" for index in indices]
            logger.warning(
                "These differences from the resumed run are allowed: %s.%s",
                text,
                "".join(f" {name} starts anew, and so do its schedulers." for name in names),
            )
        self._accepted = accepted
        self._report_saved_numbers([difference for difference in found if difference.kind not in self._allow])

    def _differences(self, checkpoint: CheckpointReader, current: dict[str, Any]) -> list[Difference]:
        from drivetrain._engine.resume_compatibility import find_differences, immovable_optimizers

        state, strategy = checkpoint.state(), self._core.strategy
        saved = state.get("components")
        with reporting_malformed(checkpoint, "the run's state", "components"):
            found = find_differences(saved, current, state["data"].get("samples"))
            if "optimizers" in current:
                manifest, own = checkpoint.manifest, (type(strategy).__name__, strategy.world_size)
                layouts = (manifest.metadata.strategy, manifest.world_size), own
                flattened = state.get("flattened_optimizer_state") or {}
                found += immovable_optimizers(flattened, *layouts, strategy.shards_parameters, found)
        return found

    def _report_saved_numbers(self, kept: Sequence[Difference]) -> None:
        """Say, in the log and in the run's record, which numbers of the checkpoint are used instead of this run's."""
        if kept and self._core.strategy.rank == 0:
            assert self.opened is not None
            text = "; ".join(f"{difference.saved}, not {difference.now.partition('=')[2]}" for difference in kept)
            text = f"The checkpoint's value goes on, and not that of configure_optimizers: {text}."
            kinds = ", ".join(f'"{kind}"' for kind in dict.fromkeys(difference.kind for difference in kept))
            logger.warning("%s To start with this run's values: fit(..., allow=(%s,)).", text, kinds)
            self._core.folder.note("kept settings", text, int(self.opened.progress["global_step"]))

    def load(self) -> None:
        """Load the opened checkpoint, if there is one. Collective."""
        if self.opened is not None:
            from drivetrain._engine.resume_compatibility import StartsAnew

            with self._core.span("checkpoint"):
                self._run_state().load(self.opened, StartsAnew.after(self._accepted))
            self._trainables().set_resuming(self._frozen_names() is not None)

    def restore_trainables(self) -> None:
        """Freeze and unfreeze parameters as in the resumed run, before the module is wrapped. Not collective."""
        if self.opened is not None:
            from drivetrain.checkpoint._loading_hooks import HookedWeights

            module, versions = self._core.module, self.opened.manifest.metadata.layer_versions
            self.opened.renames = HookedWeights.of(module, self.opened.weights(), versions, {}).renames
        frozen = self._frozen_names()
        if frozen is not None:
            changed = freeze_only(dict(self._core.module.named_parameters()), frozen)
            if changed and self._core.strategy.rank == 0:
                logger.info(
                    "These parameters were frozen or unfrozen as in the resumed run, and now differ from the code: %s.",
                    listed(changed),
                )

    def regroup(self, optimizers: Sequence[Optimizer]) -> None:
        """Restore the parameter groups and the frozen parameters of the resumed run.

        Raises:
            ConfigurationError: optimizers or schedulers have other classes, or optimizers other groups, and ``allow``
                does not name the difference.
        """
        self._compare()
        frozen = self._frozen_names()
        if frozen is None or self.opened is None:
            return
        self._trainables().freeze_as_saved(frozen, "configure_optimizers")
        from drivetrain._engine.resume_compatibility import StartsAnew

        self._run_state().regroup(self.opened, optimizers, StartsAnew.after(self._accepted))

    def restore_trainables_after_start_hooks(self) -> None:
        """Undo what ``on_fit_start`` and ``on_train_start`` froze or unfroze in a run that resumes another."""
        frozen = self._frozen_names()
        if frozen is not None:
            self._trainables().freeze_as_saved(frozen, "on_fit_start or on_train_start")
            self._trainables().set_resuming(False)
        if self.opened is not None:
            self.opened.close()  # the run reads nothing more from the checkpoint, which may be deleted from now on

    def _trainables(self) -> Trainables:
        trainables = self._collect_parts().trainables
        assert trainables is not None
        return trainables

    def _frozen_names(self) -> set[str] | None:
        """Return the names of the parameters that were frozen in the resumed run; None if unknown or not resuming."""
        frozen = None if self.opened is None else self.opened.state().get("frozen")
        return None if frozen is None else set(frozen)

    def newest_up_to(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest checkpoint at or before ``step``, or None. Collective."""
        from drivetrain._engine.saved_state_schema import check_progress
        from drivetrain.checkpoint._format import load

        self.finish()
        control, found = self._core.strategy.control, None
        if control.rank == 0:
            for path in {path for callback in self._core.callbacks for path in callback.kept_checkpoints}:
                with suppress(CheckpointError):  # another process removed the checkpoint
                    checkpoint = load(path)
                    check_progress(checkpoint)
                    saved_step = int(checkpoint.progress["global_step"])
                    is_newer = saved_step <= step and (found is None or saved_step > found[1])
                    if is_newer and not checkpoint.weights_only:
                        found = path, saved_step
        found = control.broadcast_object(found)
        return None if found is None else (found[0], found[1])

    def roll_back(self, path: str) -> None:
        """Roll back to a checkpoint of this run, once all hooks of the current event have run. Collective.

        Callbacks are notified before and after the rollback. The state of callbacks is loaded in between.

        Raises:
            CheckpointError: the checkpoint cannot be opened. Damaged contents raise the error later, in the loop.
            ConfigurationError: the checkpoint has other optimizers or schedulers, which ``allow`` has permitted.
        """
        from drivetrain._engine.resume_compatibility import StartsAnew
        from drivetrain.checkpoint._format import load, run_collectively

        core = self._core
        checkpoint = run_collectively(
            core.strategy.control, f"The checkpoint {path!r} cannot be opened", lambda: load(path)
        )

        found = self._differences(checkpoint, self._memory.components)
        replaced = [each for each in found if each.kind in ("optimizer", "scheduler") and each.kind in self._allow]
        if replaced:
            raise ConfigurationError(
                f"The run cannot go back to {path!r}: it had {replaced[0].saved}, and this run {replaced[0].now}.",
                "the state in the checkpoint does not belong to what started anew in this run (fit's argument allow).",
                "save a checkpoint soon after the start of this run, to which it can go back.",
            )

        def load_now() -> None:
            self.finish()
            for callback in core.callbacks:
                callback.before_rollback(core.trainer, core.module)
            self._run_state().load(checkpoint, StartsAnew(), rolling_back=True)
            if core.strategy.rank == 0:
                core.folder.note("rolled back", f"to {path}", core.progress.global_step)
            for callback in core.callbacks:
                callback.after_rollback(core.trainer, core.module, path)

        self.requests.roll_back(load_now)

    def load_weights(self) -> None:
        """Load the weights and counters of the opened checkpoint for an evaluation, if there is one. Collective."""
        if self.opened is not None:
            with self._core.span("checkpoint"):
                self._run_state().load_weights(self.opened, self._core.request.averaged)
            self._core.progress.load_state_dict(self.opened.progress)
            self._core.progress.cut_short = False
            self.opened.close()

    def _callback_folders(self) -> list[str]:
        """Return the folders that callbacks write checkpoints to, each once."""
        return list(dict.fromkeys(folder for callback in self._core.callbacks for folder in callback.writes_to))

    def _run_state(self) -> RunCheckpoint:
        from drivetrain._engine.run_checkpoint import RunCheckpoint

        return RunCheckpoint(self._core, self._data, self._collect_parts(), self._memory)

    # Writing the checkpoints of this run

    def rehearse_saves(self) -> None:
        """Check that the state that the callbacks will save can be saved: now, and after the first step. Collective.

        Raises:
            CheckpointError: a part of the state cannot be saved. The error is raised on every rank.
        """
        if any(callback.writes_to for callback in self._core.callbacks):
            from drivetrain._engine.save_rehearsal import SaveRehearsal

            optimizers = self._collect_parts().optimization.optimizers
            rehearsal = SaveRehearsal(self._core, optimizers, self.requests, self._run_state)
            rehearsal.run()
            rehearsal.repeat_after_first_step()

    def save(self, path: str, weights_only: bool, trainable_only: bool = False) -> None:
        """Write a checkpoint, now or at the next point of the current epoch at which a run can be resumed. Collective.

        Raises:
            ConfigurationError: the run has ended, and this process does not have the whole state to resume from; or it
                has failed within a step.
            CheckpointError: the checkpoint could not be written. The error is raised on every rank.
        """
        core = self._core
        if not weights_only:
            from drivetrain._engine.state_after_run import check_state_is_whole

            check_state_is_whole(core, self._collect_parts)
        if self.run_failed:
            if core.strategy.module is None:
                from drivetrain._engine.state_after_run import refuse_half_step

                refuse_half_step(core, self._collect_parts())
            self.write_after_failure(path, None, trainable_only, weights_only=weights_only)
            return
        with core.span("checkpoint"):
            self.write(path, weights_only, trainable_only=trainable_only)

    def write(
        self,
        path: str,
        weights_only: bool,
        background: bool = False,
        on_complete: Callable[[], None] = lambda: None,
        identifier: str = "",
        digest: str | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Write a checkpoint now, or within an epoch, at the next point at which a run can be resumed. Collective.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out the state that only a resumed run needs.
            background: copy the state, and write the copy while training continues.
            on_complete: called once the checkpoint is complete.
            identifier: the identifier in the checkpoint's manifest; "" for a random identifier. Rank 0's value is used.
            digest: the name of the digest to store for each file, in addition to the checksum. Rank 0's value is used.
            trainable_only: store only checksums of parameters that have never trained.

        Raises:
            CheckpointError: this checkpoint or an earlier background save could not be written. The error is raised on
                every rank.
        """
        if self.requests.in_epoch and not self.run_failed:
            arguments = (path, weights_only, background, on_complete, identifier, digest, trainable_only)
            self.requests.ask(partial(self.write, *arguments))
            return
        from drivetrain.checkpoint._format import copy_to_host, save

        core, strategy = self._core, self._core.strategy
        checkpoint = self._run_state()
        contents = checkpoint.contents(weights_only, trainable_only)
        contents.hash_algorithm = digest
        metadata = contents.metadata = self._with_lineage(contents.metadata, identifier or os.urandom(16).hex())
        if strategy.rank == 0 and core.trainer.loggers:
            from drivetrain._engine.run_loggers import flush_loggers

            flush_loggers(core.trainer)

        def record_completion() -> None:
            self.written = path
            on_complete()
            if strategy.rank == 0:
                core.folder.note_checkpoint(path, metadata)

        if strategy.module is None:
            # The run has ended: every rank holds the whole state, and the ranks no longer communicate.
            if strategy.rank == 0:
                save(path, contents, LocalControl())
                record_completion()
            return
        control = strategy.control
        if not background:
            save(path, contents, control, checkpoint.shard_of)
            record_completion()
            return
        if self._background is None:
            from drivetrain._engine.background import BackgroundSaver

            self._background = BackgroundSaver(control, self.requests)
        staged = copy_to_host(contents, control.rank, control.world_size, checkpoint.shard_of, snapshot=True)
        self._background.save(path, staged, record_completion)

    def _with_lineage(self, metadata: CheckpointMetadata, identifier: str) -> CheckpointMetadata:
        """Return metadata with identifier, parent and lineage set, and make this checkpoint the parent of the next."""
        parent, self._parent_checkpoint_id = self._parent_checkpoint_id, identifier
        self._checkpoints_written += 1
        lineage = (*self._ancestors, (self._lineage_id, self._checkpoints_written))
        from drivetrain.runs._identity import class_path

        folder, module = self._core.folder, class_path(type(self._core.module))
        run = {"id": folder.id, "name": folder.name, "folder": _absolute(folder.path), "module": module}
        return replace(metadata, identifier=identifier, parent=parent, lineage=lineage, run=run if folder.id else {})

    def write_after_failure(
        self,
        path: str,
        digest: str | None,
        trainable_only: bool,
        then: Callable[[], None] = lambda: None,
        identifier: str = "",
        weights_only: bool = False,
    ) -> None:
        """Save the state that a failed run had after its last whole step; log a warning if this state is lost."""
        from drivetrain._engine.state_after_run import go_back_to_whole_step

        if self._core.strategy.world_size > 1:
            logger.warning("Nothing is saved after the failure: the other ranks have ended, and their state is lost.")
            return
        if not go_back_to_whole_step(self._core, self._collect_parts()):
            return
        self.abandon()  # an earlier save that ended later would be named as the newest
        self.write(path, weights_only, False, then, identifier, digest, trainable_only)

    def save_before_leaving(self) -> None:
        """Let the callbacks save a checkpoint to resume from, and wait until it is complete. Collective.

        Raises:
            CheckpointError: a checkpoint could not be written. The error is raised on every rank.
        """
        self.finish()
        core = self._core
        with self.requests.at_resumable_point():
            saved = [callback.save_before_leaving(core.trainer, core.module) for callback in core.callbacks]
        self.requests.run()
        self.finish()
        if not any(saved) and core.strategy.rank == 0 and not core.request.trial and not self._warned_of_no_save:
            # This method runs a second time if the run stops at the end of an epoch.
            self._warned_of_no_save = True
            logger.warning(
                "The run ends early and nothing is saved: it has no Checkpoint callback, and no other callback saves a "
                "checkpoint in save_before_leaving."
            )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._background is not None:
            with self._core.span("checkpoint"):
                self._background.finish()

    def abandon(self) -> None:
        """Wait for the checkpoint that is being written in the background. Its errors are ignored: the run failed."""
        for request in self.requests.waiting:
            if isinstance(request, partial) and request.func == self.write:
                text = "The checkpoint %r is not written: the run failed before the end of the step or event."
                logger.warning(text, request.args[0])
        self.requests.waiting.clear()
        if self._background is not None:
            self._background.abandon()


def _absolute(folder: str | None) -> str:
    """Return the folder as an absolute path or URL, which is valid in any working directory."""
    return "" if folder is None else folder if "://" in folder else os.path.abspath(folder)
