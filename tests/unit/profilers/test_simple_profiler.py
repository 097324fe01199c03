"""SimpleProfiler: the sum of the table is the run's time to the nanosecond (L-05)."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from profiler_case import Net, fit, loader

from drivetrain import Callback
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import ProfiledRun, Profiler, PyTorchProfiler, SimpleProfiler


def paths(profiler: SimpleProfiler) -> dict[str, Any]:
    return {" > ".join(row.path): row for row in profiler.rows()}


def adds_up(profiler: SimpleProfiler) -> bool:
    return 0 < profiler.total_ns == sum(row.self_ns for row in profiler.rows())


class Watching(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with trainer.profiler.profile("mine"):
            pass


class Moving(Net):
    """Has a hook of the transfer, and a span of its own in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("augmentation"):
            batch = batch * 2
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_start(self) -> None:
        pass


def test_every_phase_is_a_row_and_all_rows_add_up_to_the_run(tmp_path: Path) -> None:
    # L-05
    profiler = SimpleProfiler()
    runner = fit(
        tmp_path,
        profiler=profiler,
        callbacks=[Watching(), Checkpoint(every_n_train_steps=2)],
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
    )
    runner.fit(Moving(), loader(), loader())
    assert runner.profiler is profiler
    assert adds_up(profiler)
    rows = paths(profiler)
    calls = {name: rows[name].calls for name in rows}
    assert calls["training > forward"] == calls["training > backward"] == calls["training > optimizer"] == 4
    assert calls["training > data"] == 5  # the last finds the end
    assert calls["training > transfer"] == calls["training > forward > augmentation"] == 4
    assert calls["training > optimizer > clipping"] == 4
    assert calls["training > checkpoint"] == 3  # the dry run that is repeated after the first step, and two saves
    assert calls["training > logging > loggers"] == 2
    assert calls["training > Watching.on_train_batch_end > mine"] == 4
    assert calls["training > validation"] == 1
    assert calls["training > validation > forward"] == 4
    assert calls["sanity check > forward"] == 1
    assert calls["Moving.on_train_start"] == 1
    set_up = {"configure_optimizers", "loaders", "prepare_data", "setup_environment", "setup_module"}
    assert {f"set-up > {name}" for name in set_up} <= calls.keys()
    assert {"set-up", "taking down", "other", "profiler"} <= calls.keys()
    assert rows["profiler"].calls == sum(row.calls for row in profiler.rows()[:-2])
    assert rows["profiler"].self_ns > 0


def test_the_text_says_what_the_rows_do_and_is_in_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # L-05
    runner = fit(tmp_path, profiler="simple")
    runner.fit(Net(), loader())
    text = runner.profiler.summary()
    assert text in capsys.readouterr().out
    assert runner.log_dir is not None  # without loggers and checkpoints as well
    file = Path(runner.log_dir, "profile", "fit-simple-rank-0.txt")
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    lines = text.splitlines()
    assert lines[0].startswith("Profile of fit on cpu: ")
    rule = [number for number, line in enumerate(lines) if set(line) == {"-"}]
    body = lines[rule[0] + 1 : rule[1]]
    assert isinstance(runner.profiler, SimpleProfiler)
    assert [line.split("  0.")[0].strip() for line in body] == [row.path[-1] for row in runner.profiler.rows()]
    shown = [float(line.split("  0.")[1].split()[0]) for line in [*body, lines[rule[1] + 1]]]  # millionths of "self"
    assert abs(sum(shown[:-1]) - shown[-1]) <= len(body)  # each is rounded
    assert "the row 'profiler'" in text


def test_manual_optimization_has_backward_and_optimizer_within_its_forward(tmp_path: Path) -> None:
    # L-05
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler).fit(Manual(), loader())
    assert adds_up(profiler)
    rows = paths(profiler)
    assert rows["training > forward > backward"].calls == rows["training > forward > optimizer"].calls == 4


def test_a_closure_is_within_the_optimizers_step(tmp_path: Path) -> None:
    # L-05
    class Closing(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler).fit(Closing(), loader())
    assert adds_up(profiler)
    assert paths(profiler)["training > optimizer > forward"].calls >= 4


