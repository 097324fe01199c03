"""Finds the differences between actual and expected results."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from oracle.outcome import Evaluated, Outcome
from oracle.program import Program

DRIVETRAIN_ERRORS = ("ConfigurationError", "CheckpointError", "DistributedError", "NonFiniteError", "DrivetrainError")
"""Errors of drivetrain's own, whose messages say what to do."""

TOLERANCES = {
    "32-true": 2e-5,
    "64-true": 1e-11,
    "bf16-mixed": 2e-3,
    "16-mixed": 1e-3,
    "bf16-true": 4e-2,
    "16-true": 5e-3,
}
"""Largest absolute difference of weights from the loop's, by precision: what another order of sums explains."""


def differences(
    program: Program, expected: Outcome, ranks: list[Outcome], resumed: bool = False, tolerance: float | None = None
) -> list[str]:
    """Return one phrase for every difference between the interpreter's results and those of each process of the engine.

    ``ranks`` may be of the run that resumed. The absolute tolerance of weights is by default that of the precision.
    """
    errors = {one.error for one in ranks}
    if expected.refused:
        return judge_refusal_by_name(program, ranks)
    if errors - {""}:
        return refused(program, expected, ranks)
    if expected.error:
        return [f"{expected.error} was swallowed"]
    found: list[str] = []
    first, tolerance = ranks[0], TOLERANCES[program.precision] if tolerance is None else tolerance
    for rank, outcome in enumerate(ranks):
        found += [f"rank {rank}: {what}" for what in tensor_differences(expected.weights, outcome.weights, tolerance)]
    if first.counts != expected.counts and (not program.stop or program.stop.how == "max_steps"):
        found.append(f"counts: {first.counts} for {expected.counts}")
    if program.launcher:  # a launched run returns nothing else to the caller
        return found + metric_differences(expected, first, tolerance)
    found += [f"rank {rank} has other weights than rank 0" for rank in ranks_apart(ranks)]
    strategy = program.resume.strategy if resumed and program.resume is not None else program.strategy
    if not strategy.startswith("deepspeed"):  # whose optimizer holds flat partitions, under names of its own
        found += state_differences(expected, first, tolerance)
    found += rate_differences(expected, first, resumed)
    found += norm_differences(expected, first, tolerance)
    found += order_differences(program, expected, ranks, resumed)
    found += logged(program, expected, first, tolerance, resumed)
    return found


def refused(program: Program, expected: Outcome, ranks: list[Outcome]) -> list[str]:
    """Judge a run that raised: the error is the program's own, or a permitted refusal before any step differs."""
    kinds = {one.error for one in ranks}
    failed = next(one for one in ranks if one.error)
    if len(kinds) > 1 and "RankFailedError" not in kinds:
        return [f"some ranks raised {sorted(kinds)}: {failed.text[:300]}"]
    if not failed.error == expected.error == "Planned":
        if failed.error not in DRIVETRAIN_ERRORS:
            return [f"raised {failed.error}: {failed.text[:300]}"]
        too_early = "ran out after" in failed.text and expected.error != failed.error
        if too_early or not permitted(program, failed.text):
            return [f"refused: {failed.text[:300]}"]
    return same_until_refused(program, expected, ranks)


def permitted(program: Program, text: str) -> bool:
    """Return whether the program may be refused with this message: any other refusal is a finding."""
    validation, writes, resume = program.validation, program.writes, program.resume
    strategies = {program.strategy, resume.strategy if resume is not None else ""}
    edits = writes is not None and writes.of_gradients and writes.hook == "on_after_backward" and program.accumulate > 1
    correlates = any(log.what == "pearson" for log in program.logs)  # torchmetrics cannot merge these states
    may_be_refused = {
        "val_check_interval=": validation is not None and isinstance(validation.interval, int),
        "with a training loader of unknown length": program.data.length_error is None,
        "The states of PearsonCorrCoef": resume is not None and resume.ranks < program.ranks and correlates,
        "ran out after": any(plan.kind == "linear" for plan in program.schedulers),
        "FSDP has the gradients of a window only at its end": edits,
        "ZeRO has the whole gradients only at the end of a window": edits,
        "is partitioned by DeepSpeedStrategy(stage=3)": (
            writes is not None and not writes.of_gradients and "deepspeed_stage_3" in strategies
        ),
        "find_unused_parameters": program.net.unused and "ddp" in strategies,
    }
    return any(words in text and may for words, may in may_be_refused.items())


