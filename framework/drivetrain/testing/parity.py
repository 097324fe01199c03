"""Assertions that two runs are equal. Their errors name the steps, parameters or ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def assert_close_states(
    actual: Mapping[str, Any], expected: Mapping[str, Any], *, atol: float = 1e-5, rtol: float = 1e-5
) -> None:
    """Assert that two states have the same names, and close values of the same shapes.

    Args:
        actual: a ``state_dict()`` of a module or an optimizer: nested mappings and sequences of tensors and plain
            values. Sharded tensors are gathered, so every rank must call this function.
        expected: the state to compare with.
        atol: the absolute tolerance.
        rtol: the relative tolerance. Values of different dtypes are compared in the wider dtype.

    Raises:
        AssertionError: the states differ. The message lists every name that is missing, unexpected or different.
    """
    actual_leaves, expected_leaves = dict(_leaves(actual)), dict(_leaves(expected))
    problems = [f"missing: {name}" for name in expected_leaves if name not in actual_leaves]
    problems += [f"unexpected: {name}" for name in actual_leaves if name not in expected_leaves]
    for name, value in expected_leaves.items():
        problem = _difference(actual_leaves.get(name, value), value, atol, rtol)
        problems += [] if problem is None else [f"{name}: {problem}"]
    if problems:
        raise AssertionError(
            f"states differ in {len(problems)} of {len(expected_leaves)} entries:\n  " + "\n  ".join(problems)
        )


def assert_close_traces(
    actual: Sequence[float | Tensor], expected: Sequence[float | Tensor], *, atol: float = 1e-5, rtol: float = 1e-5
) -> None:
    """Assert that two series with one number per step are close: losses, gradient norms, learning rates.

    Raises:
        AssertionError: the series differ. The message gives the first step that differs, or the two lengths.
    """
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} steps, {len(expected)} expected")
    for step, (value, expected_value) in enumerate(zip(actual, expected, strict=True)):
        problem = _difference(torch.as_tensor(value), torch.as_tensor(expected_value), atol, rtol)
        if problem is not None:
            raise AssertionError(f"step {step} of {len(expected)} is the first that differs: {problem}")


def assert_equal_ranks(states: Sequence[Mapping[str, Any]]) -> None:
    """Assert that the states of all ranks equal the state of rank 0 bit for bit.

    Args:
        states: one state per rank, as `run_distributed` returns them.

    Raises:
        AssertionError: a rank differs. The message names the rank and the entries.
    """
    for rank, state in enumerate(states[1:], start=1):
        try:
            assert_close_states(state, states[0], atol=0.0, rtol=0.0)
        except AssertionError as error:
            raise AssertionError(f"rank {rank} differs from rank 0: {error}") from None


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else key)


def _difference(actual: Any, expected: Any, atol: float, rtol: float) -> str | None:
    """Return a description of the difference of two values, or None if they are close."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        actual, expected = _gather_full_value(actual), _gather_full_value(expected)
        if not actual.dtype.is_floating_point and not actual.dtype.is_complex:
            atol = rtol = 0.0
    elif not isinstance(actual, float) or not isinstance(expected, float):
        same = type(actual) is type(expected) and actual == expected
        return None if same else f"{actual!r} instead of {expected!r}"
    try:
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True, check_dtype=False)
    except AssertionError as error:
        return str(error)
    return None


def _gather_full_value(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    full_value: Tensor = tensor if gather is None else gather()
    return full_value.detach().cpu()
