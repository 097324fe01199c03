"""Reads from the disk what `decide` needs to know: the runs of an experiment and their checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from drivetrain._format import CheckpointReader, load
from drivetrain._runs.checkpoint_folders import children, read_latest
from drivetrain._runs.directory import CHECKPOINTS, split_folder
from drivetrain._runs.identity import encode_hyper_parameters
from drivetrain._runs.record import Record, read
from drivetrain._runs.run_folder import CKPT_PATH_KEYWORDS
from drivetrain._runs.start_decision import Found, StartDecision, StartRequest, run_id_of
from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import child, resolve_folder
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")

T = TypeVar("T")

RETRY_SECONDS = 30.0
"""How long requests to a failing storage are retried, in seconds.

If the retries ended early, a newer checkpoint could be missed.
"""

_FIRST_PAUSE = 0.5  # seconds before the first retry; the pause doubles for each further retry


class StartSearch:
    """Finds what is on the disk when a run begins.

    Args:
        request: what was asked of the run.
        retry_seconds: the total duration of all pauses between attempts if a storage fails; `RETRY_SECONDS` by default.
    """

    def __init__(self, request: StartRequest, retry_seconds: float | None = None) -> None:
        self.request = request
        self._retry = StorageRetry(RETRY_SECONDS if retry_seconds is None else retry_seconds)
        self._stored: dict[str, Record | None] = {}  # the records of runs by the folders that checkpoints store
        self.found = Found()
        """What was found so far."""

    def look(self) -> Found:
        """Find everything that `decide` needs for the request.

        Raises:
            StorageError: the storage still fails after the last retry.
        """
        request = self.request
        folder = request.version or request.last
        if folder is not None and request.needs_folder:
            self.found.owner = self.read_record(child(request.runs_folder, folder))
        if request.ckpt_path in CKPT_PATH_KEYWORDS:
            self._collect_runs()
        elif request.ckpt_path is not None and request.is_fit:
            self._find_given(request.ckpt_path)
        return self.found

    def refresh(self, decision: StartDecision) -> None:
        """Read the record again that another process has changed since the decision."""
        found, run, folder = self.found, decision.resumes, child(self.request.runs_folder, decision.version or "")
        now = self.read_record(folder)
        found.alive.pop(folder, None)
        if run is None or found.owner == run:
            found.owner = now
        if run is not None:
            del found.runs[run.id]
            if now is not None:
                found.runs[now.id] = now

    def drop_if_unreadable(self, path: str, check: Callable[[CheckpointReader], None]) -> bool:
        """Leave out the checkpoint at a path, with a warning, if ``check`` raises `CheckpointError` for it.

        Returns:
            Whether the checkpoint was left out.
        """
        checkpoint = next(each for each in self.found.checkpoints if each.path == path)
        try:
            self._retry.call(partial(check, checkpoint))
        except StorageError:
            raise
        except CheckpointError as problem:
            logger.warning("Skipping checkpoint %r. %s", path, problem)
            self.found.checkpoints.remove(checkpoint)
            return True
        return False

    def read_record(self, folder: str) -> Record | None:
        """Return the current record in a folder; None if there is none."""
        return self._retry.call(partial(read, folder))

    def _collect_runs(self) -> None:
        """Add the runs of this experiment with their checkpoints, and the checkpoints in folders of the user."""
        request, found = self.request, self.found
        if request.version is not None and request.is_fit:
            names = [request.version]
        else:
            names = self._retry.call(partial(children, request.runs_folder))
        folders = [child(request.runs_folder, name) for name in names]
        records = [record for record in map(self.read_record, folders) if record is not None]
        for record in sorted(records, key=lambda record: str(record.document.get("started")), reverse=True):
            document = record.document
            if not record.is_training:
                continue
            module, name = str(document.get("module", "")), str(document.get("name", ""))
            difference = request.identity.difference(module, name, document.get("hyper_parameters"))
            if difference is not None:
                found.skipped.append(f"{record.name} ({difference})")
            elif found.runs.setdefault(record.id, record) is record:
                found.checkpoints += self._checkpoints_of(record, [child(record.folder, CHECKPOINTS)])
        searched = {resolve_folder(child(record.folder, CHECKPOINTS)) for record in records}
        self._collect_checkpoints([each for each in request.checkpoint_folders if resolve_folder(each) not in searched])

    def _collect_checkpoints(self, folders: Sequence[str]) -> None:
        """Add the checkpoints of this experiment in folders that the user named, and the runs that wrote them."""
        for checkpoint in resumable_in(folders, self._retry):
            difference = self._difference_of(checkpoint)
            if difference is None:
                self.found.checkpoints.append(checkpoint)
                self._add_run_of(checkpoint)
            else:
                self.found.skipped.append(f"{checkpoint.path!r} ({difference})")

    def _find_given(self, path: str) -> None:
        """Open the checkpoint at a path. Find the run that wrote it and that run's checkpoints, if it can go on."""
        with suppress(CheckpointError):  # every rank gets the error when it opens the checkpoint
            checkpoint = self.found.given = load(path)
            run = None
            if not checkpoint.weights_only and self._difference_of(checkpoint) is None:
                run = self._add_run_of(checkpoint)
            if run is not None:
                beside = [child(run.folder, CHECKPOINTS), split_folder(checkpoint.path)[0]]
                self.found.checkpoints += self._checkpoints_of(run, beside)

    def _checkpoints_of(self, run: Record, folders: Sequence[str]) -> list[CheckpointReader]:
        return [each for each in resumable_in(folders, self._retry) if run_id_of(each) == run.id]

    def _difference_of(self, checkpoint: CheckpointReader) -> str | None:
        """Describe how the run of a checkpoint differs from this experiment; None if both are the same experiment."""
        metadata = checkpoint.manifest.metadata
        module, name = (metadata.run.get(key, "") for key in ("module", "name"))
        return self.request.identity.difference(module, name, encode_hyper_parameters(metadata.hyper_parameters))

    def _add_run_of(self, checkpoint: CheckpointReader) -> Record | None:
        """Add the run that wrote a checkpoint; return None if its record is gone or unreachable."""
        run_id = run_id_of(checkpoint)
        folder, name = split_folder(split_folder(checkpoint.path)[0])
        record = self.read_record(folder or "/") if name == CHECKPOINTS else None
        if record is None or record.id != run_id:
            record = self._read_stored_folder(checkpoint.manifest.metadata.run.get("folder", ""))
        if record is None or record.id != run_id:
            return None
        runs_folder = self.request.runs_folder
        if resolve_folder(split_folder(record.folder)[0]) == resolve_folder(runs_folder):
            record = record._replace(folder=child(runs_folder, record.name))
        return self.found.runs.setdefault(run_id, record)

    def _read_stored_folder(self, folder: str) -> Record | None:
        """Read the record in the run folder whose path a checkpoint stores; None if there is none.

        The folder may be unreachable if the checkpoint was copied from another machine.
        """
        if folder not in self._stored:
            try:
                self._stored[folder] = read(folder) if folder else None
            except CheckpointError as error:
                self._stored[folder] = None
                logger.warning("The new run does not go on in %r, which cannot be read: %s", folder, error)
        return self._stored[folder]


