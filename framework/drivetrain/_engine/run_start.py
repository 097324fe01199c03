"""How a run begins: the folder that it writes to, and the checkpoint that it starts from.

Rank 0 looks for runs and checkpoints, decides, claims the run's folder, and tells the other ranks. The decision itself
is `decide` in `drivetrain._runs.start_decision`; everything that is written before training is written by `carry_out`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from drivetrain._config.secret_values import arguments_without_secrets, without_secrets, without_url_passwords
from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._engine.run_location import RunLocation, check_loggers_apart, hand_out, locate, writers_of
from drivetrain._engine.run_recorder import RunRecorder
from drivetrain._engine.write_checks import first_problem, unwritable
from drivetrain._format import CheckpointReader, load, run_collectively
from drivetrain._runs.directory import claim_version, make_directory, split_folder
from drivetrain._runs.identity import Identity, class_path, encode_hyper_parameters
from drivetrain._runs.process import Job
from drivetrain._runs.record import archive_record, clear_leftovers, plain, read
from drivetrain._runs.run_folder import CKPT_PATH_KEYWORDS, EvaluationNotes, RunStart
from drivetrain._runs.start_decision import StartDecision, StartRequest
from drivetrain._storage.paths import child
from drivetrain._storage.publication import lock_folder
from drivetrain.callback import KeepsCheckpoints, folders_of
from drivetrain.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore

logger = logging.getLogger("drivetrain")

_MAX_LISTED = 3  # maximum number of skipped runs that are listed by name


class StartingPoint:
    """Chooses a run's folder and the checkpoint that the run starts from.

    Args:
        run: the run, whose callbacks are collected.
    """

    def __init__(self, run: RunCore) -> None:
        self._run = run
        self._start = RunStart()

    def choose(self) -> None:
        """Choose the run's folder and, for "last", "best" and "auto", the checkpoint to start from. Collective.

        Raises:
            ConfigurationError: the folder cannot be created, or belongs to a live run. Raised on every rank.
            StorageError: the files of a remote storage cannot be listed.
        """
        run, control, location = self._run, self._run.strategy.control, locate(self._run)
        self._start = start = RunStart(*_told_by_rank_0(control, partial(_start, run, location)))
        if start.refusal is not None:
            control.monitored_barrier("the error about the run's folder")  # all ranks read the result before one leaves
            raise ConfigurationError(*start.refusal)
        run.folder.path, run.folder.id, run.folder.name = start.folder, start.id, location.name
        hand_out(run.trainer.loggers, run.folder)

    def open(self) -> CheckpointReader | None:
        """Open the checkpoint that the run starts from, if there is one, once callbacks are set up. Collective.

        Raises:
            CheckpointError: there is no checkpoint, or training cannot resume from it.
        """
        run, path = self._run, self._run.request.ckpt_path
        is_fit, opened = run.stage == "fit", None
        if path in CKPT_PATH_KEYWORDS:
            path = self._found_path()
        if path is not None:
            from drivetrain._engine.checkpoints.resumed_run import check_resumable  # only runs that resume need it

            def open_and_check() -> CheckpointReader:
                checkpoint = load(path)
                if is_fit:
                    check_resumable(checkpoint, run.trainer.seed)
                return checkpoint

            opened = run_collectively(run.strategy.control, f"The checkpoint {path!r} cannot be opened", open_and_check)
        if is_fit:
            start, metadata = self._start, None if opened is None else opened.manifest.metadata
            step = 0 if metadata is None else int(metadata.progress["global_step"])
            if start.continues_run:
                run.folder.rewinds_to = -1 if metadata is None else step
            identifier = "" if metadata is None else metadata.identifier
            run.folder.notes.note_start(path, identifier, step, start.parent, start.continues_run)
        return opened

    def _found_path(self) -> str | None:
        """Return the path of the checkpoint that was found for "last", "best" or "auto"."""
        run, path, is_fit = self._run, self._start.path, self._run.stage == "fit"
        ckpt_path = run.request.ckpt_path
        if path is None and ckpt_path != "auto":
            raise CheckpointError(
                f"ckpt_path={ckpt_path!r}: there is no checkpoint to {'resume from' if is_fit else 'evaluate'}.",
                f"looked in {', '.join([locate(run).runs_folder, *folders_of(run.callbacks)])}, for checkpoints "
                f"saved by runs of {type(run.module).__name__} with the same hyper-parameters."
                f"{_describe_skipped(self._start.skipped)}",
                "pass a path, or ckpt_path='auto', which starts a new run if there is none."
                if is_fit
                else "pass a path, or ckpt_path='last' for the newest checkpoint; 'best' needs a run with "
                "Checkpoint(monitor=...).",
            )
        return path


def _told_by_rank_0(control: ControlPlane, choose: Callable[[], RunStart]) -> Any:
    """Return what rank 0 chooses. Meanwhile it may broadcast None, which keeps the other ranks waiting. Collective."""
    told = control.broadcast_object(choose() if control.rank == 0 else None)
    while told is None:
        told = control.broadcast_object(None)
    return told


# On rank 0


def _start(run: RunCore, location: RunLocation) -> RunStart:
    """Return how the run begins, once its folder is claimed."""
    try:
        decision = _find_and_claim(run, location)
    except ConfigurationError as error:
        return RunStart(refusal=(error.what, error.why, error.fix))
    _log_choice(run, decision)
    folder, continues = run.folder, decision.resumes is not None
    return RunStart(decision.path, folder.path, folder.id, continues, decision.parent, decision.skipped)


def _find_and_claim(run: RunCore, location: RunLocation) -> StartDecision:
    check_loggers_apart(run.trainer.loggers)
    writers = writers_of(run, location)
    problem = first_problem(writers.items())
    if problem is not None:
        raise unwritable(*problem)
    request = _request(run, location, needs_folder=bool(writers))
    search = None
    if any(each is not None for each in (request.ckpt_path, request.version, request.last)):
        # Only runs that may go on with an earlier one search the disk.
        from drivetrain._engine.start_choice import decide_finally
        from drivetrain._runs.start_search import StartSearch

        search = StartSearch(request)
        search.look()
    while True:
        decision = StartDecision() if search is None else decide_finally(search, run.strategy.control)
        if decision.refusal is not None:
            raise ConfigurationError(*decision.refusal)
        try:
            if not request.needs_folder or carry_out(decision, request.identity, run, location):
                return decision
        except OSError as error:
            place = request.runs_folder
            raise unwritable(place, writers[place], error.strerror or str(error)) from error
        assert search is not None  # a new folder has no record that may have changed
        search.refresh(decision)


def _request(run: RunCore, location: RunLocation, needs_folder: bool) -> StartRequest:
    """Return what is asked of a run: a function of the arguments of `Fit` and of the call, and of the environment."""
    ckpt_path, is_fit = run.request.ckpt_path, run.stage == "fit"
    if ckpt_path == "best" and not is_fit:
        keepers = (callback for callback in run.callbacks if isinstance(callback, KeepsCheckpoints))
        ckpt_path = next((each.best_model_path for each in keepers if each.best_model_path), ckpt_path)
    hyper_parameters = encode_hyper_parameters(without_secrets(run.module.hparams)[0])
    identity = Identity(class_path(type(run.module)), location.name, hyper_parameters, frozenset(run.trainer.searched))
    before, logger = run.request.previous_folder, location.logger
    folder_before = None if before is None else before.path
    parent, last = split_folder(folder_before or (logger is not None and logger.log_dir) or "")
    is_here = parent == location.runs_folder
    joins_last = is_here and folder_before is not None
    return StartRequest(
        ckpt_path,
        is_fit,
        identity,
        Job.of(os.environ),
        location.runs_folder,
        checkpoint_folders=folders_of(run.callbacks),
        needs_folder=needs_folder or (joins_last and not is_fit),
        version=location.version,
        last=last if is_here else None,
        joins_last=joins_last,
    )


def carry_out(decision: StartDecision, identity: Identity, run: RunCore, location: RunLocation) -> bool:
    """Claim the folder that was decided on, and begin the run's record in it. Nothing else is written before training.

    Returns:
        Whether the folder is the run's; False if its record has changed since the disk was searched.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    before = run.request.previous_folder
    if decision.adds_to:
        assert decision.version is not None
        run.folder.path = child(location.runs_folder, decision.version)
        if before is not None and before.path == run.folder.path:
            run.folder.id, run.folder.notes = before.id, EvaluationNotes(before.notes)
        return True
    earlier = decision.resumes or decision.replaces
    with lock_folder(location.runs_folder):
        if decision.version is None:
            version, created = claim_version(location.runs_folders)
            folder = child(location.runs_folder, version)
        else:
            folder, created = child(location.runs_folder, decision.version), []
            if read(folder) != earlier:
                return False
        created = created or make_directory(folder)
        if decision.resumes is not None:
            clear_leftovers(folder)
        elif earlier is not None:
            kept_as = archive_record(folder)
            if earlier.is_training:
                logger.warning("%r has an earlier run's files; its record is kept as %s.", folder, kept_as)
        # A profile is written after the end of the run, so that its folder is not removed then.
        removable = [] if run.profile_needs_folder else created
        recorder = RunRecorder(folder, _description(run, identity), decision.resumes, removable)
    run.folder.path, run.folder.id, run.folder.notes = folder, recorder.id, recorder
    return True


