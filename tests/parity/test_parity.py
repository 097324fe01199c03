"""Every strategy trains as the reference loop does: the definition of correct.

What is compared, for every case: the order of samples, the loss and the total gradient norm of every step, learning
rates, after which micro-batches a step was made, and in the end weights and optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import parity_device
import pytest
import torch
from parity_cases import BY_NAME, CASES, Case
from parity_engine import Record, together
from parity_pools import Results, case_of, jobs_of
from parity_reference import Trace
from parity_strategies import STRATEGIES, Candidate, Job

from drivetrain.testing import assert_close_states, assert_close_traces, assert_equal_ranks

Run = Callable[[Candidate, int], Results]
Reference = Callable[..., Trace]

BF16 = 2.0**-8
"""The relative distance of two neighbouring bf16 numbers."""


class Precise(NamedTuple):
    """The tolerances and reference settings of a precision."""

    atol: float
    by_rank: bool
    why: str


PRECISIONS = {
    "32-true": Precise(1e-5, False, "a sum over a window in another order"),
    "64-true": Precise(1e-12, False, "the same, in double"),
    # Each rank's micro-batch is rounded separately, so the reference computes them one by one too.
    "bf16-mixed": Precise(1e-6, True, "the same roundings; the norm is summed up in another order"),
    "16-mixed": Precise(1e-6, True, "the same roundings; the norm is summed up in another order"),
    "bf16-true": Precise(0.0, True, "the same roundings"),
}


class Cell(NamedTuple):
    """A case under a strategy."""

    candidate: Candidate
    ranks: int
    job: Job

    def __str__(self) -> str:
        return f"{self.candidate.name}-{self.ranks}-{self.job[0]}-{self.job[1]}".replace(" ", "_")

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.candidate.tensor


CELLS = [
    Cell(candidate, ranks, job)
    for candidate in STRATEGIES
    for ranks in (candidate.ranks, *candidate.also_on)
    for job in jobs_of(candidate, ranks)
]
TRAINED = [cell for cell in CELLS if cell.candidate.refusal(cell.job) is None]
REFUSED = [cell for cell in CELLS if cell.candidate.refusal(cell.job) is not None]


@pytest.fixture
def cell(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Cell:
    found: Cell = request.param
    name, precision = found.job
    record_property("row", name if precision == "32-true" else f"{name} ({precision})")
    record_property("column", found.candidate.name)
    record_property("shows", BY_NAME[name].shows)
    if found.candidate.refusal(found.job) is not None:
        record_property("cell", "refused")
    return found


@pytest.mark.parametrize("cell", TRAINED, ids=str, indirect=True)
def test_training(cell: Cell, results: Run, references: Reference) -> None:
    # B-01 to B-09, B-11, B-13, B-15 to B-17, B-20, B-21; C-01; the cases say which
    case, precision = case_of(cell.job), cell.job[1]
    records = _records(results(cell.candidate, cell.ranks), cell.job)
    precise = PRECISIONS[precision]
    by_rank = True if precise.by_rank else None
    # Global batches are the same at every world size, unless each rank computes or reads separately.
    world = cell.data_ranks if precise.by_rank or case.by_rank or case.own_parts else 1
    # A split layer rounds each part, so in a low precision the reference computes it in two parts too.
    in_two = precise.by_rank and cell.candidate.tensor > 1
    expected = references(case.name, world, precision, by_rank, in_two, cell.candidate.zero)
    actual = together(case, records[:: cell.candidate.tensor])
    atol = _tolerance(cell, case)

    assert actual.batches == expected.batches, "the samples of a global micro-batch (B-04, B-11)"
    assert actual.steps == expected.steps, "micro-batches after which the optimizer stepped (B-02)"
    assert actual.planned == expected.planned, "estimated_stepping_batches (B-09)"
    assert_close_traces(actual.losses, expected.losses, atol=atol, rtol=atol)
    norm_atol = max(atol, 2 * BF16) if cell.candidate.shards and precision == "bf16-true" else atol
    assert_close_traces(actual.norms, expected.norms, atol=norm_atol, rtol=norm_atol)
    assert actual.rates == expected.rates, "learning rates (B-09)"
    assert actual.scales == expected.scales, "loss scales (B-06)"
    assert_close_states(actual.weights, expected.weights, atol=atol, rtol=atol)
    assert_equal_ranks([record.trace.weights for record in records])
    if case.compares_state:
        first, second = ({str(at): state for at, state in enumerate(trace.states)} for trace in (actual, expected))
        assert_close_states(first, second, atol=atol, rtol=atol)


@pytest.mark.parametrize("cell", REFUSED, ids=str, indirect=True)
def test_refused_by_name(cell: Cell, results: Run) -> None:
    # C-01, B-13, G-07: on every rank; later training in the same processes still matches
    for record in results(cell.candidate, cell.ranks).records[cell.job]:
        assert "ConfigurationError" in record.error
        assert str(cell.candidate.refusal(cell.job)) in record.error


def test_the_cases_have_their_stated_properties(references: Reference) -> None:
    """Check the properties of the cases, without which their tests would pass without testing anything."""
    # B-05: clipping changes most steps
    plain = references("plain", 1, "32-true", None)
    for name in ("clipped by norm", "several optimizers", "sparse embedding"):
        bound = BY_NAME[name].clip
        assert bound is not None
        norms = references(name, 1, "32-true", None).norms
        assert sum(norm > bound[0] for norm in norms) > len(norms) / 2
    by_value = references("clipped by value", 1, "32-true", None)
    assert not torch.allclose(by_value.weights["head.weight"], plain.weights["head.weight"], atol=1e-3)
    # B-02
    accumulated = references("accumulated", 1, "32-true", None)
    assert accumulated.steps[:10] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    # B-21
    weightless = references("zero-weight window", 1, "32-true", None)
    assert math.isnan(weightless.losses[1])
    assert weightless.steps == [0, 1, 1, 1, 1, 2, 2, 3, 3, 4]
    # B-06: the fourth step overflows, and no other
    overflow = references("fp16 overflow on one rank", 2, "16-mixed", True)
    assert overflow.steps == [1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert overflow.scales == [65536.0] * 3 + [32768.0] * 7
    # B-04: the tail leaves ranks without samples, for two ranks and for four
    assert [len(batch) for batch in references("uneven data, joining ranks", 1, "32-true", None).batches[:3]] == [
        32,
        32,
        1,
    ]


@pytest.mark.parametrize(
    "candidate", [one for one in STRATEGIES if one.ranks > 1 and not one.only], ids=lambda one: one.name
)
def test_batch_norm_under_ddp_uses_per_rank_statistics(
    candidate: Candidate, results: Run, references: Reference
) -> None:
    """BatchNorm under DDP is not BatchNorm of the global batch: the case compares with per-rank statistics."""
    records = _records(results(candidate, candidate.ranks), ("BatchNorm", "32-true"))
    of_the_global_batch = references("BatchNorm", 1, "32-true", False)
    gap = records[0].trace.weights["head.weight"] - of_the_global_batch.weights["head.weight"]
    assert gap.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("candidate", "precision"),
    [
        pytest.param(candidate, precision, id=f"{candidate.name}-{precision}")
        for candidate in STRATEGIES
        for precision, precise in PRECISIONS.items()
        # With two samples per rank, the first losses overflow at the initial scale: those steps are skipped, as they
        # should be.
        if precise.by_rank
        and not candidate.only
        and precision not in candidate.refuses_precisions
        and not (candidate.ranks // candidate.tensor > 2 and precision == "16-mixed")
    ],
)
def test_low_precision_stays_near_full(
    candidate: Candidate, precision: str, results: Run, references: Reference
) -> None:
    # B-01: the difference that the dtype explains. Losses are of order 1 and each is rounded at least once: some units
    # in the last place of the compute dtype (2**-8 for bf16, 2**-11 for fp16), which 20 steps of training propagate.
    unit = 2.0**-11 if precision == "16-mixed" else BF16
    job = ("plain", precision)
    records = _records(results(candidate, candidate.ranks), job)
    losses = together(case_of(job), records[:: candidate.tensor]).losses
    full = references("plain", 1, "32-true", None).losses
    assert_close_traces(losses, full, atol=4 * unit, rtol=4 * unit)
    assert losses != full


@pytest.mark.parametrize("candidate", STRATEGIES, ids=lambda one: one.name)
def test_master_weights_are_in_fp32(candidate: Candidate, results: Run) -> None:
    # B-01: parameters and optimizer state, where the precision is mixed
    for job, records in results(candidate, candidate.ranks).records.items():
        if job[1] in ("bf16-mixed", "16-mixed") and candidate.refusal(job) is None:
            trace = records[0].trace
            dtypes = {value.dtype for value in trace.weights.values() if value.is_floating_point()}
            assert dtypes == {torch.float32}
            moments = [
                state["exp_avg"].dtype for states in trace.states for state in states.values() if "exp_avg" in state
            ]
            assert set(moments) == {torch.float32}


@pytest.mark.parametrize("candidate", STRATEGIES, ids=lambda one: one.name)
def test_clipping_returns_the_norm_before_it(candidate: Candidate, results: Run) -> None:
    # B-05: the global one, unscaled
    jobs = {
        job: records
        for job, records in results(candidate, candidate.ranks).records.items()
        if case_of(job).clip is not None
        and case_of(job).clip[1] == "norm"  # type: ignore[index]
        and candidate.refusal(job) is None
    }
    for job, records in jobs.items():
        for record in records:
            norms = [norm if math.isfinite(norm) else math.inf for norm in record.clipped_norms]
            norms = norms[case_of(job).accumulate - 1 :]
            assert set(norms) == set(record.trace.norms), job


@pytest.mark.parametrize("candidate", [one for one in STRATEGIES if not one.only], ids=lambda one: one.name)
def test_a_window_without_weight_is_warned_about_once(candidate: Candidate, results: Run) -> None:
    # B-21
    for record in _records(results(candidate, candidate.ranks), ("zero-weight window", "32-true")):
        assert [warning for warning in record.warnings if "sum to zero" in warning] == [
            "An accumulation window made no step, because the weights of its batches sum to zero. "
            "This warning is not repeated."
        ]


@pytest.mark.parametrize("candidate", STRATEGIES, ids=lambda one: one.name)
def test_a_parameter_without_gradient_has_no_state(candidate: Candidate, results: Run) -> None:
    # B-07, B-08
    records = results(candidate, candidate.ranks).records
    for name, absent in (
        ("frozen parameters", ["body.0.weight", "body.0.bias"]),
        ("unused parameter", ["spare.weight", "spare.bias"]),
        ("tied weights", ["head.weight"]),  # the same parameter as embed.weight, which has one state
    ):
        if candidate.zero and name == "unused parameter":
            continue  # partitions are flat: a missing gradient counts as zero, as in the reference
        if (name, "32-true") in records and name not in candidate.refuses:
            torch.manual_seed(5)
            before = BY_NAME[name].net().state_dict()
            trace = _records(results(candidate, candidate.ranks), (name, "32-true"))[0].trace
            for key in absent:
                assert key not in trace.states[0]
                if name != "tied weights":
                    assert torch.equal(trace.weights[key], before[key])


def test_every_case_runs_under_every_strategy() -> None:
    for candidate in STRATEGIES:
        asked = set(jobs_of(candidate, candidate.ranks))
        assert asked >= {(case.name, "32-true") for case in CASES if not candidate.only or case.name in candidate.only}


def _records(results: Results, job: Job) -> list[Record]:
    records = results.records[job]
    for rank, record in enumerate(records):
        if record.error:
            pytest.fail(f"rank {rank}:\n{record.error}", pytrace=False)
    return records


def _tolerance(cell: Cell, case: Case) -> float:
    precision = cell.job[1]
    if parity_device.DEVICE != "cpu":
        # Muon computes in bf16.
        return max(parity_device.TOLERANCES[precision], 8 * BF16 if case.name == "several optimizers" else 0.0)
    if cell.candidate.shards:
        # The norm is summed shard by shard, and four ranks' gradients in another order than one by one.
        in_order = cell.data_ranks == 2 and case.clip is None
        if precision == "bf16-true":
            return 0.0 if in_order else 4 * BF16
        if precision == "16-mixed" and not in_order:
            return 1e-4  # the last bit of a weight decides how it is rounded to fp16
        if case.name == "several optimizers" and cell.ranks > 2:
            return 5e-3  # the last bit of a gradient, and Muon computes in bf16
    return max(case.atol, PRECISIONS[precision].atol) if precision == "32-true" else PRECISIONS[precision].atol
