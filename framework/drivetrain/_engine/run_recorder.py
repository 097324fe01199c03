"""Writes ``run.json`` on rank 0: when the run begins, at checkpoints, every 30 s, and at the end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from drivetrain._config.secret_values import without_url_passwords
from drivetrain._format import CheckpointMetadata
from drivetrain._format.manifest import versions
from drivetrain._runs import liveness
from drivetrain._runs.directory import RECORD, remove_unused
from drivetrain._runs.process import Job, Process
from drivetrain._runs.record import (
    FINISHED,
    FORMAT,
    RUNNING,
    Record,
    now,
    plain,
    read,
    write,
)
from drivetrain._runs.run_folder import RunNotes
from drivetrain._runtime.working_directory import working_directory
from drivetrain._storage.folder import StorageError

logger = logging.getLogger("drivetrain")

_MAX_ENTRIES = 1000  # of each list in a record (parts, events, checkpoints); the newest are kept


class RunRecorder(RunNotes):
    """Keeps the record of one run up to date, on rank 0.

    Args:
        folder: the run's folder, which exists.
        run: the entries of the record that are known when the run begins.
        resumes: the run that is resumed, whose id the run keeps; None for a new run.
        created: the folders that were created for this run, its own first.
    """

    def __init__(
        self,
        folder: str,
        run: Mapping[str, Any],
        resumes: Record | None,
        created: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.id = os.urandom(8).hex() if resumes is None else resumes.id
        self._earlier = None if resumes is None else resumes.document
        self._created = created
        self._trained = False
        self._write_failed = False  # whether the last attempt to write failed
        self._lock = threading.Lock()
        self._document: dict[str, Any] | None = _first_document(self.id, run, self._earlier or {})
        self._token = self._document["parts"][-1]["token"]
        write(folder, self._document)
        liveness.running_ids.add(self.id)
        self._has_ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="drivetrain-heartbeat", daemon=True)
        self._heartbeat.start()

    def __reduce__(self) -> tuple[type[RunNotes], tuple[()]]:
        return RunNotes, ()  # another process does not write the record

    def note_start(self, path: str | None, identifier: str, step: int, parent: str, continues_run: bool) -> None:
        with self._lock:  # written with the next update
            if self._document is not None:
                if parent and not continues_run:
                    self._document["parent"] = parent
                text = "a fresh start" if path is None else f"from {path}"
                _add_event(self._document, "resumed" if continues_run else "began", text, step)
                self._document["parts"][-1].update(from_step=step, from_checkpoint=identifier or None)

    def note_training(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        self._trained = True
        self._update(lambda document: document.update(data=plain(data)), seed=seed, batch_size=batch_size)

    def note_checkpoint(self, path: str, metadata: CheckpointMetadata) -> None:
        entry = {
            "path": _relative(path, self.folder),
            "id": metadata.identifier,
            "step": metadata.progress.get("global_step"),
            "epoch": metadata.progress.get("epoch"),
            "weights_only": metadata.weights_only,
            "written": now(),
        }

        def add(document: dict[str, Any]) -> None:
            others = [other for other in document["checkpoints"] if other.get("path") != entry["path"]]
            document["checkpoints"] = [*others, entry][-_MAX_ENTRIES:]

        self._update(add)

    def note_removal(self, identifier: str) -> None:
        with self._lock:  # written with the next update
            if self._document is not None:
                entries = self._document["checkpoints"]
                self._document["checkpoints"] = [entry for entry in entries if entry.get("id") != identifier]

    def note(self, kind: str, text: str, step: int) -> None:
        self._update(lambda document: _add_event(document, kind, text, step))

    def end(self, status: str, why: str, step: int) -> None:
        """Record how the run ended. Passwords in URLs are not written.

        If the run never trained, the folders that were created for it are removed, unless something was written to
        them. If the run resumed an earlier one, the record of the earlier run is restored, unless
        the earlier run had made all its steps and is now marked as finished.
        """
        why = without_url_passwords(why)
        self._has_ended.set()
        self._heartbeat.join(liveness.HEARTBEAT_SECONDS)
        liveness.running_ids.discard(self.id)
        # A run that was killed after its last checkpoint has made all its steps, but is not recorded as finished.
        completes = status == FINISHED and self._earlier is not None and self._earlier.get("status") != FINISHED
        if not self._trained and not completes:
            with suppress(OSError, StorageError):
                if self._earlier is not None:
                    with self._lock:
                        if self._document is not None:
                            self._write(self._earlier)
                    return
                if remove_unused(self._created):
                    return
        time = now()

        def close(document: dict[str, Any]) -> None:
            document.update(status=status, why=why, ended=time)

        self._update(close, status=status, why=why, ended=time, to_step=step)

    def _beat(self) -> None:
        """Write the record with a new heartbeat, which is the current time, every `HEARTBEAT_SECONDS` seconds."""
        while not self._has_ended.wait(liveness.HEARTBEAT_SECONDS):
            self._update(lambda document: None)

    def _update(self, change: Callable[[dict[str, Any]], None], **part: Any) -> None:
        """Change the record and write it.

        Args:
            change: modifies the document it is called with.
            part: entries to set in the document's last part.
        """
        with self._lock:
            if self._document is None:
                return
            change(self._document)
            self._document["parts"][-1] |= part
            self._document["heartbeat"] = now()
            try:
                self._write(self._document)
                self._write_failed = False
            except (OSError, StorageError) as error:
                if not self._write_failed:
                    logger.warning(
                        "%s in %r cannot be written. The next update tries again. The error: %s",
                        RECORD,
                        self.folder,
                        error,
                    )
                self._write_failed = True

    def _write(self, document: dict[str, Any]) -> None:
        """Write the record, unless another run has written its own record there in the meantime."""
        current = read(self.folder)
        parts = None if current is None else current.parts
        if current is not None and (not parts or parts[-1].get("token") != self._token):
            logger.warning(
                "%s in %r now belongs to another run. This run no longer writes it, but both runs still write other "
                "files to the folder.",
                RECORD,
                self.folder,
            )
            self._document = None
        else:
            write(self.folder, document)


def _first_document(identifier: str, run: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    time, process, jobs = now(), asdict(Process.here()), [asdict(job) for job in Job.of(os.environ)]
    part = {
        "token": os.urandom(8).hex(),
        "started": time,
        "ended": None,
        "status": RUNNING,
        "why": None,
        "process": process,
        "job": jobs,
        **{name: run[name] for name in ("world_size", "strategy", "precision")},
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
        **run,
        "status": RUNNING,
        "why": None,
        "started": before.get("started", time),
        "heartbeat": time,
        "ended": None,
        "process": process,
        "job": jobs,
        "working_directory": working_directory(),
        "versions": versions(),
        "data": None,
        "checkpoints": checkpoints,
        "parts": [*parts, part][-_MAX_ENTRIES:],
        "events": events,
    }


def _add_event(document: dict[str, Any], kind: str, text: str, step: int) -> None:
    event = {"at": now(), "kind": kind, "step": step, "text": text}
    document["events"] = [*document["events"], event][-_MAX_ENTRIES:]


def _relative(path: str, folder: str) -> str:
    """Return a checkpoint's path, relative to the run's folder if the checkpoint is inside it, else absolute."""
    if "://" in path or "://" in folder:
        return path.removeprefix(f"{folder.rstrip('/')}/")
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return os.path.abspath(path) if relative.startswith("..") else relative


def _list(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
