"""StartingPoint: the folder that a run writes to, and the checkpoint that it starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._engine.ranks.rank_facts import check_folder_agreement
from drivetrain._runs import CKPT_PATH_KEYWORDS
from drivetrain._runs.run_folder import RunStart
from drivetrain.callback import WantsRunFolder, folders_of
from drivetrain.errors import CheckpointError

# Whatever reads checkpoints is imported on use, because many runs read none.
if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_parts import RunCore
    from drivetrain._format import CheckpointReader


class StartingPoint:
    """Chooses a run's folder and the checkpoint that the run starts from.

    Args:
        core: the run, whose callbacks are collected.
    """

    def __init__(self, core: RunCore) -> None:
        self._core = core
        self._path = core.request.ckpt_path
        self._searched_folders = folders_of(core.callbacks)
        self._start = RunStart()

    @classmethod
    def choose(cls, core: RunCore) -> StartingPoint:
        """Choose the run's folder and, for "last", "best" and "auto", the checkpoint to start from. Collective.

        Raises:
            ConfigurationError: the folder cannot be created. The error is raised on every rank.
            StorageError: a folder cannot be listed.
        """
        point = cls(core)
        profilers = [core.trainer.profiler] if core.profile_needs_folder else []
        callbacks = [each for each in core.callbacks if isinstance(each, WantsRunFolder) and each.wants_run_folder]
        argument = [] if point._path is None else ["ckpt_path"]
        needed_by = [*(type(user).__name__ for user in (*core.trainer.loggers, *callbacks, *profilers)), *argument]
        check_folder_agreement(core.strategy.control, needed_by)
        if needed_by:
            point._begin()
        return point

    def claim_folder_for_late_callbacks(self) -> None:
        """Choose a folder, if the run has none, for callbacks that were appended in `setup`. Collective."""
        if self._core.stage == "fit" and self._core.folder.path is None:
            self._begin()

    def _begin(self) -> None:
        from drivetrain._engine.run_start import begin

        self._start = begin(self._core)

    def open(self) -> CheckpointReader | None:
        """Open the checkpoint that the run starts from, if there is one. Collective.

        Raises:
            CheckpointError: there is no checkpoint, or training cannot resume from it.
        """
        core, path, start = self._core, self._path, self._start
        is_fit = core.stage == "fit"
        if path in CKPT_PATH_KEYWORDS:
            path = self._found_path()
        if path is None:
            if is_fit:
                core.folder.note_start(None, start)
            return None
        from drivetrain._engine.checkpoints.resumed_run import check_resumable
        from drivetrain._format import load, run_collectively

        def open_and_check() -> CheckpointReader:
            checkpoint = load(path)
            if is_fit:
                check_resumable(checkpoint, core.trainer.seed)
            return checkpoint

        opened = run_collectively(core.strategy.control, f"The checkpoint {path!r} cannot be opened", open_and_check)
        if is_fit:
            core.folder.note_start(opened.manifest.metadata, start._replace(path=path))
        return opened

    def _found_path(self) -> str | None:
        """Return the path of the checkpoint that was found for "last", "best" or "auto"."""
        from drivetrain._engine.run_location import locate
        from drivetrain._engine.run_start import find_in_folders

        core, path, is_fit = self._core, self._start.path, self._core.stage == "fit"
        folders = folders_of(core.callbacks)
        # Rank 0 chooses for all ranks, because a network file system may show the others an older state.
        added_in_setup = [folder for folder in folders if folder not in self._searched_folders]
        if path is None and added_in_setup:
            path = find_in_folders(core, added_in_setup)
        if path is None and self._path != "auto":
            raise CheckpointError(
                f"ckpt_path={self._path!r}: there is no checkpoint to {'resume from' if is_fit else 'evaluate'}.",
                f"looked in {', '.join([locate(core).runs_folder, *folders])}, for checkpoints "
                f"saved by runs of {type(core.module).__name__} with the same hyper-parameters."
                f"{self._start.skipped}",
                "pass a path, or ckpt_path='auto', which starts a new run if there is none."
                if is_fit
                else "pass a path, or ckpt_path='last' for the newest checkpoint; 'best' needs a run with "
                "Checkpoint(monitor=...).",
            )
        return path
