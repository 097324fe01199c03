"""Profilers: a table that sums up to the run's time, a trace for Perfetto, and the functions of each phase (L-05)."""

from __future__ import annotations

import cProfile
import json
import pickle
import pstats
import re
import threading
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader

from drivetrain import Callback, Fit
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import AdvancedProfiler, ProfiledRun, PyTorchProfiler, SimpleProfiler
from one_layer import OneLayer


def fit(path: Path, **options: Any) -> Fit:
    """Return a `Fit` of one epoch on the CPU whose files go to ``path``."""
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, "seed": 0, **off}
    return Fit(**{"default_root_dir": path, **settings, **options})


def loader(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, 2), batch_size=2)  # type: ignore[arg-type]


class Net(OneLayer):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)


class FailingNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


class SpanningNet(Net):
    spans = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("augmentation"):
            self.spans += 1
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_start(self) -> None:
        pass


def rows_by_path(profiler: SimpleProfiler) -> dict[str, Any]:
    """Return the rows of a run's profile, and check that they add up to the run's time, to the nanosecond."""
    assert 0 < profiler.total_ns == sum(row.self_ns for row in profiler.rows())
    return {" > ".join(row.path): row for row in profiler.rows()}


class SpanningCallback(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with trainer.profiler.profile("mine"):
            pass


def test_every_phase_is_a_row_and_all_rows_add_up_to_the_run(tmp_path: Path) -> None:  # L-05
    profiler = SimpleProfiler()
    noting = LambdaCallback(on_train_end=lambda *_: None)
    callbacks = [SpanningCallback(), Checkpoint(every_n_train_steps=2), noting]
    options: dict[str, Any] = {"enable_checkpointing": True, "logger": CSVLogger(tmp_path), "log_every_n_steps": 2}
    options |= {"gradient_clip_val": 1.0, "num_sanity_val_steps": 1, "detect_anomaly": True}
    runner = fit(tmp_path, profiler=profiler, callbacks=callbacks, **options)
    runner.fit(SpanningNet(), loader(), loader())
    assert runner.profiler is profiler
    rows = rows_by_path(profiler)
    calls = {name: rows[name].calls for name in rows}
    expected = {
        "training > forward": 4,
        "training > backward": 4,
        "training > optimizer": 4,
        "training > data": 5,  # the last finds the end
        "training > transfer": 4,
        "training > forward > augmentation": 4,
        "training > optimizer > clipping": 4,
        "training > checkpoint": 3,  # the dry run that is repeated after the first step, and two saves
        "training > logging > loggers": 2,
        "training > SpanningCallback.on_train_batch_end > mine": 4,
        "training > validation": 1,
        "training > validation > forward": 4,
        "sanity check > forward": 1,
        "SpanningNet.on_train_start": 1,
        "callback.on_train_end": 1,
    }
    assert {name: calls[name] for name in expected} == expected
    set_up = {"configure_optimizers", "loaders", "prepare_data", "setup_environment", "setup_module"}
    assert {f"set-up > {name}" for name in set_up} <= calls.keys()
    assert {"set-up", "taking down", "other", "profiler"} <= calls.keys()
    assert rows["profiler"].calls == sum(row.calls for row in profiler.rows()[:-2])
    assert rows["profiler"].self_ns > 0


def test_the_summary_shows_the_rows_and_is_in_the_runs_folder(tmp_path: Path, capsys: Any) -> None:  # L-05
    runner = fit(tmp_path, profiler="simple")
    runner.fit(Net(), loader())
    assert isinstance(runner.profiler, SimpleProfiler)
    text = runner.profiler.summary()
    assert text in capsys.readouterr().out
    file = Path(str(runner.log_dir), "profile", "fit-simple-rank-0.txt")  # without loggers and checkpoints as well
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    lines = text.splitlines()
    assert lines[0].startswith("Profile of fit on cpu: ")
    rows = runner.profiler.rows()
    shown = re.findall(r"^ *(\S.*?)  +(\d+\.\d{6})", text, re.MULTILINE)
    assert [name for name, _ in shown] == [*(row.path[-1] for row in rows), "total"]
    assert [seconds for _, seconds in shown[:-1]] == [f"{row.self_ns / 1e9:.6f}" for row in rows]
    runner.validate(Net(), loader(), verbose=False)
    assert sorted(tmp_path.rglob("*.txt")) == [file, file.with_name("validate-simple-rank-0.txt")]


class ManualNet(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).square().mean())
        optimizer.step()


