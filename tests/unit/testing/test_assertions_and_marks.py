from __future__ import annotations

import sys

import pytest
import torch

from drivetrain import testing
from drivetrain.testing import assert_close_states, assert_close_traces, assert_equal_ranks

WEIGHT = torch.arange(6.0).reshape(2, 3)


def _state(**changes: object) -> dict[str, object]:
    state: dict[str, object] = {
        "weight": WEIGHT,
        "steps": torch.tensor(4),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0),
        "special": torch.tensor([float("nan"), float("inf"), 2.0]),
        "nested": {"exp_avg": [torch.ones(2), 0.9], "name": "adam", "none": None},
    }
    return state | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": WEIGHT + torch.eye(2, 3) * 1e-3},
            r"(?s)weight: .* 0.00\d+ at index \(0, 0\)",
        ),
        ({"weight": torch.arange(6.0)}, r"weight: .*shape.*\[6\]\) != .*\[2, 3\]"),
        ({"weight": torch.full((2, 3), float("nan"))}, "(?s)weight: .*Mismatched elements: 6 / 6"),
        ({"steps": torch.tensor(5)}, r"(?s)steps: .*Expected 4 but got 5"),
        ({"mask": torch.tensor([True, True])}, r"(?s)mask: .*difference: 1 at index \(1,\)"),
        (
            {"special": torch.tensor([float("nan"), float("inf"), 3.0])},
            r"(?s)special: .* 1.0 at index \(2,\)",
        ),
        (
            {"nested": {"exp_avg": [torch.ones(2), 0.8], "name": "adam", "none": None}},
            "Expected 0.9 but got 0.8",
        ),
        ({"nested": {"exp_avg": [torch.ones(2), 0.9], "name": "sgd", "none": None}}, r"nested.name: 'sgd' instead"),
        ({"nested": {"exp_avg": [torch.ones(2), 0.9], "none": None}}, "missing: nested.name"),
        ({"more": 1}, "unexpected: more"),
    ],
)
def test_each_difference_is_named(changes: dict[str, object], message: str) -> None:
    assert_close_states(_state(), _state(), atol=0.0, rtol=0.0)
    assert_close_states(_state(weight=WEIGHT.double() + 5e-6), _state())
    with pytest.raises(AssertionError, match=message):
        assert_close_states(_state(**changes), _state())


def test_traces_name_the_first_step_that_differs_and_ranks_must_agree_bit_for_bit() -> None:
    assert_close_traces([1.0, torch.tensor(2.0)], [torch.tensor(1.0), 2.0])
    with pytest.raises(AssertionError, match="step 1 of 3 is the first that differs"):
        assert_close_traces([1.0, 2.1, 3.1], [1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="2 steps, 3 expected"):
        assert_close_traces([1.0, 2.0], [1.0, 2.0, 3.0])
    assert_equal_ranks([_state(), _state(), _state()])
    with pytest.raises(AssertionError, match=r"(?s)rank 2 differs from rank 0.*weight"):
        assert_equal_ranks([_state(), _state(), _state(weight=WEIGHT + 5e-6)])


def test_marks_skip_only_what_the_machine_lacks() -> None:
    assert testing.requires_cuda(10_000).mark.args == (True,)
    assert testing.requires_cuda(0).mark.args == (False,)
    assert testing.requires_package("torch").mark.args == (False,)
    assert testing.requires_package("no_such_package_here.part").mark.args == (True,)
    assert testing.requires_command("no-such-command-here").mark.args == (True,)
    assert testing.requires_linux().mark.args == (sys.platform != "linux",)
