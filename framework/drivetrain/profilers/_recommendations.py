"""What to do next, read off the shares of a run's time."""

from __future__ import annotations

from typing import NamedTuple

from drivetrain.profilers._phase_times import Phase
from drivetrain.profilers.profiler import ProfiledRun

MOST = 3
"""Lines of advice."""

LOOPS = ("training", "validation", "test", "predict")
"""The phase that is a run's loop, of which shares are taken."""

_LOGGING = ("logging", "loggers")
_COMPUTES = ("forward", "backward", "optimizer")
_ENGINES = frozenset({*LOOPS, *_COMPUTES, "data", "transfer", "windows", "checkpoint", *_LOGGING})

SHORT_US = 20.0
"""Microseconds below which an operation is short: about what starting a kernel takes."""


class SmallOperations(NamedTuple):
    """What a trace says of short operations.

    Attributes:
        what: "kernels" of a GPU, or "operations" of the CPU.
        per_step: how many of a micro-batch.
        median_us: how long one takes, in microseconds.
        share: of the time of all, the part in kinds of which one takes less than `SHORT_US`; on a GPU, the part of the
            steps' time in which no kernel ran.
    """

    what: str
    per_step: float
    median_us: float
    share: float


class _Advice(NamedTuple):
    """A share, from which one on it is worth a line, and what follows "12%" in that line."""

    share: float
    worth: float
    text: str


def loop_of(root: Phase) -> Phase | None:
    """Return the phase that is the run's loop; None where the run did not come to it."""
    return next((root.children[name] for name in LOOPS if name in root.children), None)


def next_steps(root: Phase, run: ProfiledRun, small: SmallOperations | None = None) -> list[str]:
    """Return at most `MOST` sentences, each with the share that it comes from, the largest first."""
    loop = loop_of(root)
    whole = root.total_ns
    if loop is None or not loop.total_ns:
        return []
    of = "training" if loop.name == "training" else f"the {loop.name} loop"
    apart = ("validation",) if loop.name == "training" else ()

    def part(*names: str) -> float:
        return loop.within(names, apart) / loop.total_ns

    found = [
        _Advice(part("data"), 0.2, f"of {of} waited for data: {_read_faster(run)}"),
        _Advice(part("transfer"), 0.1, f"of {of} was transfer to the device: {_move_faster(run)}"),
        _Advice(part(*_LOGGING), 0.1, f"of {of} was logging: {_log_less(run)}"),
        _Advice(part("checkpoint"), 0.1, f"of {of} wrote checkpoints: {_SAVE_LESS}"),
        _Advice(part("windows"), 0.1, f"of {of} waited for other ranks to deal out micro-batches: {_DEAL_FASTER}"),
        _Advice(part("optimizer"), 0.4, f"of {of} was the optimizer's step: {_STEP_FASTER}"),
        *(_Advice(of_hook, 0.1, f"of {of} was {name}: {_HOOK_LESS}") for name, of_hook in _hooks(loop, apart)),
    ]
    found.append(_Advice(loop.self_ns / loop.total_ns, 0.5, f"of {of} was spent around its steps: {_STEP_LONGER}"))
    if apart:
        found.append(_Advice(loop.within(apart) / loop.total_ns, 0.4, f"of {of} was validation: {_VALIDATE_LESS}"))
    if small is not None:
        found.append(_Advice(small.share, 0.5, _fewer(small)))
    found.append(_Advice((whole - loop.total_ns) / whole, 0.7, f"of the run was not {of}: {_RUN_LONGER}"))
    advice = sorted((one for one in found if one.share >= one.worth), key=lambda one: -one.share)[:MOST]
    if not advice:
        computing = part(*_COMPUTES)
        text = f"of {of} was forward, backward and optimizer; nothing else stands out: {_compute_faster(run)}"
        advice = [_Advice(computing, 0.0, text)]
    return [f"{one.share:.0%} {one.text}" for one in advice]


_SAVE_LESS = (
    "save less often (every_n_train_steps, every_n_epochs), or while training goes on (Checkpoint(save_async=True))."
)
_DEAL_FASTER = "make the ranks' data equally fast, and give their sampler a length."
_STEP_FASTER = "use a fused optimizer (fused=True), or step less often (accumulate_grad_batches)."
_STEP_LONGER = "they are too short for what comes with each; use a larger batch."
_HOOK_LESS = "do less in it, or do it less often."
_VALIDATE_LESS = (
    "validate less often (val_check_interval, check_val_every_n_epoch) or on less data (limit_val_batches)."
)
_RUN_LONGER = "the run is short for a profile; profile more steps (max_steps, limit_train_batches)."


def _read_faster(run: ProfiledRun) -> str:
    if run.num_workers == 0:
        return "read ahead in other processes, DataLoader(num_workers=4, persistent_workers=True)."
    if run.num_workers is None:
        return "read ahead (num_workers of the loader), or do less for each sample."
    return f"num_workers={run.num_workers} does not keep up; raise it or prefetch_factor, or do less for each sample."


def _move_faster(run: ProfiledRun) -> str:
    if run.device.type == "cuda" and run.pin_memory is False:
        return "give the loader pin_memory=True, so that copies overlap with computing."
    return "send less (uint8 or half precision, converted on the device), and do less in the transfer's hooks."


def _log_less(run: ProfiledRun) -> str:
    return f"raise log_every_n_steps (now {run.log_every_n_steps}), and log fewer values."


def _compute_faster(run: ProfiledRun) -> str:
    compiled = "" if run.compiles else "compile=True, "
    return f"try {compiled}precision='bf16-mixed' or a larger batch."


def _fewer(small: SmallOperations) -> str:
    counted = f"{small.per_step:.0f} {small.what} a micro-batch, of {small.median_us:.1f} us in the median"
    if small.what == "kernels":
        what = f"of the traced steps' time no kernel ran ({counted})"
    else:
        what = f"of the time in operations went to kinds that take less than {SHORT_US:.0f} us ({counted})"
    return f"{what}: use a larger batch, compile=True, or an optimizer with fused=True."


def _hooks(loop: Phase, apart: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the share of each hook of the loop, and of each span of the user's own that is in no hook and no step."""
    found: dict[str, int] = {}
    _add_hooks(loop, apart, found)
    return [(name, time / loop.total_ns) for name, time in found.items()]


def _add_hooks(phase: Phase, apart: tuple[str, ...], found: dict[str, int]) -> None:
    for child in phase.children.values():
        if child.name in apart or child.name in ("forward", "transfer", "data"):
            continue
        if child.name in _ENGINES:
            _add_hooks(child, apart, found)
        else:
            own = child.total_ns - child.within(("checkpoint", *_LOGGING))  # which have lines of their own
            found[child.name] = found.get(child.name, 0) + own