class ClosureNet(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@pytest.mark.parametrize(
    ("stage", "kind", "phases"),
    [
        ("validate", Net, ["validation > forward"]),
        ("predict", Net, ["predict > forward"]),
        ("fit", FailingNet, ["training > forward"]),
        ("fit", ManualNet, ["training > forward > backward", "training > forward > optimizer"]),
        ("fit", ClosureNet, ["training > optimizer > forward"]),
    ],
)
def test_each_kind_of_run_is_profiled(tmp_path: Path, capsys: Any, stage: str, kind: Any, phases: Any) -> None:  # L-05
    profiler = SimpleProfiler()
    with pytest.raises(ValueError, match="no more") if kind is FailingNet else nullcontext():
        getattr(fit(tmp_path, profiler=profiler), stage)(kind(), loader())
    rows = rows_by_path(profiler)
    assert [rows[phase].calls for phase in phases] == [4] * len(phases)
    (file,) = tmp_path.rglob(f"profile/{stage}-simple-rank-0.txt")
    assert file.read_text() in capsys.readouterr().out


def test_a_second_run_begins_anew_and_a_used_profiler_can_be_sent_to_another_process(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    for _ in range(2):
        fit(tmp_path, profiler=profiler).fit(Net(), loader())
        assert rows_by_path(profiler)["training > forward"].calls == 4
    sent = pickle.loads(pickle.dumps(profiler))
    with profiler.profile("outside"):  # of a run
        pass
    assert sent.rows() == profiler.rows()


class LoadingNet(Net):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(4)


def test_a_resumed_run_is_profiled_from_its_checkpoint_and_with_rebuilt_loaders(tmp_path: Path) -> None:  # L-05, L-07
    profiler, saving = SimpleProfiler(), Checkpoint(tmp_path / "kept")
    options: dict[str, Any] = {"enable_checkpointing": True, "reload_dataloaders_every_n_epochs": 1}
    fit(tmp_path, callbacks=[saving], **options).fit(LoadingNet())
    fit(tmp_path, profiler=profiler, max_epochs=3, **options).fit(LoadingNet(), ckpt_path=saving.last_model_path)
    calls = {name: row.calls for name, row in rows_by_path(profiler).items()}
    expected = {"training > forward": 8, "training > data": 10, "training > validation > data": 6}
    expected["set-up > checkpoint"] = 1
    assert {name: calls[name] for name in expected} == expected


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_run_within_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_shared: bool) -> None:  # L-05
    outer = SimpleProfiler()
    inner = outer if is_shared else SimpleProfiler()

    class Nesting(Net):
        def on_train_start(self) -> None:
            fit(tmp_path / "inner", profiler=inner).fit(Net(), loader())

    fit(tmp_path, profiler=outer).fit(Nesting(), loader(4))
    prefix = "Nesting.on_train_start > fit > " if is_shared else ""
    assert rows_by_path(inner)[f"{prefix}training > forward"].calls == 4
    assert rows_by_path(outer)["training > forward"].calls == 2
    assert capsys.readouterr().out.count("Profile of fit") == (1 if is_shared else 2)


def test_nested_phases_of_one_thread_are_counted_once_and_unpaired_ones_are_refused() -> None:
    def work() -> None:
        with profiler.profile("elsewhere"):
            pass

    profiler = SimpleProfiler()
    profiler.begin(ProfiledRun("fit"))
    with profiler.profile("a"), profiler.profile("b"), profiler.profile("a"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    with profiler.profile("a"):
        for phase in ("b", "fit"):  # fit: the run's own
            with pytest.raises(ConfigurationError, match=rf"stop\('{phase}'\) without a start"):
                profiler.stop(phase)
    profiler.end()
    rows = rows_by_path(profiler)
    assert rows.keys() == {"a", "a > b", "a > b > a", "other", "profiler"}
    assert [rows[name].calls for name in ("a", "a > b", "a > b > a")] == [2, 1, 1]
    assert rows["a"].total_ns == rows["a"].self_ns + rows["a > b"].total_ns


def test_a_short_table_in_a_chosen_file_has_only_times_and_shares(tmp_path: Path) -> None:  # L-05
    profiler = SimpleProfiler(tmp_path / "kept", "first/try", extended=False)
    fit(tmp_path, profiler=profiler).fit(Net(), loader())
    text = (tmp_path / "kept/first/try-rank-0.txt").read_text()
    assert text.splitlines()[1].split() == ["phase", "self", "s", "share", "total", "s"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # no folder of the run for the profile's sake


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "drivetrain_logs").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"SimpleProfiler cannot write to .*(?s:.*)dirpath"):
        fit(tmp_path, profiler="simple").fit(Net(), loader())


def test_a_profile_goes_to_an_object_store(tmp_path: Path) -> None:  # L-05
    folder = f"memory://profiles-{tmp_path.name}"
    for profiler in (SimpleProfiler(folder), PyTorchProfiler(folder)):
        fit(tmp_path, profiler=profiler).fit(Net(), loader(10))
    store = fsspec.filesystem("memory")
    names = sorted(path.rpartition("/")[2] for path in store.ls(folder, detail=False))
    assert names == ["fit-pytorch-rank-0.trace.json", "fit-pytorch-rank-0.txt", "fit-simple-rank-0.txt"]
    store.rm(folder, recursive=True)


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: Any, capsys: Any) -> None:  # L-05
    (tmp_path / "file").write_text("in the way")
    for profiler in (SimpleProfiler(tmp_path / "file"), PyTorchProfiler(tmp_path / "file" / "below")):
        runner = fit(tmp_path, profiler=profiler)
        runner.fit(Net(), loader(16))
        assert (runner.state, runner.global_step) == ("finished", 8)
    assert "A part of this run's profile is lost: FileExistsError" in caplog.text
    assert "A trace of this run's profile could not be written" in caplog.text
    assert "Profile of fit" in capsys.readouterr().out


