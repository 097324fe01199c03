"""Decides which checkpoint a run starts from and which folder it writes to, from what is on the disk and was asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drivetrain._format import CheckpointReader
from drivetrain._runs.directory import split_folder
from drivetrain._runs.identity import Identity
from drivetrain._runs.liveness import is_alive
from drivetrain._runs.process import Job
from drivetrain._runs.record import FINISHED, Record
from drivetrain._runs.run_folder import CKPT_PATH_KEYWORDS


class StartRequest(NamedTuple):
    """What was asked of a new run.

    Attributes:
        ckpt_path: a path or URL, one of `CKPT_PATH_KEYWORDS`, or None for a fresh start.
        is_fit: whether the run trains. An evaluation may read from runs that are under way.
        identity: the experiment of the run.
        jobs: the jobs that the process of the run belongs to.
        runs_folder: the folder that contains the folders of all runs of this name.
        checkpoint_folders: folders in which the user lets checkpoints be written.
        needs_folder: whether the run writes files.
        version: the name of the folder that the user chose; None for any.
        last: the name of the folder that this `Fit`, or the first logger on its own, wrote to before; None if there is
            none.
        joins_last: whether ``last`` is the folder of the last run of this `Fit`, which its evaluations write to.
    """

    ckpt_path: str | None
    is_fit: bool
    identity: Identity
    jobs: Sequence[Job]
    runs_folder: str
    checkpoint_folders: Sequence[str] = ()
    needs_folder: bool = True
    version: str | None = None
    last: str | None = None
    joins_last: bool = False


@dataclass(slots=True)
class Found:
    """What is on the disk when a run begins.

    Attributes:
        runs: the runs of this experiment, by id.
        checkpoints: the checkpoints of this experiment that a run can resume from. If ``ckpt_path`` is a path, those of
            the same run.
        given: the checkpoint that ``ckpt_path`` names, if that is the path of one.
        owner: the run that had the folder `StartRequest.version` or `StartRequest.last` before.
        skipped: the runs and checkpoints that were left out, each with the reason.
        alive: whether a run is under way, by its folder, where that is known from watching its heartbeat.
    """

    runs: dict[str, Record] = field(default_factory=dict)
    checkpoints: list[CheckpointReader] = field(default_factory=list)
    given: CheckpointReader | None = None
    owner: Record | None = None
    skipped: list[str] = field(default_factory=list)
    alive: dict[str, bool] = field(default_factory=dict)

    def is_alive(self, run: Record, request: StartRequest) -> bool | None:
        """Return whether a run is under way; None if only its heartbeat can show it."""
        return self.alive[run.folder] if run.folder in self.alive else is_alive(run, request.jobs)


class StartDecision(NamedTuple):
    """How a run begins.

    Attributes:
        path: the checkpoint that the run starts from; None for a fresh start.
        resumes: the run in whose folder the run goes on; None for a folder of its own.
        version: the name of the run's folder; None for the next free one.
        replaces: another run that had this folder before, whose record is kept under another name.
        adds_to: whether an evaluation writes into the folder ``version`` of an earlier run, and leaves its record.
        parent: the id of the run that wrote the checkpoint; "" if unknown.
        skipped: the runs that were passed over, each with the reason.
        unsure_of: a run that is taken for dead here, but may be under way on another machine.
        refusal: the what, why and fix of an error that prevents the run.
    """

    path: str | None = None
    resumes: Record | None = None
    version: str | None = None
    replaces: Record | None = None
    adds_to: bool = False
    parent: str = ""
    skipped: tuple[str, ...] = ()
    unsure_of: Record | None = None
    refusal: tuple[str, str, str] | None = None


def decide(found: Found, request: StartRequest) -> StartDecision:
    """Return how a run begins. Nothing is read or written.

    The decision is not final if it is `StartDecision.unsure_of` a run: watch that run, note in `Found.alive` whether it
    is under way, and decide again.
    """
    decision = _choose_checkpoint(found, request)
    run = decision.resumes
    if run is not None and request.is_fit and found.is_alive(run, request) is None:
        decision = decision._replace(unsure_of=run)
    if run is None or not request.is_fit or request.ckpt_path == "best" or not _is_in_place(run, request):
        return _choose_folder(decision._replace(resumes=None), found, request)
    return decision._replace(version=run.name)


def run_id_of(checkpoint: CheckpointReader) -> str:
    """Return the id of the run that wrote a checkpoint; "" if unknown."""
    return checkpoint.manifest.metadata.run.get("id", "")


# The checkpoint, and the run that wrote it


def _choose_checkpoint(found: Found, request: StartRequest) -> StartDecision:
    if request.ckpt_path in CKPT_PATH_KEYWORDS:
        return _newest_of_experiment(found, request)
    if found.given is None:
        return StartDecision(request.ckpt_path)
    run_id = run_id_of(found.given)
    run, skipped = found.runs.get(run_id), found.skipped
    if run is not None and found.is_alive(run, request):
        skipped = [_describe_alive(run), *skipped]
        run = None
    newest = _newest_of(found.checkpoints)
    if newest is None or newest.manifest.identifier != found.given.manifest.identifier:
        run = None  # later checkpoints of that run stay in its folder, and this run gets another
    return StartDecision(request.ckpt_path, run, parent=run_id, skipped=tuple(skipped))


def _newest_of_experiment(found: Found, request: StartRequest) -> StartDecision:
    """Return the newest checkpoint and its run. Those of an earlier start of the same job come first."""
    runs = sorted(found.runs.values(), key=lambda run: str(run.document.get("started")), reverse=True)
    alive = [run for run in runs if request.is_fit and found.is_alive(run, request)]
    dead = [run for run in runs if run not in alive]
    skipped = (*map(_describe_alive, reversed(alive)), *found.skipped)
    excluded = {run.id for run in alive}
    checkpoints = [checkpoint for checkpoint in found.checkpoints if run_id_of(checkpoint) not in excluded]
    of_this_job = [run for run in dead if any(job.is_same(other) for job in request.jobs for other in run.jobs)]
    job_ids = {run.id for run in of_this_job}
    newest = _newest_of(checkpoint for checkpoint in checkpoints if run_id_of(checkpoint) in job_ids)
    if newest is None and request.is_fit:
        unfinished = next((run for run in of_this_job if run.status != FINISHED), None)
        if unfinished is not None:  # the job was stopped before its first save
            return StartDecision(None, unfinished, skipped=skipped)
    newest = newest or _newest_of(checkpoints)
    if newest is None:
        return StartDecision(skipped=skipped)
    run_id = run_id_of(newest)
    return StartDecision(newest.path, found.runs.get(run_id), parent=run_id, skipped=skipped)


def _newest_of(checkpoints: Iterable[CheckpointReader]) -> CheckpointReader | None:
    """Return the newest of some checkpoints; None if there are none.

    A checkpoint is newer than its ancestors in the lineage, regardless of their timestamps; between unrelated
    checkpoints, the checkpoint with the later timestamp is newer.
    """
    checkpoints = list(checkpoints)
    without_descendants = [
        checkpoint for checkpoint in checkpoints if not any(_descends_from(other, checkpoint) for other in checkpoints)
    ]
    return max(without_descendants, key=lambda each: (each.manifest.written, each.path), default=None)


def _descends_from(checkpoint: CheckpointReader, other: CheckpointReader) -> bool:
    return checkpoint.manifest.metadata.descends_from(other.manifest.metadata)


def _is_in_place(run: Record, request: StartRequest) -> bool:
    """Return whether a run's folder is one that the new run may have: the user may have chosen another."""
    parent, name = split_folder(run.folder)
    return request.needs_folder and parent == request.runs_folder.rstrip("/") and request.version in (None, name)