NAMES = {"groups": "group", "members": "weight", "amsgrad": "amsgrad", "class": "AdamW"}
"""What an error that refuses another optimizer says, by what has changed."""


def judge_refusal_by_name(program: Program, ranks: list[Outcome]) -> list[str]:
    """Judge a resume that must be refused because of its optimizer: the error names what differs, and the consent."""
    assert program.resume is not None
    changed = program.resume.changed
    for outcome in ranks:
        if outcome.error != "ConfigurationError":
            return [f"other {changed} of an optimizer: {outcome.error or 'not refused'} {outcome.text[:300]}"]
        for word in (NAMES[changed], "allow="):
            if word not in outcome.text:
                return [f"other {changed} of an optimizer: the error does not say {word!r}: {outcome.text[:300]}"]
    return []


def evaluation_differences(program: Program, expected: Evaluated, ranks: list[Evaluated]) -> list[str]:
    tolerance = TOLERANCES[program.precision]
    found = []
    for rank, held in enumerate(ranks):
        if held.refused != expected.refused:
            found.append(f"rank {rank}: {held.text[:300] or 'it was not refused'}")
        elif held.weights:  # which may have another dtype where they are only loaded
            cast = {name: value.to(expected.weights[name].dtype) for name, value in held.weights.items()}
            apart = tensor_differences(expected.weights, cast, max(tolerance, 1e-6))
            found += [f"rank {rank}: {what}" for what in apart]
        if not math.isnan(held.loss) and not same_number("score", expected.loss, held.loss, tolerance):
            found.append(f"rank {rank}: the loss is {held.loss!r} for {expected.loss!r}")
    return found


def same_until_refused(program: Program, expected: Outcome, ranks: list[Outcome]) -> list[str]:
    """Return whether no step differs before the end of the run."""
    found = []
    for rank, outcome in enumerate(ranks):
        for at, ((steps, held), (must, wanted)) in enumerate(zip(outcome.steps, expected.steps, strict=False)):
            if steps != must or (len(held) and differs(wanted, held, TOLERANCES[program.precision])):
                found.append(f"rank {rank}: micro-batch {at} went wrong before the run was refused")
                break
    return found


def tensor_differences(expected: dict[str, Tensor], held: dict[str, Tensor], tolerance: float) -> list[str]:
    found = []
    if set(expected) != set(held):
        return [f"{sorted(set(expected) ^ set(held))} on one side only"]
    for name, wanted in expected.items():
        if held[name].dtype != wanted.dtype:
            found.append(f"{name} is {held[name].dtype} and not {wanted.dtype}")
        elif differs(wanted, held[name], tolerance):
            found.append(f"{name} is {distance(wanted, held[name]):.3g} off")
    return found


def by_key(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key} of {name}": value for name, state in states.items() for key, value in state.items()}


def state_differences(expected: Outcome, outcome: Outcome, tolerance: float) -> list[str]:
    found = []
    for number, (wanted, held) in enumerate(zip(expected.states, outcome.states, strict=False)):
        apart = tensor_differences(by_key(wanted), by_key(held), 10 * tolerance)
        found += [f"optimizer {number}: {what}" for what in apart]
    for number, (plan, state) in enumerate(zip(expected.schedulers, outcome.schedulers, strict=False)):
        if plan["steps"] != state["steps"] or not close(plan["rates"], state["rates"]):
            found.append(f"scheduler {number}: {state} for {plan}")
    if len(expected.schedulers) != len(outcome.schedulers) or len(expected.states) != len(outcome.states):
        found.append("another number of optimizers or schedulers")
    return found


def ranks_apart(ranks: list[Outcome]) -> list[int]:
    """Return the ranks whose weights are not, bit for bit, those of rank 0."""
    apart = []
    for rank, outcome in enumerate(ranks):
        pairs = [(value, outcome.weights[name]) for name, value in ranks[0].weights.items()]
        if any(not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs):
            apart.append(rank)
    return apart


