"""Signals in a run of one process: it saves and stops without losing a step. A-03, G-03."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import resource
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

from drivetrain import Callback, ConfigurationError
from drivetrain._engine.signals import Signals
from drivetrain.callbacks import Checkpoint, PredictionWriter
from drivetrain.checkpoint import load
from drivetrain.data import read_predictions
from drivetrain.loggers import Logger

RUN = "drivetrain_logs/version_0"  # the folder of the first run, below the root


class Sending(Callback):
    """Sends this process signals in a hook of a given step, and then calls a given function."""

    def __init__(self, *numbers: int, step: int = 3, hook: str = "on_train_batch_end", pause: float = 0.0) -> None:
        self.numbers, self.step, self.pause = numbers, step, pause
        self.told: list[BaseException] = []
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.pause)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.told.append(exception)


def names(folder: Path) -> list[str]:
    return sorted(one for one in os.listdir(folder) if "step=" in one)


@pytest.mark.parametrize(
    ("number", "setting", "raised"),
    [
        (signal.SIGTERM, "auto", SystemExit),
        (signal.SIGHUP, ["SIGUSR1", "SIGHUP"], SystemExit),
        (signal.SIGINT, "SIGUSR1", KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("every", [None, 2])
def test_a_signal_saves_and_stops_and_the_run_resumes_exactly(
    tmp_path: Path, number: signal.Signals, setting: Any, raised: type[BaseException], every: int | None
) -> None:
    undisturbed = Regression()
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    options: dict[str, Any] = {"max_epochs": 2, "preemption_signals": setting, "enable_checkpointing": True}
    folder = tmp_path / RUN / "checkpoints"
    sending = Sending(number)
    before = signal.getsignal(number), signal.set_wakeup_fd(-1)
    run = fit(tmp_path, callbacks=[sending, Checkpoint(folder, every_n_train_steps=every)], **options)
    with pytest.raises(raised) as caught:
        run.fit(Regression(), regression())
    if raised is SystemExit:
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 128 + number
    assert sending.told == [caught.value]
    assert (run.state, run.global_step) == ("interrupted", 3)
    assert (signal.getsignal(number), signal.set_wakeup_fd(-1)) == before
    assert not [one for one in threading.enumerate() if one.name.startswith("drivetrain")]
    interrupted = [one for one in names(folder) if one.startswith("interrupted")]
    assert interrupted == ["interrupted-step=3"]
    # It has another name than regular checkpoints, and is removed once the run has saved again.
    resumed = Regression()
    run = fit(tmp_path, callbacks=Checkpoint(folder, every_n_train_steps=every), **options)
    run.fit(resumed, regression(), ckpt_path="auto")
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)
    assert run.global_step == 12
    assert len(names(folder)) == 1
    assert "interrupted" not in names(folder)[0]


def test_the_best_are_not_displaced(tmp_path: Path) -> None:
    class Scored(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", float(self.global_step))

    def saver() -> Checkpoint:
        return Checkpoint(tmp_path / "c", monitor="score", mode="min")

    run = fit(tmp_path, max_epochs=3, callbacks=[saver(), Sending(signal.SIGTERM, step=14)])
    with pytest.raises(SystemExit):
        run.fit(Scored(), regression(), regression())
    assert names(tmp_path / "c") == ["epoch=0-step=6", "interrupted-step=14"]
    assert load(tmp_path / "c" / "interrupted-step=14").progress["global_step"] == 14


def test_a_second_signal_ends_the_run_immediately(tmp_path: Path) -> None:
    sending = Sending(signal.SIGTERM, signal.SIGTERM, pause=0.6)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, enable_checkpointing=True, callbacks=sending).fit(Tiny(), loader(20))
    assert caught.value.code == 143
    assert not (tmp_path / RUN / "checkpoints").exists()


class Threads(Callback):
    """Records the names of the threads that run during training."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        time.sleep(0.1)  # time for a thread that fails to end
        self.names = {thread.name for thread in threading.enumerate()}


def test_signals_are_watched_in_a_process_with_many_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    threads = Threads()
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        fit(tmp_path, max_epochs=1, callbacks=threads).fit(Regression(), regression())
    assert "drivetrain-signals" in threads.names


def test_a_signal_repeated_immediately_is_a_duplicate(tmp_path: Path) -> None:
    """For example from a launcher that forwards a signal sent to the whole process group."""
    sending = Sending(signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(SystemExit):
        fit(tmp_path, enable_checkpointing=True, callbacks=sending).fit(Tiny(), loader(20))
    assert names(tmp_path / RUN / "checkpoints") == ["interrupted-step=3"]


@pytest.mark.parametrize(("hook", "step"), [("on_train_end", 10), ("setup", 0)])
def test_with_nothing_to_save_the_previous_handler_gets_the_signal(tmp_path: Path, hook: str, step: int) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        run = fit(tmp_path, callbacks=Sending(signal.SIGTERM, step=step, hook=hook))
        run.fit(Tiny(), loader(20))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]
    assert run.state == "finished"


