"""What must be the same on all ranks is compared by one function, whose error names each difference (A-10)."""

from __future__ import annotations

from typing import Any

import pytest

# Private: a run has no such number of differences, and no rank with a missing name.
from drivetrain._distributed.control_plane import digest_of, refuse_differences
from drivetrain.errors import CheckpointError, DistributedError


def test_each_difference_is_named_with_its_values_and_their_ranks() -> None:
    ranks: list[dict[str, Any]] = [{"a": 1, "b": "x", "c": None}, {"a": 1, "b": "y", "c": None}, {"a": 1, "b": "x"}]
    with pytest.raises(CheckpointError) as found:
        refuse_differences(ranks, "the reason.", "the fix.", CheckpointError)
    error = found.value
    differences = 'b: "x" on rank(s) [0, 2]; "y" on rank(s) [1] | c: null on rank(s) [0, 1]; missing on rank(s) [2]'
    assert error.what == f"The ranks do not agree on {differences}."
    assert (error.why, error.fix) == ("the reason.", "the fix.")
    with pytest.raises(DistributedError) as many:
        refuse_differences([{f"name {number}": rank for number in range(23)} for rank in range(2)], "", "")
    assert many.value.what.count(" on rank(s) [1]") == 20
    assert many.value.what.endswith(" | 3 more.")


def test_equal_values_raise_nothing() -> None:
    refuse_differences([{"a": (1, 2), "b": float("nan")}, {"b": float("nan"), "a": [1, 2]}], "", "")
    assert digest_of({"a": (1, 2), "b": 3}) == digest_of({"b": 3, "a": [1, 2]})
    assert digest_of(["a", "b"]) != digest_of(["b", "a"])
