"""Chooses a run's checkpoint and folder. Rank 0 decides and sends the result to the other ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from drivetrain._config.secret_values import arguments_without_secrets, without_secrets, without_url_passwords
from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._engine.run_folder import CKPT_PATH_KEYWORDS, RunFolder, StartDecision
from drivetrain._engine.run_location import (
    RunLocation,
    claim_at_first_write,
    first_with_files,
    locate_logger,
    locate_logs,
    locate_run,
    loggers_sharing_folder,
    logs_into,
    previous_versions,
    run_name,
    write_error,
)
from drivetrain._engine.run_recorder import RunRecorder
from drivetrain._engine.saved_state_schema import check_saved_state, reporting_malformed
from drivetrain._engine.write_checks import write_problem
from drivetrain.callback import KeepsCheckpoints, folders_of
from drivetrain.checkpoint._discovery import StorageRetry
from drivetrain.checkpoint._folders import child, is_checkpoint_at, is_plain_name
from drivetrain.checkpoint._format import CheckpointReader, load
from drivetrain.checkpoint._retention import KeptCheckpoint
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.runs import _liveness
from drivetrain.runs._directory import (
    free_version,
    lock_folder,
)
from drivetrain.runs._identity import Identity, class_path, encode_hyper_parameters
from drivetrain.runs._liveness import HeartbeatWatch
from drivetrain.runs._process import Job
from drivetrain.runs._record import plain, read
from drivetrain.runs._resume_point import ResumeCandidates, ResumePoint

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import RunCore

logger = logging.getLogger("drivetrain")

_POLL_INTERVAL = 5.0
"""Seconds between two reads of another run's heartbeat, and between two messages to the other ranks."""


def begin(run: RunCore) -> StartDecision:
    """Choose the checkpoint that a run starts from, and claim the run's folder. Collective.

    Args:
        run: the run. This function sets the path and the id of its folder.

    Raises:
        ConfigurationError: the folder cannot be created, or belongs to a live run. Raised on every rank.
        StorageError: the files of a remote storage cannot be listed.
    """
    control, folder, ckpt_path = run.strategy.control, run.folder, run.request.ckpt_path
    is_fit = run.stage == "fit"
    place = locate_run(run) if is_fit else None
    fixed = None if place is None else place.fixed
    search = None
    needs_search = ckpt_path in CKPT_PATH_KEYWORDS or (is_fit and ckpt_path is not None) or fixed is not None
    if control.rank == 0 and needs_search:
        search = _search(run, place)
    if is_fit and (ckpt_path is not None or fixed is not None):
        _wait_for_liveness(control, search)
    decided = _decide(run, place, search) if control.rank == 0 else None
    beginning = StartDecision(*control.broadcast_object(decided))
    if beginning.problem is not None:
        control.count_flags("the error about the run's folder")  # no rank may leave before all have read the result
        raise ConfigurationError(*beginning.problem)
    if control.rank > 0:
        folder.path, folder.id = beginning.folder, beginning.id
        for each, version in zip(run.trainer.loggers, beginning.versions, strict=False):
            each.adopt(version)
    folder.name, folder.is_of_fit = run_name(run), folder.is_of_fit or is_fit
    folder.before = None
    return beginning


def find_in_folders(run: RunCore, folders: Sequence[str]) -> str | None:
    """Return the newest checkpoint in folders that callbacks chose in their ``setup``. Collective."""
    control = run.strategy.control
    search = _search(run, None, folders) if control.rank == 0 else None
    if run.stage == "fit":
        _wait_for_liveness(control, search)  # an evaluation may read the checkpoints of a live run
    found: str | None = control.broadcast_object(None if search is None else _choose(run, search).path)
    return found


# The checkpoint


def _search(run: RunCore, place: RunLocation | None, folders: Sequence[str] | None = None) -> ResumeCandidates:
    location, ckpt_path = place or locate_logs(run), run.request.ckpt_path
    hyper_parameters = encode_hyper_parameters(without_secrets(run.module.hparams)[0])
    identity = Identity(class_path(type(run.module)), run_name(run), hyper_parameters, frozenset(run.trainer.searched))
    search = ResumeCandidates(
        location.path, location.fixed if run.stage == "fit" else None, identity, Job.of(os.environ), StorageRetry()
    )
    if place is not None and place.fixed is not None:
        search.set_folder_owner(place.fixed)
    if folders is not None:
        search.collect_checkpoints(folders)
    elif ckpt_path in CKPT_PATH_KEYWORDS:
        search.collect_runs(folders_of(run.callbacks))
    elif ckpt_path is not None:
        with suppress(CheckpointError):  # every rank gets the error when it opens the checkpoint
            search.add_run_of(load(ckpt_path))
    return search


