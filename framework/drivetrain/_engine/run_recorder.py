"""``run.json`` as rank 0 keeps it: written as the run begins, at checkpoints, every 30 s, and at the end."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format import CheckpointMetadata, StorageError
from drivetrain.checkpoint._format.manifest import versions
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.errors import ConfigurationError
from drivetrain.runs import _liveness
from drivetrain.runs._directory import RECORD, claim_version, make_directory, missing_directories
from drivetrain.runs._process import Job, Process
from drivetrain.runs._record import (
    FINISHED,
    FORMAT,
    RUNNING,
    Record,
    archive_record,
    clear_leftovers,
    now,
    plain,
    read,
    remove,
    write,
)

logger = logging.getLogger("drivetrain")

_MOST = 1000  # parts, events and checkpoints that a record lists, the newest


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a run as it begins.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        module: its class.
        name: the run's.
        hyper_parameters: the module's, without secrets, as JSON.
        settings: of `Fit`, each with its value and source, without secrets.
        argv: the command line, without secrets.
        world_size: processes.
        strategy: its name.
        precision: its dtypes in words.
        device: rank 0's.
    """

    stage: str
    module: str
    name: str
    hyper_parameters: Mapping[str, Any]
    settings: Mapping[str, Any]
    argv: list[str]
    world_size: int
    strategy: str
    precision: str
    device: str


