"""The checkpoints of one run: the one it goes on from, and those that it writes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._engine.handshake import settle_folder
from drivetrain._engine.run_folder import CHOSEN, Beginning
from drivetrain._engine.saved_state_schema import taking
from drivetrain._engine.seeding import order_seed
from drivetrain._loops.stopping import limit_reached
from drivetrain._loops.trainables import restore_frozen
from drivetrain._runtime.generators import preserved_generators
from drivetrain.errors import CheckpointError, ConfigurationError, listed

# What reads and writes checkpoints is imported where it is wanted: many runs begin afresh and keep none.
if TYPE_CHECKING:
    from drivetrain._engine.background import BackgroundSaver
    from drivetrain._engine.run_checkpoint import RunCheckpoint
    from drivetrain._engine.session_state import SessionState
    from drivetrain.checkpoint._format import Checkpoint, Facts

logger = logging.getLogger("drivetrain")


class RunCheckpoints:
    """Opens, loads and writes checkpoints.

    Args:
        session: the run.
        path: what it starts from: a path or URL, "last", "best" or "auto"; None for a fresh start.
        allow: what may differ from the run that it goes on with.
    """

    def __init__(self, session: SessionState, path: str | None, allow: Sequence[str] = ()) -> None:
        self._session = session
        self._path = path
        self._allow = allow
        self._anew: set[str] = set()  # of what may differ, what does
        self._background: BackgroundSaver | None = None
        self._run = os.urandom(8).hex()  # rank 0's tells this run from others
        self._ancestors: tuple[tuple[str, int], ...] = ()
        self._parent, self._count = "", 0
        self._beginning = Beginning()
        self._looked_in: list[str] = []
        self.opened: Checkpoint | None = None
        """What the run goes on from."""
        self.ended_before: str | None = None
        """Why nothing is left to train of what was found by "auto"; None where something is."""
        self._said_that_none_saves = False
        self.written: str | None = None
        """The last one that this run has written, and that became whole, wherever that is."""

    # Reading

    def begin(self) -> None:
        """Settle which checkpoint the run begins with, and its folder. Collective.

        Raises:
            ConfigurationError: on every rank: its folder cannot be made.
            StorageError: a storage refuses to say what there is.
        """
        session = self._session
        self._looked_in = self._folders()
        wanted_by = self._what_wants_a_folder()
        settle_folder(session.strategy.control, wanted_by)
        if wanted_by:
            from drivetrain._engine.run_start import begin

            self._beginning = begin(session, session.folder, self._path, _check_form)

    def _what_wants_a_folder(self) -> list[str]:
        session, trainer = self._session, self._session.trainer
        profilers = [trainer.profiler] if session.profiling.wants_folder else []
        saving = [one for one in session.callbacks if one.wants_run_folder]
        asked = [] if self._path is None else ["ckpt_path"]
        return [*(type(one).__name__ for one in (*trainer.loggers, *saving, *profilers)), *asked]

    def claim_for_late(self) -> None:
        """Claim a folder for callbacks that have come in `setup`, where the run has none yet. Collective."""
        session = self._session
        if session.stage == "fit" and session.folder.path is None:
            from drivetrain._engine.run_start import begin

            self._beginning = begin(session, session.folder, self._path, _check_form)

    def open(self) -> int:
        """Open what the run starts from, and return the seed of the order of its samples. Collective.

        Raises:
            CheckpointError: there is none, or training cannot go on from it.
        """
        session = self._session
        seed, control, fitting = session.trainer.seed, session.strategy.control, session.stage == "fit"
        path, beginning = self._path, self._beginning
        if path in CHOSEN:
            from drivetrain._engine.run_location import where_runs_are
            from drivetrain._engine.run_start import find_beside

            # Chosen by rank 0, for all: another rank may see a file system that lags behind.
            since = [one for one in self._folders() if one not in self._looked_in]
            path = beginning.path
            if path is None and since:
                path = find_beside(session, since, self._path or "", _check_form)
            if path is None and self._path != "auto":
                raise CheckpointError(
                    f"ckpt_path={self._path!r}: there is no checkpoint that a run could go on from.",
                    f"looked in {', '.join([where_runs_are(session), *self._folders()])}, for what runs of "
                    f"{type(session.module).__name__} with these hyper-parameters have saved.",
                    "pass a path, or ckpt_path='auto', which starts afresh where there is none.",
                )
        if path is None:
            if fitting:
                session.folder.begins_with(None, None, "", beginning.went_on)
            return order_seed(seed, control)

        from drivetrain._engine.checkpoint_compatibility import check_goes_on
        from drivetrain.checkpoint._format import agreed, load

        def opened() -> Checkpoint:
            checkpoint = load(path)
            if fitting:
                check_goes_on(checkpoint, seed)
            return checkpoint

        self.opened = agreed(control, f"The checkpoint {path!r} cannot be opened", opened)
        assert self.opened is not None
        if fitting:
            facts = self.opened.manifest.facts
            self._ancestors, self._parent = facts.lineage, facts.identifier
            session.folder.begins_with(facts, path, beginning.parent, beginning.went_on)
        return int(self.opened.state()["data"]["seed"]) if fitting else order_seed(seed, control)

    def see_what_is_left(self) -> None:
        """Find out, by the settings of this run, whether the one that it goes on from has ended.

        Raises:
            ConfigurationError: it has, and was asked for by its path, or as "last" or "best".
        """
        if self.opened is None:
            return
        trainer, progress = self._session.trainer, self.opened.progress
        epoch, step = int(progress["epoch"]), int(progress["global_step"])
        ended, way_out = limit_reached(trainer.max_epochs, trainer.max_steps, epoch, step), "raise the limit"
        loop = self.opened.state()["loop"]
        if loop and loop.get("left_after_last_step") and step == trainer.max_steps:
            ended = limit_reached(trainer.max_epochs, -1, epoch, step)  # a validation, or the epoch's end, is to come
        if ended is not None and trainer.fast_dev_run:
            way_out = f"leave out fast_dev_run={trainer.fast_dev_run}, which sets that limit"
        elif ended is None and (not loop or loop.get("asked_to_stop") is None):
            ended, way_out = self._stopped_early(epoch, step), "give it more patience or another threshold"
        if ended is None or self._path == "auto":
            self.ended_before = ended
            return
        raise ConfigurationError(
            f"ckpt_path={self._path!r}: {ended}, so that nothing is left to train.",
            f"{self.opened.path!r} holds {epoch} epoch(s) and {step} optimizer step(s).",
            f"{way_out}, or evaluate it with validate or test; ckpt_path='auto' ends such a run in order.",
        )

    def _stopped_early(self, epoch: int, step: int) -> str | None:
        """Why a callback ended the run; one that is patient for longer now has another key, and finds no state."""
        assert self.opened is not None
        trainer, states = self._session.trainer, self.opened.state()["callbacks"]
        if epoch < (trainer.min_epochs or 0) or step < (trainer.min_steps or 0):
            return None
        for callback in self._session.callbacks:
            saved = states.get(callback.state_key)
            with taking(self.opened, "the run's state", f"callbacks/{callback.state_key}"):
                reason = None if saved is None else callback.why_ended(saved["state"])
            if reason is not None:
                return f"{type(callback).__name__} has ended it: {reason}"
        return None

    def check_data(self) -> None:
        """Look whether module and data are those of the run that goes on. Collective.

        Raises:
            ConfigurationError: they are not, and `allow` does not name them.
        """
        session = self._session
        if session.stage != "fit":
            return
        from drivetrain._engine.resume_compatibility import class_name, data_facts

        assert session.data is not None
        facts = data_facts(session.data.train, session.data.loaders)
        session.made_of |= {"module": class_name(session.module), "data": facts}
        self._compare()

    def _compare(self) -> None:
        """Refuse what differs from the run that goes on, as far as this one is made by now."""
        if self.opened is None:
            return
        from drivetrain._engine.resume_compatibility import differences, refuse

        now = self._session.made_of
        if self._session.reload is not None and not self.opened.progress.get("batch_idx"):
            # The epoch has not begun: what was saved is of the loader before.
            now = {name: value for name, value in now.items() if name != "data"}
        found = differences(self.opened.state().get("made_of"), now)
        refuse(self.opened.path, found, self._allow)
        differing = {one.consent for one in found}
        if differing - self._anew and self._session.strategy.rank == 0:
            told = "; ".join(f"{one.saved}, now {one.now}" for one in found if one.consent not in self._anew)
            logger.warning("Not as in the run that goes on, and allowed: %s.", told)
        self._anew |= differing

    def load(self) -> None:
        """Go on from what was opened, if anything. Collective."""
        if self.opened is not None:
            with self._session.profiling.span("checkpoint"):
                self._contents().load(self.opened, anew=self._anew)
            self._session.trainables.resuming(self._frozen() is not None)

    def restore_trainables(self) -> None:
        """Let the module train what it trained in the run that goes on, before it is wrapped. Talks to nobody."""
        frozen = self._frozen()
        if frozen is not None:
            changed = restore_frozen(dict(self._session.module.named_parameters()), frozen)
            if changed and self._session.strategy.rank == 0:
                logger.info(
                    "As in the run that goes on, and other than in the code, is what trains of %s.", listed(changed)
                )

    def regroup(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the groups that they had in the run that goes on; what trains stays as it was there.

        Raises:
            ConfigurationError: they, or the schedulers, are of other classes, and `allow` does not name them.
        """
        self._compare()
        frozen = self._frozen()
        if frozen is None or self.opened is None:
            return
        session = self._session
        session.trainables.keep_frozen(frozen, "configure_optimizers")
        if "optimizer" not in self._anew:
            self._contents().regroup(self.opened, optimizers)

    def keep_trainables(self) -> None:
        """Undo what hooks that begin a resumed run froze or unfroze."""
        frozen = self._frozen()
        if frozen is not None:
            self._session.trainables.keep_frozen(frozen, "on_fit_start or on_train_start")
            self._session.trainables.resuming(False)
        if self.opened is not None:
            self.opened.close()  # nothing more is read: it may be removed, and its space be free

    def _frozen(self) -> set[str] | None:
        """What did not train in the run that goes on; None for a fresh start, or a checkpoint that does not say."""
        frozen = None if self.opened is None else self.opened.state().get("frozen")
        return None if frozen is None else set(frozen)

    def before(self, step: int) -> tuple[str, int] | None:
        """Return the newest whole one of this run's that holds no step after ``step``, and its own. Collective."""
        from drivetrain._engine.saved_state_schema import check_progress
        from drivetrain.checkpoint._format import load

        self.finish()
        control, found = self._session.strategy.control, None
        if control.rank == 0:
            for path in {path for one in self._session.callbacks for path in one.kept_checkpoints}:
                with suppress(CheckpointError):  # somebody else has removed it
                    checkpoint = load(path)
                    check_progress(checkpoint)
                    at = int(checkpoint.progress["global_step"])
                    if at <= step and not checkpoint.weights_only and (found is None or at > found[1]):
                        found = path, at
        found = control.from_rank_0(found)
        return None if found is None else (found[0], found[1])

    def roll_back(self, path: str) -> None:
        """Go back to a checkpoint of this run as soon as all hooks are through, and train on from there. Collective.

        Callbacks are told before and after, and see their state loaded in between.

        Raises:
            CheckpointError: it cannot be opened; later, from the loop: it is damaged.
        """
        from drivetrain.checkpoint._format import agreed, load

        session = self._session
        checkpoint = agreed(session.strategy.control, f"The checkpoint {path!r} cannot be opened", lambda: load(path))

        def back() -> None:
            self.finish()
            for callback in session.callbacks:
                callback.before_going_back(session.trainer, session.module)
            self._contents().load(checkpoint, back=True)
            if session.strategy.rank == 0:
                session.folder.note("went back", f"to {path}", session.progress.global_step)
            for callback in session.callbacks:
                callback.after_going_back(session.trainer, session.module, path)

        session.saves.go_back(back)

    def load_weights(self) -> None:
        """Take the weights of what was opened, if anything. Collective."""
        if self.opened is not None:
            with self._session.profiling.span("checkpoint"):
                self._contents().load_weights(self.opened)
            self.opened.close()

    def _folders(self) -> list[str]:
        return list(dict.fromkeys(path for one in self._session.callbacks for path in one.writes_to))

    def _contents(self) -> RunCheckpoint:
        from drivetrain._engine.run_checkpoint import RunCheckpoint

        return RunCheckpoint(self._session)

    # Writing

    def rehearse(self) -> None:
        """Find out, before the first step, whether what the callbacks are going to save has a form. Collective.

        All is done that a save does, but for the copies and the writing. Where weights alone are kept, the rest is only
        wanted should a signal come: what is amiss with it is said.

        Raises:
            CheckpointError: on every rank: something has none.
        """
        session = self._session
        saving = [one for one in session.callbacks if one.writes_to]
        if not saving:
            return
        with preserved_generators(session.strategy.device):  # hooks may draw
            whole = any(one.saves_whole for one in saving)
            self._rehearse(weights_only=not whole)
            if not whole and session.leaves_on_signals:
                try:
                    self._rehearse(weights_only=False)
                except CheckpointError as error:
                    if session.strategy.rank == 0:
                        logger.warning("Told to leave by a signal, this run could not save what goes on: %s", error)

    def _rehearse(self, weights_only: bool) -> None:
        from drivetrain.checkpoint._format import agreed, check_facts, stage

        control, checkpoint = self._session.strategy.control, self._contents()
        contents = checkpoint.contents(weights_only, rehearsing=True)
        staged = stage(contents, control.rank, control.world_size, checkpoint.shard_of)

        def formed() -> None:
            if staged.problem is not None:
                raise staged.problem
            check_facts(contents.facts)

        agreed(control, "What this run has could not be saved", formed)

    def save(self, path: str, weights_only: bool, trainable_only: bool = False) -> None:
        """Write a checkpoint, within an accumulation window at its end. Collective.

        Raises:
            ConfigurationError: what a whole one would hold ended with the processes that the run took place in.
            CheckpointError: on every rank, where it could not be written.
        """
        session = self._session
        if session.was_elsewhere and not weights_only:
            raise ConfigurationError(
                "save_checkpoint after a run that took place in other processes.",
                "its optimizers' states ended with them; here are the trained weights.",
                "save within the run, from a hook, or with weights_only=True.",
            )
        if session.progress.within_window:
            # Its gradients are in no checkpoint; all ranks are at the same micro-batch of it.
            session.saves.ask(lambda: self.write(path, weights_only, trainable_only=trainable_only))
        else:
            with session.profiling.span("checkpoint"):
                self.write(path, weights_only, trainable_only=trainable_only)

    def write(
        self,
        path: str,
        weights_only: bool,
        background: bool = False,
        then: Callable[[], None] = lambda: None,
        identifier: str = "",
        digest: str | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Write a checkpoint now. Collective.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out what a run needs to go on.
            background: copy the state, and write while training goes on.
            then: called once it is whole.
            identifier: what the manifest says of it; "" draws one. Rank 0's counts.
            digest: of each file, beside its checksums. Rank 0's counts.
            trainable_only: leave out parameters that have never trained, but for checksums by which they are known.

        Raises:
            CheckpointError: on every rank, where it could not be written, or an earlier one in the background.
        """
        from drivetrain.checkpoint._format import save, stage

        session, strategy = self._session, self._session.strategy
        checkpoint = self._contents()
        contents = checkpoint.contents(weights_only, trainable_only)
        contents.digest = digest
        facts = contents.facts = self._next_of_kin(contents.facts, identifier or os.urandom(16).hex())
        if strategy.rank == 0 and session.trainer.loggers:
            from drivetrain._engine.run_loggers import write_out

            write_out(session.trainer)

        def whole() -> None:
            self.written = path
            then()
            if strategy.rank == 0:
                session.folder.wrote(path, facts)

        if strategy.module is None:
            # After the run everything is whole on every rank, and nobody is there to write together with.
            if strategy.rank == 0:
                save(path, contents, LocalControl())
                whole()
            return
        if not weights_only:
            strategy.save_beside(path)
        control = strategy.control
        if not background:
            save(path, contents, control, checkpoint.shard_of)
            whole()
            return
        if self._background is None:
            from drivetrain._engine.background import BackgroundSaver

            self._background = BackgroundSaver(control, session.saves)
        staged = stage(contents, control.rank, control.world_size, checkpoint.shard_of, snapshot=True)
        self._background.save(path, staged, whole)

    def _next_of_kin(self, facts: Facts, identifier: str) -> Facts:
        """Say which checkpoints this one comes from, and take it for the parent of the next."""
        parent, self._parent = self._parent, identifier
        self._count += 1
        lineage = (*self._ancestors, (self._run, self._count))
        from drivetrain.runs._identity import class_path

        folder, module = self._session.folder, class_path(type(self._session.module))
        run = {"id": folder.id, "name": folder.name, "folder": _lasting(folder.path), "module": module}
        return replace(facts, identifier=identifier, parent=parent, lineage=lineage, run=run if folder.id else {})

    def write_after_failure(self, path: str, digest: str | None = None, trainable_only: bool = False) -> None:
        """Write what a failed run had as of its last step, if this is a run of one process."""
        session, strategy = self._session, self._session.strategy
        if strategy.world_size > 1 or strategy.module is None:
            logger.warning("Nothing is saved after the failure: the other ranks are gone, and with them their part.")
            return
        if session.opening is not None:
            session.opening.go_back()
        session.progress.back_to_the_window()
        self.write(path, weights_only=False, digest=digest, trainable_only=trainable_only)

    def save_before_leaving(self) -> None:
        """Let the callbacks write what a later run goes on from, and wait until that is whole. Collective.

        Raises:
            CheckpointError: on every rank, where it could not be written.
        """
        self.finish()
        session = self._session
        saved = [callback.save_before_leaving(session.trainer, session.module) for callback in session.callbacks]
        session.saves.run()
        self.finish()
        if not any(saved) and session.strategy.rank == 0 and not session.trial and not self._said_that_none_saves:
            self._said_that_none_saves = True  # where an epoch ends as well, it is asked for again
            logger.warning(
                "The run ends before its time, and nothing is saved: it has no Checkpoint callback, and none whose "
                "save_before_leaving saves."
            )

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be.
        """
        if self._background is not None:
            with self._session.profiling.span("checkpoint"):
                self._background.finish()

    def abandon(self) -> None:
        """Wait for what is being written; the run failed already."""
        if self._background is not None:
            self._background.abandon()


def _check_form(checkpoint: Checkpoint) -> None:
    from drivetrain._engine.checkpoint_compatibility import check_form

    check_form(checkpoint)


def _lasting(folder: str | None) -> str:
    """A folder as other processes find it, wherever they are started."""
    return "" if folder is None else folder if "://" in folder else os.path.abspath(folder)
