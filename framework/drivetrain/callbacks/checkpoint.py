"""Checkpoint: saves a run as it goes, and keeps the best and the newest."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.callbacks._checkpoint_names import COUNTERS, DEFAULT, check_template, checkpoint_name, names_in
from drivetrain.callbacks._monitored_value import monitored_value
from drivetrain.checkpoint._folders import (
    LATEST,
    child,
    claim_name,
    is_checkpoint_at,
    remove,
    resolve_folder,
    write_latest,
)
from drivetrain.checkpoint._format.checksums import check_digest
from drivetrain.checkpoint._retention import Retention, SavedCheckpoint
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.runs._directory import CHECKPOINTS

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_MODES = ("min", "max")
_LOOK_AT_THE_CLOCK_EVERY = 16  # steps: all ranks go by rank 0's, and asking takes a moment


class Checkpoint(Callback):
    """Saves checkpoints while a run trains, and removes those that are no longer wanted.

    It only asks: what it asks for is written once all hooks of the event are through and no accumulation window is
    open, so that a run can go on from it exactly. A new checkpoint is whole before an old one goes. Removed is only
    what this run wrote, directly within ``dirpath`` and known by the identifier in its manifest. A name is used again
    once the checkpoint that has it is no longer kept; else ``-v1`` is added, and so on. A small file called ``latest``
    names the one written last.

    Without any of ``every_n_train_steps``, ``every_n_epochs`` and ``train_time_interval`` it saves once an epoch, or
    after each validation where there are several in an epoch.

    Args:
        dirpath: a folder or an fsspec URL; by default ``checkpoints`` in the run's own folder, ``trainer.log_dir``.
        filename: a template of counters and logged values, such as ``"{epoch:03d}-{val_loss:.3f}"``.
        monitor: the logged value that says which are best, or "epoch" or "step"; None keeps the newest.
        mode: "min" where less is better, "max" where more is.
        save_top_k: how many of the best to keep; -1 for all, 0 for none.
        save_last: keep the newest too, whatever its value; the same as ``keep_last=1``.
        every_n_train_steps: optimizer steps between two; 0 for none by steps.
        every_n_epochs: epochs between two; 0 for none by epochs, so that only what else asks for one is saved.
        train_time_interval: time between two.
        save_weights_only: leave out what a run needs to go on.
        save_on_exception: save where a run fails, as of its last step. On one process only.
        save_async: copy the state, and write it while training goes on.
        keep_last: how many of the newest to keep besides the best.
        trainable_only: leave out parameters that have never trained: an adapter of a few megabytes is saved without the
            model that it adapts. Checksums of what is left out are kept, and whoever loads the checkpoint has to have
            that.
        digest: "sha256" has the manifest hold each file's SHA-256, which `drivetrain.checkpoint.verify` compares, so
            that a signature over the manifest covers all; None for checksums alone.
        verbose: say each save, on rank 0.
        auto_insert_metric_name: put ``name=`` before each value in ``filename``.
        save_on_train_epoch_end: save at the end of a training epoch (True) or of a validation (False). ``None`` takes
            the epoch's end where validation runs once an epoch or not at all, else the validation's end.
        enable_version_counter: False is refused: a name is not taken from a checkpoint that is kept.

    Raises:
        ConfigurationError: arguments that contradict each other, or that no checkpoint could follow.
    """

    priority = -20  # after early stopping; the module has logged by then

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
        if not enable_version_counter:
            raise ConfigurationError(
                "Checkpoint(enable_version_counter=False).",
                "one checkpoint would be written over another that is to be kept.",
                "drop it: a name is used again once its checkpoint is no longer kept; -v1 is added until then.",
            )
        _check_monitor(monitor, mode)
        check_digest("Checkpoint", digest)
        _check(mode, save_top_k, keep_last, every_n_train_steps, every_n_epochs, train_time_interval)
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self._of_run: str | None = None  # `dirpath`, where it was chosen by the run
        self._run = ""  # the run's id
        self._is_off = False
        self.filename = DEFAULT if filename is None else filename
        check_template(self.filename)
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.keep_last = max(keep_last or 0, int(bool(save_last)))
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.save_weights_only = save_weights_only
        self.save_on_exception = save_on_exception
        self.save_async = save_async
        self.trainable_only = trainable_only
        self.digest = digest
        self.verbose = verbose
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self._by_itself = (every_n_train_steps, every_n_epochs, train_time_interval) == (None, None, None)
        self._at_epoch_end = True
        self._begin()
        if every_n_train_steps or train_time_interval is not None:
            # Set here, so that a step costs nothing where only epochs count.
            self.on_train_batch_end = self._after_micro_batch  # type: ignore[method-assign]

    def _begin(self) -> None:
        self._retention = Retention(self.save_top_k, self.keep_last, self.mode)
        self._saved_at = -1  # optimizer steps
        self._asked_at = 0
        self._whole_at = -1  # optimizer steps, of the last one that a run can go on from
        self._current: float | None = None
        self._interim: SavedCheckpoint | None = None  # what `save_before_leaving` wrote
        self._clock = time.monotonic()
        self._fitting = False
        self._written: dict[str, Any] = {}  # the list of before the run went back
        self._claims: dict[str, Callable[[], None]] = {}  # to names that are being written to, and how to give them up
        self._going: list[SavedCheckpoint] = []  # to be removed as soon as a later one is whole

    # What it has written

    @property
    def best_model_path(self) -> str:
        """The best checkpoint that is kept; "" where there is none."""
        return self._path(self._retention.best)

    @property
    def best_model_score(self) -> float | None:
        """Its value."""
        best = self._retention.best
        return None if best is None else best.score

    @property
    def current_score(self) -> float | None:
        """The value of the one that was last asked for; None where nothing is monitored."""
        return self._current

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the ``save_top_k`` best, which is the next to go; "" while there are fewer."""
        return self._path(self._retention.kth_best)

    @property
    def kth_value(self) -> float | None:
        """Its value."""
        kth = self._retention.kth_best
        return None if kth is None else kth.score

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint with these values.

        Args:
            metrics: counters and logged values, by name.
            filename: a template; None is this callback's own.
            ver: the number that is added where the name is taken; None for none.
        """
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        name = self._name(self.filename if filename is None else filename, values)
        name = name if ver is None else f"{name}-v{ver}"
        return name if self.dirpath is None else child(self.dirpath, name)

    def _name(self, template: str, values: Mapping[str, float]) -> str:
        return checkpoint_name(template, values, named=self.auto_insert_metric_name)

    @property
    def last_model_path(self) -> str:
        """The newest that is kept; "" where there is none."""
        return self._path(self._retention.newest)

    @property
    def best_k_models(self) -> dict[str, float | None]:
        """Every path that is kept, with its value."""
        return {self._path(one): one.score for one in self._retention.kept}

    # State

    @property
    def state_key(self) -> str:
        """The class and everything that tells two of them apart."""
        names = ("monitor", "mode", "every_n_train_steps", "every_n_epochs", "save_weights_only")
        return f"{type(self).__qualname__}{ {name: getattr(self, name) for name in names}!r}"

    def state_dict(self) -> dict[str, Any]:
        """What this run has written, by name and identifier, and where."""
        best = self._retention.best
        return {
            "dirpath": None if self.dirpath is None else resolve_folder(self.dirpath),
            "run": self._run,
            "best": "" if best is None else best.name,
            "saved_at": self._saved_at,
            "asked_at": self._asked_at,
            "interim": None if self._interim is None else asdict(self._interim),
            "going": [asdict(one) for one in self._going],
            **self._retention.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the list of what was written, if it is this run's and in this folder; else these files stay."""
        self._saved_at, self._asked_at = (_step(state_dict.get(name)) for name in ("saved_at", "asked_at"))
        folder = state_dict.get("dirpath")
        same_run = state_dict.get("run", self._run) in (self._run, "")  # versions without folders for runs had no id
        if self.dirpath is None or folder != resolve_folder(self.dirpath) or not same_run:
            return
        try:
            self._retention.load_state_dict(state_dict)
            going, interim = state_dict.get("going", []), state_dict.get("interim")
            # Versions before identifiers were kept wrote paths: what they were about to remove stays.
            self._going = [SavedCheckpoint.from_state(one) for one in going if not isinstance(one, str)]
            self._interim = SavedCheckpoint.from_state(interim) if isinstance(interim, Mapping) else None
        except (ValueError, TypeError) as error:
            self._retention = Retention(self.save_top_k, self.keep_last, self.mode)
            logger.warning("What the earlier run kept in %r cannot be read, and is left there: %s", folder, error)

    def take_over(self, state_dict: Mapping[str, Any]) -> None:
        """Know what was kept, and where the run chose the folder, too."""
        if self.dirpath is None or self.dirpath == self._of_run:
            self.dirpath = self._of_run = state_dict["dirpath"]
        else:
            self.dirpath = os.path.expanduser(self.dirpath)
        self._run = state_dict["run"]
        self.load_state_dict(state_dict)

    # What the engine asks

    @property
    def writes_to(self) -> Sequence[str]:
        """The folder."""
        return () if self.dirpath is None or self._is_off else (self.dirpath,)

    @property
    def wants_run_folder(self) -> bool:
        """Checkpoints without a ``dirpath`` are in it, and the run's record beside them."""
        return True

    @property
    def kept_checkpoints(self) -> Sequence[str]:
        """Every path that is kept."""
        return list(self.best_k_models)

    @property
    def saves_whole(self) -> bool:
        """Whether any are kept that hold more than weights."""
        return not self._is_off and not self.save_weights_only and (self.save_top_k != 0 or self.keep_last > 0)

    @property
    def monitors(self) -> Mapping[str, str]:
        """``monitor``, and what ``filename`` names."""
        kind = type(self).__name__
        named = names_in(self.filename)
        found = {name: f"{kind}(filename={self.filename!r}), which names {name!r}" for name in named}
        return (
            found
            if self.monitor in (None, *COUNTERS)
            else {str(self.monitor): f"{kind}(monitor={self.monitor!r})", **found}
        )

    def before_going_back(self, trainer: RunContext, module: TrainModule) -> None:
        """Keep the list of what was written."""
        self._written = self._retention.state_dict()

    def after_going_back(self, trainer: RunContext, module: TrainModule, path: str) -> None:
        """Go on with the list of what was written; what came later goes.

        Started again before it has come by once more, a run would go on from the newest.
        """
        self._retention.load_state_dict(self._written)
        later, self._whole_at = self._retention.drop_after(trainer.global_step), -1
        self._going += later
        if trainer.strategy.control.rank == 0:
            folder, _, name = path.rpartition("/")
            self._tidy(trainer, list(self._going), name if later and folder == self._folder().rstrip("/") else None)

    # When

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Begin afresh."""
        if stage != "fit":
            return
        self._is_off = bool(trainer.fast_dev_run) or trainer.barebones
        self._run = trainer.run_id
        if self.dirpath is None or self.dirpath == self._of_run:
            self.dirpath = self._of_run = None if trainer.log_dir is None else child(trainer.log_dir, CHECKPOINTS)
        else:
            self.dirpath = os.path.expanduser(self.dirpath)
        self._begin()
        self._fitting = True

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Evaluation outside of fit is none of our business."""
        self._fitting = False
        for name in list(self._claims):
            self._give_up(name)  # it could not be written

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Settle when to save, and remove what an earlier run was about to."""
        once_an_epoch = trainer.val_check_interval in (None, 1.0) and trainer.check_val_every_n_epoch == 1
        at_epoch_end = self.save_on_train_epoch_end
        self._at_epoch_end = once_an_epoch or not trainer.num_val_batches if at_epoch_end is None else at_epoch_end
        self._clock = time.monotonic()
        if trainer.strategy.control.rank == 0 and not self._is_off:
            self._tidy(trainer, list(self._going))  # killed at the wrong moment, the earlier run did not come to it

    def _after_micro_batch(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Save every so many steps, or after so much time."""
        step = trainer.global_step
        if step == self._asked_at:
            return
        self._asked_at = step
        every, interval = self.every_n_train_steps, self.train_time_interval
        if every and step % every == 0:
            self._ask(trainer)
        elif interval is not None and step % _LOOK_AT_THE_CLOCK_EVERY == 0:
            past = time.monotonic() - self._clock >= interval.total_seconds()
            if trainer.strategy.control.from_rank_0(past):
                self._clock = time.monotonic()
                self._ask(trainer)

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Save after a validation, where its end is the moment."""
        if not self._fitting or self._at_epoch_end or trainer.sanity_checking:
            return
        every = self.every_n_epochs if self.save_on_train_epoch_end is False else None
        if self._by_itself or (every and (trainer.current_epoch + 1) % every == 0):
            self._ask(trainer)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Save every so many epochs."""
        every = self.every_n_epochs or int(self._by_itself and self._at_epoch_end)
        if every and self.save_on_train_epoch_end is not False and (trainer.current_epoch + 1) % every == 0:
            self._ask(trainer)

    def on_exception(self, trainer: RunContext, module: TrainModule, exception: BaseException) -> None:
        """Save what there is, where that was asked for."""
        if self._interim is not None and self._interim.step == trainer.global_step:
            return  # it left because of a signal, and has saved
        if self._fitting and self.save_on_exception and not self._is_off:
            path = child(self._folder(), f"exception-step={trainer.global_step}")
            trainer.save_after_failure(path, self.digest, self.trainable_only)

    def save_before_leaving(self, trainer: RunContext, module: TrainModule) -> bool:
        """Save what a later run goes on from. Of several, the first that keeps whole ones does it for all. Collective.

        Such a checkpoint counts for nothing in what is kept, and goes once the later run has saved a further one.
        """
        savers = [one for one in trainer.callbacks if isinstance(one, Checkpoint)]
        if self._is_off or self is not min(savers, key=lambda one: one.save_weights_only, default=self):
            return False
        step = trainer.global_step
        if self._whole_at == step:
            return True
        earlier = [] if self._interim is None else [self._interim]
        name, identifier = self._choose(trainer, f"interrupted-step={step}", earlier)
        self._going += [one for one in earlier if one.name != name]
        self._interim, self._whole_at = SavedCheckpoint(name, identifier, step=step), step
        self._write(trainer, name, identifier, weights_only=False, background=False)
        return True

    # How

    def _ask(self, trainer: RunContext) -> None:
        if self._is_off or (self.save_top_k == 0 and self.keep_last == 0):
            return
        score = None if self.monitor is None else self._score(trainer, self.monitor)
        self._current = score
        values = {name: float(value) for name, value in trainer.callback_metrics.items()} if self._logs else {}
        values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        trainer.defer_save(lambda: self._save(trainer, score, values))

    @property
    def _logs(self) -> bool:
        """Whether the name holds logged values, which are brought over from the device for it."""
        return self.filename != DEFAULT

    def _save(self, trainer: RunContext, score: float | None, values: Mapping[str, float]) -> None:
        if trainer.global_step == self._saved_at and score is None:
            return  # an epoch's end comes with its last step
        self._saved_at = trainer.global_step
        if not self._retention.would_keep(score):
            return
        wanted = self._name(self.filename, values)
        name, identifier = self._choose(trainer, wanted, self._retention.to_remove(score))
        self._going += self._retention.add(name, identifier, score, trainer.global_step)
        if not self.save_weights_only:
            self._whole_at = trainer.global_step
            if self._interim is not None and self._interim.step < trainer.global_step:
                self._going.append(self._interim)
                self._interim = None
        if self.verbose and trainer.strategy.control.rank == 0:
            why = "" if score is None else f", {self.monitor} = {score:.6g}"
            logger.info("Epoch %d, step %d: saving %r%s.", values["epoch"], values["step"], name, why)
        self._write(trainer, name, identifier, self.save_weights_only, self.save_async)

    def _choose(self, trainer: RunContext, name: str, to_remove: Sequence[SavedCheckpoint]) -> tuple[str, str]:
        """Rank 0 chooses a name and an identifier: what this run keeps no longer is written over, and nothing else."""
        control = trainer.strategy.control
        chosen: tuple[str, str] = control.from_rank_0(self._claim(name, to_remove) if control.rank == 0 else None)
        return chosen[0], chosen[1]

    def _claim(self, name: str, to_remove: Sequence[SavedCheckpoint]) -> tuple[str, str]:
        folder = self._folder()

        def ours(taken: str) -> bool:
            with suppress(OSError):  # the storage does not say: another name is taken
                return any(one.name == taken and is_checkpoint_at(folder, taken, one.identifier) for one in to_remove)
            return False

        name, give_up = claim_name(folder, name, ours)
        self._claims[name] = give_up
        return name, secrets.token_hex(16)

    def _write(self, trainer: RunContext, name: str, identifier: str, weights_only: bool, background: bool) -> None:
        leader = trainer.strategy.control.rank == 0
        going = list(self._going)  # what goes with a later one stays until that is whole

        def whole() -> None:
            if leader:
                self._tidy(trainer, going, name)
                self._give_up(name)
            else:
                self._going = [one for one in self._going if one not in going]

        path = child(self._folder(), name)
        trainer.write_checkpoint(path, weights_only, background, whole, identifier, self.digest, self.trainable_only)

    def _tidy(self, trainer: RunContext, going: Sequence[SavedCheckpoint], newest: str | None = None) -> None:
        """On rank 0, once a later one is whole: say which is the newest, and remove what is no longer kept.

        What a storage refuses is tried again the next time: the run goes on, for nothing is lost.
        """
        folder = self._folder()
        try:
            if newest is not None:
                write_latest(folder, newest)
        except Exception as error:  # each store's library has errors of its own
            logger.warning(
                "%s in %r cannot be written (%s): the checkpoint %r is whole.", LATEST, folder, error, newest
            )
        for one in going:
            try:
                remove(folder, one.name, one.identifier)
                self._going.remove(one)
                trainer.checkpoint_removed(one.identifier)
            except Exception as error:
                logger.warning("%r in %r is no longer kept, and cannot be removed yet: %s", one.name, folder, error)

    def _give_up(self, name: str) -> None:
        give_up = self._claims.pop(name, None)
        if give_up is not None:
            give_up()

    def _folder(self) -> str:
        assert self.dirpath is not None
        return self.dirpath

    def _path(self, kept: SavedCheckpoint | None) -> str:
        return "" if kept is None else child(self._folder(), kept.name)

    def _score(self, trainer: RunContext, monitor: str) -> float:
        if monitor in COUNTERS and monitor not in trainer.callback_metrics:
            return float(trainer.current_epoch if monitor == "epoch" else trainer.global_step)
        value = monitored_value(trainer, monitor)
        if value is None:
            known = sorted(trainer.callback_metrics)
            raise ConfigurationError(
                f"Checkpoint(monitor={monitor!r}): nothing of that name was logged.{nearest(monitor, known)}",
                f"logged so far: {', '.join(known)}" if known else "nothing was logged so far",
                f"self.log({monitor!r}, ...) before a checkpoint is due, or monitor another key",
            )
        return value


