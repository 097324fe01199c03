"""PyTorchProfiler: the format, spans, extent and location of a trace for Perfetto (L-05)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from profiler_case import Net, fit, loader
from torch.profiler import profile, schedule
from trace_events import SCHEMA, is_within, overlapping, spans_of

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import PyTorchProfiler


def trace_in(folder: Path, name: str = "*.trace.json") -> dict[str, Any]:
    (path,) = folder.rglob(name)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def steps_of(trace: dict[str, Any]) -> list[int]:
    names = {one["name"] for one in trace["traceEvents"] if one["name"].startswith("ProfilerStep#")}
    return sorted(int(name.partition("#")[2]) for name in names)


def test_a_trace_has_the_form_that_perfetto_reads_and_our_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # L-05
    class Spanning(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("augmentation"):
                batch = batch * 2
            return super().training_step(batch, batch_idx)

    runner = fit(tmp_path, profiler="pytorch", gradient_clip_val=1.0)
    runner.fit(Spanning(), loader(32), loader())
    assert runner.log_dir is not None
    profile_folder = Path(runner.log_dir, "profile")
    assert sorted(path.name for path in profile_folder.iterdir()) == [
        "fit-pytorch-rank-0.trace.json",
        "fit-pytorch-rank-0.txt",
    ]
    trace = trace_in(profile_folder)
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    assert not overlapping(trace)
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
    assert f"https://ui.perfetto.dev: {profile_folder / 'fit-pytorch-rank-0.trace.json'}" in text


def test_the_schema_and_the_nesting_refuse_what_is_wrong() -> None:
    # L-05
    good = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    jsonschema.Draft202012Validator(SCHEMA).validate({"traceEvents": [good]})
    for lacking in ("dur", "ts", "pid", "tid", "name", "ph"):
        event = {key: value for key, value in good.items() if key != lacking}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate({"traceEvents": [event]})
    late = {**good, "name": "b", "ts": 2.0}
    assert overlapping({"traceEvents": [good, late]}) == [("a", "b")]
    assert not overlapping({"traceEvents": [good, {**late, "tid": 2}]})
    assert not overlapping({"traceEvents": [good, {**late, "ts": 1.5, "dur": 1.0}]})


def test_a_validation_within_the_traced_steps_nests_and_counts_its_batches(tmp_path: Path) -> None:
    # L-05
    runner = fit(tmp_path, profiler=PyTorchProfiler(schedule=schedule(wait=0, warmup=1, active=6, repeat=1)))
    runner.fit(Net(), loader(), loader(4))
    trace = trace_in(tmp_path)
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    assert not overlapping(trace)
    assert steps_of(trace) == [1, 2, 3, 4, 5, 6]  # of training three, of validation two, and what comes at the end
    assert len(spans_of(trace, "forward")) == 5
    inside = [
        one for one in spans_of(trace, "forward") if any(is_within(one, v) for v in spans_of(trace, "validation"))
    ]
    assert len(inside) == 2


def test_each_cycle_of_a_schedule_is_a_file_of_its_own(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "mine", schedule=schedule(wait=1, warmup=0, active=1, repeat=3))
    fit(tmp_path, profiler=profiler).fit(Net(), loader(32))
    found = {path.name: steps_of(json.loads(path.read_text())) for path in tmp_path.glob("*.trace.json")}
    assert found == {
        "mine-rank-0.trace.json": [1],
        "mine-rank-0-2.trace.json": [3],
        "mine-rank-0-3.trace.json": [5],
    }


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_is_traced_too(tmp_path: Path, stage: str) -> None:
    # L-05
    getattr(fit(tmp_path, profiler="pytorch"), stage)(Net(), loader(32))
    trace = trace_in(tmp_path / "profile", f"{stage}-pytorch-rank-0.trace.json")
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    assert not overlapping(trace)
    assert steps_of(trace) == [2, 3, 4]
    assert len(spans_of(trace, "forward")) == 3


def test_a_run_that_fails_while_it_is_traced_leaves_the_trace(tmp_path: Path) -> None:
    # L-05
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, profiler="pytorch").fit(Failing(), loader(32))
    trace = trace_in(tmp_path)
    assert not overlapping(trace)
    assert steps_of(trace) == [2, 3]
    with profile():  # nobody else traces any more
        pass


def test_a_run_too_short_for_its_schedule_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler()
    fit(tmp_path, profiler=profiler).fit(Net(), loader(2))
    assert "Nothing was traced: the loop ended after 1 micro-batches" in profiler.summary()
    assert not list(tmp_path.rglob("*.trace.json"))


def test_a_table_alone_is_written_without_a_trace(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(export_to_chrome=False, group_by_input_shapes=True, sort_by_key="cpu_time_total")
    fit(tmp_path, profiler=profiler).fit(Net(), loader(32))
    assert [path.suffix for path in tmp_path.rglob("profile/*")] == [".txt"]
    assert "Input Shapes" in profiler.summary()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"memory_snapshot=True\) on cpu"):
        fit(tmp_path, profiler=PyTorchProfiler(memory_snapshot=True)).fit(Net(), loader())
    schedules: Any = 3
    with pytest.raises(ConfigurationError, match=r"schedule=3"):
        PyTorchProfiler(schedule=schedules)
    with profile(), pytest.raises(ConfigurationError, match="one profiler at a time"):
        fit(tmp_path, profiler="pytorch").fit(Net(), loader())
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # L-05: it is written within a step
    (tmp_path / "file").write_text("")
    runner = fit(tmp_path, profiler=PyTorchProfiler(dirpath=tmp_path / "file" / "below"))
    runner.fit(Net(), loader(32), loader())
    assert runner.global_step == 16
    assert "A trace of this run's profile could not be written" in caplog.text


def test_a_column_that_the_table_does_not_have_is_refused_at_once() -> None:
    # L-05: it would be asked for within a step
    with pytest.raises(ConfigurationError, match=r"sort_by_key='cpu_time_totl'.*'cpu_time_total'"):
        PyTorchProfiler(sort_by_key="cpu_time_totl")


@pytest.mark.parametrize("column", ["cuda_time_total", "self_cuda_time_total", "cpu_memory_usage", "count"])
def test_a_table_is_sorted_by_every_column_that_torch_names(tmp_path: Path, column: str) -> None:
    # L-05
    profiler = PyTorchProfiler(sort_by_key=column, export_to_chrome=False)
    fit(tmp_path, profiler=profiler).fit(Net(), loader(16), loader())
    assert "Operations of the traced micro-batches" in profiler.summary()
