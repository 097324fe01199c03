"""Process-wide state (A rows), failing cleanly (G-05, G-07), and switches."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import calling, linear, tiny
from torch import nn

from drivetrain import Callback, ConfigurationError, Fit, NonFiniteError
from drivetrain.loggers import CSVLogger
from drivetrain_strategies import SingleDeviceStrategy


def _process() -> dict[str, Any]:
    """Return the process-wide state that a run must restore."""
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "gradients": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "excepthooks": (sys.excepthook, threading.excepthook),
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "process group": torch.distributed.is_initialized(),
        "python generator": random.getstate(),
        "torch generator": torch.get_rng_state().tolist(),
        "matmul": torch.get_float32_matmul_precision(),
    }


class TestBuilding:
    def test_a_fit_has_no_side_effect(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-01: with the default loggers and callbacks, and every switch that changes the process in a run."""
        monkeypatch.chdir(tmp_path)
        before = _process()
        Fit()
        Fit(default_root_dir=tmp_path / "new", seed=3, deterministic=True, precision="16-mixed", detect_anomaly=True)
        Fit(strategy="ddp", devices=2, accelerator="cpu", precision="64-true", compile=True, logger=True)
        assert _process() == before
        assert list(tmp_path.iterdir()) == []

    def test_a_strategy_used_by_two_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-07: a request of one run to its strategy does not carry over to the next."""
        synchronised = []

        class Recording(SingleDeviceStrategy):
            def setup_module(self, module: nn.Module) -> Any:
                synchronised.append(self.sync_batchnorm)
                return super().setup_module(module)

        strategy = Recording()
        # Private, because the CPU is refused: only an accelerator synchronises a BatchNorm.
        asks = "drivetrain._engine.launch.asks_for_sync_batchnorm"
        monkeypatch.setattr(asks, lambda trainer, *others: trainer.sync_batchnorm)
        for asked in (True, False):
            fit(tmp_path, strategy=strategy, sync_batchnorm=asked).fit(Tiny(), loader(4))
        assert synchronised == [True, False]

    def test_a_run_within_another(self, tmp_path: Path) -> None:
        """A-07: a run inside a hook of another does not change that run's state."""

        def nest(trainer: Any) -> None:
            fit(tmp_path, max_epochs=2, seed=9).fit(Tiny(), loader(4))
            assert module.trainer is trainer

        module, alone = Tiny(), Tiny()
        runner = fit(tmp_path, max_epochs=2, callbacks=calling("on_train_epoch_end", nest))
        runner.fit(module, loader(4, shuffle=True))
        fit(tmp_path, max_epochs=2).fit(alone, loader(4, shuffle=True))
        assert module.seen == alone.seen
        assert runner.global_step == 4


class Failing(Tiny):
    """Fails in a given batch."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fail_at:
            raise ValueError("as planned")
        return super().training_step(batch, batch_idx)


class TestProcessState:
    @pytest.mark.parametrize(
        ("options", "fail_at"),
        [
            ({}, None),
            ({}, 1),
            ({"deterministic": True}, 1),
            ({"deterministic": "warn", "detect_anomaly": True}, None),
            ({"precision": "64-true"}, 1),
            ({"precision": "bf16-true"}, None),
            ({"benchmark": True}, None),
        ],
    )
    def test_a_fit_restores_the_process(self, tmp_path: Path, options: dict[str, Any], fail_at: int | None) -> None:
        """A-03: once fit returns or raises."""
        module = Failing(fail_at)
        module.layer.eval()
        fit(tmp_path).fit(Tiny(), loader(2))  # what torch itself sets up at first use
        before, flags = _process(), [child.training for child in module.modules()]
        with pytest.raises(ValueError, match="as planned") if fail_at is not None else nullcontext():
            fit(tmp_path, **options).fit(module, loader(4), loader(4))
        assert _process() == before
        assert [child.training for child in module.modules()] == flags

    @pytest.mark.parametrize("verb", ["validate", "test", "predict"])
    def test_an_evaluation_restores_the_process(self, tmp_path: Path, verb: str) -> None:
        module = Tiny()
        fit(tmp_path).fit(Tiny(), loader(2))
        before = _process()
        getattr(fit(tmp_path, deterministic=True), verb)(module, loader(4))
        assert _process() == before
        assert all(child.training for child in module.modules())

    def test_user_settings_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-03: an environment variable is never overwritten."""
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        seen: list[Any] = []

        def look(trainer: Any) -> None:
            seen.extend([os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()])

        fit(tmp_path, deterministic=True, callbacks=calling("on_train_start", look)).fit(Tiny(), loader(2))
        assert seen == [":16:8", True]

    def test_grad_mode_around_fit(self, tmp_path: Path) -> None:
        """A run started under no_grad trains, and restores the mode."""
        module, before = Regression(), Regression()
        with torch.no_grad():
            fit(tmp_path).fit(module, regression())
            assert not torch.is_grad_enabled()
        assert not torch.equal(module.layer.weight, before.layer.weight)


