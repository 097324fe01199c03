"""All ranks go on, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain.errors import CheckpointError

T = TypeVar("T")


def gather_or_raise(control: ControlPlane, summary: str, value: Any, problem: Exception | None) -> list[Any]:
    """Return every rank's ``value``, unless one of them has a problem. Collective.

    Args:
        control: between the ranks.
        failing: what does not come about if one of them has.
        value: this rank's; a plain one, as for `ControlPlane.gather_objects`.
        problem: this rank's.

    Raises:
        CheckpointError: naming the rank and the cause; a rank's own is raised there as it is.
    """
    told, problems = _gather(control, value, problem)
    if not problems:
        return told
    if isinstance(problem, CheckpointError):
        raise problem
    raise _error_of_ranks(summary, problems) from problem


def run_collectively(control: ControlPlane, summary: str, work: Callable[[], T]) -> T:
    """Do ``work`` and return what it gives, once every rank has done its own. Collective.

    Args:
        control: between the ranks.
        failing: what does not come about if one of them fails.
        work: this rank's.

    Raises:
        CheckpointError: as `gather_or_raise` does.
    """
    try:
        result = work()
    except Exception as error:
        problems = _gather(control, None, error)[1]
        if isinstance(error, CheckpointError):
            raise  # as it is: raised once more by another function it would show the same frames twice
        raise _error_of_ranks(summary, problems) from error
    gather_or_raise(control, summary, None, None)
    return result


def _gather(
    control: ControlPlane, value: Any, problem: Exception | None
) -> tuple[list[Any], dict[int, tuple[str, str, str]]]:
    told = control.gather_objects((None, value) if problem is None else (_error_texts(problem), None))
    return [one for _, one in told], {rank: one for rank, (one, _) in enumerate(told) if one is not None}


def _error_of_ranks(summary: str, problems: dict[int, tuple[str, str, str]]) -> CheckpointError:
    rank, (what, why, fix) = next(iter(problems.items()))
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckpointError(f"{summary}: rank {rank}{others}: {what}", why, fix)


def _error_texts(problem: Exception) -> tuple[str, str, str]:
    if isinstance(problem, CheckpointError):
        return problem.what, problem.why, problem.fix
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, OSError):
        return text, "the storage refused.", "check the path, its permissions and the space that is left."
    return text, "", "look at the cause above; the training state is as it was."