def _description(run: RunCore, identity: Identity) -> dict[str, Any]:
    """Return the entries of the record that are known when the run begins, without secrets."""
    trainer, strategy = run.trainer, run.strategy
    settings = dict(trainer.settings.items())
    given = {name: _public(setting.value) for name, setting in settings.items() if setting.source != "default"}
    public, secrets = without_secrets(given)
    arguments, argument_secrets = arguments_without_secrets(sys.argv)
    hyper_parameters = [each.hparams for each in (run.datamodule, run.module) if each is not None]
    run.secrets.warn([*chain(*(without_secrets(each)[1] for each in hyper_parameters)), *secrets, *argument_secrets])
    return {
        "stage": run.stage,
        "module": identity.module,
        "name": identity.name,
        "hyper_parameters": identity.hyper_parameters,
        "settings": plain(
            {
                name: {"value": public.get(name, setting.value), "source": setting.source}
                for name, setting in settings.items()
                if name in public or name not in given
            }
        ),
        "argv": [sys.executable, *arguments],
        "world_size": strategy.world_size,
        "strategy": strategy.name,
        "precision": strategy.precision.describe(),
        "device": str(strategy.device),
    }


def _public(value: Any) -> Any:
    return without_url_passwords(value) if isinstance(value, str) else value


def _log_choice(run: RunCore, decision: StartDecision) -> None:
    ckpt_path = run.request.ckpt_path
    if ckpt_path not in CKPT_PATH_KEYWORDS:
        return
    found = decision.path is not None
    use, none = ("continuing from", "a fresh start") if run.stage == "fit" else ("the weights of", "no checkpoint")
    text = f"{use} {decision.path}" if found else none
    if decision.resumes is not None and not found:
        text += f" in {decision.resumes.folder}, which this job had claimed"
    logger.warning("ckpt_path=%r: %s.%s", ckpt_path, text, _describe_skipped(decision.skipped))


def _describe_skipped(skipped: Sequence[str]) -> str:
    """Return a sentence that lists the runs that were passed over; "" if there are none."""
    if not skipped:
        return ""
    more = "; ..." if len(skipped) > _MAX_LISTED else ""
    return f" Skipped: {'; '.join(skipped[:_MAX_LISTED])}{more}."
