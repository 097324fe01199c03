"""Tests of `make bench`'s tools: equal work is checked, and the page is that of the results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import drivetrain
import drivetrain_strategies
from benchmarks import results
from benchmarks.parts import RULES, part_of
from benchmarks.peers import ours
from benchmarks.slopes import time_loops
from benchmarks.turns import Turns
from benchmarks.work import WAYS, WORKS, Way, raw


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_engine_does_the_same_work_as_the_raw_loop(way: Way, capsys: pytest.CaptureFixture[str]) -> None:
    assert ours.train(WORKS["linear"], way, 7) == raw(WORKS["linear"], 7)
    assert capsys.readouterr().out == ""


def test_loops_take_turns_at_the_same_steps_and_different_work_is_refused() -> None:
    steps, batch, seen = 2, 3, []
    turns = Turns(steps, batch)

    def loop(name: str, result: float = 1.0) -> float:
        seen.append(name)
        for _ in DataLoader(turns.data(torch.arange(4.0 * steps * batch)), batch_size=batch):
            seen.append(name)
        seen.append(name)
        return result

    found = turns.run({name: partial(loop, name) for name in "abc"})
    assert "".join(seen) == "abc" + 3 * "aabbcc" + "aaabbbccc"
    assert [(name, len(slopes.wall), len(slopes.busy)) for name, slopes in found.items()] == [(n, 2, 2) for n in "abc"]
    with pytest.raises(SystemExit, match="different work: after 8 steps"):
        turns.run({name: partial(loop, name, result) for name, result in (("a", 1.0), ("b", 1.0 + 1e-12))})
    with pytest.raises(SystemExit, match="different work"):
        time_loops({"one": lambda steps: 1.0, "other": lambda steps: 1.0 + 1e-12}, 1, {"one": 2, "other": 3}, 1)


def test_every_path_of_ours_in_the_table_of_parts_exists() -> None:
    assert part_of(None) is None  # the time before and after the steps
    roots = {"drivetrain": drivetrain, "drivetrain_strategies": drivetrain_strategies}
    ours = [fragment for fragment, _ in RULES if fragment.startswith("/drivetrain")]
    paths = [Path(str(roots[fragment.split("/")[1]].__file__)).parents[1] / fragment[1:] for fragment in ours]
    assert [path for path in paths if not path.exists()] == []


def test_the_summary_page_matches_the_long_tables() -> None:
    page, pictures = results.page(results.DOCS)
    assert (results.DOCS / "benchmarks.md").read_text() == page, "run `python -m benchmarks.results`"
    for name, picture in pictures.items():
        assert (results.DOCS / "images" / name).read_text() == picture, name
