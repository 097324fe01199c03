"""Which of the runs that there are a new one goes on with, and from which of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from drivetrain.checkpoint._discovery import Asking, newest_of, whole_in
from drivetrain.checkpoint._folders import child, children, resolved
from drivetrain.checkpoint._format import Checkpoint, StorageError
from drivetrain.errors import CheckpointError
from drivetrain.runs._directory import CHECKPOINTS
from drivetrain.runs._identity import Identity, encoded
from drivetrain.runs._liveness import Watch, is_alive
from drivetrain.runs._process import Job
from drivetrain.runs._record import FINISHED, Record, read

logger = logging.getLogger("drivetrain")

_PATIENCE_ELSEWHERE = 5.0  # seconds in all, for records that a run can do without
_MOST_NAMED = 3  # of the runs that were passed over


class Choice(NamedTuple):
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


class Search:
    """Looks through the runs of a place, and through folders of checkpoints that were named beside it.

    Args:
        place: the folder or URL where runs have theirs.
        version: the name of the only folder there that counts; None for all.
        identity: of the new run.
        jobs: those that its process belongs to.
        asking: waits for storages that refuse.
    """

    def __init__(
        self, place: str, version: str | None, identity: Identity, jobs: Sequence[Job], asking: Asking
    ) -> None:
        self._place = place
        self._version = version
        self._identity = identity
        self._jobs = jobs
        self._asking = asking
        self._asking_elsewhere = Asking(_PATIENCE_ELSEWHERE)
        self._out_of_reach: set[str] = set()
        self._searches = False  # it was given more than one checkpoint
        self._passed_over: list[str] = []
        self._alive: dict[str, bool | None] = {}  # by folder
        self._known: dict[str, Record] = {}  # the runs of this experiment, by their ids
        self._occupant: Record | None = None  # of whatever experiment, in the folder that the new run is to have
        self._beside: list[Checkpoint] = []  # in folders that the user has named

    # What there is

    def look_through(self, folders: Sequence[str]) -> None:
        """Take all runs of the place, and the checkpoints in ``folders``, of which some may be these runs' own."""
        self._searches = True
        names = [self._version] if self._version is not None else self._asking.until_answered(self._names)
        found = [self._asking.until_answered(partial(self._read_neighbour, child(self._place, name))) for name in names]
        records = sorted((one for one in found if one is not None), key=_started, reverse=True)
        for record in records:
            if record.is_training and self._is_ours(record):
                self.note(record)
        inside = {resolved(child(record.folder, CHECKPOINTS)) for record in records}
        self.look_in([one for one in folders if resolved(one) not in inside])

    def look_in(self, folders: Sequence[str]) -> None:
        """Take the checkpoints in folders that the user has named."""
        self._searches = True
        for one in whole_in(folders, self._asking):
            why_not = self.why_another(one)
            if why_not is None:
                self._beside.append(one)
                self.look_at(one)
            else:
                self._passed_over.append(f"{one.path!r} ({why_not})")

    def look_at(self, checkpoint: Checkpoint) -> None:
        """Take the run that wrote a checkpoint."""
        record = self.run_of(checkpoint)
        if record is not None:
            self.note(record)

    def note(self, record: Record) -> None:
        """Take a run that is of this experiment."""
        self._known.setdefault(record.id, record)

    def consider_occupant(self, version: str) -> None:
        """Take the run that has the folder which the new one is to have by its name."""
        self._occupant = self._read(child(self._place, version))

    def _names(self) -> list[str]:
        return children(self._place)

    def read_again(self, folder: str) -> Record | None:
        """Return the record that lies in a folder now.

        Raises:
            StorageError: the storage refuses, for as long as it is asked.
        """
        return self._read(folder)

    def _read(self, folder: str) -> Record | None:
        return self._asking.until_answered(partial(read, folder))

    def _read_neighbour(self, folder: str) -> Record | None:
        try:
            return read(folder)
        except StorageError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            name = folder.rpartition("/")[2]
            self._passed_over.append(f"{name} (its record may not be read)")
            return None

    def _is_ours(self, record: Record) -> bool:
        document = record.document
        module, name = str(document.get("module", "")), str(document.get("name", ""))
        why_not = self._identity.why_not(module, name, document.get("hyper_parameters"))
        if why_not is not None:
            self._passed_over.append(f"{record.name} ({why_not})")
        return why_not is None

    def why_another(self, checkpoint: Checkpoint) -> str | None:
        """Say how the run of a checkpoint differs from the new one; None where it does not."""
        facts = checkpoint.manifest.facts
        module = facts.run.get("module", "")
        if not module:  # of a version that had no folders for runs
            try:
                made_of = checkpoint.state().get("made_of")
            except CheckpointError:
                made_of = None  # it is passed over once it comes to that
            module = str(made_of.get("module", "")) if isinstance(made_of, dict) else ""
        return self._identity.why_not(module, facts.run.get("name", ""), encoded(facts.hyper_parameters))

    def run_of(self, checkpoint: Checkpoint) -> Record | None:
        """Return the record of the run that wrote a checkpoint; None where there is none any more."""
        facts = checkpoint.manifest.facts
        parent, _, _ = checkpoint.path.rstrip("/").rpartition("/")
        above, _, name = parent.rpartition("/")
        record = self._read(above or "/") if name == CHECKPOINTS else None
        if record is None or record.id != facts.run.get("id"):
            record = self._read_elsewhere(facts.run.get("folder", ""))
        return record if record is not None and record.id == facts.run.get("id") else None

    def _read_elsewhere(self, folder: str) -> Record | None:
        """Read the record that a checkpoint names. It may have been copied from where nobody here can look."""
        if folder and folder not in self._out_of_reach:
            try:
                return self._asking_elsewhere.until_answered(partial(read, folder))
            except CheckpointError as error:
                self._out_of_reach.add(folder)
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
        if self._occupant is not None and self._lives(self._occupant) is None:
            return self._occupant
        out_of_sight = [record for record in self._known.values() if self._lives(record) is None]
        if not out_of_sight or not self._searches:
            return next(iter(out_of_sight), None)
        _, record = self._newest(check)
        return record if record in out_of_sight else None

    def watched(self, watch: Watch) -> None:
        """Take what a watch over the run that was `undecided` has shown."""
        record = watch.record
        self._alive[record.folder] = bool(watch.is_alive)
        if watch.after is not None and self._known.get(record.id) is record:
            self._known[record.id] = watch.after
        if watch.after is not None and self._occupant is record:
            self._occupant = watch.after

    def was_seen_to_live(self, record: Record) -> bool:
        """Whether a run is known to be under way."""
        return bool(self._lives(record))

    def taken(self, record: Record) -> None:
        """Note that somebody else has gone on with a run meanwhile."""
        self._alive[record.folder] = True

    def _lives(self, record: Record) -> bool | None:
        if record.folder not in self._alive:
            self._alive[record.folder] = is_alive(record, self._jobs)
        return self._alive[record.folder]

    # Choosing

    def newest(self, check: Callable[[Checkpoint], None], alive_too: bool = False) -> Choice:
        """Return the newest checkpoint of the same experiment, and whose folder the run goes on in.

        What this job wrote when it ran before comes first.

        Args:
            check: raises `CheckpointError` of what cannot be gone on from.
            alive_too: do not pass over runs that are under way: nothing will be written.
        """
        found, record = self._newest(check, alive_too)
        return self._choice(None if found is None else found.path, record, found)

    def _newest(
        self, check: Callable[[Checkpoint], None], alive_too: bool = False
    ) -> tuple[Checkpoint | None, Record | None]:
        """Return the checkpoint and its run; a run alone where this job was stopped before it had saved anything."""
        known = sorted(self._known.values(), key=_started, reverse=True)
        dead = [one for one in known if alive_too or not self._is_alive(one)]
        ids = {record.id for record in dead}
        of_this_job = [one for one in dead if self._is_of_this_job(one)]
        mine = {record.id for record in of_this_job}
        beside = [one for one in self._beside if not self._belongs_to_another(one, ids)]
        for records, others in (
            (of_this_job, [one for one in beside if one.manifest.facts.run.get("id") in mine]),
            (dead, beside),
        ):
            inside = {
                one.path: (one, record)
                for record in records
                for one in whole_in([child(record.folder, CHECKPOINTS)], self._asking)
                if one.manifest.facts.run.get("id", record.id) == record.id
            }
            found = newest_of([*(one for one, _ in inside.values()), *others], self._asking, check)
            if found is not None:
                # As it was when it was found to be dead: by now somebody may go on with it.
                return found, inside[found.path][1] if found.path in inside else self._known_run(found)
            unfinished = [one for one in records if records is of_this_job and one.status != FINISHED]
            if unfinished and not alive_too:
                return None, unfinished[0]
        return None, None

    def at(self, checkpoint: Checkpoint) -> Choice:
        """Return what going on from this very checkpoint means."""
        record = self._known_run(checkpoint)
        whole = record is not None and self.why_another(checkpoint) is None and not checkpoint.weights_only
        if record is None or not whole or self._is_alive(record):
            return self._choice(checkpoint.path, None, checkpoint)
        folder = checkpoint.path.rstrip("/").rpartition("/")[0]
        inside = whole_in([child(record.folder, CHECKPOINTS), folder], self._asking)
        of_its_run = [one for one in inside if one.manifest.facts.run.get("id") == record.id]
        newest = newest_of(of_its_run, self._asking)
        is_newest = newest is not None and newest.manifest.identifier == checkpoint.manifest.identifier
        return self._choice(checkpoint.path, record if is_newest else None, checkpoint)

    def _known_run(self, checkpoint: Checkpoint) -> Record | None:
        return self._known.get(checkpoint.manifest.facts.run.get("id", ""))

    def _choice(self, path: str | None, record: Record | None, checkpoint: Checkpoint | None) -> Choice:
        if record is not None:  # where its folder is elsewhere, what is written goes where it was asked for
            here = self._is_here(record)
            record = record._replace(folder=child(self._place, record.name)) if here else None
        parent = "" if checkpoint is None else checkpoint.manifest.facts.run.get("id", "")
        return Choice(path, record, parent, tuple(self._passed_over))

    def _is_here(self, record: Record) -> bool:
        if self._version is not None and record.name != self._version:
            return False
        above = record.folder.rstrip("/").rpartition("/")[0]
        return resolved(above) == resolved(self._place)

    def _is_alive(self, record: Record) -> bool:
        alive = self._lives(record)
        if alive:
            process = record.process
            where = "" if process is None else f", process {process.pid} on {process.host}"
            told = f"{record.name} (it is under way{where})"
            if told not in self._passed_over:
                self._passed_over.insert(0, told)
        return bool(alive)

    def _is_of_this_job(self, record: Record) -> bool:
        return any(one.is_same(other) for one in self._jobs for other in record.jobs)

    def _belongs_to_another(self, checkpoint: Checkpoint, ids: set[str]) -> bool:
        """Whether its run is known, and none that can be gone on with."""
        run = checkpoint.manifest.facts.run.get("id", "")
        return run in self._known and run not in ids


def _started(record: Record) -> str:
    return str(record.document.get("started"))