class TestOutsideARun:
    """A-04."""

    @pytest.mark.parametrize(
        ("call", "after"),
        [
            (lambda module: module.trainer, False),
            (lambda module: module.log("x", 1.0), True),
            (lambda module: module.all_gather(torch.ones(1)), True),
            (lambda module: module.optimizers(), False),
            (lambda module: module.lr_schedulers(), False),
            (lambda module: module.manual_backward(torch.ones(())), True),
            (lambda module: module.print("x"), False),
        ],
    )
    def test_attributes_of_a_run_are_refused(self, tmp_path: Path, call: Any, after: bool) -> None:
        with pytest.raises(ConfigurationError, match="not in a run") as caught:
            call(Tiny())
        assert caught.value.fix
        finished, failed = Tiny(), Failing(0)
        fit(tmp_path).fit(finished, loader(2))
        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path).fit(failed, loader(2))
        for module in (finished, failed):
            with pytest.raises(ConfigurationError, match="not in a run") if after else nullcontext():
                call(module)

    def test_after_a_run_the_trainer_is_the_one_that_ran_it(self, tmp_path: Path) -> None:
        # L-10
        module, trainer = Tiny(), fit(tmp_path)
        assert (module.current_epoch, module.global_step, module.global_rank) == (0, 0, 0)
        trainer.fit(module, loader(4))
        assert (module.current_epoch, module.global_step) == (1, 2)
        assert module.optimizers().param_groups
        assert module.loggers == []
        fit(tmp_path).fit(Tiny(), loader(2))
        assert module.trainer is trainer
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(ConfigurationError, match="not in a run"):
                _ = copied.trainer
        assert module.double().layer.weight.dtype == torch.float64

    def test_a_trainer_may_be_set_before_a_run_and_not_in_one(self, tmp_path: Path) -> None:
        # L-10
        module = Tiny()
        module.trainer = fit(tmp_path, max_epochs=3)
        assert module.trainer.max_epochs == 3
        setting = calling("on_train_start", lambda trainer: setattr(module, "trainer", Fit()))
        with pytest.raises(ConfigurationError, match=r"Tiny.trainer was set during a run"):
            fit(tmp_path, callbacks=setting).fit(module, loader(2))

    def test_a_nested_module_can_access_the_run(self, tmp_path: Path) -> None:
        # L-10
        class Outer(Tiny):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Tiny()

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.inner.log("inner", float(self.inner.global_step))
                return super().training_step(batch, batch_idx)

        module, trainer = Outer(), fit(tmp_path)
        trainer.fit(module, loader(4))
        assert float(trainer.callback_metrics["inner"]) == 1.0
        assert module.inner.trainer is trainer

    def test_an_unknown_attribute_is_a_plain_attribute_error(self) -> None:
        for owner in (Tiny(), Tiny().hparams):
            with pytest.raises(AttributeError) as caught:
                _ = owner.trainr
            assert "run" not in str(caught.value)


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.to(torch.float64),
        lambda module: module.half(),
        lambda module: module.to("cpu"),
        lambda module: module.float(),
        lambda module: module.to_empty(device="cpu"),
    ],
)
def test_moving_a_module_during_a_run_is_refused(tmp_path: Path, move: Any) -> None:
    """A-09."""
    module = Tiny()
    with pytest.raises(ConfigurationError, match=r"moved or re-cast.*during a run"):
        fit(tmp_path, callbacks=calling("on_train_batch_start", lambda trainer: move(module))).fit(module, loader(2))


