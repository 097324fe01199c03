"""The order of hooks, and that third-party callbacks and loggers are used through their interfaces only (K-02)."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, recording_callback, recording_module, regression
from small_modules import calling
from test_logging import Kept

from drivetrain import Callback, ConfigurationError, DataModule
from drivetrain.callbacks import Checkpoint, LambdaCallback, LossSpikeGuard, ProgressBar
from drivetrain.checkpoint import SaveRequest


def _everyone(*hooks: str) -> list[str]:
    """Return a hook as seen by a callback, the module, and a callback that runs after it."""
    return [f"{who}.{hook}" for hook in hooks for who in ("early", "module", "late")]


def _evaluation(stage: str, batches: int) -> list[str]:
    batch = ["module.on_before_batch_transfer", "module.on_after_batch_transfer"]
    batch += [*_everyone(f"on_{stage}_batch_start"), f"module.{stage}_step", *_everyone(f"on_{stage}_batch_end")]
    order = [f"module.on_{stage}_model_eval", *_everyone(f"on_{stage}_start", f"on_{stage}_epoch_start")]
    order += [*(batch * batches), *_everyone(f"on_{stage}_epoch_end", f"on_{stage}_end")]
    return [*order, f"module.on_{stage}_model_train"]


def _train_batch(opens: bool = True, closes: bool = True) -> list[str]:
    order = ["module.on_before_batch_transfer", "module.on_after_batch_transfer"]
    order += _everyone("on_train_batch_start")
    order += _everyone("on_before_zero_grad") if opens else []
    order += ["module.training_step", *_everyone("on_before_backward", "on_after_backward")]
    order += _everyone("on_before_optimizer_step") if closes else []
    return order + _everyone("on_train_batch_end")


def _run(tmp_path: Path, stage: str, *loaders: Any, **options: Any) -> list[str]:
    calls: list[str] = []
    callbacks = [recording_callback("late", calls, priority=-1), recording_callback("early", calls)]
    getattr(fit(tmp_path, callbacks=callbacks, **options), stage)(recording_module(calls), *loaders)
    return calls


def test_the_full_order_of_fit(tmp_path: Path) -> None:
    # two epochs of four micro-batches in windows of three, two validation batches, a sanity check of one
    calls = _run(tmp_path, "fit", loader(8), loader(4), max_epochs=2, accumulate_grad_batches=3, num_sanity_val_steps=1)
    epoch = [
        *_everyone("on_train_epoch_start"),
        *(_train_batch(closes=False) + _train_batch(opens=False, closes=False) + _train_batch(opens=False)),
        *_train_batch(),
        *_evaluation("validation", 2),
        *_everyone("on_train_epoch_end"),
    ]
    assert calls == [
        *("module.configure_callbacks", "module.prepare_data", *_everyone("setup")),
        *("module.configure_model", "module.configure_optimizers", *_everyone("on_fit_start")),
        *("early.on_sanity_check_start", "late.on_sanity_check_start"),
        *_evaluation("validation", 1),
        *("early.on_sanity_check_end", "late.on_sanity_check_end"),
        *_everyone("on_train_start"),
        *(epoch * 2),
        *_everyone("on_train_end", "on_fit_end", "teardown"),
    ]


@pytest.mark.parametrize(("verb", "stage"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_full_order_of_evaluation(tmp_path: Path, verb: str, stage: str) -> None:
    assert _run(tmp_path, verb, loader(4)) == [
        *("module.configure_callbacks", "module.prepare_data", *_everyone("setup"), "module.configure_model"),
        *_evaluation(stage, 2),
        *_everyone("teardown"),
    ]


def test_overridden_hooks_set_the_modes_that_steps_see(tmp_path: Path) -> None:
    seen: list[Any] = []

    class SetsModes(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.nn.Dropout()

        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.noise.train()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()
            self.noise.eval()

        on_predict_model_eval = on_validation_model_eval

        def note(self, batch: Any = None, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            seen.append((self.training, self.noise.training))

        validation_step = test_step = predict_step = on_train_epoch_end = note

    module, trainer = SetsModes(), fit(tmp_path, num_sanity_val_steps=0)
    trainer.fit(module, loader(2), loader(2))
    assert seen == [(False, True), (True, False)]  # training goes on in the modes that the hook left
    assert all(layer.training for layer in module.modules())  # as before the run
    trainer.test(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
    assert seen[2:] == [(False, False), (False, True)]


def test_callbacks_run_by_descending_priority_then_in_the_given_order(tmp_path: Path) -> None:
    calls: list[str] = []
    priorities = {"a": 0, "b": 5, "c": -2, "d": 0, "e": -1}
    callbacks = [recording_callback(name, calls, priority) for name, priority in priorities.items()]
    fit(tmp_path, callbacks=callbacks).fit(recording_module(calls), loader(2))
    order = [call.split(".")[0] for call in calls if call.endswith(".on_train_start")]
    assert order == ["b", "a", "d", "module", "e", "c"]


def test_a_data_module_is_set_up_first_and_taken_down(tmp_path: Path) -> None:
    calls: list[str] = []

    def noting(name: str, returned: Any = None) -> Any:
        def call(self: Any, *stage: str) -> Any:
            calls.append(" ".join([f"data.{name}", *stage, str(self.trainer.max_epochs)]))
            return returned

        return call

    names = ("prepare_data", "setup", "teardown")
    loaders = {name: noting(name, loader(2)) for name in ("train_dataloader", "val_dataloader")}
    data = type("Data", (DataModule,), {name: noting(name) for name in names} | loaders)()
    fit(tmp_path, num_sanity_val_steps=0).fit(recording_module(calls), datamodule=data)
    noted = ("dataloader", "on_fit_start", *names)
    assert [call for call in calls if any(name in call for name in noted)] == [
        *("data.prepare_data 1", "module.prepare_data", "data.setup fit 1", "module.setup"),
        *("data.train_dataloader 1", "data.val_dataloader 1", "module.on_fit_start"),
        *("data.teardown fit 1", "module.teardown"),
    ]


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *(("prepare_data", OSError), ("configure_optimizers", ValueError), ("on_train_start", ValueError)),
        *(("training_step", KeyboardInterrupt), ("validation_step", ValueError)),
    ],
)
def test_a_failure_reaches_on_exception_and_then_teardown(tmp_path: Path, where: str, kind: Any) -> None:
    calls: list[str] = []
    seen: list[BaseException] = []
    error = kind("as planned")

    def watch(trainer: Any, module: Any, exception: BaseException) -> None:
        assert module.trainer is trainer  # still within the run
        seen.append(exception)

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader(4)

        val_dataloader = train_dataloader

        def on_exception(self, exception: BaseException) -> None:
            seen.append(exception)

    def failing(*args: Any) -> Any:
        raise error

    module = recording_module(calls)
    setattr(type(module), where, failing)
    trainer = fit(tmp_path, callbacks=[recording_callback("early", calls), LambdaCallback(on_exception=watch)])
    with pytest.raises(kind, match="as planned") as caught:
        trainer.fit(module, datamodule=Data())
    assert caught.value is error
    assert seen == [error, error]
    is_set_up = where != "prepare_data"
    end = ["early.on_exception", "module.on_exception"] + ["early.teardown", "module.teardown"] * is_set_up
    assert calls[-len(end) :] == end
    assert calls.count("module.teardown") == is_set_up
    assert "early.on_fit_end" not in calls
    assert (trainer.state, trainer.interrupted, trainer.training) == ("interrupted", True, False)


@pytest.mark.parametrize("hook", ["setup", "teardown"])
def test_every_callback_that_was_set_up_is_torn_down_once(tmp_path: Path, hook: str) -> None:
    calls: list[str] = []

    def failing(*args: Any) -> None:
        raise ValueError("as planned")

    hooks: dict[str, Any] = {hook: failing}
    callbacks = [recording_callback("first", calls), LambdaCallback(**hooks), recording_callback("last", calls)]
    with pytest.raises(ValueError, match="as planned"):
        fit(tmp_path, callbacks=callbacks).fit(Tiny(), loader(4))
    assert calls.count("first.teardown") == 1
    assert hook == "setup" or calls.count("last.teardown") == 1
    assert calls.count("first.on_exception") == 1


def test_minus_one_from_on_train_batch_start_ends_the_epoch_and_drops_the_open_window(tmp_path: Path) -> None:
    calls: list[str] = []

    class Skipping(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 1 and batch_idx == 3 else -2

        def on_train_epoch_end(self) -> None:
            self.log("at_end", 2.0)  # a value of the epoch

    module = Skipping(lr=1.0)
    callbacks = recording_callback("callback", calls)
    trainer = fit(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(module, loader(8))
    assert [numbers[0] for numbers in module.seen] == [0, 2, 4, 6, 0, 2, 4]
    assert (trainer.current_epoch, trainer.global_step, trainer.micro_batches) == (2, 3, 7)
    assert calls.count("callback.on_train_epoch_end") == 2
    assert calls.count("callback.on_train_batch_end") == 7
    assert float(trainer.callback_metrics["at_end"]) == 2.0
    assert all(parameter.grad is None for parameter in module.parameters())


class Saver(Callback):
    """A third-party callback that saves a checkpoint every few steps."""

    saves_resumable = True
    writes_to: Any = ()
    kept_checkpoints: Any = ()
    best_model_path = ""

    def __init__(self, folder: Path, every: int = 10**9, leaving: str = "save") -> None:
        self.folder, self.every, self.leaving = folder, every, leaving
        self.writes_to, self.kept_checkpoints = [str(folder)], []
        self.rollbacks: list[str] = []

    def _request(self, trainer: Any) -> SaveRequest:
        path = f"{self.folder}/mine-{trainer.global_step}"
        return SaveRequest(path, on_complete=lambda: self.kept_checkpoints.append(path))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            trainer.save(lambda: self._request(trainer))

    def save_before_leaving(self, trainer: Any, module: Any) -> bool:
        if self.leaving == "save":
            trainer.save(lambda: self._request(trainer))
        elif self.leaving == "save_checkpoint":
            trainer.save_checkpoint(f"{self.folder}/mine-{trainer.global_step}")
        return self.leaving != "nothing"

    def before_rollback(self, trainer: Any, module: Any) -> None:
        self.rollbacks.append(f"before at {trainer.global_step}")

    def after_rollback(self, trainer: Any, module: Any, path: str) -> None:
        self.rollbacks.append(f"after at {trainer.global_step}: {os.path.basename(path)}")


PREEMPTED = calling(
    "on_train_batch_end", lambda run: signal.raise_signal(signal.SIGTERM) if run.global_step == 3 else None
)


@pytest.mark.parametrize("leaving", ["save", "save_checkpoint", "nothing"])
def test_a_third_party_callback_saves_before_a_preempted_run_exits(tmp_path: Path, caplog: Any, leaving: str) -> None:
    callbacks = [Saver(tmp_path / "own", leaving=leaving), PREEMPTED]
    with pytest.raises(SystemExit):
        fit(tmp_path, max_epochs=2, callbacks=callbacks).fit(Regression(), regression())
    assert ("nothing is saved" in caplog.text) == (leaving == "nothing")
    if leaving == "nothing":
        return
    assert os.listdir(tmp_path / "own") == ["mine-3"]
    # "auto" searches the folder that the callback declares.
    resumed, undisturbed = Regression(), Regression()
    trainer = fit(tmp_path, max_epochs=2, callbacks=Saver(tmp_path / "own"))
    trainer.fit(resumed, regression(), ckpt_path="auto")
    assert trainer.global_step == 12
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)


def test_every_callback_that_keeps_full_checkpoints_saves(tmp_path: Path) -> None:
    weights, whole = tmp_path / "weights", tmp_path / "whole"
    callbacks = [Checkpoint(weights, save_weights_only=True), Checkpoint(whole), Saver(tmp_path / "own"), PREEMPTED]
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=callbacks).fit(Regression(), regression())
    assert not weights.exists()
    assert "interrupted-step=3" in os.listdir(whole)
    assert os.listdir(tmp_path / "own") == ["mine-3"]


def test_a_run_goes_back_to_a_checkpoint_of_a_third_party_callback(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "own", every=2)

    def go_back(trainer: Any) -> None:
        if trainer.global_step == 5 and not saver.rollbacks:
            path, step = trainer.checkpoint_before(3)
            assert (os.path.basename(path), step) == ("mine-2", 2)
            trainer.roll_back(path)

    fit(tmp_path, callbacks=[saver, calling("on_train_batch_end", go_back)]).fit(Regression(), regression())
    assert saver.rollbacks == ["before at 5", "after at 2: mine-2"]
    # LossSpikeGuard uses the same interface and does not check for a class.
    fit(tmp_path, callbacks=[LossSpikeGuard("rollback"), Saver(tmp_path / "b")]).fit(Regression(), regression())


def test_folders_of_third_party_callbacks_and_loggers_are_probed_before_the_first_step(tmp_path: Path) -> None:
    class Rows(Kept):
        save_dir = str(tmp_path / "file" / "logs")

    (tmp_path / "file").write_text("")
    for options, name in (({"callbacks": Saver(tmp_path / "file" / "own")}, "Saver"), ({"logger": Rows()}, "Rows")):
        run = fit(tmp_path, **options)
        with pytest.raises(ConfigurationError, match=f"{name} cannot write to .*is not a folder"):
            run.fit(Regression(), regression())
        assert run.global_step == 0


def test_lines_are_printed_through_a_callback_that_offers_it(tmp_path: Path, capsys: Any) -> None:
    class Screen(Callback):
        lines: list[str]

        def write_line(self, text: str) -> bool:
            self.lines = [text]
            return True

    screen, stream = Screen(), io.StringIO()
    fit(tmp_path, callbacks=screen).print("loss", 3)
    assert screen.lines == ["loss 3"]
    fit(tmp_path, callbacks=ProgressBar(stream=stream)).print("loss", 4)
    assert stream.getvalue() == "loss 4\n"
    fit(tmp_path, callbacks=Saver(tmp_path)).print("loss", 5)
    assert capsys.readouterr().out == "loss 5\n"


def test_windows_and_monitors_of_a_third_party_callback_count(tmp_path: Path, caplog: Any) -> None:
    class Doubling(Callback):
        monitors: Any = {"valloss": "Doubling('valloss')"}  # noqa: RUF012

        def micro_batches_per_window(self, epoch: int) -> int:
            return 2**epoch

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.estimate = trainer.estimated_stepping_batches

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("val_loss", 1.0)

    doubling = Doubling()
    fit(tmp_path, max_epochs=3, callbacks=doubling).fit(Regression(), regression())
    assert doubling.estimate == 6 + 3 + 2
    named = "Doubling('valloss'): nothing of that name was logged in the first step. Did you mean 'val_loss'"
    assert named in caplog.text


def test_a_run_ended_by_a_third_party_callback_is_finished(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = True

        def state_dict(self) -> dict[str, Any]:
            return {"enough": True}

        def reason_for_ending(self, state_dict: Mapping[str, Any]) -> str | None:
            return "it is enough" if state_dict["enough"] else None

    run = fit(tmp_path, max_epochs=5, callbacks=[Enough(), Saver(tmp_path / "own", every=1)])
    run.fit(Regression(), regression())
    path = f"{tmp_path}/own/mine-{run.global_step}"
    with pytest.raises(ConfigurationError, match="Enough has ended the run: it is enough"):
        fit(tmp_path, max_epochs=5, callbacks=Enough()).fit(Regression(), regression(), ckpt_path=path)
