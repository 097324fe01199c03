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


def test_the_work_of_a_rank_is_the_same_among_thousands_as_among_eight() -> None:
    few, many = _calls(8), _calls(4096)
    assert many[0] <= few[0] + 50  # no work is done per rank
    assert abs(many[1] - few[1]) <= 1
