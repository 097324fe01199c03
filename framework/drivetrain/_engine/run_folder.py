"""The folder of a run: chosen or claimed as the run begins, its record kept, and whether the run lives shown in it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from drivetrain._config.secret_values import arguments_without_secrets
from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format import StorageError
from drivetrain.checkpoint._format.manifest import Facts, versions
from drivetrain.checkpoint._format.place import filesystem_of
from drivetrain.errors import ConfigurationError
from drivetrain.runs import _liveness
from drivetrain.runs._directory import RECORD, claim_version, make_directory
from drivetrain.runs._identity import class_path, encoded
from drivetrain.runs._process import Job, Process
from drivetrain.runs._record import FORMAT, RUNNING, Record, now, plain, put_aside, read, remove, write

if TYPE_CHECKING:
    from drivetrain._engine.run_state import RunState

logger = logging.getLogger("drivetrain")

DEFAULT_NAME = "drivetrain_logs"
_MOST = 1000  # parts, events and checkpoints that a record lists, the newest


class RunFolder:
    """The folder of one run, and its record. All but `path`, `id` and `parent` is of rank 0 alone.

    Args:
        run: the run.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.path: str | None = None
        """The folder, a path or URL; None where the run has none."""
        self.id = ""
        """What tells the run from all others; "" where it has no folder."""
        self.name = ""
        """What runs of one kind are called: the first logger's name."""
        self.parent = ""
        """The id of the run whose checkpoint it began with; "" for none."""
        self.rewinds_to: int | None = None
        """The optimizer step after which logs are dropped, in a folder that the run goes on in."""
        self._document: dict[str, Any] | None = None
        self.before: RunFolder | None = None
        """That of the last run of the same `Fit`, which an evaluation may log to."""
        self._trained = False
        self._made = False  # by this run
        self._earlier: dict[str, Any] | None = None  # the record of the run that goes on, as it was
        self._failing = False  # its record could not be written the last time
        self._lock = threading.Lock()
        self._heart: _Heart | None = None

    # Beginning

    def claim(self, place: str, fixed: str | None, asked: str | None) -> None:
        """Make a folder that no other run has, and write the record in it.

        Args:
            place: where runs of this name have theirs.
            fixed: its name, where the user has given it.
            asked: the name that somebody was told it would have.

        Raises:
            ConfigurationError: another run that is under way has the folder ``fixed``.
            OSError: it cannot be made, or written to.
        """
        if fixed is None:
            self._made = True
            folder = child(place, claim_version(place, asked))
        else:
            folder = child(place, fixed)
            self._take_over(folder)
        self._begin(folder, os.urandom(8).hex(), {})

    def _take_over(self, folder: str) -> None:
        """Let a folder that the user has named be this run's; the record of the one before keeps lying there."""
        before = read(folder)
        if before is None:
            self._made = not os.path.lexists(folder) and filesystem_of(folder)[0] is None
            make_directory(folder)
            return
        if _liveness.is_alive(before, Job.of(os.environ)):
            raise ConfigurationError(
                f"The folder {folder!r} belongs to a run that is under way{_told(before.process)}.",
                "two runs would write to one log.",
                "wait for it, or give this run's logger another version, or none.",
            )
        kept = put_aside(folder)
        if before.is_training:
            logger.warning("%r has an earlier run's files: its record is kept as %s.", folder, kept)

    def go_on(self, record: Record) -> bool:
        """Take the folder of a run that has ended, or was killed; whether nobody else has done so meanwhile."""
        again = read(record.folder)
        if again is None or again.document != record.document:
            return False
        self._earlier = record.document
        self._begin(record.folder, record.id, record.document)
        return True

    def take_over(self, folder: RunFolder) -> None:
        """Be that of a run that took place in other processes."""
        self.path, self.id, self.name, self.parent = folder.path, folder.id, folder.name, folder.parent

    def join(self, before: RunFolder) -> None:
        """Be in the folder of the run before, as an evaluation of what it has trained."""
        self.path, self.id, self.name, self._document = before.path, before.id, before.name, before._document

    def _begin(self, folder: str, identifier: str, before: Mapping[str, Any]) -> None:
        run = self._run
        self.path, self.id, self.name = folder, identifier, name_of(run)
        time, process = now(), Process.here()
        hyper_parameters, _ = run.left_out.take_out(run.module.hparams)
        settings = {
            name: {"value": setting.value, "source": setting.source} for name, setting in run.trainer.settings.items()
        }
        public, _ = run.left_out.take_out(settings)
        arguments, left_out = arguments_without_secrets(sys.argv)
        run.left_out.tell(left_out)
        jobs = [one.as_json() for one in Job.of(os.environ)]
        part = {
            "token": os.urandom(8).hex(),
            "started": time,
            "ended": None,
            "status": RUNNING,
            "why": None,
            "process": process.as_json(),
            "job": jobs,
            "world_size": run.strategy.world_size,
            "strategy": run.strategy.name,
            "precision": run.strategy.precision.name,
            "seed": None,
            "batch_size": None,
            "from_checkpoint": None,
            "from_step": 0,
            "to_step": None,
        }
        parts = before.get("parts")
        events = before.get("events")
        checkpoints = before.get("checkpoints")
        self._document = {
            "format": FORMAT,
            "id": identifier,
            "parent": before.get("parent") or None,
            "stage": run.stage,
            "module": class_path(type(run.module)),
            "name": self.name,
            "hyper_parameters": encoded(hyper_parameters),
            "status": RUNNING,
            "why": None,
            "started": before.get("started", time),
            "heartbeat": time,
            "ended": None,
            "process": process.as_json(),
            "job": jobs,
            "argv": [sys.executable, *arguments],
            "working_directory": _working_directory(),
            "world_size": run.strategy.world_size,
            "strategy": run.strategy.name,
            "precision": run.strategy.precision.describe(),
            "device": str(run.strategy.device),
            "versions": _versions(),
            "settings": plain(public),
            "data": None,
            "loggers": [],
            "checkpoints": checkpoints if isinstance(checkpoints, list) else [],
            "parts": [*(parts if isinstance(parts, list) else [])[1 - _MOST :], part],
            "events": (events if isinstance(events, list) else [])[-_MOST:],
        }
        write(folder, self._document)
        self._made = self._made and filesystem_of(folder)[0] is None
        if run.stage == "fit":
            _liveness.under_way.add(identifier)
            self._heart = _Heart(self)
            self._heart.start()

    # What happens to it

    def begins_with(self, facts: Facts | None, path: str | None, parent: str, went_on: bool) -> None:
        """Note which checkpoint the run begins with.

        Args:
            facts: what the checkpoint says; None for a fresh start.
            path: where it is.
            parent: the id of the run that wrote it.
            went_on: whether it is in the folder of that run.
        """
        step = 0 if facts is None else int(facts.progress.get("global_step", 0))
        self.rewinds_to = (step if facts is not None else -1) if went_on else None
        if self._document is None:
            return
        with self._lock:
            part = self._document["parts"][-1]
            part["from_step"] = step
            part["from_checkpoint"] = None if facts is None else facts.identifier
            if not went_on and parent:
                self._document["parent"] = parent
        kind = "went on" if went_on else "began"
        self.note(kind, "a fresh start" if path is None else f"from {path}", step)

    def note_loggers(self) -> None:
        """Note the loggers, whose versions are known by now. It is written with whatever is written next."""
        if self._document is not None:
            self._document["loggers"] = [
                {"class": class_path(type(one)), "name": plain(one.name), "version": plain(one.version)}
                for one in self._run.trainer.loggers
            ]

    def trains(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        """Note what there is to train on, once training begins."""
        self._trained = True
        self.update(lambda document: document.__setitem__("data", plain(data)), seed=seed, batch_size=batch_size)

    def wrote(self, path: str, facts: Facts) -> None:
        """Note a checkpoint that has become whole."""
        if self._document is None or self.path is None:
            return
        entry = {
            "path": _relative(path, self.path),
            "id": facts.identifier,
            "step": facts.progress.get("global_step"),
            "epoch": facts.progress.get("epoch"),
            "weights_only": facts.weights_only,
            "written": now(),
        }

        def add(document: dict[str, Any]) -> None:
            others = [one for one in document["checkpoints"] if one.get("path") != entry["path"]]
            document["checkpoints"] = [*others, entry][-_MOST:]

        self.update(add)

    def removed(self, identifier: str) -> None:
        """Note that a checkpoint is no longer kept. It is written with whatever is written next."""
        with self._lock:
            if self._document is not None:
                kept = [one for one in self._document["checkpoints"] if one.get("id") != identifier]
                self._document["checkpoints"] = kept

    def note(self, kind: str, text: str, step: int | None = None) -> None:
        """Add an event, and write the record."""
        at = self._run.progress.global_step if step is None else step
        event = {"at": now(), "kind": kind, "step": at, "text": text}
        self.update(lambda document: document.__setitem__("events", [*document["events"], event][-_MOST:]))

    def update(self, change: Callable[[dict[str, Any]], None], **part: Any) -> None:
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
            self._write()

    def beat(self) -> None:
        """Show that the run lives."""
        self.update(lambda document: None)

    def end(self, status: str, why: str) -> None:
        """Note how the run ended.

        One that never trained leaves no trace: an empty folder goes, and a record that it went on with is as before.

        Args:
            status: of `runs._record`.
            why: in a sentence.
        """
        if self._heart is not None:
            self._heart.stop()
            self._heart = None
        _liveness.under_way.discard(self.id)
        if self._document is None or self.path is None:
            return
        if self._run.stage == "fit" and not self._trained:
            if self._made and self._is_bare():
                with suppress(OSError):
                    remove(self.path)
                    os.rmdir(self.path)
                    return
            if self._earlier is not None:
                with suppress(OSError):
                    write(self.path, self._earlier)
                    return
        step = self._run.progress.global_step

        def close(document: dict[str, Any]) -> None:
            document.update(status=status, why=why, ended=now())

        self.update(close, status=status, why=why, ended=now(), to_step=step)

    def _is_bare(self) -> bool:
        assert self.path is not None
        with suppress(OSError):
            return os.listdir(self.path) == [RECORD]
        return False

    def _write(self) -> None:
        assert self._document is not None
        assert self.path is not None
        try:
            there = read(self.path)
            ours = self._document["parts"][-1]["token"]
            if there is not None and (not there.parts or there.parts[-1].get("token") != ours):
                logger.warning(
                    "%s in %r is another run's by now%s: this one no longer writes it. Both write to one folder.",
                    RECORD,
                    self.path,
                    _told(there.process),
                )
                self._document = None
                return
            write(self.path, self._document)
            self._failing = False
        except (OSError, StorageError) as error:
            if not self._failing:
                logger.warning("%s in %r cannot be written, and is tried again later: %s", RECORD, self.path, error)
            self._failing = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"before": None, "_run": None, "_lock": None, "_heart": None, "_document": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.Lock()


class _Heart(threading.Thread):
    """Writes the record every `HEARTBEAT` seconds, beside the training."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(name="drivetrain-heartbeat", daemon=True)
        self._folder = folder
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_liveness.HEARTBEAT):
            self._folder.beat()

    def stop(self) -> None:
        self._ended.set()
        self.join(_liveness.HEARTBEAT)


def name_of(run: RunState) -> str:
    """Return the name of a run: its first logger's with files."""
    return next((str(one.name) for one in run.trainer.loggers if one.writes_to is not None), DEFAULT_NAME)


def _versions() -> dict[str, str]:
    """The libraries that are there; of optional ones those that have been imported."""
    found = versions()
    for name in ("deepspeed", "lightning_utilities", "numpy", "torchmetrics", "transformers"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def _relative(path: str, folder: str) -> str:
    """A checkpoint's path as seen from the run's folder, if it is in it; else all of it."""
    if "://" in path:
        return path.removeprefix(f"{folder.rstrip('/')}/")
    inside = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return os.path.abspath(path) if inside.startswith("..") else inside


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _told(process: Process | None) -> str:
    return "" if process is None else f" (process {process.pid} on {process.host})"