class TestFailing:
    def test_the_same_process_and_object_can_fit_again(self, tmp_path: Path) -> None:
        """G-07, in one process."""
        runner = fit(tmp_path)
        module = Failing(1)
        for _ in range(2):
            with pytest.raises(ValueError, match="as planned"):
                runner.fit(module, loader(8))
        with pytest.raises(ConfigurationError):
            runner.fit(module)
        module.fail_at = None
        module.seen.clear()
        runner.fit(module, loader(8))
        assert len(module.seen) == 4
        assert (runner.state, runner.global_step) == ("finished", 4)

    def test_what_was_logged_before_a_failure_is_written(self, tmp_path: Path) -> None:
        class Logging(Failing):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.log("it", 1.0)

        logger = CSVLogger(tmp_path, version="run")
        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path, logger=logger, log_every_n_steps=1).fit(Logging(2), loader(8))
        assert "it" in Path(logger.log_dir, "metrics.csv").read_text()

    def test_an_error_in_on_exception_does_not_hide_the_first(self, tmp_path: Path) -> None:
        def fail(trainer: Any) -> None:
            raise RuntimeError("a second one")

        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path, callbacks=calling("on_exception", fail)).fit(Failing(0), loader(4))


@pytest.mark.parametrize(("value", "manual"), [(float("nan"), False), (float("inf"), True)])
def test_detect_anomaly_names_the_batch_of_a_loss(tmp_path: Path, value: float, manual: bool) -> None:
    # G-05
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch) * (value if self.trainer.micro_batches == 8 else 1)}

    runner = fit(tmp_path, detect_anomaly=True, max_epochs=3)
    with pytest.raises(NonFiniteError, match=r"on rank 0 at batch index 2 of epoch 1, after 8 optimizer steps"):
        runner.fit(linear(training_step=step, automatic_optimization=not manual), regression(24))
    assert runner.global_step == 8


def test_detect_anomaly_names_the_operation_in_the_backward(tmp_path: Path) -> None:
    # G-05
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (torch.sqrt(self.layer.weight.sum() * 0) * 0 if batch_idx == 1 else 0)

    with pytest.raises(NonFiniteError, match=r"'SqrtBackward0' returned nan values.* at batch index 1 of epoch 0"):
        fit(tmp_path, detect_anomaly=True).fit(linear(training_step=step), regression(24))


