"""Checkpoint: when it saves, what it keeps, and how a run resumes (F-07, F-08, F-15, F-16)."""

from __future__ import annotations

import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.callbacks._checkpoint_names import checkpoint_name
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._retention import Retention

RUN = "drivetrain_logs/version_0"  # the folder of the first run, below the root


class Scored(TrainModule):
    """Logs the given score at the end of each epoch."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scores = scores
        self.started: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_start(self) -> None:
        self.started.append(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2)), batch_size=1)


def fit(path: Path, checkpoint: Any, **options: Any) -> Fit:
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "seed": 1, **options}
    return Fit(default_root_dir=path, callbacks=checkpoint, **settings)


def names(path: Path) -> list[str]:
    return sorted(one.name for one in (path / RUN / "checkpoints").iterdir() if one.is_dir())


class TestWhen:
    def test_once_an_epoch_and_the_newest_stays(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint()
        fit(tmp_path, checkpoint, max_epochs=3).fit(Scored([0.0] * 3), loader())
        assert names(tmp_path) == ["epoch=2-step=18"]
        assert (tmp_path / RUN / "checkpoints" / "latest").read_text() == "epoch=2-step=18"
        assert (
            checkpoint.best_model_path
            == checkpoint.last_model_path
            == str(tmp_path / RUN / "checkpoints/epoch=2-step=18")
        )
        assert verify(checkpoint.best_model_path) == []

    def test_every_n_steps(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(every_n_train_steps=4, save_top_k=-1)
        fit(tmp_path, checkpoint, max_epochs=2).fit(Scored([0.0] * 2), loader())
        assert names(tmp_path) == ["epoch=0-step=4", "epoch=1-step=12", "epoch=1-step=8"]

    def test_every_n_steps_counts_steps_and_not_micro_batches(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(every_n_train_steps=1, save_top_k=-1)
        fit(tmp_path, checkpoint, max_epochs=1, accumulate_grad_batches=4).fit(Scored([0.0]), loader())
        assert names(tmp_path) == ["epoch=0-step=1", "epoch=0-step=2"]
        assert load(tmp_path / RUN / "checkpoints/epoch=0-step=1").progress["batch_idx"] == 4

    def test_every_n_epochs(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(every_n_epochs=2, save_top_k=-1)
        fit(tmp_path, checkpoint, max_epochs=5).fit(Scored([0.0] * 5), loader())
        assert names(tmp_path) == ["epoch=1-step=12", "epoch=3-step=24"]

    def test_by_the_clock(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(train_time_interval=timedelta(microseconds=1), save_top_k=-1)
        fit(tmp_path, checkpoint, max_steps=40).fit(Scored([0.0] * 9), loader())
        assert names(tmp_path) == ["epoch=2-step=16", "epoch=5-step=32"]

    def test_after_each_validation_where_there_are_several(self, tmp_path: Path) -> None:
        class Validated(Scored):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val", self.layer(batch[0]).mean())

        checkpoint = Checkpoint(save_top_k=-1)
        trainer = fit(tmp_path, checkpoint, max_epochs=1, val_check_interval=2)
        trainer.fit(Validated([0.0]), loader(), loader())
        assert names(tmp_path) == ["epoch=0-step=2", "epoch=0-step=4", "epoch=0-step=6"]

    def test_nothing_where_nothing_is_to_be_kept(self, tmp_path: Path) -> None:
        fit(tmp_path, Checkpoint(save_top_k=0), max_epochs=1).fit(Scored([0.0]), loader())
        assert not (tmp_path / RUN / "checkpoints").exists()

    def test_on_an_exception(self, tmp_path: Path) -> None:
        class Failing(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if trainer.micro_batches == 5:
                    raise RuntimeError("out of luck")

        callbacks = [Checkpoint(save_on_exception=True), Failing()]
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(tmp_path, callbacks, max_epochs=1, accumulate_grad_batches=2).fit(Scored([0.0]), loader())
        assert names(tmp_path) == ["exception-step=2"]
        saved = load(tmp_path / RUN / "checkpoints/exception-step=2").progress
        assert (saved["batch_idx"], saved["samples_seen"]) == (4, 4)  # the state after the last step


class TestWhatIsKept:
    def test_the_best_by_a_value(self, tmp_path: Path) -> None:
        # F-07
        checkpoint = Checkpoint(monitor="score", save_top_k=2, filename="{epoch}-{score:.1f}")
        fit(tmp_path, checkpoint, max_epochs=4).fit(Scored([3.0, 1.0, 4.0, 2.0]), loader())
        assert names(tmp_path) == ["epoch=1-score=1.0", "epoch=3-score=2.0"]
        assert checkpoint.best_model_score == 1.0
        assert checkpoint.best_model_path.endswith("epoch=1-score=1.0")
        assert set(checkpoint.best_k_models.values()) == {1.0, 2.0}

    def test_the_newest_besides(self, tmp_path: Path) -> None:
        # F-07
        checkpoint = Checkpoint(monitor="score", mode="max", keep_last=2)
        fit(tmp_path, checkpoint, max_epochs=4).fit(Scored([3.0, 5.0, 4.0, 2.0]), loader())
        assert names(tmp_path) == ["epoch=1-step=12", "epoch=2-step=18", "epoch=3-step=24"]
        assert checkpoint.best_model_path.endswith("epoch=1-step=12")
        assert checkpoint.last_model_path.endswith("epoch=3-step=24")

    def test_what_others_wrote_stays(self, tmp_path: Path) -> None:
        # F-07, F-15, F-16
        folder = tmp_path / "checkpoints"
        (folder / "best").mkdir(parents=True)
        (folder / "tmp").mkdir()
        fit(tmp_path, Checkpoint(folder), max_epochs=1).fit(Scored([0.0]), loader())
        fit(tmp_path, Checkpoint(folder), max_epochs=2).fit(Scored([0.0] * 2), loader())
        fit(tmp_path, Checkpoint(folder), max_epochs=1).fit(Scored([0.0]), loader())
        assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == [
            "best",
            "epoch=0-step=6",
            "epoch=0-step=6-v1",
            "epoch=1-step=12",
            "tmp",
        ]

    def test_a_resumed_run_goes_on_with_its_list(self, tmp_path: Path) -> None:
        fit(tmp_path, Checkpoint(keep_last=2, save_top_k=0), max_epochs=3).fit(Scored([0.0] * 3), loader())
        assert names(tmp_path) == ["epoch=1-step=12", "epoch=2-step=18"]
        resumed = Scored([0.0] * 4)
        fit(tmp_path, Checkpoint(keep_last=2, save_top_k=0), max_epochs=4).fit(resumed, loader(), ckpt_path="last")
        assert resumed.started == [3]
        assert names(tmp_path) == ["epoch=2-step=18", "epoch=3-step=24"]
        elsewhere = Checkpoint(tmp_path / "elsewhere", keep_last=2, save_top_k=0)
        fit(tmp_path, elsewhere, max_epochs=5).fit(Scored([0.0] * 5), loader(), ckpt_path="last")
        assert names(tmp_path) == ["epoch=2-step=18", "epoch=3-step=24"]  # not this run's
        assert len(list((tmp_path / "elsewhere").glob("epoch=*"))) == 1

    @pytest.mark.parametrize("another_run", [False, True])
    def test_what_a_killed_run_was_about_to_remove(self, another_run: bool, tmp_path: Path) -> None:
        # F-05, F-07: killed after the second checkpoint was complete and before the first was removed
        first, aside = tmp_path / RUN / "checkpoints/epoch=0-step=6", tmp_path / "aside"
        fit(tmp_path, Checkpoint(), max_epochs=1).fit(Scored([0.0]), loader())
        shutil.copytree(first, aside)
        fit(tmp_path, Checkpoint(), max_epochs=2).fit(Scored([0.0] * 2), loader(), ckpt_path="auto")
        assert names(tmp_path) == ["epoch=1-step=12"]
        if another_run:
            fit(tmp_path / "other", Checkpoint(tmp_path / "theirs"), max_epochs=1).fit(Scored([0.0]), loader())
            shutil.copytree(tmp_path / "theirs/epoch=0-step=6", first)
        else:
            shutil.copytree(aside, first)
        start = tmp_path / RUN / "checkpoints/epoch=1-step=12"
        fit(tmp_path, Checkpoint(), max_epochs=3).fit(Scored([0.0] * 3), loader(), ckpt_path=start)
        assert names(tmp_path) == ["epoch=0-step=6"] * another_run + ["epoch=2-step=18"]

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_a_value_that_is_no_number_is_the_worst(self, mode: str) -> None:
        retention = Retention(1, 0, mode)
        assert retention.add("a", "1", float("nan")) == []
        assert [one.name for one in retention.add("b", "2", 1.0)] == ["a"]
        assert not retention.would_keep(float("nan"))

    def test_two_callbacks_of_one_class(self, tmp_path: Path) -> None:
        # F-12, F-16
        best = Checkpoint(monitor="score", filename="best-{epoch}")
        steps = Checkpoint(every_n_train_steps=5, filename="steps-{step}")
        fit(tmp_path, [best, steps], max_epochs=2).fit(Scored([1.0, 2.0]), loader())
        assert names(tmp_path) == ["best-epoch=0", "steps-step=10"]
        again = [Checkpoint(monitor="score", filename="best-{epoch}"), Checkpoint(every_n_train_steps=5)]
        fit(tmp_path, again, max_epochs=3).fit(Scored([1.0, 2.0, 0.5]), loader(), ckpt_path="last")
        assert names(tmp_path) == ["best-epoch=2", "epoch=2-step=15"]

    def test_weights_only(self, tmp_path: Path) -> None:
        fit(tmp_path, Checkpoint(save_weights_only=True), max_epochs=1).fit(Scored([0.0]), loader())
        saved = load(tmp_path / RUN / "checkpoints/epoch=0-step=6")
        assert saved.weights_only
        assert set(saved.weights()) == {"layer.weight", "layer.bias"}


class TestGoingOn:
    def test_a_clock_that_was_ahead_does_not_hold_a_run_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # J-03: each restart resumed from the checkpoint written by a clock an hour ahead
        clock = time.time
        monkeypatch.setattr("time.time", lambda: clock() + 3600)
        kept: dict[str, Any] = {"save_top_k": -1}
        fit(tmp_path, Checkpoint(**kept), max_epochs=1).fit(Scored([0.0]), loader(), ckpt_path="auto")
        monkeypatch.setattr("time.time", clock)
        for epochs in (2, 3, 4):
            module = Scored([0.0] * epochs)
            fit(tmp_path, Checkpoint(**kept), max_epochs=epochs).fit(module, loader(), ckpt_path="auto")
            assert module.started == [epochs - 1]
        metadata = [load(tmp_path / RUN / "checkpoints" / name).manifest.metadata for name in names(tmp_path)]
        assert [len(one.lineage) for one in metadata] == [1, 2, 3, 4]
        assert [one.parent for one in metadata[1:]] == [one.identifier for one in metadata[:-1]]

    def test_auto_starts_afresh_and_then_goes_on(self, tmp_path: Path) -> None:
        first, second = Scored([0.0] * 4), Scored([0.0] * 4)
        fit(tmp_path, Checkpoint(), max_epochs=2).fit(first, loader(), ckpt_path="auto")
        fit(tmp_path, Checkpoint(), max_epochs=4).fit(second, loader(), ckpt_path="auto")
        assert (first.started, second.started) == ([0, 1], [2, 3])

    def test_auto_passes_over_what_no_run_can_go_on_from(self, tmp_path: Path) -> None:
        folder = tmp_path / RUN / "checkpoints"
        fit(tmp_path, Checkpoint(keep_last=3), max_epochs=2).fit(Scored([0.0] * 2), loader())
        fit(tmp_path, Checkpoint(folder, "weights", save_weights_only=True), max_epochs=1).fit(Scored([0.0]), loader())
        (folder / "epoch=1-step=12" / "manifest.json").unlink()  # torn
        module = Scored([0.0] * 2)
        fit(tmp_path, Checkpoint(), max_epochs=2).fit(module, loader(), ckpt_path="auto")
        assert module.started == [1]

    def test_the_best(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(monitor="score", keep_last=1)
        trainer = fit(tmp_path, checkpoint, max_epochs=3)
        trainer.fit(Scored([2.0, 1.0, 3.0]), loader())
        best = load(checkpoint.best_model_path).weights()
        for each in (trainer, fit(tmp_path, Checkpoint(monitor="score"))):
            module = Scored([])
            module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign, misc]
            each.test(module, loader(), ckpt_path="best")
            assert torch.equal(module.layer.weight, best["layer.weight"])

    def test_last_and_best_say_where_they_looked(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no checkpoint to resume from.*\n.*checkpoints"):
            fit(tmp_path, Checkpoint(), max_epochs=1).fit(Scored([0.0]), loader(), ckpt_path="last")

    def test_saving_after_a_resume_does_not_collide(self, tmp_path: Path) -> None:
        # F-15
        fit(tmp_path, Checkpoint(every_n_train_steps=2, save_top_k=-1), max_epochs=1).fit(Scored([0.0]), loader())
        before = {name: load(tmp_path / RUN / "checkpoints" / name).manifest.identifier for name in names(tmp_path)}
        start = tmp_path / RUN / "checkpoints/epoch=0-step=2"
        kind = type("Other", (Checkpoint,), {})  # a class with its own state key
        other = kind(tmp_path / RUN / "checkpoints", every_n_train_steps=2, save_top_k=-1)
        fit(tmp_path, other, max_epochs=1).fit(Scored([0.0]), loader(), ckpt_path=start)
        after = {name: load(tmp_path / RUN / "checkpoints" / name).manifest.identifier for name in names(tmp_path)}
        assert {name: after[name] for name in before} == before
        assert sorted(set(after) - set(before)) == ["epoch=0-step=4-v1", "epoch=0-step=6-v1"]


class Replaced(Checkpoint):
    """Replaces its folder by a file after the folder was checked."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        Path(str(self.dirpath)).write_text("")