def _step(number: Any) -> int:
    return number if type(number) is int else -1


def _check_monitor(monitor: Any, mode: str) -> None:
    if monitor is not None and not isinstance(monitor, str):
        raise ConfigurationError(
            f"Checkpoint(monitor={monitor!r}).",
            "it is the name of a logged value.",
            "give a name, such as 'val_loss', or None to keep the newest.",
        )
    if monitor is None and mode == "max":
        raise ConfigurationError(
            "Checkpoint(mode='max') without a monitor.",
            "no value says which checkpoint is best, and the newest would be kept.",
            "give monitor= the name of a logged value, or drop mode.",
        )


def _check(mode: str, top_k: int, keep_last: int | None, steps: Any, epochs: Any, interval: Any) -> None:
    if mode not in _MODES:
        raise ConfigurationError(
            f"Checkpoint(mode={mode!r}).{nearest(str(mode), _MODES)}",
            "it says which direction is better",
            "give 'min' or 'max'",
        )
    for name, value, least in (
        ("save_top_k", top_k, -1),
        ("keep_last", keep_last, 0),
        ("every_n_train_steps", steps, 0),
        ("every_n_epochs", epochs, 0),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigurationError(
                f"Checkpoint({name}={value!r}).", f"it is a number, {least} or more.", f"give at least {least}."
            )
    if interval is not None and (not isinstance(interval, timedelta) or interval <= timedelta(0)):
        raise ConfigurationError(
            f"Checkpoint(train_time_interval={interval!r}).",
            "it is the time between two checkpoints.",
            "give a datetime.timedelta, such as timedelta(minutes=30).",
        )
