"""Uploads checkpoints to wandb as artifacts."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from drivetrain._storage.paths import folder_at, local_path

_log = logging.getLogger("drivetrain")


class CheckpointUploads:
    """Uploads the checkpoints of `Checkpoint` callbacks, each once. A failed upload is logged and does not end a run.

    Args:
        which: ``log_model`` of `WandbLogger`: False, True or "all".
        name: the name of the artifact; None for ``model-<id of the run>``.

    Methods take the `WandbLogger` whose run stores the artifacts.
    """

    def __init__(self, which: bool | str, name: str | None) -> None:
        self._which = which
        self._name = name
        self._waiting: list[Any] = []  # callbacks whose checkpoints are uploaded at the end of the run
        self._uploaded: set[tuple[str, Any]] = set()

    def after_save(self, callback: Any, logger: Any) -> None:
        """Upload the new checkpoint of a callback, or remember the callback for the end of the run."""
        if self._which == "all" or (self._which and callback.save_top_k == -1):
            self._upload(callback, logger)
        elif self._which and callback not in self._waiting:
            self._waiting.append(callback)

    def at_end(self, logger: Any) -> None:
        """Upload the checkpoints that are left at the end of a run."""
        for callback in self._waiting:
            self._upload(callback, logger)
        self._waiting.clear()

    def _upload(self, callback: Any, logger: Any) -> None:
        paths = dict(callback.best_k_models)
        paths.setdefault(callback.last_model_path, None)
        for path, score in paths.items():
            try:
                version = (path, _modified_at(path))
                if version[1] is not None and version not in self._uploaded:
                    self._upload_one(callback, path, score, logger)
                    self._uploaded.add(version)
            except Exception as error:
                _log.warning("wandb cannot store the checkpoint %r: %s: %s", path, type(error).__name__, error)

    def _upload_one(self, callback: Any, path: str, score: Any, logger: Any) -> None:
        metadata = {
            "score": None if score is None else float(score),
            "original_filename": os.path.basename(path),
            "Checkpoint": {
                name: getattr(callback, name) for name in ("monitor", "mode", "save_top_k", "save_weights_only")
            },
        }
        artifact: Any = import_module("wandb").Artifact(
            self._name or f"model-{logger.run_id}", "model", metadata=metadata
        )
        if local_path(path) is not None:
            artifact.add_dir(path)
        else:
            artifact.add_reference(path, checksum=False)
        aliases = ["latest", "best"] if path == callback.best_model_path else ["latest"]
        logger.experiment.log_artifact(artifact, aliases=aliases)


def _modified_at(path: str) -> Any:
    """Return what distinguishes a checkpoint from an earlier one of the same name; None if there is no checkpoint."""
    folder = folder_at(path)
    return folder.read("manifest.json") if path and folder.exists("manifest.json") else None