def test_fast_dev_run_and_a_run_without_a_profiler_write_nothing(tmp_path: Path, capsys: Any) -> None:  # L-05
    fit(tmp_path, profiler="simple", fast_dev_run=True).fit(Net(), loader())
    assert "Profile of fit" in capsys.readouterr().out
    runner, module = fit(tmp_path), SpanningNet()
    runner.fit(module, loader())
    assert module.spans == 4
    assert runner.profiler.summary() == ""
    assert not list(tmp_path.iterdir())


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
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
    folder = Path(str(runner.log_dir), "profile")
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


def test_each_cycle_of_a_schedule_has_its_own_file_and_a_run_too_short_for_it_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler()
    fit(tmp_path, profiler=profiler).fit(Net(), loader(2))
    assert "Nothing was traced: the loop ended after 1 micro-batches" in profiler.summary()
    assert not list(tmp_path.rglob("*.trace.json"))
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


@pytest.mark.parametrize("column", ["cuda_time_total", "self_cuda_time_total", "cpu_memory_usage", "count"])
def test_a_table_alone_is_sorted_by_every_column_that_torch_names(tmp_path: Path, column: str) -> None:  # L-05
    profiler = PyTorchProfiler(export_to_chrome=False, group_by_input_shapes=True, sort_by_key=column)
    fit(tmp_path, profiler=profiler).fit(Net(), loader(12))
    assert [path.suffix for path in tmp_path.rglob("profile/*")] == [".txt"]
    assert "Operations of the traced micro-batches" in profiler.summary()
    assert "Input Shapes" in profiler.summary()
    with pytest.raises(ConfigurationError, match="sort_by_key='cpu'"):  # before the run, not after it
        PyTorchProfiler(sort_by_key="cpu")


def test_a_memory_snapshot_is_refused_without_cuda(tmp_path: Path) -> None:  # L-05
    with pytest.raises(ConfigurationError, match=r"memory_snapshot=True\) on cpu"):
        fit(tmp_path, profiler=PyTorchProfiler(memory_snapshot=True)).fit(Net(), loader())
    assert not list(tmp_path.iterdir())


def expensive(number: int) -> int:
    return sum(n * n for n in range(number))


class BusyNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        expensive(20_000)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        expensive(3)

    def on_train_start(self) -> None:
        with pytest.raises(ConfigurationError, match="without a start"):
            self.trainer.profiler.stop("optimizer")  # and the profile goes on


def calls_of(path: Path, function: str) -> int:
    stats: Any = pstats.Stats(str(path))
    return sum(found[1] for key, found in stats.stats.items() if key[2] == function)


def test_functions_are_listed_by_the_phase_that_calls_them(tmp_path: Path, capsys: Any) -> None:  # L-05
    runner = fit(tmp_path, profiler="advanced")
    runner.fit(BusyNet(), loader())
    assert runner.profiler.summary() in capsys.readouterr().out
    written = Path(str(runner.log_dir), "profile", "fit-advanced-rank-0.txt").read_text()
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
    with cProfile.Profile():  # raises an error if another profiler is still active
        pass