@pytest.mark.parametrize(("stage", "loop"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_is_profiled_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, loop: str
) -> None:
    # L-05
    profiler = SimpleProfiler()
    runner = fit(tmp_path, profiler=profiler)
    getattr(runner, stage)(Net(), loader())
    assert adds_up(profiler)
    assert paths(profiler)[f"{loop} > forward"].calls == 4
    assert (tmp_path / "profile" / f"{stage}-simple-rank-0.txt").read_text() in capsys.readouterr().out


def test_an_evaluation_after_a_fit_writes_beside_its_profile(tmp_path: Path) -> None:
    # L-05
    runner = fit(tmp_path, profiler="simple")
    runner.fit(Net(), loader())
    runner.test(Net(), loader(), verbose=False)
    assert runner.log_dir is None or not (tmp_path / "profile").exists()
    found = sorted(path.name for path in tmp_path.rglob("*.txt"))
    assert found == ["fit-simple-rank-0.txt", "test-simple-rank-0.txt"]


def test_a_run_that_fails_leaves_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # L-05
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    profiler = SimpleProfiler()
    runner = fit(tmp_path, profiler=profiler)
    with pytest.raises(ValueError, match="no more"):
        runner.fit(Failing(), loader())
    assert adds_up(profiler)
    assert paths(profiler)["training > forward"].calls == 3
    assert runner.log_dir is not None
    assert Path(runner.log_dir, "profile", "fit-simple-rank-0.txt").read_text() in capsys.readouterr().out


def test_a_second_run_begins_anew_and_a_used_profiler_can_be_sent_to_another_process(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    for _ in range(2):
        fit(tmp_path, profiler=profiler).fit(Net(), loader())
        assert paths(profiler)["training > forward"].calls == 4
    sent = pickle.loads(pickle.dumps(profiler))
    assert sent.rows() == profiler.rows()
    with profiler.profile("outside"):  # of a run
        pass
    assert sent.rows() == profiler.rows()


def test_a_run_within_a_run_is_a_phase_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # L-05
    profiler = SimpleProfiler()

    class Nesting(Net):
        def on_train_start(self) -> None:
            fit(tmp_path / "inner", profiler=profiler).fit(Net(), loader())

    fit(tmp_path, profiler=profiler).fit(Nesting(), loader(4))
    assert adds_up(profiler)
    rows = paths(profiler)
    assert rows["Nesting.on_train_start > fit > training > forward"].calls == 4
    assert rows["training > forward"].calls == 2
    assert capsys.readouterr().out.count("Profile of fit") == 1


def test_two_profilers_of_nested_runs_do_not_see_each_other(tmp_path: Path) -> None:
    inner, outer = SimpleProfiler(), SimpleProfiler()

    class Nesting(Net):
        def on_train_start(self) -> None:
            fit(tmp_path / "inner", profiler=inner).fit(Net(), loader())

    fit(tmp_path, profiler=outer).fit(Nesting(), loader(4))
    assert adds_up(inner)
    assert adds_up(outer)
    assert paths(inner)["training > forward"].calls == 4
    assert paths(outer)["training > forward"].calls == 2


# By itself


def begun() -> SimpleProfiler:
    profiler = SimpleProfiler()
    profiler.begin(ProfiledRun("fit"))
    return profiler


def test_nested_phases_are_counted_once() -> None:
    profiler = begun()
    with profiler.profile("a"), profiler.profile("b"), profiler.profile("a"):
        pass
    with profiler.profile("a"):
        pass
    profiler.end()
    assert adds_up(profiler)
    rows = paths(profiler)
    assert [rows[name].calls for name in ("a", "a > b", "a > b > a")] == [2, 1, 1]
    assert rows["a"].total_ns == rows["a"].self_ns + rows["a > b"].total_ns
    assert rows["a"].longest_ns >= rows["a > b"].longest_ns >= rows["a > b > a"].longest_ns > 0


def test_a_phase_that_outlasts_the_one_around_it_is_told_apart() -> None:
    profiler = begun()
    profiler.start("hook")
    profiler.start("across")
    profiler.stop("hook")
    profiler.start("forward")
    profiler.stop("across")
    profiler.stop("forward")
    profiler.end()
    assert adds_up(profiler)
    assert paths(profiler).keys() == {"hook", "hook > across", "forward", "other", "profiler"}
    assert "'across' ended after its parent phase 1 times" in profiler.summary()


def test_a_stop_without_a_start_is_refused() -> None:
    profiler = begun()
    with profiler.profile("a"), pytest.raises(ConfigurationError, match=r"stop\('b'\) without a start"):
        profiler.stop("b")
    with pytest.raises(ConfigurationError, match=r"stop\('fit'\)"):
        profiler.stop("fit")  # the run's own
    profiler.end()
    assert adds_up(profiler)


def test_other_threads_are_not_counted() -> None:
    profiler = begun()

    def elsewhere() -> None:
        with profiler.profile("elsewhere"):
            pass

    with profiler.profile("a"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    profiler.end()
    assert adds_up(profiler)
    assert "elsewhere" not in profiler.summary()


def test_a_short_table_has_times_and_shares_alone(tmp_path: Path) -> None:
    profiler = SimpleProfiler(tmp_path / "there", "mine", extended=False)
    fit(tmp_path, profiler=profiler).fit(Net(), loader())
    text = (tmp_path / "there" / "mine-rank-0.txt").read_text()
    assert text.splitlines()[1].split() == ["phase", "self", "s", "share", "total", "s"]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]  # no folder of the run for the profile's sake


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "drivetrain_logs").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"The profiler cannot write to .*(?s:.*)dirpath"):
        fit(tmp_path, profiler="simple").fit(Net(), loader())


