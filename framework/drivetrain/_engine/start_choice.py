"""Decides on rank 0 how a run begins that may go on with an earlier one, once the disk was searched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._format import CheckpointReader, load
from drivetrain._runs import liveness
from drivetrain._runs.checkpoint_folders import is_checkpoint_at
from drivetrain._runs.retention import KeptCheckpoint
from drivetrain._runs.run_folder import CKPT_PATH_KEYWORDS
from drivetrain._runs.start_decision import StartDecision, decide
from drivetrain._runs.start_search import StartSearch
from drivetrain._storage.paths import child

logger = logging.getLogger("drivetrain")


def decide_finally(search: StartSearch, control: ControlPlane) -> StartDecision:
    """Decide until the decision holds: its checkpoint can be read, and no run that it takes for dead is under way.

    Args:
        search: what was found on the disk.
        control: connects the ranks, which wait for the decision of rank 0.

    Raises:
        StorageError: the storage still fails after the last retry.
    """
    request, found = search.request, search.found
    while True:
        decision = decide(found, request)
        found_path = decision.path if request.ckpt_path in CKPT_PATH_KEYWORDS else None
        if found_path is not None:
            from drivetrain._engine.checkpoints.resumed_run import check_saved_state  # only runs that resume need it

            if search.drop_if_unreadable(found_path, check_saved_state):
                continue
        run = decision.unsure_of
        if run is None:
            return _with_best(decision, search) if found_path and request.ckpt_path == "best" else decision
        logger.warning(
            "%s may be under way on another machine. This run watches the record of that run for %.0f s.",
            run.name,
            liveness.WATCH_SECONDS,
        )
        # Each look ends with a broadcast, before the other ranks have waited for longer than the strategy permits.
        found.alive[run.folder] = liveness.watch(run, search.read_record, partial(control.broadcast_object, None))


def _with_best(decision: StartDecision, search: StartSearch) -> StartDecision:
    """Return a decision for the newest checkpoint with the best one by a monitored value, which the newest one names.

    Without a best one, a fit starts from the newest, and an evaluation from none.
    """
    assert decision.path is not None
    request, run = search.request, search.found.runs.get(decision.parent)
    path, problem = _best_checkpoint(load(decision.path), [] if request.is_fit else request.checkpoint_folders)
    if path is not None or request.is_fit:
        return decision._replace(path=path or decision.path)
    name = repr(decision.path) if run is None else run.name
    return decision._replace(path=None, skipped=(*decision.skipped, f"{name} ({problem})"))


def _best_checkpoint(newest: CheckpointReader, folders: Sequence[str]) -> tuple[str | None, str]:
    """Return the path of the best checkpoint by a monitored value, or None and the reason why there is none.

    Args:
        newest: the newest checkpoint of a run. The state of its callbacks names the best checkpoint.
        folders: other folders in which the best checkpoint may be.
    """
    problem = "none of its Checkpoint callbacks has saved by a monitored value"
    with newest.reading("callbacks"):
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
