"""Recommendations, derived from how a run's time is divided among its phases."""

from __future__ import annotations

from typing import NamedTuple

from drivetrain.profilers._phase import Phase
from drivetrain.profilers.profiler import ProfiledRun

MAX_LINES = 3
"""The maximum number of recommendations."""

LOOPS = ("training", "validation", "test", "predict")
"""The possible names of the phase that is a run's main loop."""

_LOGGING = ("logging", "loggers")
_COMPUTE = ("forward", "backward", "optimizer")
_ENGINE_PHASES = frozenset({*LOOPS, *_COMPUTE, "data", "transfer", "windows", "checkpoint", *_LOGGING})

SHORT_US = 20.0
"""Operations below this many microseconds are short, because launching a kernel takes about as long."""


class SmallOperations(NamedTuple):
    """Statistics of short operations in a trace.

    Attributes:
        kind: "kernels" of a GPU, or "operations" of the CPU.
        per_step: the number of operations per micro-batch.
        median_us: the median duration in microseconds.
        share: on a CPU, the share of operation time that is spent in operators whose median duration is below
            `SHORT_US`. On a GPU, the share of the steps' time in which no kernel ran.
    """

    kind: str
    per_step: float
    median_us: float
    share: float


class _Advice(NamedTuple):
    """A possible recommendation.

    Attributes:
        share: the share that the recommendation concerns, usually of the main loop's time.
        threshold: the smallest share at which the recommendation is reported.
        text: the text that follows the share as a percentage.
    """

    share: float
    threshold: float
    text: str


def loop_of(root: Phase) -> Phase | None:
    """Return the phase of the run's main loop; None if the run did not reach this loop."""
    return next((root.children[name] for name in LOOPS if name in root.children), None)


def next_steps(root: Phase, run: ProfiledRun, small_operations: SmallOperations | None = None) -> list[str]:
    """Return at most `MAX_LINES` recommendations, the one with the largest share first."""
    loop = loop_of(root)
    run_time = root.total_ns
    if loop is None or not loop.total_ns:
        return []
    loop_name = "training" if loop.name == "training" else f"the {loop.name} loop"
    excluded = ("validation",) if loop.name == "training" else ()

    def share_of(*names: str) -> float:
        return loop.time_in(names, excluded) / loop.total_ns

    candidates = [
        _Advice(share_of("data"), 0.2, f"of {loop_name} waited for data: {_data_advice(run)}"),
        _Advice(share_of("transfer"), 0.1, f"of {loop_name} was transfer to the device: {_transfer_advice(run)}"),
        _Advice(share_of(*_LOGGING), 0.1, f"of {loop_name} was logging: {_logging_advice(run)}"),
        _Advice(share_of("checkpoint"), 0.1, f"of {loop_name} wrote checkpoints: {_CHECKPOINT_ADVICE}"),
        _Advice(
            share_of("windows"),
            0.1,
            f"of {loop_name} waited for other ranks to agree on micro-batches: {_WINDOWS_ADVICE}",
        ),
        _Advice(share_of("optimizer"), 0.4, f"of {loop_name} was the optimizer's step: {_OPTIMIZER_ADVICE}"),
        *(_Advice(share, 0.1, f"of {loop_name} was {name}: {_HOOK_ADVICE}") for name, share in _hooks(loop, excluded)),
    ]
    candidates.append(
        _Advice(
            loop.self_ns / loop.total_ns,
            0.5,
            f"of {loop_name} was spent outside of the phases of its steps: {_OVERHEAD_ADVICE}",
        )
    )
    if excluded:
        candidates.append(
            _Advice(loop.time_in(excluded) / loop.total_ns, 0.4, f"of {loop_name} was validation: {_VALIDATION_ADVICE}")
        )
    if small_operations is not None:
        candidates.append(_Advice(small_operations.share, 0.5, _small_operations_advice(small_operations)))
    candidates.append(
        _Advice((run_time - loop.total_ns) / run_time, 0.7, f"of the run was not {loop_name}: {_SHORT_RUN_ADVICE}")
    )
    reported = sorted(
        (advice for advice in candidates if advice.share >= advice.threshold), key=lambda advice: -advice.share
    )[:MAX_LINES]
    if not reported:
        computing = share_of(*_COMPUTE)
        text = f"of {loop_name} was forward, backward and optimizer; nothing else stands out: {_compute_advice(run)}"
        reported = [_Advice(computing, 0.0, text)]
    return [f"{advice.share:.0%} {advice.text}" for advice in reported]


_CHECKPOINT_ADVICE = (
    "save less often (every_n_train_steps, every_n_epochs), or while training continues (Checkpoint(save_async=True))."
)
_WINDOWS_ADVICE = "make the ranks' data equally fast, and give their sampler a length."
_OPTIMIZER_ADVICE = "use a fused optimizer (fused=True), or step less often (accumulate_grad_batches)."
_OVERHEAD_ADVICE = "the steps are too short for the fixed overhead of a step; use a larger batch."
_HOOK_ADVICE = "do less work there, or do it less often."
_VALIDATION_ADVICE = (
    "validate less often (val_check_interval, check_val_every_n_epoch) or on less data (limit_val_batches)."
)
_SHORT_RUN_ADVICE = "the run is short for a profile; profile more steps (max_steps, limit_train_batches)."


def _data_advice(run: ProfiledRun) -> str:
    if run.num_workers == 0:
        return "read in worker processes, DataLoader(num_workers=4, persistent_workers=True)."
    if run.num_workers is None:
        return "read in worker processes (num_workers of the loader), or do less for each sample."
    return f"num_workers={run.num_workers} does not keep up; raise it or prefetch_factor, or do less for each sample."


def _transfer_advice(run: ProfiledRun) -> str:
    if run.device.type == "cuda" and run.pin_memory is False:
        return "set pin_memory=True in the loader, so that copies overlap with computation."
    return "transfer less data (uint8 or half precision, converted on the device), and do less in the transfer hooks."


def _logging_advice(run: ProfiledRun) -> str:
    return f"raise log_every_n_steps (now {run.log_every_n_steps}), and log fewer values."


def _compute_advice(run: ProfiledRun) -> str:
    compiled = "" if run.compiles else "compile=True, "
    return f"try {compiled}precision='bf16-mixed' or a larger batch."


def _small_operations_advice(small_operations: SmallOperations) -> str:
    counted = f"{small_operations.per_step:.0f} {small_operations.kind} per micro-batch, "
    counted += f"median {small_operations.median_us:.1f} us"
    if small_operations.kind == "kernels":
        description = f"of the traced steps' time no kernel ran ({counted})"
    else:
        description = f"of the time in operations was spent in operations shorter than {SHORT_US:.0f} us ({counted})"
    return f"{description}: use a larger batch, compile=True, or an optimizer with fused=True."


def _hooks(loop: Phase, excluded: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the share of each hook of the loop, and of each of the user's phases outside of hooks and steps."""
    candidates: dict[str, int] = {}
    _add_hooks(loop, excluded, candidates)
    return [(name, time / loop.total_ns) for name, time in candidates.items()]


def _add_hooks(phase: Phase, excluded: tuple[str, ...], candidates: dict[str, int]) -> None:
    for child in phase.children.values():
        if child.name in excluded or child.name in ("forward", "transfer", "data"):
            continue
        if child.name in _ENGINE_PHASES:
            _add_hooks(child, excluded, candidates)
        else:
            time = child.total_ns - child.time_in(
                ("checkpoint", *_LOGGING)
            )  # Checkpoints and logging are reported separately.
            candidates[child.name] = candidates.get(child.name, 0) + time
