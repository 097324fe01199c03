"""Checkpoint: saves before the first validation, equal scores, and names that cannot be written (Q-05)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from callback_modules import Regression, loader, quiet_fit

from drivetrain import Callback, ConfigurationError, Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._retention import Retention

EPOCH = 10  # optimizer steps of an epoch


class Validated(Regression):
    """Logs the given values of ``val_loss``, one for each validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores
        self.validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.scores[self.validations])
            self.validations += 1


class StopAt(Callback):
    """Fails after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("out of luck")


def trainer_of(root: Path, callbacks: Any, **options: Any) -> Fit:
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    defaults = {"default_root_dir": root, "enable_checkpointing": True, "max_epochs": 2}
    return quiet_fit(callbacks=callbacks, **(defaults | options))


def fit(root: Path, callbacks: Any, scores: list[float], ckpt_path: str | None = None, **options: Any) -> Fit:
    trainer = trainer_of(root, callbacks, **options)
    trainer.fit(Validated(scores), loader(), loader(8), ckpt_path=ckpt_path)
    return trainer


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


class TestBeforeTheFirstValidation:
    @pytest.mark.parametrize("save_async", [False, True])
    def test_a_due_save_waits_for_the_validation_and_says_so_once(
        self, save_async: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        # the first due save ended the run with "no value of that name was logged"
        every_four = Checkpoint(
            tmp_path / "here", monitor="val_loss", every_n_train_steps=4, save_top_k=-1, save_async=save_async
        )
        fit(tmp_path, every_four, [0.7, 0.4], num_sanity_val_steps=1)
        assert names(tmp_path / "here") == ["epoch=0-step=10", "epoch=1-step=20"]  # those of validations (S-04)
        (line,) = messages(caplog, "waits")
        assert "monitor='val_loss'" in line
        assert "step 4" in line

    def test_saves_by_time_wait_as_well(self, tmp_path: Path) -> None:
        #
        timed = Checkpoint(
            tmp_path / "here", monitor="val_loss", train_time_interval=timedelta(microseconds=1), save_top_k=-1
        )
        fit(tmp_path, timed, [0.7], check_val_every_n_epoch=2)
        assert names(tmp_path / "here") == ["epoch=1-step=20"]

    def test_the_end_of_an_epoch_without_validation_waits(self, tmp_path: Path) -> None:
        #
        each_epoch = Checkpoint(tmp_path / "here", monitor="val_loss", every_n_epochs=1, save_top_k=-1)
        fit(tmp_path, each_epoch, [0.7, 0.4], max_epochs=4, check_val_every_n_epoch=2)
        assert names(tmp_path / "here")[0] == "epoch=1-step=20"
        assert each_epoch.best_model_score == 0.4

    def test_a_name_with_a_value_waits_for_the_value(self, tmp_path: Path) -> None:
        #
        named = Checkpoint(tmp_path / "here", filename="{epoch}-{val_loss:.1f}", every_n_train_steps=4)
        fit(tmp_path, named, [0.7, 0.4], max_epochs=1)
        assert names(tmp_path / "here") == ["epoch=0-val_loss=0.7"]

    def test_the_newest_is_kept_without_a_score_until_then(self, tmp_path: Path) -> None:
        # keep_last and save_last do not depend on the monitored value, so a killed run loses no more than before
        newest = Checkpoint(
            tmp_path / "here", "{step}-{val_loss:.1f}", "val_loss", every_n_train_steps=4, save_last=True
        )
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(tmp_path, [newest, StopAt(9)], [0.7])
        assert names(tmp_path / "here") == ["step=8-val_loss=nan"]
        assert newest.best_model_score is None
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(tmp_path, [newest, StopAt(17)], [0.7], ckpt_path=newest.last_model_path)
        assert newest.best_model_score == 0.7
        assert names(tmp_path / "here") == ["step=10-val_loss=0.7", "step=16-val_loss=nan"]

    def test_a_validation_that_never_comes_is_said_at_the_end_and_the_weights_are_saved(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        #
        checkpoint = Checkpoint(tmp_path / "here", monitor="val_loss", every_n_train_steps=4)
        fit(tmp_path, checkpoint, [], check_val_every_n_epoch=5)
        assert names(tmp_path / "here") == ["epoch=1-step=20"]
        assert checkpoint.best_model_score is None
        assert verify(checkpoint.best_model_path) == []
        assert len(messages(caplog, "waits")) == len(messages(caplog, "without a score")) == 1

    def test_a_run_that_ends_before_its_validation_is_saved(self, tmp_path: Path) -> None:
        # max_steps ends the epoch before its validation
        checkpoint = Checkpoint(tmp_path / "here", monitor="val_loss")
        fit(tmp_path, checkpoint, [], max_steps=3)
        assert names(tmp_path / "here") == ["epoch=0-step=3"]

    def test_a_value_of_training_does_not_wait(self, tmp_path: Path) -> None:
        #
        checkpoint = Checkpoint(tmp_path / "here", monitor="train_loss", every_n_train_steps=4, save_top_k=-1)
        fit(tmp_path, checkpoint, [0.7], max_epochs=1)
        assert names(tmp_path / "here") == ["epoch=0-step=4", "epoch=0-step=8"]

    def test_the_end_of_the_epoch_is_reached_for_a_value_that_is_logged_there(self, tmp_path: Path) -> None:
        # the value comes after the validation for which the save waited
        class Epochs(Validated):
            def on_train_epoch_end(self) -> None:
                self.log("whole", 2.0)

        checkpoint = Checkpoint(tmp_path / "here", monitor="whole", every_n_train_steps=8)
        trainer_of(tmp_path, checkpoint, max_epochs=1).fit(Epochs([0.7]), loader(), loader(8))
        assert checkpoint.best_model_score == 2.0

    def test_a_name_that_the_validation_does_not_log_ends_the_run(self, tmp_path: Path) -> None:
        # a wrong name is still an error
        checkpoint = Checkpoint(tmp_path / "here", monitor="val_los", every_n_train_steps=4)
        with pytest.raises(ConfigurationError, match=r"'val_los'.*\n?.*Did you mean 'val_loss'"):
            fit(tmp_path, checkpoint, [0.7, 0.4])

    def test_without_validation_nothing_is_waited_for(self, tmp_path: Path) -> None:
        #
        checkpoint = Checkpoint(tmp_path / "here", monitor="val_loss", every_n_train_steps=4)
        trainer = trainer_of(tmp_path, checkpoint)
        with pytest.raises(ConfigurationError, match="monitor='val_loss'"):
            trainer.fit(Validated([]), loader())
        with pytest.raises(ConfigurationError, match="monitor='val_loss'"):
            fit(tmp_path, checkpoint, [], limit_val_batches=0)

    def test_a_resumed_run_saves_at_the_validation_that_the_earlier_run_waited_for(self, tmp_path: Path) -> None:
        # the run was saved between the due save and the validation
        class SaveAt(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if trainer.global_step == 8:
                    trainer.save_checkpoint(str(tmp_path / "aside"))

        def checkpoint() -> Checkpoint:
            return Checkpoint(tmp_path / "here", monitor="val_loss", every_n_train_steps=7)

        with pytest.raises(RuntimeError, match="out of luck"):
            fit(tmp_path, [checkpoint(), SaveAt(), StopAt(9)], [])
        fit(tmp_path, checkpoint(), [0.7], ckpt_path=str(tmp_path / "aside"), max_epochs=1)
        assert names(tmp_path / "here") == ["epoch=0-step=10"]


class TestEqualScores:
    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_the_earlier_of_two_equal_scores_stays(self, mode: str) -> None:
        #
        retention = Retention(2, 0, mode)
        assert retention.add("a", "1", 1.0) == []
        assert retention.add("b", "2", 1.0) == []
        assert not retention.would_keep(1.0)
        assert retention.best is not None
        assert retention.best.name == "a"
        better = 0.0 if mode == "min" else 2.0
        assert [saved.name for saved in retention.add("c", "3", better)] == ["b"]

    def test_scores_that_are_no_number_are_equal(self) -> None:
        #
        retention = Retention(1, 0, "min")
        retention.add("a", "1", float("nan"))
        assert not retention.would_keep(float("nan"))

    def test_a_score_beats_no_score(self) -> None:
        #
        retention = Retention(1, 0, "max")
        retention.add("a", "1", None)
        assert [saved.name for saved in retention.add("b", "2", float("nan"))] == ["a"]
        assert not retention.would_keep(None)

    def test_a_metric_that_stands_still_writes_nothing(self, tmp_path: Path) -> None:
        # each epoch replaced the checkpoint by one with the same score
        checkpoint = Checkpoint(tmp_path / "here", monitor="val_loss")
        fit(tmp_path, checkpoint, [0.7] * 3, max_epochs=3)
        assert names(tmp_path / "here") == ["epoch=0-step=10"]
        newest = Checkpoint(tmp_path / "there", monitor="val_loss", save_last=True)
        fit(tmp_path, newest, [0.7] * 3, max_epochs=3)
        assert names(tmp_path / "there") == ["epoch=0-step=10", "epoch=2-step=30"]


class TestNames:
    @pytest.mark.parametrize(
        "filename",
        ["latest", "Latest", "manifest.json", "state.json", "model.safetensors", "a\0b", "a\nb", "x" * 300, "é" * 255],
    )
    def test_a_name_that_collides_or_cannot_be_written_is_refused(self, filename: str) -> None:
        # the run failed at its first save, or the file `latest` could not be written any more
        with pytest.raises(ConfigurationError, match="filename="):
            Checkpoint(filename=filename)

    @pytest.mark.parametrize("filename", ["{" + "v" * 250 + "}", "{val_loss:0300.2f}", "{val_loss:.>9}", "{epoch:s}"])
    def test_a_template_whose_names_would_be_refused_is_refused(self, filename: str) -> None:
        #
        with pytest.raises(ConfigurationError, match="filename="):
            Checkpoint(filename=filename, auto_insert_metric_name=filename.startswith("{vvv"))

    @pytest.mark.parametrize("dirpath", ["d" * 300, "é" * 200, "a\0b"])
    def test_a_folder_that_cannot_be_created_is_refused_before_the_first_step(
        self, dirpath: str, tmp_path: Path
    ) -> None:
        #
        module = Validated([0.7])
        trainer = trainer_of(tmp_path, Checkpoint(f"{tmp_path}/missing/{dirpath}"))
        with pytest.raises(ConfigurationError, match="cannot write to"):
            trainer.fit(module, loader())
        assert trainer.global_step == 0

    def test_names_of_two_callbacks_in_one_folder_are_told_apart(self, tmp_path: Path) -> None:
        #
        best = Checkpoint("memory://two-callbacks", monitor="val_loss")
        steps = Checkpoint("memory://two-callbacks", every_n_train_steps=EPOCH)
        fit(tmp_path, [best, steps], [0.7], max_epochs=1)
        assert {best.best_model_path, steps.best_model_path} == {
            "memory://two-callbacks/epoch=0-step=10",
            "memory://two-callbacks/epoch=0-step=10-v1",
        }
        assert load(best.best_model_path).progress["epoch"] == 1
        assert load(steps.best_model_path).progress["batch_idx"] == EPOCH