def test_none_handles_no_signal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that runs the tests may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, preemption_signals=None, enable_checkpointing=True, callbacks=Sending(signal.SIGINT)).fit(
                Tiny(), loader(20)
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / RUN / "checkpoints").exists()


@pytest.mark.parametrize("value", ["SIGTREM", ["SIGKILL"], [9], "TERM"])
def test_an_unknown_signal_is_refused(tmp_path: Path, value: Any) -> None:  # G-06
    with pytest.raises(ConfigurationError, match="preemption_signals"):
        fit(tmp_path, preemption_signals=value)


def test_in_another_thread_no_signal_is_handled(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: fit(tmp_path).fit(Tiny(), loader(20)))
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


class Late(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            time.sleep(0.3)


def test_a_run_that_exceeds_its_time_limit_loses_no_step(tmp_path: Path) -> None:
    undisturbed, resumed = Regression(), Regression()
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=100)
    run = fit(tmp_path, max_epochs=2, max_time=timedelta(seconds=0.3), callbacks=[saver, Late()])
    run.fit(Regression(), regression())
    assert (run.state, names(tmp_path / "c")) == ("finished", [f"interrupted-step={run.global_step}"])
    assert run.global_step < 12
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=100)
    fit(tmp_path, max_epochs=2, callbacks=saver).fit(resumed, regression(), ckpt_path="auto")
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        (signal.SIGUSR1, "exit 0", "scontrol requeue 77: the job is queued again."),
        (signal.SIGUSR1, "echo no such job >&2; exit 1", "scontrol requeue 77: no such job."),
        (signal.SIGTERM, "exit 0", None),
    ],
)
def test_slurm_requeues_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    answer: str,
    said: str | None,
) -> None:
    stub = tmp_path / "scontrol"
    stub.write_text(
        f'#!/bin/sh\nls {tmp_path}/{RUN}/checkpoints >> {tmp_path}/told; echo "$@" >> {tmp_path}/told\n{answer}\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with caplog.at_level("WARNING", logger="drivetrain"), pytest.raises(SystemExit):
        fit(tmp_path, enable_checkpointing=True, callbacks=Sending(number)).fit(Tiny(), loader(20))
    told = (tmp_path / "told").read_text().split("\n") if said else []
    assert told[:3] == (["interrupted-step=3", "latest", "requeue 77"] if said else [])
    assert said is None or any(said in record.getMessage() for record in caplog.records)


def test_slurm_requeues_a_job_that_had_not_begun_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # J-09
    stub = tmp_path / "scontrol"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    run = fit(tmp_path, enable_checkpointing=True, callbacks=Sending(signal.SIGUSR1, step=0, hook="setup"))
    with pytest.raises(SystemExit) as left:
        run.fit(Tiny(), loader(20))
    assert left.value.code == 128 + signal.SIGUSR1
    assert (tmp_path / "told").read_text() == "requeue 77\n"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


# Evaluations


class Evaluated(Regression):
    """Sends this process signals in a given micro-batch of an evaluation.

    Args:
        numbers: the signals.
        at: the micro-batch, or the name of a hook.
        pause: seconds after each signal.
    """

    def __init__(self, *numbers: int, at: int | str = 2, pause: float = 0.0) -> None:
        super().__init__()
        self.numbers, self.at, self.pause = numbers, at, pause
        self.batches = 0

    def send(self, where: int | str) -> None:
        if where == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.pause)

    def _evaluate(self, batch: Any, batch_idx: int) -> None:
        self.send(batch_idx)
        self.batches += 1
        self.log("score", float(batch_idx))

    validation_step = test_step = _evaluate

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.send(batch_idx)
        self.batches += 1
        return self.layer(batch[0])

    def setup(self, stage: str) -> None:
        self.send("setup")

    def on_test_start(self) -> None:
        self.send("on_test_start")

    def on_test_end(self) -> None:
        self.send("on_test_end")


class Ended(Logger):
    """Records the status with which a run ends."""

    name = "ended"
    version = 0
    status: str | None = None

    def log_metrics(self, metrics: Any, step: int) -> None:
        """Nothing is recorded."""

    def finalize(self, status: str) -> None:
        self.status = status


