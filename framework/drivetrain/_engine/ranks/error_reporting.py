"""Notes that state where a run failed, and one-line output of ranks that fail because another rank failed."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drivetrain._distributed.failure import RankFailedError
from drivetrain.errors import LossSpikeError, NonFiniteError

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore

_KNOWN_FIXES = {
    "got mixed torch.Tensor and DTensor": (
        "in hooks and in compiled steps, a sharded parameter is a DTensor outside of the forward of its unit. Compute "
        "with parameter.full_tensor(), on every rank. In a step that is not compiled, sharded parameters and plain "
        "tensors may be combined, if its first call combines some: add a penalty that begins later with a factor of 0. "
        "A teacher is moved in on_train_batch_end, where all weights are DTensors (docs/averaging.md)."
    ),
    **dict.fromkeys(
        ("Inference tensors cannot be saved for backward", "inference tensor outside InferenceMode"),
        "evaluation runs in torch.inference_mode, and autograd cannot use a tensor that was kept from an evaluation (a "
        "cache, a running mean). Use Fit(inference_mode=False), or clone the tensor in training_step.",
    ),
}
"""Fixes by texts of torch's errors about sharded parameters, and about tensors from an evaluation."""


def note_where(error: BaseException, run: RunCore, trains: bool) -> None:
    """Add a note with the rank, epoch, step and batch index at which the run failed.

    Errors that already name this position (`NonFiniteError`, `LossSpikeError`, `RankFailedError`) get no note.

    Args:
        error: the error that ends the run.
        run: the run, with its loops in the state in which the error was raised.
        trains: whether the training loop exists.
    """
    if isinstance(error, NonFiniteError | LossSpikeError | RankFailedError):
        return
    progress, metrics = run.progress, run.metrics
    places = [f"rank {run.strategy.rank}"]
    if trains:
        places += [f"epoch {progress.epoch}", f"global step {progress.global_step}"]
    current = run.current
    if current.loop == "training" and metrics.batch is None:
        # The error was raised while the next batch was being read.
        places.append(f"after {progress.batch_idx} batches of the epoch")
    elif current.loop is not None:
        prefix = "" if current.loop == "training" else f"{current.loop} "
        places.append(f"{prefix}batch index {current.batch_idx}")
    if len(places) > 1 or run.strategy.world_size > 1:
        error.add_note("Where: " + ", ".join(places))


def note_known_fixes(error: BaseException) -> None:
    """Add a note with a fix to torch's errors about tensors from an evaluation, and about sharded parameters."""
    for text, fix in _KNOWN_FIXES.items():
        if isinstance(error, RuntimeError) and text in str(error):
            error.add_note(f"Fix: {fix}")


def print_in_one_line(error: BaseException, summary: str) -> None:
    """Make Python print ``summary`` and the error's notes instead of a traceback if ``error`` ends the process.

    Only the rank that failed first prints a traceback, so that the tracebacks of the other ranks do not hide it.

    `sys.excepthook` is replaced until the error is garbage-collected, so that a caller who catches and drops the error
    gets the previous hook back. A hook of the user is never replaced. docs/decisions/0024 gives the reasons.
    """
    hook = sys.excepthook
    if threading.current_thread() is not threading.main_thread() or not _is_replaceable(hook):
        return
    if not isinstance(hook, OneLineHook):
        sys.excepthook = hook = OneLineHook(hook)
    hook.mark(error, "; ".join([summary, *getattr(error, "__notes__", [])]))


class OneLineHook:
    """Replaces `sys.excepthook`, to print each error that was passed to `mark` as one line.

    Args:
        previous: the hook that prints all other errors. It is restored once no marked error is left.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self._marked_count = 0

    def mark(self, error: BaseException, line: str) -> None:
        """Attach to ``error`` the line that is printed in place of its traceback."""
        self._marked_count += 1
        attached = error.__dict__[_LINE_ATTRIBUTE] = _Line(line)
        # The finalizer is on the line, which lives as long as the error. Most exceptions do not allow weak references.
        weakref.finalize(attached, self._release).atexit = False

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        line = error.__dict__.get(_LINE_ATTRIBUTE)
        if line is None:
            self._previous(kind, error, traceback)
            return
        # print() would write the newline separately on an unbuffered stderr, and the lines of two ranks could mix.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        time.sleep(_EXIT_DELAY)

    def _release(self) -> None:
        self._marked_count -= 1
        if not self._marked_count and sys.excepthook is self:
            sys.excepthook = self._previous


class _Line(str):
    """The line to print. `str` itself does not support weak references, and this subclass does."""


_LINE_ATTRIBUTE = "__drivetrain_one_line__"

_EXIT_DELAY = 0.5
"""Seconds to wait after printing: torchrun and SLURM end all processes when the first exits, and the rank that prints
a traceback may not have finished."""


def _is_replaceable(hook: Any) -> bool:
    """Whether the hook is Python's, torch's (which adds the rank) or an `OneLineHook`, rather than the user's."""
    module = getattr(hook, "__module__", "") or ""
    return hook is sys.__excepthook__ or isinstance(hook, OneLineHook) or module.startswith("torch.distributed")
