"""Checkpoint: saves checkpoints during training, and keeps the best and the newest."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain._runs.checkpoint_folders import LATEST, claim_name, is_checkpoint_at, remove, write_latest
from drivetrain._runs.directory import CHECKPOINTS
from drivetrain._runs.retention import KeptCheckpoint, Retention
from drivetrain._runtime.working_directory import resolved_path
from drivetrain._storage.paths import child, resolve_folder
from drivetrain.callback import Callback
from drivetrain.callbacks._checkpoint_names import (
    COUNTERS,
    DEFAULT_TEMPLATE,
    check_template,
    checkpoint_name,
    names_in,
)
from drivetrain.callbacks._monitored_value import acts_at_epoch_end, fresh_value, missing_value, was_logged
from drivetrain.checkpoint.save_request import SaveRequest
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_MODES = ("min", "max")
_TIME_CHECK_INTERVAL = 16  # optimizer steps between checks of the elapsed time, each of which is a broadcast


class Checkpoint(Callback):
    """Saves checkpoints during training, and removes those that are no longer kept.

    A checkpoint is written after all hooks of the event that triggers it, and only when no accumulation window is open,
    so that a run can resume from it exactly. An old checkpoint is removed only after a new one is complete. Only
    checkpoints that this run has written are removed: folders directly in ``dirpath`` with an identifier of this run in
    their manifest. If a new checkpoint would have the name of one that is kept, ``-v1``, ``-v2``, ... is appended to
    the new name. A small file ``latest`` contains the name of the newest checkpoint.

    A save that is due before the first validation and needs a value that only the validation logs (by ``monitor`` or
    ``filename``) waits for it. With ``save_last`` or ``keep_last`` the newest state is saved meanwhile, without a score
    and with ``nan`` in its name. If no validation follows, the state at the end of the run is saved like that.

    Of checkpoints with equal monitored values the earlier is kept.

    Without ``every_n_train_steps``, ``every_n_epochs`` and ``train_time_interval``, the callback saves once per epoch,
    or after each validation if an epoch has several validations.

    Args:
        dirpath: a folder or fsspec URL; by default ``checkpoints`` in the run's folder, ``trainer.log_dir``.
        filename: a template of counters and logged values, such as ``"{epoch:03d}-{val_loss:.3f}"``.
        monitor: the logged value by which checkpoints are compared, or "epoch" or "step"; None keeps the newest.
        mode: "min" if lower values are better, "max" if higher values are better.
        save_top_k: how many of the best checkpoints to keep; -1 for all, 0 for none.
        save_last: whether to also keep the newest checkpoint, whatever its monitored value. Same as ``keep_last=1``.
        every_n_train_steps: optimizer steps between checkpoints; 0 to not save by steps.
        every_n_epochs: epochs between checkpoints; 0 to not save by epochs.
        train_time_interval: time between checkpoints.
        save_weights_only: whether to save only the weights, from which a run cannot resume.
        save_on_exception: whether to save the state after the last step, unless it is saved already, if the run fails.
            Needs a single process. The checkpoint is removed once the resumed run has saved a later one.
        save_async: whether to copy the state and write it in the background while training continues.
        keep_last: how many of the newest checkpoints to keep besides the best.
        trainable_only: whether to leave out parameters that were never trained, so that an adapter is saved without its
            base model. The checkpoint contains checksums of the parameters left out, because it can be loaded only with
            the same base model.
        digest: "sha256" stores each file's SHA-256 in the manifest, for `drivetrain.checkpoint.verify`, so that a
            signature of the manifest covers all files. None stores only checksums.
        verbose: whether to log each save on rank 0.
        auto_insert_metric_name: whether to put ``name=`` before each value in ``filename``.
        save_on_train_epoch_end: whether to save at the end of a training epoch (True) or at the end of a validation
            (False). None chooses the epoch's end if validation runs once per epoch or not at all, and the validation's
            end otherwise.
        enable_version_counter: must be True, because a checkpoint that is kept is never overwritten.

    Raises:
        ConfigurationError: an argument is invalid, or arguments contradict each other.
    """

    shown_as = "checkpoint_callback"
    priority = -20  # after early stopping and after the module's own hooks, which log values
    _key_arguments = ("monitor", "mode", "every_n_train_steps", "every_n_epochs", "save_weights_only")

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        save_async: bool = False,
        keep_last: int | None = None,
        trainable_only: bool = False,
        digest: str | None = None,
        verbose: bool = False,
        auto_insert_metric_name: bool = True,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        check_types(Checkpoint, locals())
        if not enable_version_counter:
            raise ConfigurationError(
                "Checkpoint(enable_version_counter=False).",
                "a checkpoint could overwrite another one that is kept.",
                "remove the argument: -v1 is appended to a name only while a checkpoint with that name is kept.",
            )
        if monitor is None and mode == "max":
            raise ConfigurationError(
                "Checkpoint(mode='max') without a monitor.",
                "without a monitored value the newest checkpoint is kept, whatever the mode.",
                "set monitor= to the name of a logged value, or remove mode.",
            )
        check_choice("Checkpoint", "mode", mode, _MODES, "the direction in which the monitored value improves")
        check_count("Checkpoint", "save_top_k", save_top_k, -1, "how many of the best checkpoints to keep, -1 for all")
        check_count("Checkpoint", "keep_last", keep_last or 0, 0, "how many of the newest checkpoints to keep")
        check_count("Checkpoint", "every_n_train_steps", every_n_train_steps or 0, 0, "a number of optimizer steps")
        check_count("Checkpoint", "every_n_epochs", every_n_epochs or 0, 0, "a number of epochs")
        if digest is not None:
            check_choice("Checkpoint", "digest", digest, ("sha256",), "stored of each file, besides its checksums")
        self.dirpath = None if dirpath is None else resolved_path(dirpath, "dirpath")
        self._default_dirpath: str | None = None  # the folder that the run chose, if the user passed no `dirpath`
        self._run_id = ""
        self._disabled = False
        self.filename = DEFAULT_TEMPLATE if filename is None else filename
        if filename is not None:
            check_template(filename, auto_insert_metric_name)
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.keep_last = max(keep_last or 0, int(bool(save_last)))
        # Python's integers, because NumPy's would change `state_key`.
        self.every_n_train_steps = every_n_train_steps and int(every_n_train_steps)
        self.every_n_epochs = every_n_epochs and int(every_n_epochs)
        self.train_time_interval = train_time_interval
        self.save_weights_only = save_weights_only
        self.save_on_exception = save_on_exception
        self.save_async = save_async
        self.trainable_only = trainable_only
        self.digest = digest
        self.verbose = verbose
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self._uses_default_interval = (every_n_train_steps, every_n_epochs, train_time_interval) == (None, None, None)
        self._at_epoch_end = True
        self._reset()
        if every_n_train_steps or train_time_interval is not None:
            # Set per instance, so that saving by epochs adds no hook to the step.
            self.on_train_batch_end = self._after_micro_batch  # type: ignore[method-assign]

    def _reset(self) -> None:
        self._retention = Retention(self.save_top_k, self.keep_last, self.mode)
        self._last_saved_step = -1  # global_step of the last save
        self._waiting_in: int | None = None  # the epoch in which a save waits for a value that it needs; None for none
        self._has_validated = False  # whether a validation has run since training started or was resumed
        self._said_that_it_waits = False
        self._last_considered_step = 0  # global_step at which a save by steps or time was last considered
        self._last_resumable_step = -1  # global_step of the last checkpoint that a run can resume from
        self.current_score: float | None = None
        """Monitored value at the last save; None without ``monitor``."""
        self._last_timed_save = time.monotonic()  # when training started or ``train_time_interval`` was last reached
        self._fitting = False
        self._retention_before_rollback = self._retention
        self._releases: dict[str, Callable[[], None]] = {}  # of names that are reserved against other runs, on rank 0

    # Which checkpoints are kept, and under which names

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint that is kept; "" if there is none."""
        return self._path(self._retention.best)

    @property
    def best_model_score(self) -> float | None:
        """Monitored value of the best checkpoint."""
        best = self._retention.best
        return None if best is None else best.score

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the ``save_top_k`` best checkpoints, which is removed next; "" if fewer are kept."""
        return self._path(self._retention.kth_best)

    @property
    def kth_value(self) -> float | None:
        """Monitored value of the checkpoint at `kth_best_model_path`."""
        kth = self._retention.kth_best
        return None if kth is None else kth.score

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path that a checkpoint with these values would have.

        Args:
            metrics: counters and logged values, by name.
            filename: a template; None uses this callback's.
            ver: the version that is appended, as in ``-v1``; None for no version.
        """
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        name = self._name(self.filename if filename is None else filename, values)
        name = name if ver is None else f"{name}-v{ver}"
        return name if self.dirpath is None else child(self.dirpath, name)

    def _name(self, template: str, values: Mapping[str, float]) -> str:
        return checkpoint_name(template, values, named=self.auto_insert_metric_name)

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint that is kept; "" if there is none."""
        return self._path(self._retention.newest)

    @property
    def best_k_models(self) -> dict[str, float | None]:
        """Paths of all checkpoints that are kept, with their monitored values."""
        return {self._path(saved): saved.score for saved in self._retention.kept}

    # State of this callback in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the folder, and the names and identifiers of the checkpoints that this run has written."""
        return {
            "dirpath": None if self.dirpath is None else resolve_folder(self.dirpath),
            "run": self._run_id,
            "last_saved_step": self._last_saved_step,
            "waiting_in": self._waiting_in,
            **self._retention.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the list of checkpoints if this run has written them to this folder. Others are never removed."""
        folder = state_dict["dirpath"]
        if not self._fitting:  # the run was in other processes, and this is the state of its rank 0
            self._run_id = state_dict["run"]
            self._choose_folder(folder)
        last_saved_step, waiting_in = state_dict["last_saved_step"], state_dict["waiting_in"]
        self._last_saved_step = last_saved_step if type(last_saved_step) is int else -1
        self._waiting_in = waiting_in if type(waiting_in) is int else None
        same_run = state_dict["run"] in (self._run_id, "")
        if self.dirpath is None or folder != resolve_folder(self.dirpath) or not same_run:
            return
        retention = Retention(self.save_top_k, self.keep_last, self.mode)
        try:
            retention.load_state_dict(state_dict)
        except (ValueError, TypeError) as error:
            logger.warning(
                "The list of the earlier run's checkpoints in %r cannot be read, so this run does not remove them: %s",
                folder,
                error,
            )
            return
        self._retention = retention
        resumable = [*([] if self.save_weights_only else retention.kept), retention.interrupt_checkpoint]
        self._last_resumable_step = max([-1, *(saved.step for saved in resumable if saved is not None)])

    # What the engine asks of callbacks that have it

    @property
    def writes_to(self) -> Sequence[str]:
        """The folder of the checkpoints."""
        return () if self.dirpath is None or self._disabled else (self.dirpath,)

    wants_run_folder = True
    """The run's folder contains ``run.json`` and, without ``dirpath``, the checkpoints."""

    @property
    def kept_checkpoints(self) -> Sequence[str]:
        """Paths of all checkpoints that are kept, and of one that an interrupted run has written."""
        interrupted = self._path(self._retention.interrupt_checkpoint)
        return [*self.best_k_models, *([interrupted] if interrupted else [])]

    @property
    def saves_resumable(self) -> bool:
        """Whether checkpoints that a run can resume from are kept."""
        return not self._disabled and not self.save_weights_only and (self.save_top_k != 0 or self.keep_last > 0)

    @property
    def monitors(self) -> Mapping[str, str]:
        """The logged values that ``monitor`` and ``filename`` require."""
        callback = type(self).__name__
        in_filename = f"{callback}(filename={self.filename!r}), which names "
        required = {name: f"{in_filename}{name!r}" for name in names_in(self.filename)}
        if self.monitor is None or self.monitor in COUNTERS:
            return required
        return {self.monitor: f"{callback}(monitor={self.monitor!r})", **required}

    def before_rollback(self, trainer: RunContext, module: TrainModule) -> None:
        """Keep the list of checkpoints, which loading the checkpoint's state replaces."""
        self._retention_before_rollback = self._retention

    def after_rollback(self, trainer: RunContext, module: TrainModule, path: str) -> None:
        """Restore the list of checkpoints, and remove checkpoints later than the one that was loaded.

        If the later checkpoints remained, a run that is restarted would resume from the newest of them.
        """
        self._retention = self._retention_before_rollback
        has_later = self._retention.drop_after(trainer.global_step)
        self._last_resumable_step, self._last_considered_step = -1, trainer.global_step
        if trainer.strategy.control.rank == 0:
            folder, _, name = path.rpartition("/")
            is_newest = has_later and folder == self._folder().rstrip("/")
            self._clean_up(trainer, list(self._retention.to_remove), name if is_newest else None)

    # When to save

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Reset this callback's state and determine the folder of the checkpoints."""
        if stage != "fit":
            return
        self._disabled = bool(trainer.fast_dev_run) or trainer.barebones
        self._run_id = trainer.run_id
        self._choose_folder(None if trainer.log_dir is None else child(trainer.log_dir, CHECKPOINTS))
        self._reset()
        self._fitting = True

    def _choose_folder(self, default: str | None) -> None:
        """Use the folder that the user has chosen, or else ``default``, which a later run may change."""
        if self.dirpath is None or self.dirpath == self._default_dirpath:
            self.dirpath = self._default_dirpath = default
        else:
            self.dirpath = os.path.expanduser(self.dirpath)

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Release the names of checkpoints that were not completed."""
        self._fitting = False
        while self._releases:
            self._releases.popitem()[1]()

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Determine when to save, and remove obsolete checkpoints that an interrupted run has left behind."""
        self._at_epoch_end = acts_at_epoch_end(trainer, self.save_on_train_epoch_end)
        self._last_considered_step = trainer.global_step
        self._last_timed_save = time.monotonic()
        if trainer.strategy.control.rank == 0 and not self._disabled:
            self._clean_up(trainer, list(self._retention.to_remove))

    def _after_micro_batch(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save a checkpoint if ``every_n_train_steps`` or ``train_time_interval`` is reached."""
        step = trainer.global_step
        if step == self._last_considered_step:
            return
        self._last_considered_step = step
        every, interval = self.every_n_train_steps, self.train_time_interval
        if every and step % every == 0:
            self._request_save(trainer)
        elif interval is not None and step % _TIME_CHECK_INTERVAL == 0:
            is_due = time.monotonic() - self._last_timed_save >= interval.total_seconds()
            if trainer.strategy.control.broadcast_object(is_due):
                self._last_timed_save = time.monotonic()
                self._request_save(trainer)

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Save a checkpoint if checkpoints are saved at the end of validations, or if a save waits for a validation."""
        if not self._fitting or trainer.sanity_checking:
            return
        self._has_validated = True
        every = self.every_n_epochs if self.save_on_train_epoch_end is False else None
        is_due = self._uses_default_interval or (every and (trainer.current_epoch + 1) % every == 0)
        if is_due and not self._at_epoch_end:
            self._request_save(trainer)
        elif self._waiting_in is not None:
            self._request_save(trainer, may_wait=True)  # the end of the epoch may still log the value

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Save a checkpoint if checkpoints are saved at the end of epochs and ``every_n_epochs`` is reached."""
        every = self.every_n_epochs or int(self._uses_default_interval and self._at_epoch_end)
        is_due = every and self.save_on_train_epoch_end is not False and (trainer.current_epoch + 1) % every == 0
        if is_due or self._waiting_in is not None:
            self._request_save(trainer)

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Save the state without a score if a save still waits for a value."""
        if self._waiting_in is not None:
            self._request_save(trainer, is_last=True)

    def on_exception(self, trainer: RunContext, module: TrainModule, exception: BaseException) -> None:
        """Save a checkpoint if ``save_on_exception`` is set and the state of the last step is not saved yet."""
        if not self._fitting or not self.save_on_exception or self._disabled or self._is_saved(trainer):
            return
        trainer.save(lambda: self._interrupted(trainer, "exception"))

    def save_before_leaving(self, trainer: RunContext, module: TrainModule) -> bool:
        """Save a checkpoint to resume from. A collective operation.

        If a run has several `Checkpoint` callbacks, only one saves: the first without ``save_weights_only``, or else
        the first; none if one of them has saved the state of this step. The saved checkpoint does not count towards
        ``save_top_k`` and ``keep_last``, and is removed once a later checkpoint is complete.
        """
        savers = _savers(trainer)
        if self._disabled or self is not min(savers, key=lambda saver: saver.save_weights_only, default=self):
            return False
        if all(saver._last_resumable_step != trainer.global_step for saver in savers):
            trainer.save(lambda: self._interrupted(trainer, "interrupted"))
        return True

    def _interrupted(self, trainer: RunContext, prefix: str) -> SaveRequest:
        """Return the request for a checkpoint that is removed once a later one is complete. Collective."""
        step, earlier = trainer.global_step, self._retention.interrupt_checkpoint
        name, identifier = self._reserve(trainer, f"{prefix}-step={step}", [] if earlier is None else [earlier])
        self._last_resumable_step = step
        # A failed run may have abandoned a checkpoint that would have displaced others, which therefore stay.
        replaced = self._retention.add_interrupt_checkpoint(name, identifier, step)
        path, then = child(self._folder(), name), self._on_complete(trainer, name, replaced)
        return SaveRequest(path, False, self.trainable_only, False, self.digest, identifier, then)

    def _is_saved(self, trainer: RunContext) -> bool:
        """Whether a complete checkpoint holds the state of the last step of a run that failed."""
        step = trainer.global_step
        if all(saver._last_resumable_step != step for saver in _savers(trainer)):
            return False
        with suppress(Exception):  # the write that failed may be the reason why the run fails
            return trainer.world_size > 1 or (trainer.checkpoint_before(step) or ("", -1))[1] == step
        return False

    # How to save

    def _request_save(self, trainer: RunContext, may_wait: bool = False, is_last: bool = False) -> None:
        """Request a save, or wait for a later validation if a value that the save needs is not logged yet. Collective.

        Args:
            trainer: the run.
            may_wait: whether to wait although a validation has run, instead of raising an error.
            is_last: whether the run ends, so that the state is saved even without the values.

        Raises:
            ConfigurationError: no validation is to come, and a value was not logged.
        """
        if self._disabled or (self.save_top_k == 0 and self.keep_last == 0):
            return
        logged = {name: fresh_value(trainer, name) for name in self.monitors}
        missing = [name for name, value in logged.items() if value is None]
        # In `on_train_end` the current epoch is already the next one.
        epoch = self._waiting_in if is_last and self._waiting_in is not None else trainer.current_epoch
        self._waiting_in = epoch if missing and not is_last else None
        if missing:
            awaits_validation = not self._has_validated and any(trainer.num_val_batches)
            if not (is_last or may_wait or awaits_validation) and not was_logged(trainer, missing):
                raise missing_value(trainer, self.monitors[missing[0]], missing[0])
            if may_wait:
                return
            self._say_that_it_waits(trainer, missing[0])
            if not (is_last or self.keep_last):
                return
        score = None if self.monitor is None else self._score(trainer, logged)
        self.current_score = score
        values = {name: math.nan if value is None else value for name, value in logged.items()}
        values |= {"epoch": epoch, "step": trainer.global_step}
        trainer.save(lambda: self._next_checkpoint(trainer, score, values))

    def _score(self, trainer: RunContext, logged: Mapping[str, float | None]) -> float | None:
        assert self.monitor is not None
        if self.monitor in COUNTERS and self.monitor not in trainer.callback_metrics:
            return float(trainer.current_epoch if self.monitor == "epoch" else trainer.global_step)
        return logged[self.monitor] if self.monitor in logged else trainer.metrics.agreed(self.monitor)

    def _say_that_it_waits(self, trainer: RunContext, name: str) -> None:
        if trainer.strategy.control.rank == 0 and not self._said_that_it_waits:
            logger.warning(
                "%s: no value of that name was logged for the weights of step %d, whose save waits for the next "
                "validation. With keep_last=1, and at the end of the run, the newest state is saved without a score.",
                self.monitors[name],
                trainer.global_step,
            )
        self._said_that_it_waits = True

    def _next_checkpoint(
        self, trainer: RunContext, score: float | None, values: Mapping[str, float]
    ) -> SaveRequest | None:
        """Return the request for a checkpoint of this step; None if it is saved already or would not be kept."""
        step = trainer.global_step
        if self._retention.rescore(step, score) or (step == self._last_saved_step and score is None):
            return None
        self._last_saved_step = step
        if not self._retention.would_keep(score):
            return None
        preferred_name = self._name(self.filename, values)
        name, identifier = self._reserve(trainer, preferred_name, self._retention.displaced_by(score))
        self._retention.add(name, identifier, score, step, resumable=not self.save_weights_only)
        if not self.save_weights_only:
            self._last_resumable_step = step
        if self.verbose and trainer.strategy.control.rank == 0:
            monitored = "" if score is None else f", {self.monitor} = {score:.6g}"
            logger.info("Epoch %d, step %d: saving %r%s.", values["epoch"], values["step"], name, monitored)
        # What is displaced later is removed once the next checkpoint is complete.
        path, then = child(self._folder(), name), self._on_complete(trainer, name, list(self._retention.to_remove))
        weights_only, background = self.save_weights_only, self.save_async
        return SaveRequest(path, weights_only, self.trainable_only, background, self.digest, identifier, then)

    def _reserve(self, trainer: RunContext, name: str, replaceable: Sequence[KeptCheckpoint]) -> tuple[str, str]:
        """Return the name of a new checkpoint, with a version if ``name`` is taken, and an identifier. Collective.

        Only the ``replaceable`` checkpoints may be overwritten.
        """
        folder, control = self._folder(), trainer.strategy.control

        def may_overwrite(existing: str) -> bool:
            with suppress(OSError):  # If the storage fails, another name is chosen.
                named = [saved for saved in replaceable if saved.name == existing]
                return any(is_checkpoint_at(folder, existing, saved.identifier) for saved in named)
            return False

        if control.rank == 0:
            name, release = claim_name(folder, name, may_overwrite)
            self._releases[name] = release
        reserved: tuple[str, str] = control.broadcast_object((name, secrets.token_hex(16)))
        return reserved

    def _on_complete(self, trainer: RunContext, name: str, removable: Sequence[KeptCheckpoint]) -> Callable[[], None]:
        """Return the function that removes others, and is called once a checkpoint is complete."""

        def on_complete() -> None:
            if trainer.strategy.control.rank == 0:
                self._clean_up(trainer, removable, name)
                self._releases.pop(name, lambda: None)()
                for each in trainer.loggers:
                    each.after_save_checkpoint(self)
            else:
                self._retention.to_remove = [each for each in self._retention.to_remove if each not in removable]

        return on_complete

    def _clean_up(self, trainer: RunContext, removable: Sequence[KeptCheckpoint], newest: str | None = None) -> None:
        """Update ``latest`` and remove checkpoints that are no longer kept, once a later one is complete.

        Failures of the storage do not end the run, because they lose no checkpoint. The next call tries the removal
        again. Only rank 0 calls this method.
        """
        folder = self._folder()
        try:
            if newest is not None:
                write_latest(folder, newest)
        except Exception as error:  # each storage library has its own exceptions
            logger.warning("Cannot write %s in %r (%s). The checkpoint %r is complete.", LATEST, folder, error, newest)
        for saved in removable:
            try:
                remove(folder, saved.name, saved.identifier)
                self._retention.to_remove.remove(saved)
                trainer.checkpoint_removed(saved.identifier)
            except Exception as error:
                logger.warning("Cannot remove %r in %r; the run will try again: %s", saved.name, folder, error)

    def _folder(self) -> str:
        assert self.dirpath is not None
        return self.dirpath

    def _path(self, saved: KeptCheckpoint | None) -> str:
        return "" if saved is None else child(self._folder(), saved.name)


def _savers(trainer: RunContext) -> list[Checkpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