class Closing(Callback):
    """Records the hooks that are called as a run ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


EVALUATIONS = {"validate": {"verbose": False}, "test": {"verbose": False}, "predict": {}}


@pytest.mark.parametrize("entry", EVALUATIONS)
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_an_evaluation_after_the_batch(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    entry: str,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    caplog.set_level("INFO", logger="drivetrain")
    module, closing, ended = Evaluated(number), Closing(), Ended()
    before = signal.getsignal(number), signal.set_wakeup_fd(-1)
    run = fit(tmp_path, callbacks=closing, logger=ended)
    with pytest.raises(raised) as caught:
        getattr(run, entry)(module, regression(), **EVALUATIONS[entry])
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143
    assert module.batches == 3
    assert closing.calls == [raised.__name__, f"teardown {entry}"]
    assert "The run ended" not in caplog.text  # it did not train
    assert (run.state, ended.status) == ("interrupted", "interrupted")
    assert (signal.getsignal(number), signal.set_wakeup_fd(-1)) == before
    assert not [one for one in threading.enumerate() if one.name.startswith("drivetrain")]


@pytest.mark.parametrize(("at", "batches"), [("setup", 0), ("on_test_start", 1), ("on_test_end", 6)])
def test_a_signal_between_the_batches_of_an_evaluation_ends_it(tmp_path: Path, at: str, batches: int) -> None:
    module, closing = Evaluated(signal.SIGTERM, at=at), Closing()
    run = fit(tmp_path, callbacks=closing)
    with pytest.raises(SystemExit) as caught:
        run.test(module, regression(), verbose=False)
    assert (caught.value.code, module.batches, run.state) == (143, batches, "interrupted")
    assert closing.calls[-1] == "teardown test"


def test_a_second_signal_ends_an_evaluation_within_the_batch(tmp_path: Path) -> None:
    module = Evaluated(signal.SIGTERM, signal.SIGTERM, pause=0.6)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path).test(module, regression(), verbose=False)
    assert (caught.value.code, module.batches) == (143, 2)


class Evaluating(Callback):
    """Runs an evaluation in a hook of a fit, and then calls a function."""

    def __init__(self, path: Path, inner: Evaluated, after: Callable[[], object] = lambda: None) -> None:
        self.path, self.inner, self.after = path, inner, after

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any, **options: Any) -> None:
        if trainer.global_step == 3:
            fit(self.path).test(self.inner, regression(), verbose=False)
            self.after()


def test_a_signal_in_an_evaluation_within_a_hook_is_left_to_the_fit(tmp_path: Path) -> None:
    inner = Evaluated(signal.SIGTERM)
    run = fit(tmp_path, callbacks=Evaluating(tmp_path / "inner", inner), max_epochs=2, enable_checkpointing=True)
    with pytest.raises(SystemExit) as caught:
        run.fit(Regression(), regression())
    assert (caught.value.code, run.state, inner.batches) == (143, "interrupted", 6)
    assert names(tmp_path / RUN / "checkpoints") == ["interrupted-step=3"]  # the fit is saved


@pytest.mark.parametrize("nested", ["test", "fit"])
def test_processes_forked_after_a_run_within_a_hook_have_the_default_handlers(
    tmp_path: Path, nested: str
) -> None:
    codes: list[int | None] = []

    def end_a_process() -> None:
        if nested == "fit":
            fit(tmp_path / "second", callbacks=Calling(fork)).fit(Regression(), regression())
        fork()

    def fork() -> None:
        context = multiprocessing.get_context("fork")
        began = context.Event()

        def wait() -> None:
            began.set()
            time.sleep(20)

        child = context.Process(target=wait)
        child.start()
        began.wait(20)
        child.terminate()
        child.join(5)
        codes.append(child.exitcode)
        child.kill()

    run = fit(tmp_path, callbacks=Evaluating(tmp_path / "inner", Evaluated(), end_a_process))
    run.fit(Regression(), regression())
    assert set(codes) == {-signal.SIGTERM}
    assert len(codes) == (2 if nested == "fit" else 1)
    assert run.state == "finished"  # the child's signal is not taken for one to this process


class Calling(Callback):
    """Calls a function when training begins."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.function()


def test_none_handles_no_signal_in_an_evaluation(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        run = fit(tmp_path, preemption_signals=None)
        run.test(Evaluated(signal.SIGTERM), regression(), verbose=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (told, run.state) == ([signal.SIGTERM], "finished")


@pytest.mark.parametrize("returned", [False, True])
def test_a_preempted_prediction_is_resumed_and_only_then_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: bool
) -> None:
    stub = tmp_path / "scontrol"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    torch.manual_seed(0)
    leaving = Evaluated(signal.SIGUSR1)
    resumed = Evaluated()
    resumed.load_state_dict(leaving.state_dict())
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, callbacks=PredictionWriter(tmp_path / "p")).predict(
            leaving, regression(), return_predictions=returned
        )
    assert caught.value.code == 128 + signal.SIGUSR1
    assert (tmp_path / "told").exists() == (not returned)  # otherwise all batches are computed again
    fit(tmp_path, callbacks=PredictionWriter(tmp_path / "p")).predict(
        resumed, regression(), return_predictions=returned
    )
    assert (leaving.batches, resumed.batches) == (3, 6 if returned else 3)
    assert len(read_predictions(tmp_path / "p")) == 24


def test_a_preempted_test_is_not_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "scontrol"
    stub.write_text(f"#!/bin/sh\ntouch {tmp_path}/told\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for at in ("setup", 2):
        with pytest.raises(SystemExit):
            fit(tmp_path).test(Evaluated(signal.SIGUSR1, at=at), regression(), verbose=False)
    assert not (tmp_path / "told").exists()


def test_a_signal_is_noticed_while_the_main_thread_runs_no_python() -> None:
    """Other ranks then need not wait until this rank's micro-batch ends."""
    noticing: list[str] = []
    with Signals([signal.SIGTERM], lambda number: noticing.append(threading.current_thread().name)) as signals:
        signals.defer_to_run()
        sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        sender.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # more than a second without Python
        sender.join()
        signals.handled = True
    assert noticing[0] == "drivetrain-signals"