class RunRecorder:
    """Keeps the record of one run.

    Args:
        folder: the run's, which is there.
        identifier: the run's.
        run: what is known of it.
        earlier: the record of the run that goes on; None for a new one.
        made: the folders that were made for this run, the innermost first, on a local disk.
    """

    def __init__(
        self, folder: str, identifier: str, run: Description, earlier: dict[str, Any] | None, made: Sequence[str]
    ) -> None:
        self.folder = folder
        self.id = identifier
        self._earlier = earlier
        self._made = made
        self._trained = run.stage != "fit"
        self._failing = False  # it could not be written the last time
        self._lock = threading.Lock()
        self._document: dict[str, Any] | None = _first_document(identifier, run, earlier or {})
        self._token = self._document["parts"][-1]["token"]
        write(folder, self._document)
        _liveness.running_ids.add(identifier)
        self._heart = _Heart(self)
        self._heart.start()

    @classmethod
    def claim(
        cls,
        place: str,
        fixed: str | None,
        asked: str | None,
        run: Description,
        above: Sequence[str],
        expected: str | None = None,
        lives: Callable[[Record], bool] | None = None,
    ) -> Self:
        """Make a folder that no other run has, and write the record in it.

        Args:
            place: where runs of this name have theirs.
            fixed: its name, where the user has given it.
            asked: the name that somebody was told it would have.
            run: what is known of it.
            above: the folders that were made for ``place`` to be there.
            expected: the name that it has unless another run was quicker; None where nobody expects any.
            lives: whether a run was seen to live on another machine; None where nobody has looked.

        Raises:
            ConfigurationError: another run that is under way has the folder ``fixed``.
            OSError: it cannot be made, or written to.
        """
        if fixed is None:
            folder = child(place, claim_version(place, asked, expected))
            made = [folder]
        else:
            folder = child(place, fixed)
            made = _take_over(folder, lives)
        return cls(folder, os.urandom(8).hex(), run, None, [*made, *above])

    @classmethod
    def go_on(cls, record: Record, run: Description) -> Self | None:
        """Take the folder of a run that has ended, or was killed; None where somebody else has done so meanwhile.

        Raises:
            OSError: it cannot be written to.
        """
        again = read(record.folder)
        if again is None or again.document != record.document:
            return None
        clear_leftovers(record.folder)
        return cls(record.folder, record.id, run, record.document, [])

    def begins_with(self, path: str | None, identifier: str, step: int, parent: str, went_on: bool) -> None:
        """Note which checkpoint the run begins with.

        Args:
            path: where it is; None for a fresh start.
            identifier: its own; "" for a fresh start.
            step: optimizer steps that it holds.
            parent: the id of the run that wrote it; "" for none.
            went_on: whether it is in the folder of that run.
        """
        text = "a fresh start" if path is None else f"from {path}"

        def change(document: dict[str, Any]) -> None:
            if parent and not went_on:
                document["parent"] = parent
            _add_event(document, "went on" if went_on else "began", text, step)

        self._update(change, from_step=step, from_checkpoint=identifier or None)

    def note_loggers(self, described: list[dict[str, Any]], at_once: bool) -> None:
        """Note the loggers, whose versions are known by now.

        Args:
            described: each of them.
            at_once: write it; else it is written with whatever is written next.
        """
        with self._lock:
            if self._document is not None:
                self._document["loggers"] = plain(described)
        if at_once:
            self.beat()

    def trains(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        """Note what there is to train on, as training begins."""
        self._trained = True
        self._update(lambda document: document.update(data=plain(data)), seed=seed, batch_size=batch_size)

    def wrote(self, path: str, metadata: CheckpointMetadata) -> None:
        """Note a checkpoint that has become whole."""
        entry = {
            "path": _relative(path, self.folder),
            "id": metadata.identifier,
            "step": metadata.progress.get("global_step"),
            "epoch": metadata.progress.get("epoch"),
            "weights_only": metadata.weights_only,
            "written": now(),
        }

        def add(document: dict[str, Any]) -> None:
            others = [one for one in document["checkpoints"] if one.get("path") != entry["path"]]
            document["checkpoints"] = [*others, entry][-_MOST:]

        self._update(add)

    def removed(self, identifier: str) -> None:
        """Note that a checkpoint is no longer kept. It is written with whatever is written next."""
        with self._lock:
            if self._document is not None:
                kept = [one for one in self._document["checkpoints"] if one.get("id") != identifier]
                self._document["checkpoints"] = kept

    def note(self, kind: str, text: str, step: int) -> None:
        """Note an event."""
        self._update(lambda document: _add_event(document, kind, text, step))

    def beat(self) -> None:
        """Show that the run lives."""
        self._update(lambda document: None)

    def end(self, status: str, why: str, step: int) -> None:
        """Note how the run ended.

        A run that never trained leaves no trace: its folder goes if nothing else is in it, and a record that it went
        on with is as before, unless it is by this one that it has ended in order.

        Args:
            status: of `runs._record`.
            why: in words.
            step: optimizer steps that it made.
        """
        self._heart.stop()
        _liveness.running_ids.discard(self.id)
        # What was killed after its last checkpoint has made all its steps, and nobody has said so yet.
        says_more = status == FINISHED and self._earlier is not None and self._earlier.get("status") != FINISHED
        if not self._trained and not says_more:
            with suppress(OSError, StorageError):
                if self._earlier is not None:
                    with self._lock:
                        if self._document is not None:
                            self._write(self._earlier)
                    return
                if self._is_bare():
                    remove(self.folder)
                    with suppress(OSError):  # somebody else has put something there
                        for one in self._made:
                            os.rmdir(one)
                    return
        time = now()

        def close(document: dict[str, Any]) -> None:
            document.update(status=status, why=why, ended=time)

        self._update(close, status=status, why=why, ended=time, to_step=step)

    def _is_bare(self) -> bool:
        """Whether the folder was made for this run, and holds nothing but the record."""
        filesystem, root = filesystem_of(self.folder)
        return filesystem is None and bool(self._made) and os.listdir(root) == [RECORD]

    def _update(self, change: Callable[[dict[str, Any]], None], **part: Any) -> None:
        """Change the record and write it.

        Args:
            change: is given it.
            part: what to set in its last part, by name.
        """
        with self._lock:
            if self._document is None:
                return
            change(self._document)
            self._document["parts"][-1] |= part
            self._document["heartbeat"] = now()
            try:
                self._write(self._document)
                self._failing = False
            except (OSError, StorageError) as error:
                if not self._failing:
                    logger.warning("%s in %r cannot be written, and is tried again: %s", RECORD, self.folder, error)
                self._failing = True

    def _write(self, document: dict[str, Any]) -> None:
        """Write the record, unless another run has written its own there meanwhile."""
        there = read(self.folder)
        if there is not None and (not there.parts or there.parts[-1].get("token") != self._token):
            logger.warning(
                "%s in %r is another run's by now%s, and this one no longer writes it. Both write to one folder.",
                RECORD,
                self.folder,
                _told(there.process),
            )
            self._document = None
        else:
            write(self.folder, document)


class _Heart(threading.Thread):
    """Writes the record every `HEARTBEAT_SECONDS` seconds, beside the training."""

    def __init__(self, recorder: RunRecorder) -> None:
        super().__init__(name="drivetrain-heartbeat", daemon=True)
        self._recorder = recorder
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_liveness.HEARTBEAT_SECONDS):
            self._recorder.beat()

    def stop(self) -> None:
        self._ended.set()
        self.join(_liveness.HEARTBEAT_SECONDS)


