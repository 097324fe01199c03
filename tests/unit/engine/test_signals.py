"""Signals in a run of one process: it saves and stops without losing a step. A-03, G-03, J-09, Q-06."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import calling
from test_logging import Kept

from drivetrain import Callback, ConfigurationError

# Private: the grace after a first signal cannot be set.
from drivetrain._engine import signals
from drivetrain.callbacks import Checkpoint, LambdaCallback, PredictionWriter
from drivetrain.data import read_predictions
from drivetrain.testing import requires_linux

RUN = "drivetrain_logs/version_0"  # the folder of the first run, below the root
SAVED, FAILING = ["interrupted-step=3", "latest"], "echo no such job >&2; exit 1"
Requeued = Callable[[], list[str]]


def send(*numbers: int, pause: float = 0.0) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(pause)


def sending(*numbers: int, step: int = 3, hook: str = "on_train_batch_end", pause: float = 0.0) -> Callback:
    return calling(hook, lambda trainer: send(*(numbers if trainer.global_step == step else ()), pause=pause))


def recording_the_end(calls: list[str]) -> Callback:
    """A callback that records the hooks that are called as a run ends."""
    return LambdaCallback(
        on_exception=lambda trainer, module, error: calls.append(type(error).__name__),
        teardown=lambda trainer, module, stage: calls.append(f"teardown {stage}"),
    )


def names(folder: Path) -> list[str]:
    return sorted(one for one in os.listdir(folder) if "step=" in one)


@pytest.mark.parametrize(
    ("number", "setting", "raised", "every"),
    [
        (signal.SIGTERM, "auto", SystemExit, None),
        (signal.SIGHUP, ["SIGUSR1", "SIGHUP"], SystemExit, 2),
        (signal.SIGINT, "SIGUSR1", KeyboardInterrupt, 2),
    ],
)
def test_a_signal_saves_and_stops_and_the_run_resumes_exactly(
    tmp_path: Path, number: signal.Signals, setting: Any, raised: type[BaseException], every: int | None
) -> None:
    undisturbed = Regression()
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    options: dict[str, Any] = {"max_epochs": 2, "preemption_signals": setting, "enable_checkpointing": True}
    folder = tmp_path / RUN / "checkpoints"
    ending: list[str] = []
    before = signal.getsignal(number), signal.set_wakeup_fd(-1)
    saver = Checkpoint(folder, every_n_train_steps=every)
    run = fit(tmp_path, callbacks=[sending(number), recording_the_end(ending), saver], **options)
    with pytest.raises(raised) as caught:
        run.fit(Regression(), regression())
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 128 + number
    assert ending == [raised.__name__, "teardown fit"]
    assert (run.state, run.global_step) == ("interrupted", 3)
    assert (signal.getsignal(number), signal.set_wakeup_fd(-1)) == before
    assert not [one for one in threading.enumerate() if one.name.startswith("drivetrain")]
    assert [one for one in names(folder) if one.startswith("interrupted")] == ["interrupted-step=3"]
    # It has another name than regular checkpoints, and is removed once the run has saved again.
    resumed = Regression()
    run = fit(tmp_path, callbacks=Checkpoint(folder, every_n_train_steps=every), **options)
    run.fit(resumed, regression(), ckpt_path="auto")
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)
    assert run.global_step == 12
    assert len(names(folder)) == 1
    assert "interrupted" not in names(folder)[0]


@pytest.mark.parametrize(("pause", "saved"), [(0.6, False), (0.0, True)])
def test_a_second_signal_ends_the_run_unless_it_is_a_duplicate(tmp_path: Path, pause: float, saved: bool) -> None:
    """A launcher forwards a signal that was sent to the whole process group: one that comes at once is a duplicate."""
    twice = sending(signal.SIGTERM, signal.SIGTERM, pause=pause)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, enable_checkpointing=True, callbacks=twice).fit(Tiny(), loader(20))
    assert caught.value.code == 143
    folder = tmp_path / RUN / "checkpoints"
    assert (names(folder) if folder.exists() else []) == ["interrupted-step=3"] * saved


@pytest.mark.parametrize(
    ("hook", "step", "setting"),
    [
        ("on_train_end", 10, "auto"),
        ("setup", 0, "auto"),
        ("on_train_batch_end", 3, None),
        ("on_test_start", 0, None),
    ],
)
def test_the_previous_handler_gets_a_signal_with_nothing_to_save_or_that_is_not_handled(
    tmp_path: Path, hook: str, step: int, setting: str | None
) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    options: dict[str, Any] = {"preemption_signals": setting, "enable_checkpointing": setting is None}
    run, module = fit(tmp_path, callbacks=sending(signal.SIGTERM, step=step, hook=hook), **options), Tiny()
    try:
        (run.test if hook == "on_test_start" else run.fit)(module, loader(20))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM]
    assert len(module.seen + module.evaluated) == 10
    assert run.state == "finished"


@pytest.mark.parametrize("value", ["SIGTREM", ["SIGKILL"], [9], "TERM"])
def test_an_unknown_signal_is_refused(tmp_path: Path, value: Any) -> None:  # G-06
    with pytest.raises(ConfigurationError, match="preemption_signals"):
        fit(tmp_path, preemption_signals=value)


def test_a_run_that_exceeds_its_time_limit_loses_no_step(tmp_path: Path) -> None:
    undisturbed, resumed = Regression(), Regression()
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    late = calling("on_train_batch_end", lambda trainer: time.sleep(0.3 if trainer.global_step == 3 else 0))
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=100)
    run = fit(tmp_path, max_epochs=2, max_time=timedelta(seconds=0.3), callbacks=[saver, late])
    run.fit(Regression(), regression())
    assert (run.state, names(tmp_path / "c")) == ("finished", [f"interrupted-step={run.global_step}"])
    assert run.global_step < 12
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=100)
    fit(tmp_path, max_epochs=2, callbacks=saver).fit(resumed, regression(), ckpt_path="auto")
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Requeued]:
    """Runs are in job 77, and ``scontrol`` runs a given line; returns what was saved and asked for until then."""

    def answering(answer: str = "exit 0") -> Requeued:
        stub, calls, saved = tmp_path / "scontrol", tmp_path / "calls", tmp_path / RUN / "checkpoints"
        stub.write_text(f'#!/bin/sh\nls {saved} >> {calls}; echo "$@" >> {calls}\n{answer}\n')
        stub.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        return lambda: calls.read_text().split("\n")[:-1] if calls.exists() else []

    return answering


@pytest.mark.parametrize(
    ("number", "hook", "answer", "asked", "warning"),
    [
        (signal.SIGUSR1, "on_train_batch_end", "exit 0", [*SAVED, "requeue 77"], ": the job is queued again."),
        (signal.SIGUSR1, "on_train_batch_end", FAILING, [*SAVED, "requeue 77"], ": no such job."),
        (signal.SIGUSR1, "setup", "exit 0", ["requeue 77"], ": the job is queued again."),  # it had not begun training
        (signal.SIGTERM, "on_train_batch_end", "exit 0", [], None),
    ],
)
def test_slurm_requeues_the_job_once_it_is_saved(
    tmp_path: Path, slurm: Any, caplog: Any, number: int, hook: str, answer: str, asked: list[str], warning: str | None
) -> None:  # J-09
    requeued, callback = slurm(answer), sending(number, step=0 if hook == "setup" else 3, hook=hook)
    with caplog.at_level("WARNING", logger="drivetrain"), pytest.raises(SystemExit) as left:
        fit(tmp_path, enable_checkpointing=True, callbacks=callback).fit(Tiny(), loader(20))
    assert left.value.code == 128 + number
    assert requeued() == asked
    assert warning is None or f"scontrol requeue 77{warning}" in caplog.text
    assert signal.getsignal(number) is signal.SIG_DFL


class Evaluated(Regression):
    """Sends this process signals in the third micro-batch of an evaluation, with a pause after each."""

    def __init__(self, *numbers: int, pause: float = 0.0) -> None:
        super().__init__()
        self.numbers, self.pause = numbers, pause
        self.batches = 0

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            send(*self.numbers, pause=self.pause)
        self.batches += 1
        return self.layer(batch[0])

    validation_step = test_step = predict_step


@pytest.mark.parametrize(
    ("entry", "numbers", "hook", "batches"),
    [
        ("validate", [signal.SIGINT], None, 3),
        ("test", [signal.SIGUSR1], None, 3),
        ("predict", [signal.SIGTERM], None, 3),
        ("test", [signal.SIGUSR1], "setup", 0),
        ("test", [signal.SIGTERM], "on_test_start", 1),
        ("test", [signal.SIGTERM], "on_test_end", 6),
        ("test", [signal.SIGTERM, signal.SIGTERM], None, 2),  # the second one ends it within the batch
    ],
)
def test_a_signal_ends_an_evaluation_after_the_batch_and_it_is_not_requeued(
    tmp_path: Path, slurm: Any, caplog: pytest.LogCaptureFixture, entry: str, numbers: Any, hook: Any, batches: int
) -> None:
    caplog.set_level("INFO", logger="drivetrain")
    requeued, ended = slurm(), Kept()
    ending: list[str] = []
    module = Evaluated(*[] if hook else numbers, pause=0.6 * (len(numbers) - 1))
    callbacks = [recording_the_end(ending), *[sending(*numbers, step=0, hook=hook)] * bool(hook)]
    before = signal.getsignal(numbers[0]), signal.set_wakeup_fd(-1)
    run = fit(tmp_path, callbacks=callbacks, logger=ended)
    raised = KeyboardInterrupt if signal.SIGINT in numbers else SystemExit
    with pytest.raises(raised) as caught:
        getattr(run, entry)(module, regression())
    assert getattr(caught.value, "code", 128 + signal.SIGINT) == 128 + numbers[0]
    assert module.batches == batches
    complete = hook == "on_test_end"
    assert ending == [raised.__name__] * (not complete) + [f"teardown {entry}"]
    assert "The run ended" not in caplog.text  # it did not train
    assert (run.state, ended.status) == ("interrupted", "success" if complete else "interrupted")
    assert (signal.getsignal(numbers[0]), signal.set_wakeup_fd(-1)) == before
    assert not [one for one in threading.enumerate() if one.name.startswith("drivetrain")]
    assert requeued() == []


def evaluating(path: Path, inner: Evaluated, after: Callable[[], object] = lambda: None) -> Callback:
    """A callback that runs an evaluation in a hook of a fit, and then calls a function."""

    def evaluate(trainer: Any) -> None:
        if trainer.global_step == 3:
            fit(path).test(inner, regression(), verbose=False)
            after()

    return calling("on_train_batch_end", evaluate)


def test_a_signal_in_an_evaluation_within_a_hook_is_left_to_the_fit(tmp_path: Path) -> None:
    inner = Evaluated(signal.SIGTERM)
    run = fit(tmp_path, callbacks=evaluating(tmp_path / "inner", inner), max_epochs=2, enable_checkpointing=True)
    with pytest.raises(SystemExit) as caught:
        run.fit(Regression(), regression())
    assert (caught.value.code, run.state, inner.batches) == (143, "interrupted", 6)
    assert names(tmp_path / RUN / "checkpoints") == ["interrupted-step=3"]  # the fit is saved


def exit_code_after_sigterm(work: Callable[[Any], object]) -> int | None:
    """Fork a process that calls ``work(began)``, and send it SIGTERM once it has set this event."""
    context = multiprocessing.get_context("fork")
    began = context.Event()
    child = context.Process(target=work, args=(began,))
    child.start()
    assert began.wait(20)
    time.sleep(0.5)  # it is in the call that blocks by then
    child.terminate()
    child.join(20)
    child.kill()
    return child.exitcode


def test_a_process_forked_after_a_run_within_a_hook_has_the_default_handlers(tmp_path: Path) -> None:
    codes: list[int | None] = []

    def wait(began: Any) -> None:
        began.set()
        time.sleep(20)

    def fork() -> None:
        codes.append(exit_code_after_sigterm(wait))

    run = fit(tmp_path, callbacks=evaluating(tmp_path / "inner", Evaluated(), fork))
    run.fit(Regression(), regression())
    assert codes == [-signal.SIGTERM]
    assert run.state == "finished"  # the child's signal is not taken for one to this process


@requires_linux()
@pytest.mark.parametrize("hook", ["setup", "on_validation_batch_end", "on_train_end"])
def test_a_run_with_nothing_left_to_save_exits_with_143(tmp_path: Path, monkeypatch: Any, hook: str) -> None:  # J-09
    """The setup is in a call that runs no Python, like a collective that waits for another rank."""
    monkeypatch.setattr(signals, "_FIRST_SIGNAL_GRACE", 1.0)

    def train(began: Any) -> None:
        def wait(trainer: Any) -> None:
            began.set()
            if hook == "setup":
                torch.distributed.TCPStore("127.0.0.1", 0, 2, True)  # type: ignore[attr-defined]
            time.sleep(2 if hook == "on_train_end" else 30)

        run = fit(tmp_path, callbacks=calling(hook, wait), enable_checkpointing=True)
        run.fit(Tiny(), loader(), loader())

    assert exit_code_after_sigterm(train) == 143


@pytest.mark.parametrize("returned", [False, True])
def test_a_preempted_prediction_is_resumed_where_outputs_are_not_returned(
    tmp_path: Path, slurm: Any, returned: bool
) -> None:
    requeued = slurm()
    leaving, resumed = Evaluated(signal.SIGUSR1), Evaluated()
    resumed.load_state_dict(leaving.state_dict())

    def predict(module: Evaluated) -> None:
        run = fit(tmp_path, callbacks=PredictionWriter(tmp_path / "p"))
        run.predict(module, regression(), return_predictions=returned)

    with pytest.raises(SystemExit) as caught:
        predict(leaving)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert requeued() == []
    predict(resumed)
    assert (leaving.batches, resumed.batches) == (3, 6 if returned else 3)
    assert len(read_predictions(tmp_path / "p")) == 24
