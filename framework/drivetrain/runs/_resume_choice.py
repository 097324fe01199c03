"""Which of the runs that there are a new one goes on with, and from which of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from drivetrain.checkpoint._discovery import StorageRetry, resumable_in, select_newest
from drivetrain.checkpoint._folders import child, children, resolve_folder
from drivetrain.checkpoint._format import Checkpoint, StorageError
from drivetrain.errors import CheckpointError
from drivetrain.runs._directory import CHECKPOINTS
from drivetrain.runs._identity import Identity, encode_hyper_parameters
from drivetrain.runs._liveness import HeartbeatWatch, is_alive
from drivetrain.runs._process import Job
from drivetrain.runs._record import FINISHED, Record, read

logger = logging.getLogger("drivetrain")

_SHORT_RETRY_SECONDS = 5.0  # seconds in all, for records that a run can do without
_MOST_NAMED = 3  # of the runs that were passed over


class ResumeChoice(NamedTuple):
    """What a run goes on from.

    Attributes:
        path: of the checkpoint; None for a fresh start.
        record: of the run whose folder it goes on in; None for a folder of its own.
        parent: the id of the run that wrote the checkpoint; "" for none.
        passed_over: the runs that it does not go on with, each with the reason.
    """

    path: str | None = None
    record: Record | None = None
    parent: str = ""
    passed_over: tuple[str, ...] = ()

    def told(self) -> str:
        """Return the runs that were passed over in a sentence; "" for none."""
        if not self.passed_over:
            return ""
        more = len(self.passed_over) - _MOST_NAMED
        named = "; ".join(self.passed_over[:_MOST_NAMED])
        return f" Passed over: {named}{f'; and {more} more' if more > 0 else ''}."


class RunSearch:
    """Looks through the runs of a place, and through folders of checkpoints that were named beside it.

    Args:
        place: the folder or URL where runs have theirs.
        version: the name of the only folder there that counts; None for all.
        identity: of the new run.
        jobs: those that its process belongs to.
        asking: waits for storages that refuse.
    """

    def __init__(
        self, place: str, version: str | None, identity: Identity, jobs: Sequence[Job], retry: StorageRetry
    ) -> None:
        self._place = place
        self._version = version
        self._identity = identity
        self._jobs = jobs
        self._retry = retry
        self._short_retry = StorageRetry(_SHORT_RETRY_SECONDS)
        self._unreadable: set[str] = set()
        self._has_candidates = False  # it was given more than one checkpoint
        self._passed_over: list[str] = []
        self._alive: dict[str, bool | None] = {}  # by folder
        self._known: dict[str, Record] = {}  # the runs of this experiment, by their ids
        self._folder_owner: Record | None = None  # of whatever experiment, in the folder that the new run is to have
        self._user_checkpoints: list[Checkpoint] = []  # in folders that the user has named

    # What there is

    def collect_runs(self, folders: Sequence[str]) -> None:
        """Take all runs of the place, and the checkpoints in ``folders``, of which some may be these runs' own."""
        self._has_candidates = True
        names = [self._version] if self._version is not None else self._retry.call(self._names)
        found = [self._retry.call(partial(self._read_neighbour, child(self._place, name))) for name in names]
        records = sorted((one for one in found if one is not None), key=_started, reverse=True)
        for record in records:
            if record.is_training and self._is_same_experiment(record):
                self.add_run(record)
        inside = {resolve_folder(child(record.folder, CHECKPOINTS)) for record in records}
        self.collect_checkpoints([one for one in folders if resolve_folder(one) not in inside])

    def collect_checkpoints(self, folders: Sequence[str]) -> None:
        """Take the checkpoints in folders that the user has named."""
        self._has_candidates = True
        for one in resumable_in(folders, self._retry):
            difference = self.difference_of(one)
            if difference is None:
                self._user_checkpoints.append(one)
                self.add_run_of(one)
            else:
                self._passed_over.append(f"{one.path!r} ({difference})")

    def add_run_of(self, checkpoint: Checkpoint) -> None:
        """Take the run that wrote a checkpoint."""
        record = self.find_run_of(checkpoint)
        if record is not None:
            self.add_run(record)

    def add_run(self, record: Record) -> None:
        """Take a run that is of this experiment."""
        self._known.setdefault(record.id, record)

    def set_folder_owner(self, version: str) -> None:
        """Take the run that has the folder which the new one is to have by its name."""
        self._folder_owner = self._read(child(self._place, version))

    def _names(self) -> list[str]:
        return children(self._place)

    def reread(self, folder: str) -> Record | None:
        """Return the record that lies in a folder now.

        Raises:
            StorageError: the storage refuses, for as long as it is asked.
        """
        return self._read(folder)

    def _read(self, folder: str) -> Record | None:
        return self._retry.call(partial(read, folder))

    def _read_neighbour(self, folder: str) -> Record | None:
        try:
            return read(folder)
        except StorageError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            name = folder.rpartition("/")[2]
            self._passed_over.append(f"{name} (its record may not be read)")
            return None

    def _is_same_experiment(self, record: Record) -> bool:
        document = record.document
        module, name = str(document.get("module", "")), str(document.get("name", ""))
        difference = self._identity.difference(module, name, document.get("hyper_parameters"))
        if difference is not None:
            self._passed_over.append(f"{record.name} ({difference})")
        return difference is None

    def difference_of(self, checkpoint: Checkpoint) -> str | None:
        """Say how the run of a checkpoint differs from the new one; None where it does not."""
        metadata = checkpoint.manifest.metadata
        module = metadata.run.get("module", "")
        if not module:  # of a version that had no folders for runs
            try:
                made_of = checkpoint.state().get("made_of")
            except CheckpointError:
                made_of = None  # it is passed over once it comes to that
            module = str(made_of.get("module", "")) if isinstance(made_of, dict) else ""
        return self._identity.difference(
            module, metadata.run.get("name", ""), encode_hyper_parameters(metadata.hyper_parameters)
        )

    def find_run_of(self, checkpoint: Checkpoint) -> Record | None:
        """Return the record of the run that wrote a checkpoint; None where there is none any more."""
        metadata = checkpoint.manifest.metadata
        parent, _, _ = checkpoint.path.rstrip("/").rpartition("/")
        above, _, name = parent.rpartition("/")
        record = self._read(above or "/") if name == CHECKPOINTS else None
        if record is None or record.id != metadata.run.get("id"):
            record = self._read_copied_from(metadata.run.get("folder", ""))
        return record if record is not None and record.id == metadata.run.get("id") else None

    def _read_copied_from(self, folder: str) -> Record | None:
        """Read the record that a checkpoint names. It may have been copied from where nobody here can look."""
        if folder and folder not in self._unreadable:
            try:
                return self._short_retry.call(partial(read, folder))
            except CheckpointError as error:
                self._unreadable.add(folder)
                logger.warning(
                    "Whether the run in %r is under way is not known, and it is left alone: %s", folder, error
                )
        return None

    # Who lives

    def undecided(self, check: Callable[[Checkpoint], None]) -> Record | None:
        """Return a run that may live, on another machine, where it would be chosen if it were dead; None for none.

        Args:
            check: as for `newest`.
        """
        if self._folder_owner is not None and self._liveness_of(self._folder_owner) is None:
            return self._folder_owner
        out_of_sight = [record for record in self._known.values() if self._liveness_of(record) is None]
        if not out_of_sight or not self._has_candidates:
            return next(iter(out_of_sight), None)
        _, record = self._newest(check)
        return record if record in out_of_sight else None

    def finish_watch(self, watch: HeartbeatWatch) -> None:
        """Take what a watch over the run that was `undecided` has shown."""
        record = watch.record
        self._alive[record.folder] = bool(watch.is_alive)
        if watch.latest is not None and self._known.get(record.id) is record:
            self._known[record.id] = watch.latest
        if watch.latest is not None and self._folder_owner is record:
            self._folder_owner = watch.latest

    def is_known_alive(self, record: Record) -> bool:
        """Whether a run is known to be under way."""
        return bool(self._liveness_of(record))

    def mark_alive(self, record: Record) -> None:
        """Note that somebody else has gone on with a run meanwhile."""
        self._alive[record.folder] = True

    def _liveness_of(self, record: Record) -> bool | None:
        if record.folder not in self._alive:
            self._alive[record.folder] = is_alive(record, self._jobs)
        return self._alive[record.folder]

    # Choosing

    def newest(self, check: Callable[[Checkpoint], None], include_running: bool = False) -> ResumeChoice:
        """Return the newest checkpoint of the same experiment, and whose folder the run goes on in.

        What this job wrote when it ran before comes first.

        Args:
            check: raises `CheckpointError` of what cannot be gone on from.
            alive_too: do not pass over runs that are under way: nothing will be written.
        """
        found, record = self._newest(check, include_running)
        return self._choice(None if found is None else found.path, record, found)

    def _newest(
        self, check: Callable[[Checkpoint], None], include_running: bool = False
    ) -> tuple[Checkpoint | None, Record | None]:
        """Return the checkpoint and its run; a run alone where this job was stopped before it had saved anything."""
        known = sorted(self._known.values(), key=_started, reverse=True)
        ended = [one for one in known if include_running or not self._is_alive(one)]
        ids = {record.id for record in ended}
        of_this_job = [one for one in ended if self._is_of_this_job(one)]
        mine = {record.id for record in of_this_job}
        user_checkpoints = [one for one in self._user_checkpoints if not self._is_of_running_run(one, ids)]
        for records, others in (
            (of_this_job, [one for one in user_checkpoints if one.manifest.metadata.run.get("id") in mine]),
            (ended, user_checkpoints),
        ):
            inside = {
                one.path: (one, record)
                for record in records
                for one in resumable_in([child(record.folder, CHECKPOINTS)], self._retry)
                if one.manifest.metadata.run.get("id", record.id) == record.id
            }
            found = select_newest([*(one for one, _ in inside.values()), *others], self._retry, check)
            if found is not None:
                # As it was when it was found to be dead: by now somebody may go on with it.
                return found, inside[found.path][1] if found.path in inside else self._known_run(found)
            unfinished = [one for one in records if records is of_this_job and one.status != FINISHED]
            if unfinished and not include_running:
                return None, unfinished[0]
        return None, None

    def choose_checkpoint(self, checkpoint: Checkpoint) -> ResumeChoice:
        """Return what going on from this very checkpoint means."""
        record = self._known_run(checkpoint)
        whole = record is not None and self.difference_of(checkpoint) is None and not checkpoint.weights_only
        if record is None or not whole or self._is_alive(record):
            return self._choice(checkpoint.path, None, checkpoint)
        folder = checkpoint.path.rstrip("/").rpartition("/")[0]
        inside = resumable_in([child(record.folder, CHECKPOINTS), folder], self._retry)
        of_its_run = [one for one in inside if one.manifest.metadata.run.get("id") == record.id]
        newest = select_newest(of_its_run, self._retry)
        is_newest = newest is not None and newest.manifest.identifier == checkpoint.manifest.identifier
        return self._choice(checkpoint.path, record if is_newest else None, checkpoint)

    def _known_run(self, checkpoint: Checkpoint) -> Record | None:
        return self._known.get(checkpoint.manifest.metadata.run.get("id", ""))

    def _choice(self, path: str | None, record: Record | None, checkpoint: Checkpoint | None) -> ResumeChoice:
        if record is not None:  # where its folder is elsewhere, what is written goes where it was asked for
            here = self._is_in_place(record)
            record = record._replace(folder=child(self._place, record.name)) if here else None
        parent = "" if checkpoint is None else checkpoint.manifest.metadata.run.get("id", "")
        return ResumeChoice(path, record, parent, tuple(self._passed_over))

    def _is_in_place(self, record: Record) -> bool:
        if self._version is not None and record.name != self._version:
            return False
        above = record.folder.rstrip("/").rpartition("/")[0]
        return resolve_folder(above) == resolve_folder(self._place)

    def _is_alive(self, record: Record) -> bool:
        alive = self._liveness_of(record)
        if alive:
            process = record.process
            where = "" if process is None else f", process {process.pid} on {process.host}"
            told = f"{record.name} (it is under way{where})"
            if told not in self._passed_over:
                self._passed_over.insert(0, told)
        return bool(alive)

    def _is_of_this_job(self, record: Record) -> bool:
        return any(one.is_same(other) for one in self._jobs for other in record.jobs)

    def _is_of_running_run(self, checkpoint: Checkpoint, ids: set[str]) -> bool:
        """Whether its run is known, and none that can be gone on with."""
        run = checkpoint.manifest.metadata.run.get("id", "")
        return run in self._known and run not in ids


def _started(record: Record) -> str:
    return str(record.document.get("started"))
