"""The work of a rank per run and per step does not grow with the number of ranks (counted; H-01)."""

from __future__ import annotations

from benchmarks.calls import python_calls, python_calls_a_step
from benchmarks.fake_world import fake_world
from benchmarks.scale import by_engine


def _calls(size: int) -> tuple[int, float]:
    """Python functions that a run of one step calls on one rank of ``size``, and those of a step."""

    def run(steps: int) -> None:
        by_engine(size, steps)

    with fake_world(size):
        run(2)
        return python_calls(run, 1), python_calls_a_step(run)


def test_a_rank_of_thousands_does_what_a_rank_of_eight_does() -> None:
    few, many = _calls(8), _calls(4096)
    assert many[0] <= few[0] + 50  # nothing is done for each rank
    assert abs(many[1] - few[1]) <= 1