class TestSwitches:
    @pytest.mark.parametrize("inference_mode", [True, False])
    def test_inference_mode(self, tmp_path: Path, inference_mode: bool) -> None:
        seen: list[tuple[bool, bool]] = []

        def look(self: Any, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        runner, module = fit(tmp_path, inference_mode=inference_mode), tiny(validation_step=look, test_step=look)
        runner.fit(module, loader(2), loader(2))
        # S-18: validation within fit, the sanity check included, is never in inference mode
        assert set(seen) == {(False, False)}
        seen.clear()
        runner.validate(module, loader(2), verbose=False)
        runner.test(module, loader(2), verbose=False)
        assert set(seen) == {(inference_mode, False)}

    def test_a_validation_within_fit_may_differentiate(self, tmp_path: Path) -> None:
        # S-18
        def differentiate(self: Any, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                weight = torch.ones(2, requires_grad=True)
                (weight * torch.tensor([3.0, 4.0])).sum().backward()
            self.gradient = weight.grad

        module: Any = tiny(validation_step=differentiate)
        fit(tmp_path).fit(module, loader(2), loader(2))
        assert module.gradient.tolist() == [3.0, 4.0]

    def test_barebones_runs_only_the_loop(self, tmp_path: Path) -> None:
        runner = Fit(barebones=True, max_epochs=1, default_root_dir=tmp_path)
        module = Tiny()
        runner.fit(module, loader(4), loader(4))
        assert (runner.callbacks, runner.loggers) == ([], [])
        assert len(module.seen) == 2
        assert list(tmp_path.iterdir()) == []

    def test_compile(self, tmp_path: Path) -> None:
        """The compiled step computes the same, may log, and is removed afterwards."""

        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        module, plain = linear(training_step=step), linear(training_step=step)
        runner = fit(tmp_path, compile={"backend": "eager"})
        runner.fit(module, regression())
        fit(tmp_path).fit(plain, regression())
        torch.testing.assert_close(module.layer.weight, plain.layer.weight)
        assert "loss" in runner.callback_metrics
        assert "training_step" not in module.__dict__
        runner.fit(module, regression())


class TestConfigureCallbacks:
    def test_they_replace_those_of_their_class(self, tmp_path: Path) -> None:
        class First(Callback):
            def __init__(self, name: str) -> None:
                self.name = name

            def on_train_start(self, trainer: Any, module: Any) -> None:
                calls.append(self.name)

        class Second(First):
            pass

        calls: list[str] = []
        module = tiny(configure_callbacks=lambda self: First("module's"))
        fit(tmp_path, callbacks=[First("fit's"), Second("second")]).fit(module, loader(2))
        assert calls == ["second", "module's"]

    def test_what_is_no_callback_is_refused(self, tmp_path: Path) -> None:
        nothing: Any
        for nothing in (None, []):
            fit(tmp_path).fit(tiny(configure_callbacks=lambda self, nothing=nothing: nothing), loader(2))
        with pytest.raises(ConfigurationError, match="configure_callbacks returned the class Callback"):
            fit(tmp_path).fit(tiny(configure_callbacks=lambda self: [Callback, 3]), loader(2))


def test_states_of_a_run(tmp_path: Path) -> None:
    seen: list[str] = []
    runner = fit(tmp_path, callbacks=calling("setup", lambda trainer: seen.append(trainer.state)))
    assert runner.state == "idle"
    module = Tiny()
    runner.fit(module, loader(2))
    runner.validate(module, loader(2), verbose=False)
    runner.test(module, loader(2), verbose=False)
    runner.predict(module, loader(2))
    assert seen == ["fitting", "validating", "testing", "predicting"]
    assert runner.state == "finished"


def test_all_gather_has_a_leading_dimension_in_one_process_too(tmp_path: Path) -> None:
    shapes: list[Any] = []

    def gather(self: Any, batch: Any, batch_idx: int) -> None:
        gathered = self.all_gather({"a": torch.ones(3), "b": 2.0}, sync_grads=True)
        shapes.append((tuple(gathered["a"].shape), tuple(gathered["b"].shape)))

    fit(tmp_path).fit(tiny(on_train_batch_start=gather), loader(2))
    assert shapes == [((1, 3), (1,))]


def test_a_frozen_module_evaluates_and_an_unfrozen_one_trains() -> None:
    module = Tiny()
    module.freeze()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("profiler", [None, "simple", "pytorch"])
def test_a_fit_that_ran_can_be_pickled(tmp_path: Path, profiler: str | None) -> None:
    # S-17
    runner = fit(tmp_path, profiler=profiler)
    runner.fit(Tiny(), loader(4))
    copied = pickle.loads(pickle.dumps(runner))
    assert (copied.state, copied.session, copied.max_epochs) == ("idle", None, runner.max_epochs)
    module = Tiny()
    copied.fit(module, loader(4))
    assert len(module.seen) == 2