def _wait_for_liveness(control: ControlPlane, search: ResumeCandidates | None) -> None:
    """Watch the heartbeat of a run that may be live on another machine. Collective: the other ranks wait for rank 0."""
    watch: HeartbeatWatch | None = None

    def is_over() -> bool:
        nonlocal watch
        assert search is not None
        if watch is not None and watch.is_over:
            search.finish_watch(watch)
            watch = None
        if watch is None:
            uncertain = search.run_of_unknown_liveness(check_saved_state)
            if uncertain is None:
                return True
            watch = HeartbeatWatch(uncertain, _liveness.WATCH_SECONDS, search.read_record)
            logger.warning(
                "%s may be under way on another machine. This run watches the record of that run for %.0f s.",
                uncertain.name,
                _liveness.WATCH_SECONDS,
            )
        return False

    while not control.broadcast_object(is_over() if control.rank == 0 else None):
        if watch is not None:
            watch.poll(_POLL_INTERVAL)


def _choose(run: RunCore, search: ResumeCandidates | None) -> ResumePoint:
    """Return the checkpoint that a run starts from, and for a fit the record of the run that it continues."""
    ckpt_path = run.request.ckpt_path
    if search is None or ckpt_path is None:
        return ResumePoint(ckpt_path)
    if run.stage != "fit":
        return _checkpoint_to_evaluate(run, search, ckpt_path)
    if ckpt_path not in CKPT_PATH_KEYWORDS:
        with suppress(CheckpointError):
            return search.resume_from(load(ckpt_path))
        return ResumePoint(ckpt_path)  # every rank gets the error when it opens the checkpoint
    choice = search.newest(check_saved_state)
    if ckpt_path != "best" or choice.path is None:
        return choice
    best, _ = _best_checkpoint(load(choice.path), [])
    return choice._replace(path=best or choice.path, record=None)


def _checkpoint_to_evaluate(run: RunCore, search: ResumeCandidates, ckpt_path: str) -> ResumePoint:
    """Return the checkpoint whose weights an evaluation loads; its run may be live."""
    keepers = (callback for callback in run.callbacks if isinstance(callback, KeepsCheckpoints))
    best = next((keeper.best_model_path for keeper in keepers if keeper.best_model_path), None)
    if ckpt_path == "best" and best is not None:
        return ResumePoint(best)
    choice = search.newest(check_saved_state, include_running=True)
    if ckpt_path != "best" or choice.path is None:
        return choice
    newest = load(choice.path)
    path, problem = _best_checkpoint(newest, folders_of(run.callbacks))
    if path is None:
        name = repr(choice.path) if choice.record is None else choice.record.name
        return ResumePoint(None, skipped=(*choice.skipped, f"{name} ({problem})"))
    return choice._replace(path=path)


def _best_checkpoint(newest: CheckpointReader, folders: Sequence[str]) -> tuple[str | None, str]:
    """Return the path of the best checkpoint by a monitored value, or None and the reason why there is none.

    Args:
        newest: the newest checkpoint of a run. The state of its callbacks names the best checkpoint.
        folders: other folders in which the best checkpoint may be.
    """
    problem = "none of its Checkpoint callbacks has saved by a monitored value"
    with reporting_malformed(newest, "the run's state", "callbacks"):
        for saved in newest.state()["callbacks"].values():
            best = _scored_best(saved)
            if best is None:
                continue
            for folder in (newest.path.rpartition("/")[0], *folders):
                if is_checkpoint_at(folder, best.name, best.identifier):
                    return child(folder, best.name), ""
            problem = f"its best checkpoint, {best.name!r}, is not in the folder of its newest one"
    return None, problem