def resumable_in(folders: Iterable[str], retry: StorageRetry) -> list[CheckpointReader]:
    """Return the complete checkpoints directly inside ``folders`` that hold more than weights.

    Raises:
        StorageError: the storage still fails after the last retry.
    """
    checkpoints = []
    for folder in dict.fromkeys(folders):
        latest_name = retry.call(partial(read_latest, folder))
        names = retry.call(partial(children, folder))
        for name in dict.fromkeys([*names, *([latest_name] if latest_name is not None else [])]):
            checkpoint = retry.call(partial(_load_if_complete, child(folder, name)))
            if checkpoint is not None and not checkpoint.weights_only:
                checkpoints.append(checkpoint)
    return checkpoints


def _load_if_complete(path: str) -> CheckpointReader | None:
    """Open the checkpoint at ``path``; return None if it is missing or incomplete."""
    try:
        return load(path)
    except StorageError:
        raise
    except CheckpointError:
        return None


class StorageRetry:
    """Retries operations that raise `StorageError`, with exponential backoff and one time limit for all calls.

    Args:
        retry_seconds: the total duration of all pauses in seconds.
    """

    def __init__(self, retry_seconds: float) -> None:
        self._remaining = retry_seconds
        self._pause = _FIRST_PAUSE

    def call(self, operation: Callable[[], T]) -> T:
        """Return the result of ``operation``, retrying while it raises `StorageError`.

        Raises:
            StorageError: the operation still fails when the time limit is reached.
        """
        while True:
            try:
                return operation()
            except StorageError as error:
                if self._remaining <= 0:
                    raise
                pause = min(self._pause, self._remaining)
                logger.warning("%s Retrying in %.1f s.", error.what, pause)
                time.sleep(pause)
                self._remaining -= pause
                self._pause *= 2