def _describe_alive(run: Record) -> str:
    process = _describe_process(run)
    return f"{run.name} (it is running{process and f', {process}'})"


def _describe_process(run: Record) -> str:
    return "" if run.process is None else f"process {run.process.pid} on {run.process.host}"


# The folder


def _choose_folder(decision: StartDecision, found: Found, request: StartRequest) -> StartDecision:
    """Return the decision with the folder of a run that does not go on in that of another."""
    owner = found.owner
    if not request.is_fit and owner is not None and (request.joins_last or (request.version and owner.is_training)):
        return decision._replace(version=owner.name, adds_to=True)
    if request.version is None:
        # A folder without a record, or with that of an evaluation, has no run yet.
        is_free = owner is None or (request.joins_last and not owner.is_training)
        return decision._replace(version=request.last, replaces=owner) if is_free else decision
    decision = decision._replace(version=request.version, replaces=owner)
    alive = False if owner is None else found.is_alive(owner, request)
    if owner is not None and alive:
        process = _describe_process(owner)
        refusal = (
            f"The folder {owner.folder!r} belongs to a run that is under way{process and f' ({process})'}.",
            "two runs would write to the same log files.",
            "wait for that run to end; or give this run's logger another version, or no version.",
        )
        return decision._replace(refusal=refusal)
    return decision._replace(unsure_of=owner) if alive is None and request.is_fit else decision