def _first_document(identifier: str, run: Description, before: Mapping[str, Any]) -> dict[str, Any]:
    time, process, jobs = now(), Process.here().as_json(), [one.as_json() for one in Job.of(os.environ)]
    part = {
        "token": os.urandom(8).hex(),
        "started": time,
        "ended": None,
        "status": RUNNING,
        "why": None,
        "process": process,
        "job": jobs,
        "world_size": run.world_size,
        "strategy": run.strategy,
        "precision": run.precision,
        "seed": None,
        "batch_size": None,
        "from_checkpoint": None,
        "from_step": 0,
        "to_step": None,
    }
    parts, events, checkpoints = (_list(before.get(name)) for name in ("parts", "events", "checkpoints"))
    return {
        "format": FORMAT,
        "id": identifier,
        "parent": before.get("parent") or None,
        "stage": run.stage,
        "module": run.module,
        "name": run.name,
        "hyper_parameters": run.hyper_parameters,
        "status": RUNNING,
        "why": None,
        "started": before.get("started", time),
        "heartbeat": time,
        "ended": None,
        "process": process,
        "job": jobs,
        "argv": run.argv,
        "working_directory": _working_directory(),
        "world_size": run.world_size,
        "strategy": run.strategy,
        "precision": run.precision,
        "device": run.device,
        "versions": _versions(),
        "settings": run.settings,
        "data": None,
        "loggers": [],
        "checkpoints": checkpoints,
        "parts": [*parts, part][-_MOST:],
        "events": events,
    }


def _add_event(document: dict[str, Any], kind: str, text: str, step: int) -> None:
    event = {"at": now(), "kind": kind, "step": step, "text": text}
    document["events"] = [*document["events"], event][-_MOST:]


def _take_over(folder: str, lives: Callable[[Record], bool] | None) -> list[str]:
    """Make the folder that the user has named, and return what was made. The record of another run there is kept."""
    before = read(folder)
    if before is None:
        made = missing_directories(folder)
        make_directory(folder)
        return made
    if _liveness.is_alive(before, Job.of(os.environ)) or (lives is not None and lives(before)):
        raise ConfigurationError(
            f"The folder {folder!r} belongs to a run that is under way{_told(before.process)}.",
            "two runs would write to one log.",
            "wait for it, or give this run's logger another version, or none.",
        )
    kept = archive_record(folder)
    if before.is_training:
        logger.warning("%r has an earlier run's files; its record is kept as %s.", folder, kept)
    return []


def _versions() -> dict[str, str]:
    """The libraries that have been imported."""
    found = {
        name: vars(module).get("__version__")
        for name, module in list(sys.modules.items())
        if "." not in name and not name.startswith("_") and name not in sys.stdlib_module_names and module is not None
    }
    told = {name: str(version) for name, version in found.items() if isinstance(version, str)}
    return {**versions(), **dict(sorted(told.items()))}


def _relative(path: str, folder: str) -> str:
    """A checkpoint's path as seen from the run's folder, if it is in it; else all of it."""
    if "://" in path or "://" in folder:
        return path.removeprefix(f"{folder.rstrip('/')}/")
    inside = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return os.path.abspath(path) if inside.startswith("..") else inside


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _list(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _told(process: Process | None) -> str:
    return "" if process is None else f" (process {process.pid} on {process.host})"
