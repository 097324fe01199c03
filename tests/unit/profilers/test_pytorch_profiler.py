"""PyTorchProfiler: the format, spans, extent and location of a trace for Perfetto (L-05)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from profiler_case import FailingNet, Net, SpanningNet, fit, loader
from torch.profiler import profile, schedule

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import PyTorchProfiler


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the complete events of that name, by their beginnings."""
    found = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["name"] == name]
    return sorted(found, key=lambda one: one["ts"])


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def overlapping(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of complete events of one thread that overlap, and of which neither is within the other."""
    threads = defaultdict(list)
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append(one)
    found = []
    for events in threads.values():
        open_events: list[dict[str, Any]] = []
        for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= one["ts"] + 1e-3:
                open_events.pop()
            if open_events and not is_within(one, open_events[-1]):
                found.append((open_events[-1]["name"], one["name"]))
            open_events.append(one)
    return found


def trace_in(folder: Path, name: str = "*.trace.json") -> dict[str, Any]:
    """Return the only trace in a folder, and check that its spans are complete and nest."""
    (path,) = folder.rglob(name)
    found: dict[str, Any] = json.loads(path.read_text())
    assert all({"name", "ts", "dur", "pid", "tid"} <= one.keys() for one in found["traceEvents"] if one["ph"] == "X")
    assert not overlapping(found)
    return found


def steps_of(trace: dict[str, Any]) -> list[int]:
    names = {one["name"] for one in trace["traceEvents"] if one["name"].startswith("ProfilerStep#")}
    return sorted(int(name.partition("#")[2]) for name in names)


def test_a_trace_has_the_form_that_perfetto_reads_and_our_phases(tmp_path: Path, capsys: Any) -> None:  # L-05
    runner = fit(tmp_path, profiler="pytorch", gradient_clip_val=1.0)
    runner.fit(SpanningNet(), loader(32), loader())
    assert runner.log_dir is not None
    folder = Path(runner.log_dir, "profile")
    path = folder / "fit-pytorch-rank-0.trace.json"
    assert sorted(folder.iterdir()) == [path, folder / "fit-pytorch-rank-0.txt"]
    trace = trace_in(folder)
    assert steps_of(trace) == [2, 3, 4]  # of sixteen
    for name in ("data", "forward", "backward", "optimizer", "clipping", "augmentation"):
        found = spans_of(trace, name)
        assert len(found) == 3, name
        for number, span in enumerate(found, 2):
            assert is_within(span, spans_of(trace, f"ProfilerStep#{number}")[0])
    for inner, outer in (("clipping", "optimizer"), ("augmentation", "forward"), ("aten::addmm", "forward")):
        assert all(map(is_within, spans_of(trace, inner), spans_of(trace, outer)))
    text = runner.profiler.summary()
    assert text in capsys.readouterr().out
    assert "aten::" in text
    assert f"https://ui.perfetto.dev: {path}" in text


def test_a_validation_within_the_traced_steps_nests_and_counts_its_batches(tmp_path: Path) -> None:  # L-05
    runner = fit(tmp_path, profiler=PyTorchProfiler(schedule=schedule(wait=0, warmup=1, active=6, repeat=1)))
    runner.fit(Net(), loader(), loader(4))
    trace = trace_in(tmp_path)
    assert steps_of(trace) == [1, 2, 3, 4, 5, 6]  # of training three, of validation two, and what comes at the end
    forwards, validations = spans_of(trace, "forward"), spans_of(trace, "validation")
    assert len(forwards) == 5
    assert len([one for one in forwards if any(is_within(one, validation) for validation in validations)]) == 2


def test_each_cycle_of_a_schedule_has_its_own_file(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "mine", schedule=schedule(wait=1, warmup=0, active=1, repeat=3))
    fit(tmp_path, profiler=profiler).fit(Net(), loader(16))
    found = {path.name: steps_of(json.loads(path.read_text())) for path in tmp_path.glob("*.trace.json")}
    assert found == {"mine-rank-0.trace.json": [1], "mine-rank-0-2.trace.json": [3], "mine-rank-0-3.trace.json": [5]}


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_an_evaluation_is_traced(tmp_path: Path, stage: str) -> None:  # L-05
    getattr(fit(tmp_path, profiler="pytorch"), stage)(Net(), loader(12))
    trace = trace_in(tmp_path / "profile", f"{stage}-pytorch-rank-0.trace.json")
    assert steps_of(trace) == [2, 3, 4]
    assert len(spans_of(trace, "forward")) == 3


def test_a_run_that_fails_while_it_is_traced_writes_the_trace(tmp_path: Path) -> None:  # L-05
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, profiler="pytorch").fit(FailingNet(), loader(32))
    assert steps_of(trace_in(tmp_path)) == [2, 3]
    with profile(), pytest.raises(ConfigurationError, match="one profiler at a time"):  # and no other is active now
        fit(tmp_path, profiler="pytorch").fit(Net(), loader())


def test_a_run_too_short_for_its_schedule_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler()
    fit(tmp_path, profiler=profiler).fit(Net(), loader(2))
    assert "Nothing was traced: the loop ended after 1 micro-batches" in profiler.summary()
    assert not list(tmp_path.rglob("*.trace.json"))


@pytest.mark.parametrize("column", ["cuda_time_total", "self_cuda_time_total", "cpu_memory_usage", "count"])
def test_a_table_alone_is_sorted_by_every_column_that_torch_names(tmp_path: Path, column: str) -> None:  # L-05
    profiler = PyTorchProfiler(export_to_chrome=False, group_by_input_shapes=True, sort_by_key=column)
    fit(tmp_path, profiler=profiler).fit(Net(), loader(12))
    assert [path.suffix for path in tmp_path.rglob("profile/*")] == [".txt"]
    assert "Operations of the traced micro-batches" in profiler.summary()
    assert "Input Shapes" in profiler.summary()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": 3}, r"schedule=3"),
        ({"sort_by_key": "cpu_time_totl"}, r"sort_by_key='cpu_time_totl'.*'cpu_time_total'"),
        ({"memory_snapshot": True}, r"memory_snapshot=True\) on cpu"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:  # L-05
    with pytest.raises(ConfigurationError, match=named):
        fit(tmp_path, profiler=PyTorchProfiler(**options)).fit(Net(), loader())
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    # L-05: it is written within a step
    (tmp_path / "file").write_text("")
    runner = fit(tmp_path, profiler=PyTorchProfiler(dirpath=tmp_path / "file" / "below"))
    runner.fit(Net(), loader(16))
    assert runner.global_step == 8
    assert "A trace of this run's profile could not be written" in caplog.text
