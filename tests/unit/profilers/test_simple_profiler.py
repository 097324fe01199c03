"""SimpleProfiler: the sum of the table is the run's time to the nanosecond (L-05)."""

from __future__ import annotations

import pickle
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from profiler_case import FailingNet, Net, SpanningNet, fit, loader, rows_by_path

from drivetrain import Callback
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import ProfiledRun, PyTorchProfiler, SimpleProfiler


class SpanningCallback(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with trainer.profiler.profile("mine"):
            pass


class TransferringNet(SpanningNet):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_start(self) -> None:
        pass


def test_every_phase_is_a_row_and_all_rows_add_up_to_the_run(tmp_path: Path) -> None:  # L-05
    profiler = SimpleProfiler()
    runner = fit(
        tmp_path, profiler=profiler, callbacks=[SpanningCallback(), Checkpoint(every_n_train_steps=2)],
        enable_checkpointing=True, logger=CSVLogger(tmp_path), log_every_n_steps=2, gradient_clip_val=1.0,
        num_sanity_val_steps=1, detect_anomaly=True,
    )  # fmt: skip
    runner.fit(TransferringNet(), loader(), loader())
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
        "TransferringNet.on_train_start": 1,
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
    assert runner.log_dir is not None  # without loggers and checkpoints as well
    file = Path(runner.log_dir, "profile", "fit-simple-rank-0.txt")
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    lines = text.splitlines()
    assert lines[0].startswith("Profile of fit on cpu: ")
    rows = runner.profiler.rows()
    shown = [line.split("  0.") for line in lines if "  0." in line]
    assert [name.strip() for name, *_ in shown] == [*(row.path[-1] for row in rows), "total"]
    assert [cells[0].split()[0] for _, *cells in shown[:-1]] == [f"{row.self_ns / 1e9:.6f}"[2:] for row in rows]


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
def test_each_kind_of_run_is_profiled_as_its_phases_nest(
    tmp_path: Path, capsys: Any, stage: str, kind: type[Net], phases: list[str]
) -> None:  # L-05
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


def test_nested_phases_of_one_thread_are_counted_once_and_unpaired_ones_are_reported() -> None:
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
    assert rows["a"].longest_ns >= rows["a > b"].longest_ns >= rows["a > b > a"].longest_ns > 0
    profiler.begin(ProfiledRun("fit"))
    profiler.start("hook")
    profiler.start("across")
    profiler.stop("hook")
    profiler.start("forward")
    profiler.stop("across")
    profiler.stop("forward")
    profiler.end()
    assert rows_by_path(profiler).keys() == {"hook", "hook > across", "forward", "other", "profiler"}
    assert "'across' ended after its parent phase 1 times" in profiler.summary()


def test_a_short_table_in_a_chosen_file_has_only_times_and_shares(tmp_path: Path) -> None:  # L-05
    profiler = SimpleProfiler(tmp_path / "kept", "first/try", extended=False)
    fit(tmp_path, profiler=profiler).fit(Net(), loader())
    text = (tmp_path / "kept/first/try-rank-0.txt").read_text()
    assert text.splitlines()[1].split() == ["phase", "self", "s", "share", "total", "s"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # no folder of the run for the profile's sake


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "drivetrain_logs").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"The profiler cannot write to .*(?s:.*)dirpath"):
        fit(tmp_path, profiler="simple").fit(Net(), loader())


def test_a_profile_goes_to_an_object_store(tmp_path: Path) -> None:  # L-05
    folder = f"memory://profiles-{tmp_path.name}"
    for profiler in (SimpleProfiler(folder), PyTorchProfiler(folder)):
        fit(tmp_path, profiler=profiler).fit(Net(), loader(10))
    store = fsspec.filesystem("memory")
    names = sorted(path.rpartition("/")[2] for path in store.ls(folder, detail=False))
    assert names == ["fit-pytorch-rank-0.trace.json", "fit-pytorch-rank-0.txt", "fit-simple-rank-0.txt"]
    store.rm(folder, recursive=True)


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    # L-05
    (tmp_path / "file").write_text("in the way")
    runner = fit(tmp_path, profiler=SimpleProfiler(tmp_path / "file"))
    runner.fit(Net(), loader())
    assert runner.state == "finished"
    assert "A part of this run's profile is lost: FileExistsError" in caplog.text
    assert "Profile of fit" in capsys.readouterr().out


def test_fast_dev_run_and_a_run_without_a_profiler_write_nothing(tmp_path: Path, capsys: Any) -> None:  # L-05
    fit(tmp_path, profiler="simple", fast_dev_run=True).fit(Net(), loader())
    assert "Profile of fit" in capsys.readouterr().out
    runner, module = fit(tmp_path), SpanningNet()
    runner.fit(module, loader())
    assert module.spans == 4
    assert runner.profiler.summary() == ""
    assert not list(tmp_path.iterdir())
