"""Makes all ranks raise when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain.errors import CheckpointError

T = TypeVar("T")


def gather_or_raise(control: ControlPlane, summary: str, value: Any, problem: Exception | None) -> list[Any]:
    """Return every rank's ``value``, or raise on all ranks if any rank has a problem. Collective.

    Args:
        control: the control plane.
        summary: what failed as a whole, with which the error message begins.
        value: this rank's value, of a type that `ControlPlane.gather_objects` supports.
        problem: the error on this rank; None if there was none.

    Raises:
        CheckpointError: a rank failed. The error names the rank and the cause. If ``problem`` is a `CheckpointError`,
            that error is raised instead.
    """
    answers = control.gather_objects((None, value) if problem is None else (_error_texts(problem), None))
    problems = {rank: texts for rank, (texts, _) in enumerate(answers) if texts is not None}
    if not problems:
        return [rank_value for _, rank_value in answers]
    if isinstance(problem, CheckpointError):
        raise problem
    rank, (what, why, fix) = next(iter(problems.items()))
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise CheckpointError(f"{summary}: rank {rank}{others}: {what}", why, fix) from problem


def run_collectively(control: ControlPlane, summary: str, work: Callable[[], T]) -> T:
    """Run ``work`` on this rank and return its result once every rank has succeeded. Collective.

    Args:
        control: the control plane.
        summary: what failed as a whole, with which the error message begins.
        work: the function to run on this rank.

    Raises:
        CheckpointError: see `gather_or_raise`.
    """
    try:
        result = work()
    except Exception as error:
        gather_or_raise(control, summary, None, error)
        raise
    gather_or_raise(control, summary, None, None)
    return result


def _error_texts(problem: Exception) -> tuple[str, str, str]:
    if isinstance(problem, CheckpointError):
        return problem.what, problem.why, problem.fix
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, OSError):
        return text, "the storage failed, or denied access.", "check the path, its permissions and the free space."
    return text, "", "see the cause above; the training state is unchanged."
