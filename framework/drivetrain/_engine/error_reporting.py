"""What the user reads of a failure: where the run was, and one line from the ranks that only follow another's."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drivetrain._distributed.failure import RankFailedError
from drivetrain.errors import LossSpikeError, NonFiniteError
from drivetrain.launchers import current_world

if TYPE_CHECKING:
    from drivetrain._engine.session_state import SessionState

_INFERENCE = ("Inference tensors cannot be saved for backward", "inference tensor outside InferenceMode")
"""What torch says of tensors made in inference mode that are used where gradients are wanted."""


def note_where(error: BaseException, session: SessionState) -> None:
    """Add rank, epoch, step and batch index to what a run failed with, unless it says so itself.

    Args:
        error: what is going to be told.
        session: the run, whose loops stand where it was raised.
    """
    if isinstance(error, NonFiniteError | LossSpikeError | RankFailedError):
        return
    progress, metrics = session.progress, session.metrics
    places = [f"rank {session.strategy.rank}"]
    if session.loop is not None:
        places += [f"epoch {progress.epoch}", f"global step {progress.global_step}"]
    position = session.position
    if position.loop == "training" and metrics.batch is None:
        places.append(f"after {progress.batch_idx} batches of the epoch")  # reading on, between two of them
    elif position.loop is not None:
        kind = "" if position.loop == "training" else f"{position.loop} "
        places.append(f"{kind}batch index {position.batch_idx}")
    if len(places) > 1 or session.strategy.world_size > 1:
        error.add_note("Where: " + ", ".join(places))


def note_inference_tensors(error: BaseException) -> None:
    """Add the way out where a training step met a tensor that an evaluation, such as the sanity check, has left."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _INFERENCE):
        error.add_note(
            "Fix: evaluation runs in torch.inference_mode, and a tensor that was kept from it (a cache, a running "
            "mean) cannot train. Use Fit(inference_mode=False), or keep a .clone() made in training_step."
        )


@contextmanager
def told_by_its_own_rank(rank: int | None = None) -> Iterator[None]:
    """Around what this rank does in a run of several processes, each of which prints what it ends with.

    A `RankFailedError` that comes out of it, and that nobody catches, is then printed as one line.

    Args:
        rank: this one; None is its rank among the processes that we started.
    """
    try:
        yield
    except RankFailedError as error:
        world = current_world() if rank is None else None
        rank = world.placement.rank if world is not None else rank or 0
        print_in_a_line(error, f"Rank {rank} ends because of another: {error.failure.one_line_summary()}")
        raise


def print_in_a_line(error: BaseException, line: str) -> None:
    """Let the process print ``line``, and the error's notes, where ``error`` ends it."""
    if threading.current_thread() is threading.main_thread() and _belongs_to_nobody(sys.excepthook):
        sys.excepthook = OneLine(error, "; ".join([line, *getattr(error, "__notes__", [])]))


class OneLine:
    """Stands in ``sys.excepthook`` for as long as one error lives, and prints a line in its place.

    Args:
        error: which. It gets an attribute, by which it is known: most of Python's own take no weak reference.
        line: what is printed where it ends the process.
    """

    def __init__(self, error: BaseException, line: str) -> None:
        before = sys.excepthook
        self._before: Callable[..., Any] = before._before if isinstance(before, OneLine) else before
        self._line = line
        mark = error.__dict__[_MARK] = _Mark()
        self._mark = weakref.ref(mark, self._put_back)

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        mark = error.__dict__.get(_MARK)
        if mark is not None and mark is self._mark():
            # In one piece: where nothing is buffered, print() lets another rank's words in before the end of the line.
            sys.stderr.write(f"{self._line}\n")
            sys.stderr.flush()
            time.sleep(_WHILE_ANOTHER_TELLS)
        else:
            self._before(kind, error, traceback)

    def _put_back(self, _: object) -> None:
        if sys.excepthook is self:
            sys.excepthook = self._before


class _Mark:
    """Lives as long as the error that has it."""


_MARK = "__drivetrain_one_line__"

_WHILE_ANOTHER_TELLS = 0.5
"""Seconds: torchrun and SLURM end all processes with the first that ends, and one is to print its traceback yet."""


def _belongs_to_nobody(hook: Any) -> bool:
    """Whether what prints errors is Python's, torch's (which adds the rank) or ours, and no choice of the user's."""
    module = getattr(hook, "__module__", "") or ""
    return hook is sys.__excepthook__ or isinstance(hook, OneLine) or module.startswith("torch.distributed")
