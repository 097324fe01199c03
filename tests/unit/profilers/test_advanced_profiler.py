"""AdvancedProfiler: the functions of each phase (L-05)."""

from __future__ import annotations

import cProfile
import pickle
import pstats
from pathlib import Path
from typing import Any

import pytest
from profiler_case import FailingNet, Net, fit, loader

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import AdvancedProfiler


def expensive(number: int) -> int:
    return sum(n * n for n in range(number))


class BusyNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        expensive(20_000)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        expensive(3)


def calls_of(path: Path, function: str) -> int:
    stats: Any = pstats.Stats(str(path))
    return sum(found[1] for key, found in stats.stats.items() if key[2] == function)


def test_functions_are_listed_by_the_phase_that_calls_them(tmp_path: Path, capsys: Any) -> None:  # L-05
    runner = fit(tmp_path, profiler="advanced")
    runner.fit(BusyNet(), loader())
    assert runner.profiler.summary() in capsys.readouterr().out
    assert runner.log_dir is not None
    # The summary has the longest phases alone; the file has all of them.
    written = Path(runner.log_dir, "profile", "fit-advanced-rank-0.txt").read_text()
    by_phase = {part.split("\n")[0]: part for part in f"\n\n{written}".split("\n\nProfile of ")}
    assert "expensive" in by_phase["training > forward"]
    assert "expensive" not in by_phase["training > backward"]
    assert "training > BusyNet.on_train_batch_end" in by_phase


def test_statistics_open_in_pstats_and_count_a_call_once(tmp_path: Path) -> None:  # L-05
    folder = tmp_path / "there"
    profiler = AdvancedProfiler(folder, "mine", line_count_restriction=2, dump_stats=True)
    fit(tmp_path, profiler=profiler).fit(BusyNet(), loader())
    assert (folder / "mine-rank-0.txt").exists()
    assert calls_of(folder / "mine-rank-0-training___forward.prof", "expensive") == 4
    assert calls_of(folder / "mine-rank-0-training___BusyNet.on_train_batch_end.prof", "expensive") == 4
    assert sum(calls_of(path, "expensive") for path in folder.glob("*.prof")) == 8
    assert "List reduced" in profiler.summary()
    pickle.dumps(profiler)  # as a launcher does, for the next run


def test_a_failed_run_writes_its_profile_and_stops_profiling(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, profiler="advanced").fit(FailingNet(), loader())
    assert "Profile of training > forward" in "\n".join(path.read_text() for path in tmp_path.rglob("*.txt"))
    # No other is active now, and two at a time are refused.
    with cProfile.Profile(), pytest.raises(ConfigurationError, match="one profiler at a time"):
        fit(tmp_path, profiler="advanced").fit(Net(), loader())
