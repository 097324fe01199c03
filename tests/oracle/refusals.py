"""Which programs may be refused, and with which message: any other refusal is a finding."""

from __future__ import annotations

from collections.abc import Callable

from oracle.program import Program

Permit = tuple[str, Callable[[Program], bool]]
"""A part of the error message, and whether a program may be refused with it."""

PERMITTED: tuple[Permit, ...] = (
    ("val_check_interval=", lambda program: _interval_is_too_long(program)),
    ("with a training loader of unknown length", lambda program: program.data.length_error is None),
    ("The states of PearsonCorrCoef", lambda program: _merges_correlations(program)),
    ("ran out after", lambda program: any(plan.kind == "linear" for plan in program.schedulers)),
    ("FSDP has the gradients of a window only at its end", lambda program: _edits_after_backward(program)),
    ("ZeRO has the whole gradients only at the end of a window", lambda program: _edits_after_backward(program)),
    ("is partitioned by DeepSpeedStrategy(stage=3)", lambda program: _writes_partitioned_weights(program)),
    ("find_unused_parameters", lambda program: program.net.unused and _runs_plain_ddp(program)),
)


def _interval_is_too_long(program: Program) -> bool:
    validation = program.validation
    return validation is not None and isinstance(validation.interval, int)


def _edits_after_backward(program: Program) -> bool:
    writes = program.writes
    return writes is not None and writes.of_gradients and writes.hook == "on_after_backward" and program.accumulate > 1


def _writes_partitioned_weights(program: Program) -> bool:
    writes, stage_3 = program.writes, "deepspeed_stage_3"
    resumed = program.resume is not None and program.resume.strategy == stage_3
    return writes is not None and not writes.of_gradients and (resumed or program.strategy == stage_3)


def _runs_plain_ddp(program: Program) -> bool:
    return "ddp" in (program.strategy, program.resume.strategy if program.resume is not None else "")


def permitted(program: Program, text: str) -> bool:
    return any(words in text and may(program) for words, may in PERMITTED)


def _merges_correlations(program: Program) -> bool:
    """Return whether metric states that torchmetrics cannot merge come together from several ranks."""
    resume = program.resume
    return resume is not None and resume.ranks < program.ranks and any(log.what == "pearson" for log in program.logs)