class TestInTheBackground:
    def test_what_is_saved_is_the_state_at_the_call(self, tmp_path: Path) -> None:
        # F-08
        plain = Checkpoint(tmp_path / "plain", every_n_train_steps=2, save_top_k=-1)
        beside = Checkpoint(tmp_path / "beside", every_n_train_steps=2, save_top_k=-1, save_async=True)
        fit(tmp_path, [plain, beside], max_epochs=2).fit(Scored([0.0] * 2), loader())
        for one in (tmp_path / "plain").glob("epoch=*"):
            other = load(tmp_path / "beside" / one.name)
            assert verify(other.path) == []
            expected = load(one)
            assert expected.progress == other.progress
            for name, value in expected.weights().items():
                assert torch.equal(value, other.weights()[name])
            state, found = expected.optimizer_state()["state"], other.optimizer_state()["state"]
            assert torch.equal(state["layer.weight"]["exp_avg"], found["layer.weight"]["exp_avg"])
        assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-write"]

    def test_a_failure_surfaces_within_a_step(self, tmp_path: Path) -> None:
        # F-08
        class Blocked(Scored):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.started.append(self.global_step)
                for thread in threading.enumerate():
                    if thread.name == "checkpoint-write":
                        thread.join()

        checkpoint = Replaced(tmp_path / "file", every_n_train_steps=2, save_async=True)
        module = Blocked([0.0] * 2)
        with pytest.raises(CheckpointError, match="could not be written"):
            fit(tmp_path, checkpoint, max_epochs=2).fit(module, loader())
        assert module.started[-1] == 3

    def test_the_end_waits_and_raises(self, tmp_path: Path) -> None:
        # F-08
        checkpoint = Replaced(tmp_path / "file", save_async=True)
        with pytest.raises(CheckpointError, match="could not be written"):
            fit(tmp_path, checkpoint, max_epochs=1).fit(Scored([0.0]), loader())


class TestNames:
    def test_templates(self) -> None:
        values = {"epoch": 3, "val/loss": 0.256}
        assert checkpoint_name("{epoch:03d}-{val/loss:.2f}", values) == "epoch=003-val_loss=0.26"
        assert checkpoint_name("plain", values) == "plain"

    def test_what_was_not_logged_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no value 'val_los' was logged.*val_loss"):
            checkpoint_name("{val_los}", {"epoch": 1, "val_loss": 2.0})

    @pytest.mark.parametrize("template", ["", "a/b", "{epoch", ".hidden"])
    def test_what_is_no_name_is_refused(self, template: str) -> None:
        with pytest.raises(ConfigurationError, match="is not a valid name"):
            Checkpoint(filename=template)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "mn"}, "mode='mn'.*min"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"keep_last": True}, "keep_last=True"),
        ({"train_time_interval": 30}, "train_time_interval=30"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Checkpoint(**options)


def test_a_value_that_nobody_logged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"monitor='scroe'.*'score'"):
        fit(tmp_path, Checkpoint(monitor="scroe"), max_epochs=1).fit(Scored([1.0]), loader())