def norm_differences(expected: Outcome, outcome: Outcome, tolerance: float) -> list[str]:
    """Compare gradient norms and loss scales, of which a resumed run has the last ones."""
    found = []
    for what, wanted, held in (
        ("gradient norm", expected.norms, outcome.norms),
        ("loss scale", expected.scales, outcome.scales),
    ):
        for at, (one, other) in enumerate(zip(reversed(wanted), reversed(held), strict=False)):
            if math.isnan(other) and at >= len(held) - 1:  # no step yet
                continue
            if math.isfinite(one) != math.isfinite(other) or (
                math.isfinite(one) and not same_number(what, one, other, tolerance)
            ):
                found.append(f"{what} {at} micro-batches before the end: {other!r} for {one!r}")
    return found


def rate_differences(expected: Outcome, outcome: Outcome, resumed: bool) -> list[str]:
    wanted = expected.rates[expected.saved_rates :] if resumed else expected.rates
    if len(wanted) == len(outcome.rates) and all(map(close, wanted, outcome.rates)):
        return []
    return [f"learning rates: {outcome.rates} for {wanted}"]


def order_differences(program: Program, expected: Outcome, ranks: list[Outcome], resumed: bool) -> list[str]:
    found = []
    after = expected.saved_after if resumed else 0
    for rank, outcome in enumerate(ranks):
        data_rank = rank // program.tensor_parallel
        wanted = [(epoch, batches[data_rank]) for epoch, batches in expected.samples_of_ranks[after:]]
        if outcome.samples != wanted:
            found.append(f"samples of rank {rank}: {outcome.samples} for {wanted}")
    hooks = expected.hooks
    if resumed:
        hooks = ["on_train_start", *expected.hooks[expected.saved_hooks :]]
    held = ranks[0].hooks
    if any(one.evaluates_again for one in program.optimizers):
        # How often a loss is re-evaluated is up to the optimizer.
        held, hooks = ([one for one in each if "backward" not in one] for each in (held, hooks))
    if held != hooks:
        differ = (at for at, (one, other) in enumerate(zip(held, hooks, strict=False)) if one != other)
        at = next(differ, min(len(hooks), len(held)))
        found.append(f"hooks from {at} on: {held[at : at + 4]} for {hooks[at : at + 4]}")
    return found


def logged(program: Program, expected: Outcome, outcome: Outcome, tolerance: float, resumed: bool) -> list[str]:
    found = []
    wanted = merged(expected.flushes[expected.saved_flushes :] if resumed else expected.flushes)
    held = merged(outcome.flushes)
    rows, rows_held = (Counter((step, key) for step, key, _ in each) for each in (wanted, held))
    if rows != rows_held:
        found.append(f"loggers: {dict(rows - rows_held)} is missing and {dict(rows_held - rows)} is too much")
    else:
        for (step, key, value), (_, _, other) in zip(wanted, held, strict=True):
            if not same_number(key, value, other, tolerance):
                found.append(f"loggers: {key} at step {step} is {other!r} for {value!r}")
    return found + metric_differences(expected, outcome, tolerance)


def metric_differences(expected: Outcome, outcome: Outcome, tolerance: float) -> list[str]:
    found = []
    for key, value in expected.metrics.items():
        if key not in outcome.metrics:
            found.append(f"callback_metrics has no {key}")
        elif not same_number(key, value, outcome.metrics[key], tolerance):
            found.append(f"callback_metrics: {key} is {outcome.metrics[key]!r} for {value!r}")
    return found


def merged(flushes: list[tuple[int, dict[str, float]]]) -> list[tuple[int, str, float]]:
    """Return every value with its step, regardless of how they were split over calls."""
    return sorted(
        ((step, key, value) for step, values in flushes for key, value in values.items() if key != "epoch"),
        key=lambda one: one[:2],
    )


def same_number(key: str, value: float, other: float, tolerance: float) -> bool:
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) and math.isnan(other)
    if key.startswith("large"):
        return abs(value - other) <= 1e-9 * abs(value)
    return abs(value - other) <= max(tolerance, 1e-6) * (10 + 10 * abs(value))


def differs(wanted: Tensor, held: Tensor, tolerance: float) -> bool:
    if wanted.shape != held.shape:
        return True
    return not torch.allclose(wanted.double(), held.double(), rtol=10 * tolerance, atol=tolerance, equal_nan=True)


def distance(wanted: Tensor, held: Tensor) -> float:
    if wanted.shape != held.shape:
        return math.inf
    return float((wanted.double() - held.double()).abs().max())


def close(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other, strict=True))
