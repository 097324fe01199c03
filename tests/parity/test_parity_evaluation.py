"""Every strategy evaluates every sample once, predicts in data set order, and draws the right random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from parity_evaluation import SEED, SIZES, Findings, samples, seeded_mlp
from parity_runs import Results
from parity_strategies import STRATEGIES, Candidate
from torch import nn
from torch.nn.functional import cross_entropy

Run = Callable[[Candidate, int], Results]


class Place(NamedTuple):
    candidate: Candidate
    ranks: int

    def __str__(self) -> str:
        return f"{self.candidate.name}-{self.ranks}".replace(" ", "_")


PLACES = [
    Place(candidate, ranks)
    for candidate in STRATEGIES
    if not candidate.only
    for ranks in (candidate.ranks, *candidate.also_on)
]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.fixture
def findings(place: Place, results: Run, request: pytest.FixtureRequest, record_property: Any) -> list[Findings]:
    row = request.node.get_closest_marker("row")
    for name, value in zip(("row", "shows"), row.args, strict=True):
        record_property(name, value)
    record_property("column", place.candidate.name)
    found = results(place.candidate, place.ranks).findings
    for rank, one in enumerate(found):
        if one.error:
            pytest.fail(f"rank {rank}:\n{one.error}", pytrace=False)
    return found


@pytest.mark.row("evaluation", "B-04, B-12, B-14: means, maxima and torchmetrics over uneven data, to the last sample")
def test_evaluation(place: Place, findings: list[Findings]) -> None:  # B-04, B-12, B-14
    for count, batch_size in SIZES:
        x, y, _ = samples(count)
        with torch.no_grad():
            output = seeded_mlp()(x)
        for rank in findings:
            scores = rank.scores[count, batch_size]
            assert scores["loss"] == pytest.approx(cross_entropy(output, y).item(), abs=1e-6)
            # One sample counted twice, or omitted, would show in the first digits.
            assert scores["accuracy"] == pytest.approx((output.argmax(-1) == y).double().mean().item(), abs=1e-7)
            assert scores["most"] == pytest.approx(output.max().item(), abs=1e-6)


@pytest.mark.row("prediction", "B-04: one prediction for each sample, in the order of the data set, on every rank")
def test_prediction(place: Place, findings: list[Findings]) -> None:  # B-04
    for count, batch_size in SIZES:
        x, _, indices = samples(count)
        with torch.no_grad():
            expected = seeded_mlp()(x)
        for rank in findings:
            found = rank.predictions[count, batch_size]
            assert torch.equal(torch.cat([part for part, _ in found]), indices)
            torch.testing.assert_close(torch.cat([part for _, part in found]), expected, atol=1e-6, rtol=0)


@pytest.mark.row("dropout masks", "B-18: differ between ranks and steps, the same again on a rerun")
def test_dropout(place: Place, findings: list[Findings]) -> None:
    # B-18: W different masks; the same where layers are split; the same again in a second run
    data_ranks = place.ranks // place.candidate.tensor
    for rank in findings:
        first, again = rank.masks
        assert len(first) == -(-16 // (4 * data_ranks))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    masks = [tuple(mask.tolist()) for rank in findings for mask in rank.masks[0]]
    assert len(set(masks)) == len(masks) // place.candidate.tensor


@pytest.mark.row(
    "initialisation", "B-18: with a seed, the weights of the hand-written loop; without a seed, those of rank 0"
)
def test_initialisation(place: Place, findings: list[Findings]) -> None:
    # B-18: with a seed equal everywhere, and equal to a hand-written loop; without one, rank 0's
    torch.manual_seed(SEED)
    seeded = nn.Linear(6, 16).weight
    torch.manual_seed(0)
    of_rank_0 = nn.Linear(6, 16).weight
    for rank in findings:
        assert len(rank.initial) == 2
        assert all(torch.equal(initial, seeded) for initial in rank.initial)
        assert rank.unseeded is not None
        assert torch.equal(rank.unseeded, of_rank_0)


@pytest.mark.row("reductions", "B-02, C-02: gradients are exchanged once a window")
def test_no_reduction_within_a_window(place: Place, findings: list[Findings]) -> None:
    # B-02, C-02: counted after each of 5 micro-batches, K=2; ZeRO 2 and 3 exchange them after each
    each = place.candidate.name.startswith(("deepspeed_stage_2", "deepspeed_stage_3"))
    expected = [] if place.ranks == 1 else [1, 2, 3, 4, 5] if each else [0, 1, 1, 2, 3]
    assert all(rank.reductions == expected for rank in findings)