def _scored_best(state: Any) -> KeptCheckpoint | None:
    """Return the best checkpoint of a callback's state; None if it has no score or the state is another callback's."""
    name, kept = (state.get("best"), state.get("kept")) if isinstance(state, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(kept, list):
        return None
    saved = [KeptCheckpoint.from_state(each) for each in kept if isinstance(each, dict) and "score" in each]
    return next((each for each in saved if each.name == name.rpartition("/")[2] and each.score is not None), None)


# The folder, on rank 0


def _decide(run: RunCore, place: RunLocation | None, search: ResumeCandidates | None) -> StartDecision:
    folder = run.folder
    if place is None:
        choice = _choose(run, search)
    else:
        problem = write_problem(place.path)
        if problem is not None:
            return StartDecision(problem=write_error(place, problem))
        try:
            choice = _claim_folder(run, place, search)
        except ConfigurationError as error:
            return StartDecision(problem=(error.what, error.why, error.fix))
        except OSError as error:
            return StartDecision(problem=write_error(place, error.strerror or str(error)))
    if run.request.ckpt_path in CKPT_PATH_KEYWORDS:
        _log_choice(run, run.request.ckpt_path, choice)
    skipped = choice.describe_skipped()
    if run.stage != "fit":
        _share_with_evaluation(run)
        return StartDecision(choice.path, folder.path, folder.id, versions=_versions(run), skipped=skipped)
    continues = choice.record is not None
    return StartDecision(choice.path, folder.path, folder.id, continues, choice.parent, _versions(run), skipped=skipped)


def _claim_folder(run: RunCore, place: RunLocation, search: ResumeCandidates | None) -> ResumePoint:
    """Choose a checkpoint, and claim the folder of its run or a new one, under a lock on the parent folder."""
    folder = run.folder
    loggers, described = run.trainer.loggers, _description(run)
    with lock_folder(place.path):
        while True:
            choice = _choose(run, search)
            if choice.record is None:
                fixed = place.fixed or place.evaluated
                is_known_alive = None if search is None else search.is_known_alive
                recorder = RunRecorder.claim(place.path, fixed, place.asked, described, is_known_alive=is_known_alive)
                _set_recorder(folder, recorder)
                break
            resumed = RunRecorder.resume(choice.record, described)
            if resumed is not None:
                _set_recorder(folder, resumed)
                break
            assert search is not None
            search.mark_alive(choice.record)  # another process claimed it first
    assert folder.path is not None
    version = folder.path.rstrip("/").rpartition("/")[2]
    first = first_with_files(loggers)
    sharing = [] if first is None else loggers_sharing_folder(first, loggers)
    for each in sharing:
        each.adopt(version)
    others = [each for each in loggers if each not in sharing]
    saved_versions = previous_versions(choice.record, loggers)

    def note(at_once: bool = True) -> None:
        assert folder.recorder is not None
        folder.recorder.note_loggers(
            [{"class": class_path(type(each)), "name": each.name, "version": each.version_name} for each in loggers],
            at_once,
        )

    for each in others:
        saved_version = saved_versions.get(loggers.index(each))
        if saved_version is not None and is_plain_name(saved_version):
            each.adopt(saved_version)
        else:
            claim_at_first_write(each, others, note)
    note(at_once=False)
    return choice


def _set_recorder(folder: RunFolder, recorder: RunRecorder) -> None:
    folder.recorder, folder.path, folder.id = recorder, recorder.folder, recorder.id


def _description(run: RunCore) -> dict[str, Any]:
    """Return the entries of the record that are known when the run begins, without secrets."""
    trainer, strategy = run.trainer, run.strategy
    settings = {name: {"value": _public(each.value), "source": each.source} for name, each in trainer.settings.items()}
    public, setting_secrets = without_secrets(settings)
    arguments, argument_secrets = arguments_without_secrets(sys.argv)
    datamodule = run.datamodule
    _, data_secrets = without_secrets({} if datamodule is None else datamodule.hparams)
    hyper_parameters, module_secrets = without_secrets(run.module.hparams)
    run.secrets.warn([*data_secrets, *module_secrets, *setting_secrets, *argument_secrets])
    return {
        "stage": run.stage,
        "module": class_path(type(run.module)),
        "name": run_name(run),
        "hyper_parameters": encode_hyper_parameters(hyper_parameters),
        "settings": plain(public),
        "argv": [sys.executable, *arguments],
        "world_size": strategy.world_size,
        "strategy": strategy.name,
        "precision": strategy.precision.describe(),
        "device": str(strategy.device),
    }


def _public(value: Any) -> Any:
    return without_url_passwords(value) if isinstance(value, str) else value


def _share_with_evaluation(run: RunCore) -> None:
    """Make an evaluation log to the last run's folder, or to a folder that is claimed at the first write."""
    folder, loggers = run.folder, run.trainer.loggers
    first = first_with_files(loggers)
    before = folder.before
    if first is None:
        return
    if before is not None and before.path is not None and logs_into(first, before.path):
        folder.join(before)
        return
    place = locate_logger(first, loggers)
    version = place.fixed or place.asked or free_version(place.path)
    folder.path = child(place.path, version)

    @cache
    def claim() -> str:
        with lock_folder(place.path):
            existing = None if place.fixed is None else read(folder.path or "")
            if place.fixed is not None and existing is not None and existing.is_training:
                return place.fixed  # keep the record of the fit that ran in this folder
            _set_recorder(folder, RunRecorder.claim(place.path, place.fixed, place.asked, _description(run), version))
        assert folder.path is not None
        return folder.path.rstrip("/").rpartition("/")[2]

    sharing = loggers_sharing_folder(first, loggers)
    for each in sharing:
        if each.directory is not None:
            each.directory.expect(version, claim)
        else:
            each.adopt(version)
    for each in loggers:
        if each not in sharing:
            claim_at_first_write(each, loggers)


def _versions(run: RunCore) -> tuple[str, ...]:
    """Return the loggers' versions; empty if there are no other ranks to send them to."""
    return tuple(each.version_name for each in run.trainer.loggers) if run.strategy.world_size > 1 else ()


def _log_choice(run: RunCore, ckpt_path: str, choice: ResumePoint) -> None:
    found = choice.path is not None
    use, none = ("continuing from", "a fresh start") if run.stage == "fit" else ("the weights of", "no checkpoint")
    text = f"{use} {choice.path}" if found else none
    if choice.record is not None and not found:
        text += f" in {choice.record.folder}, which this job had claimed"
    logger.warning("ckpt_path=%r: %s.%s", ckpt_path, text, choice.describe_skipped())
