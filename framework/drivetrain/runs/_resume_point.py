"""Chooses the checkpoint and the run that a new run resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import child, resolve_folder
from drivetrain.checkpoint._discovery import StorageRetry, resumable_in, select_newest
from drivetrain.checkpoint._folders import children
from drivetrain.checkpoint._format import CheckpointReader
from drivetrain.errors import CheckpointError
from drivetrain.runs._directory import CHECKPOINTS
from drivetrain.runs._identity import Identity, encode_hyper_parameters
from drivetrain.runs._liveness import HeartbeatWatch, is_alive
from drivetrain.runs._process import Job
from drivetrain.runs._record import FINISHED, Record, read

logger = logging.getLogger("drivetrain")

_SHORT_RETRY_SECONDS = 5.0  # duration of retries in seconds, for records that are useful but not required
_MAX_LISTED = 3  # maximum number of skipped runs that are listed by name


class ResumePoint(NamedTuple):
    """The checkpoint and the run that a new run resumes from.

    Attributes:
        path: path of the checkpoint; None for a fresh start.
        record: record of the run into whose folder the new run writes; None for a new folder.
        parent: id of the run that wrote the checkpoint; "" if unknown.
        skipped: the runs that were skipped, each with the reason.
    """

    path: str | None = None
    record: Record | None = None
    parent: str = ""
    skipped: tuple[str, ...] = ()

    def describe_skipped(self) -> str:
        """Return a sentence that lists the skipped runs; "" if there are none."""
        if not self.skipped:
            return ""
        more = len(self.skipped) - _MAX_LISTED
        listed = "; ".join(self.skipped[:_MAX_LISTED])
        return f" Skipped: {listed}{f'; and {more} more' if more > 0 else ''}."


class ResumeCandidates:
    """Searches for a checkpoint to resume from in a folder of runs, and in folders of checkpoints that the user named.

    Args:
        runs_folder: the folder or URL that holds the runs.
        version: name of the only run folder to search; None for all run folders.
        identity: the experiment of the new run.
        jobs: the jobs that the process of the new run belongs to.
        retry: retries failing storage requests.
    """

    def __init__(
        self, runs_folder: str, version: str | None, identity: Identity, jobs: Sequence[Job], retry: StorageRetry
    ) -> None:
        self._runs_folder = runs_folder
        self._version = version
        self._identity = identity
        self._jobs = jobs
        self._retry = retry
        self._short_retry = StorageRetry(_SHORT_RETRY_SECONDS)
        self._unreadable_folders: set[str] = set()  # folders, stored in checkpoints, whose storage failed
        self._is_search = False  # whether folders are searched, instead of using one given checkpoint
        self._skipped: list[str] = []  # the skipped runs and checkpoints, each with the reason
        self._liveness: dict[str, bool | None] = {}  # whether each run is alive, by its folder; None if unknown
        self._runs: dict[str, Record] = {}  # runs of this experiment, by id
        self._folder_owner: Record | None = None  # the run, of any experiment, that used the new run's folder before
        self._user_checkpoints: list[CheckpointReader] = []  # checkpoints in folders that the user named

    # Collection of the runs and checkpoints that may be resumed from

    def collect_runs(self, folders: Sequence[str]) -> None:
        """Add all runs of this experiment, and the checkpoints in ``folders``.

        A folder that is the checkpoint folder of one of the runs is skipped, because it is searched with its run.
        """
        self._is_search = True
        names = [self._version] if self._version is not None else self._retry.call(partial(children, self._runs_folder))
        results = [self._retry.call(partial(self._read_if_permitted, child(self._runs_folder, name))) for name in names]
        records = sorted((record for record in results if record is not None), key=_start_time, reverse=True)
        for record in records:
            if record.is_training and self._is_same_experiment(record):
                self._runs.setdefault(record.id, record)
        checkpoint_folders_of_runs = {resolve_folder(child(record.folder, CHECKPOINTS)) for record in records}
        self.collect_checkpoints(
            [folder for folder in folders if resolve_folder(folder) not in checkpoint_folders_of_runs]
        )

    def collect_checkpoints(self, folders: Sequence[str]) -> None:
        """Add the checkpoints in folders that the user named."""
        self._is_search = True
        for checkpoint in resumable_in(folders, self._retry):
            difference = self.difference_of(checkpoint)
            if difference is None:
                self._user_checkpoints.append(checkpoint)
                self.add_run_of(checkpoint)
            else:
                self._skipped.append(f"{checkpoint.path!r} ({difference})")

    def add_run_of(self, checkpoint: CheckpointReader) -> None:
        """Add the run that wrote a checkpoint."""
        record = self.find_run_of(checkpoint)
        if record is not None:
            self._runs.setdefault(record.id, record)

    def set_folder_owner(self, version: str) -> None:
        """Read the record in the folder that the user named for the new run."""
        self._folder_owner = self.read_record(child(self._runs_folder, version))

    def read_record(self, folder: str) -> Record | None:
        """Return the current record of a folder.

        Raises:
            StorageError: the storage still fails after the last retry.
        """
        return self._retry.call(partial(read, folder))

    def _read_if_permitted(self, folder: str) -> Record | None:
        try:
            return read(folder)
        except StorageError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            name = folder.rpartition("/")[2]
            self._skipped.append(f"{name} (no permission to read its record)")
            return None

    def _is_same_experiment(self, record: Record) -> bool:
        document = record.document
        module, name = str(document.get("module", "")), str(document.get("name", ""))
        difference = self._identity.difference(module, name, document.get("hyper_parameters"))
        if difference is not None:
            self._skipped.append(f"{record.name} ({difference})")
        return difference is None

    def difference_of(self, checkpoint: CheckpointReader) -> str | None:
        """Describe how the run of a checkpoint differs from this experiment; None if both are the same experiment."""
        metadata = checkpoint.manifest.metadata
        module, name = (metadata.run.get(key, "") for key in ("module", "name"))
        if not module:  # the run had no folder
            try:
                components = checkpoint.state().get("components")
            except CheckpointError:
                components = None  # the checkpoint is skipped later
            module = str(components.get("module", "")) if isinstance(components, dict) else ""
        return self._identity.difference(module, name, encode_hyper_parameters(metadata.hyper_parameters))

    def find_run_of(self, checkpoint: CheckpointReader) -> Record | None:
        """Return the record of the run that wrote a checkpoint; None if the record is gone or unreachable."""
        metadata = checkpoint.manifest.metadata
        checkpoints_folder, _, _ = checkpoint.path.rstrip("/").rpartition("/")
        run_folder, _, name = checkpoints_folder.rpartition("/")
        record = self.read_record(run_folder or "/") if name == CHECKPOINTS else None
        if record is None or record.id != metadata.run.get("id"):
            record = self._read_stored_folder(metadata.run.get("folder", ""))
        return record if record is not None and record.id == metadata.run.get("id") else None

    def _read_stored_folder(self, folder: str) -> Record | None:
        """Read the record in the run folder whose path a checkpoint stores; None if there is none.

        The folder may be unreachable if the checkpoint was copied from another machine.
        """
        if folder and folder not in self._unreadable_folders:
            try:
                return self._short_retry.call(partial(read, folder))
            except CheckpointError as error:
                self._unreadable_folders.add(folder)
                logger.warning(
                    "It is unknown whether the run in %r is alive, so the new run will not write into that folder: %s",
                    folder,
                    error,
                )
        return None

    # Liveness of the collected runs

    def run_of_unknown_liveness(self, check: Callable[[CheckpointReader], None]) -> Record | None:
        """Return a run that may be alive on another machine and would be chosen if it were dead; None if there is none.

        Args:
            check: see `newest`.
        """
        if self._folder_owner is not None and self._liveness_of(self._folder_owner) is None:
            return self._folder_owner
        uncertain = [record for record in self._runs.values() if self._liveness_of(record) is None]
        if not uncertain or not self._is_search:
            return next(iter(uncertain), None)
        _, record = self._newest(check)
        return record if record in uncertain else None

    def finish_watch(self, watch: HeartbeatWatch) -> None:
        """Store the outcome of the watch on a run that `run_of_unknown_liveness` returned."""
        record = watch.record
        self._liveness[record.folder] = bool(watch.is_alive)
        if watch.latest is not None and self._runs.get(record.id) is record:
            self._runs[record.id] = watch.latest
        if watch.latest is not None and self._folder_owner is record:
            self._folder_owner = watch.latest

    def is_known_alive(self, record: Record) -> bool:
        """Return whether a run is known to be alive."""
        return bool(self._liveness_of(record))

    def mark_alive(self, record: Record) -> None:
        """Mark a run as alive because another process has resumed it."""
        self._liveness[record.folder] = True

    def _liveness_of(self, record: Record) -> bool | None:
        if record.folder not in self._liveness:
            self._liveness[record.folder] = is_alive(record, self._jobs)
        return self._liveness[record.folder]

    # Choice of the checkpoint and the run

    def newest(self, check: Callable[[CheckpointReader], None], include_running: bool = False) -> ResumePoint:
        """Return the newest checkpoint of the experiment, and the run into whose folder the new run writes.

        Checkpoints of an earlier start of the same job take precedence.

        Args:
            check: raises `CheckpointError` for a checkpoint that cannot be resumed from.
            include_running: also consider runs that are alive. Evaluations set this, because they write nothing into
                the folders of these runs.
        """
        checkpoint, record = self._newest(check, include_running)
        return self._choice(None if checkpoint is None else checkpoint.path, record, checkpoint)

    def _newest(
        self, check: Callable[[CheckpointReader], None], include_running: bool = False
    ) -> tuple[CheckpointReader | None, Record | None]:
        """Return the newest checkpoint and its run; (None, run) if an earlier start of this job has not saved yet."""
        by_start = sorted(self._runs.values(), key=_start_time, reverse=True)
        candidates = [record for record in by_start if include_running or not self._skip_if_alive(record)]
        candidate_ids = {record.id for record in candidates}
        job_records = [record for record in candidates if self._is_of_this_job(record)]
        job_run_ids = {record.id for record in job_records}
        user_checkpoints = [
            checkpoint for checkpoint in self._user_checkpoints if not self._run_is_excluded(checkpoint, candidate_ids)
        ]
        job_checkpoints = [
            checkpoint for checkpoint in user_checkpoints if checkpoint.manifest.metadata.run.get("id") in job_run_ids
        ]
        for records, other_checkpoints in ((job_records, job_checkpoints), (candidates, user_checkpoints)):
            checkpoints_with_run = {
                checkpoint.path: (checkpoint, record)
                for record in records
                for checkpoint in resumable_in([child(record.folder, CHECKPOINTS)], self._retry)
                if checkpoint.manifest.metadata.run.get("id", record.id) == record.id
            }
            run_checkpoints = [checkpoint for checkpoint, _ in checkpoints_with_run.values()]
            newest = select_newest([*run_checkpoints, *other_checkpoints], self._retry, check)
            if newest is not None:
                # Return the record whose liveness was determined. Another process may have resumed the run since then.
                newest_with_run = checkpoints_with_run.get(newest.path)
                return newest, self._known_run(newest) if newest_with_run is None else newest_with_run[1]
            if records is job_records and not include_running:
                unfinished = [record for record in records if record.status != FINISHED]
                if unfinished:
                    return None, unfinished[0]
        return None, None

    def resume_from(self, checkpoint: CheckpointReader) -> ResumePoint:
        """Return the choice for a given checkpoint.

        The new run writes into the folder of the checkpoint's run if that folder has no newer checkpoint.
        """
        record = self._known_run(checkpoint)
        resumable = record is not None and self.difference_of(checkpoint) is None and not checkpoint.weights_only
        if record is None or not resumable or self._skip_if_alive(record):
            return self._choice(checkpoint.path, None, checkpoint)
        folder = checkpoint.path.rstrip("/").rpartition("/")[0]
        checkpoints_beside = resumable_in([child(record.folder, CHECKPOINTS), folder], self._retry)
        checkpoints_of_run = [
            candidate for candidate in checkpoints_beside if candidate.manifest.metadata.run.get("id") == record.id
        ]
        newest = select_newest(checkpoints_of_run, self._retry)
        is_newest = newest is not None and newest.manifest.identifier == checkpoint.manifest.identifier
        return self._choice(checkpoint.path, record if is_newest else None, checkpoint)

    def _known_run(self, checkpoint: CheckpointReader) -> Record | None:
        return self._runs.get(checkpoint.manifest.metadata.run.get("id", ""))

    def _choice(self, path: str | None, record: Record | None, checkpoint: CheckpointReader | None) -> ResumePoint:
        if record is not None:  # the new run writes only into a folder inside of the requested runs folder
            in_place = self._is_in_place(record)
            record = record._replace(folder=child(self._runs_folder, record.name)) if in_place else None
        parent = "" if checkpoint is None else checkpoint.manifest.metadata.run.get("id", "")
        return ResumePoint(path, record, parent, tuple(self._skipped))

    def _is_in_place(self, record: Record) -> bool:
        if self._version is not None and record.name != self._version:
            return False
        parent = record.folder.rstrip("/").rpartition("/")[0]
        return resolve_folder(parent) == resolve_folder(self._runs_folder)

    def _skip_if_alive(self, record: Record) -> bool:
        """Return whether a run is alive, and if so add it to the skipped runs."""
        alive = self._liveness_of(record)
        if alive:
            process = record.process
            process_text = "" if process is None else f", process {process.pid} on {process.host}"
            skipped_run = f"{record.name} (it is running{process_text})"
            if skipped_run not in self._skipped:
                self._skipped.insert(0, skipped_run)
        return bool(alive)

    def _is_of_this_job(self, record: Record) -> bool:
        return any(job.is_same(other) for job in self._jobs for other in record.jobs)

    def _run_is_excluded(self, checkpoint: CheckpointReader, candidate_ids: set[str]) -> bool:
        """Return whether the checkpoint's run is known but is not among the runs that can be resumed."""
        run_id = checkpoint.manifest.metadata.run.get("id", "")
        return run_id in self._runs and run_id not in candidate_ids


def _start_time(record: Record) -> str:
    return str(record.document.get("started"))