def test_a_profile_goes_to_an_object_store(tmp_path: Path) -> None:
    # L-05
    folder = f"memory://profiles-{tmp_path.name}"
    for profiler in (SimpleProfiler(folder), PyTorchProfiler(folder)):
        fit(tmp_path, profiler=profiler).fit(Net(), loader(32))
    there = fsspec.filesystem("memory")
    names = sorted(path.rpartition("/")[2] for path in there.ls(folder, detail=False))
    assert names == ["fit-pytorch-rank-0.trace.json", "fit-pytorch-rank-0.txt", "fit-simple-rank-0.txt"]
    there.rm(folder, recursive=True)


def test_a_profile_that_cannot_be_written_is_told_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    # L-05
    (tmp_path / "file").write_text("in the way")
    runner = fit(tmp_path, profiler=SimpleProfiler(tmp_path / "file"))
    runner.fit(Net(), loader())
    assert runner.state == "finished"
    assert "A part of this run's profile is lost: FileExistsError" in caplog.text
    assert "Profile of fit" in capsys.readouterr().out


def test_a_run_that_goes_on_is_profiled_from_where_it_does(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path / "kept", every_n_train_steps=2)
    fit(tmp_path, max_steps=2, callbacks=[saver], enable_checkpointing=True).fit(Net(), loader())
    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler, max_steps=4).fit(Net(), loader(), ckpt_path=saver.last_model_path)
    assert adds_up(profiler)
    rows = paths(profiler)
    assert rows["training > forward"].calls == 2
    assert rows["set-up > checkpoint"].calls == 1


def test_a_quick_try_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, profiler="simple", fast_dev_run=True).fit(Net(), loader())
    assert "Profile of fit" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.txt"))


def test_without_a_profiler_a_span_does_nothing(tmp_path: Path) -> None:
    # L-05
    class Spanning(Net):
        spans = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("mine"):
                self.spans += 1
            return super().training_step(batch, batch_idx)

    runner, module = fit(tmp_path), Spanning()
    runner.fit(module, loader())
    assert module.spans == 4
    assert runner.profiler.summary() == ""
    assert not list(tmp_path.iterdir())


def test_a_name_with_a_folder_in_it_is_written_there(tmp_path: Path) -> None:
    # L-05
    fit(tmp_path, profiler=SimpleProfiler(dirpath=tmp_path / "kept", filename="first/try")).fit(
        Net(), loader(), loader()
    )
    assert "Profile of fit" in (tmp_path / "kept/first/try-rank-0.txt").read_text()


def test_a_profiler_of_ones_own_needs_not_call_the_constructor_of_its_base(tmp_path: Path) -> None:
    # K-03
    class Counting(Profiler):
        def __init__(self) -> None:
            self.phases = 0

        def start(self, phase: str) -> None:
            self.phases += 1

        def stop(self, phase: str) -> None: ...

        def summary(self) -> str:
            return f"{self.phases} phases"

    runner = fit(tmp_path, profiler=Counting())
    runner.fit(Net(), loader(), loader())
    assert runner.log_dir is not None
    assert "phases" in Path(runner.log_dir, "profile/fit-counting-rank-0.txt").read_text()


def test_loaders_that_are_built_anew_are_timed_too(tmp_path: Path) -> None:
    # L-05, L-07
    class Loading(Net):
        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return loader(4)

    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Loading())
    assert adds_up(profiler)
    rows = paths(profiler)
    assert rows["training > data"].calls == 15  # the last of each epoch finds the end
    assert rows["training > validation > data"].calls == 9
    assert rows["training > forward"].calls == 12


@pytest.mark.parametrize("name", [None, "simple"])
def test_a_requested_checkpoint_that_a_failure_prevents_is_named(
    tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(str(tmp_path / "never"))
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, profiler=name).fit(Failing(), loader())
    assert f"The checkpoint {str(tmp_path / 'never')!r} is not written: the run failed" in caplog.text


def test_anomaly_detection_leaves_the_phases_of_a_step(tmp_path: Path) -> None:
    # L-05
    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler, detect_anomaly=True, gradient_clip_val=1.0).fit(Net(), loader())
    rows = paths(profiler)
    assert [rows[f"training > {name}"].calls for name in ("forward", "backward", "optimizer")] == [4, 4, 4]
    assert rows["training > optimizer > clipping"].calls == 4
