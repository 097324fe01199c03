"""Every strategy trains as the reference does, the plain loop of `oracle.interpreter`: the definition of correct.

What is compared, for every feature: the order of samples, the loss of every micro-batch, the total gradient norm of
every step, learning rates, after which micro-batches a step was made, weights after each, hooks, and in the end weights
and optimizer state. The reference itself is compared with training on each window as one big batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import parity_device
import pytest
import torch
from parity_features import BY_NAME, FEATURES, PRECISIONS
from parity_runs import Results, reference
from parity_strategies import STRATEGIES, Candidate, Job

from drivetrain.testing import assert_close_states, assert_close_traces, assert_equal_ranks
from oracle.compare import TOLERANCES, differences
from oracle.nets import seeded_model
from oracle.outcome import Outcome

Run = Callable[[Candidate, int], Results]

BF16 = 2.0**-8
"""The relative distance of two neighbouring bf16 numbers."""


class Cell(NamedTuple):
    candidate: Candidate
    ranks: int
    job: Job

    def __str__(self) -> str:
        return f"{self.candidate.name}-{self.ranks}-{self.job[0]}-{self.job[1]}".replace(" ", "_")


CELLS = [
    Cell(candidate, ranks, job)
    for candidate in STRATEGIES
    for ranks in (candidate.ranks, *candidate.also_on)
    for job in candidate.jobs(ranks)
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
def test_training(cell: Cell, results: Run) -> None:
    # B-01, B-02, B-03, B-04, B-05, B-06, B-07, B-08, B-09, B-11 to B-17, B-20, B-21; C-01; F-02; K-01; L-01: the
    # features say which
    feature, precision = BY_NAME[cell.job[0]], cell.job[1]
    program = cell.candidate.program(cell.job, cell.ranks)
    run = results(cell.candidate, cell.ranks)
    outcomes = run.outcomes[cell.job]
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            pytest.fail(f"rank {rank}: {outcome.error}: {outcome.text}", pytrace=False)
    expected, first, atol = reference(program), outcomes[0], _tolerance(cell)
    norm_atol = max(atol, 2 * BF16) if cell.candidate.shards and precision == "bf16-true" else atol

    assert first.planned == expected.planned, "estimated_stepping_batches (B-09)"
    assert first.rates == expected.rates, "learning rates (B-09)"
    assert first.scales == expected.scales, "loss scales (B-06)"
    assert_close_traces(first.step_norms, expected.step_norms, atol=norm_atol, rtol=norm_atol)
    for rank, outcome in enumerate(outcomes):
        losses = [losses[rank // cell.candidate.tensor] for losses in expected.losses_of_ranks]
        assert_close_traces(outcome.losses, losses, atol=atol, rtol=atol)
    _compare_steps(first, expected, atol, weights=not cell.candidate.is_zero or precision == "32-true")
    assert_close_states(first.weights, expected.weights, atol=atol, rtol=atol)
    assert_equal_ranks([outcome.weights for outcome in outcomes])
    if feature.compares_state:
        states, wanted = ({str(at): one for at, one in enumerate(each.states)} for each in (first, expected))
        assert_close_states(states, wanted, atol=atol, rtol=atol)
        assert _dtypes(first) == _dtypes(expected), "master weights and moments in float32 (B-01)"
    # Samples (B-04, B-11), hooks, logged values and metrics, and the norms that clipping returns (B-05).
    tolerance = max(norm_atol, TOLERANCES[precision])
    plain = replace(program, resume=None) if program.resume is not None else program
    assert differences(plain, reference(plain), outcomes, tolerance=tolerance) == []
    if program.resume is not None:
        assert differences(program, expected, run.resumed[cell.job], True, tolerance) == []


def _compare_steps(outcome: Outcome, expected: Outcome, atol: float, weights: bool) -> None:
    """Compare after which micro-batches the optimizer stepped (B-02), and weights there if a rank has all of them."""
    assert [steps for steps, _ in outcome.steps] == [steps for steps, _ in expected.steps]
    for (_, held), (_, wanted) in zip(outcome.steps, expected.steps, strict=True):
        if weights and len(held):
            torch.testing.assert_close(held, wanted, atol=atol, rtol=atol)


def _dtypes(outcome: Outcome) -> list[dict[str, dict[str, torch.dtype]]]:
    return [
        {name: {key: value.dtype for key, value in state.items() if key != "step"} for name, state in states.items()}
        for states in outcome.states
    ]


@pytest.mark.parametrize("cell", REFUSED, ids=str, indirect=True)
def test_refused_by_name(cell: Cell, results: Run) -> None:
    # C-01, B-13, G-07: on every rank; later training in the same processes still matches
    for outcome in results(cell.candidate, cell.ranks).outcomes[cell.job]:
        assert outcome.error == "ConfigurationError"
        assert str(cell.candidate.refusal(cell.job)) in outcome.text


def test_each_pair_of_a_strategy_and_a_feature_is_run_or_refused_with_a_reason() -> None:
    page = (Path(__file__).parents[2] / "docs/parity.md").read_text()
    assert [feature.name for feature in FEATURES if f"| {feature.name} |" not in page] == []
    for candidate in STRATEGIES:
        jobs = candidate.jobs(candidate.ranks)
        assert len(jobs) == len(set(jobs))
        assert bool(candidate.only) == bool(candidate.why_only)
        assert set(candidate.only) | set(candidate.refuses) <= set(BY_NAME)
        for feature in FEATURES if not parity_device.CASES else ():
            assert (feature.name, "32-true") in jobs or feature.name not in candidate.only != ()
        for precision, plan in PRECISIONS.items():
            of_precision = {name for name, each in jobs if each == precision}
            refused = candidate.refuses_precisions.get(precision)
            assert (
                candidate.only
                or parity_device.CASES
                or of_precision >= ({"token-weighted"} if refused else {*plan.features})
            )


@pytest.mark.parametrize("name", [one.name for one in FEATURES if not one.by_rank])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_reference_equals_training_on_each_window_as_one_big_batch(name: str, ranks: int) -> None:
    # B-01 to B-04, B-13, B-16, B-21
    feature = BY_NAME[name]
    one, by_rank = reference(feature.as_one_batch()), reference(feature.on("single_device", ranks, 1, "32-true"))
    assert_close_states(by_rank.weights, one.weights)
    assert_close_traces(by_rank.step_norms, one.step_norms)
    assert by_rank.rates == one.rates
    stepped = [{steps for steps, _ in each.steps if steps} for each in (one, by_rank)]
    assert stepped[0] == stepped[1]


def test_the_features_have_their_stated_properties() -> None:
    """Check the properties of the features, without which their tests would pass without testing anything."""

    def expected(name: str, ranks: int = 1, precision: str = "32-true") -> Outcome:
        return reference(BY_NAME[name].on("single_device", ranks, 1, precision))

    def steps(name: str) -> list[int]:
        return [steps for steps, _ in expected(name).steps]

    # B-05: clipping changes most steps
    for feature in BY_NAME.values():
        bound, norms = feature.program.clip, expected(feature.name).step_norms
        if bound is not None and feature.program.clip_by == "norm":
            assert sum(norm > bound for norm in norms) > len(norms) / 2
    by_value = expected("clipped by value")
    plain = reference(replace(BY_NAME["clipped by value"].program, clip=None))
    assert not torch.allclose(by_value.weights["head.weight"], plain.weights["head.weight"], atol=1e-3)
    # B-02
    assert steps("accumulated") == [0, 0, 1, 1, 2]
    # B-21
    assert steps("zero-weight window") == [0, 1, 1, 1, 2]
    assert steps("zero-weight micro-batch") == [1, 1, 2]
    assert math.isnan(expected("zero-weight window").losses_of_ranks[2][0])
    # B-06: the third step overflows, and no other
    overflow = expected("fp16 overflow on one rank", 2, "16-mixed")
    assert [count for count, _ in overflow.steps] == [1, 2, 2, 3]
    assert overflow.scales == [65536.0] * 2 + [32768.0] * 2
    # B-04: the tail leaves ranks without samples, for two ranks and for four
    assert [list(map(len, batch)) for _, batch in expected("uneven data, joining ranks", 4).samples_of_ranks[:3]] == [
        [4, 4, 4, 4],
        [4, 4, 4, 4],
        [1, 0, 0, 0],
    ]
    # B-07, B-08: no state, and the weights of before
    for name, absent in (
        ("frozen parameters", ["body.0.weight", "body.0.bias"]),
        ("unused parameter", ["orphan"]),
        ("tied weights", ["head.weight"]),  # the same parameter as the embedding's weight, which has one state
    ):
        outcome, before = expected(name), seeded_model(BY_NAME[name].program).state_dict()
        assert not set(absent) & set(outcome.states[0])
        if name != "tied weights":
            assert all(torch.equal(outcome.weights[key], before[key]) for key in absent)
    # B-08: BatchNorm under DDP is not BatchNorm of the global batch
    gap = expected("BatchNorm", 2).weights["head.weight"] - expected("BatchNorm").weights["head.weight"]
    assert gap.abs().max() > 1e-3


@pytest.mark.parametrize(("precision", "unit"), [("bf16-mixed", BF16), ("bf16-true", BF16), ("16-mixed", 2.0**-11)])
def test_low_precision_stays_near_full(precision: str, unit: float) -> None:
    # B-01: the difference that the dtype explains. Losses are of order 1 and each is rounded at least once: some units
    # in the last place of the compute dtype (2**-8 for bf16, 2**-11 for fp16), which four steps of training propagate.
    for strategy in ("single_device", "deepspeed_stage_1", "deepspeed_stage_3"):
        low, full = (
            [sum(losses) / 2 for losses in reference(BY_NAME["plain"].on(strategy, 2, 1, each)).losses_of_ranks]
            for each in (precision, "32-true")
        )
        assert_close_traces(low, full, atol=4 * unit, rtol=4 * unit)
        assert low != full


def _tolerance(cell: Cell) -> float:
    """Return the absolute and relative tolerance, which docs/parity.md explains."""
    (name, precision), program = cell.job, cell.candidate.program(cell.job, cell.ranks)
    if parity_device.DEVICE != "cpu":
        # Muon computes in bf16.
        return max(parity_device.TOLERANCES[precision], 8 * BF16 if name == "several optimizers" else 0.0)
    if cell.candidate.shards:
        # The norm is summed shard by shard, and four ranks' gradients in another order than one by one.
        in_order = program.ranks == 2 and program.clip is None
        if precision == "bf16-true":
            return 0.0 if in_order else 4 * BF16
        if precision == "16-mixed" and not in_order:
            return 1e-4  # the last bit of a weight decides how it is rounded to fp16
        if name == "several optimizers" and cell.ranks > 2:
            return 5e-3  # the last bit of a gradient, and Muon computes in bf16
    return PRECISIONS[precision].atol
