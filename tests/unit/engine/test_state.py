"""Process-wide state (A rows), failing cleanly (G-05, G-07), and switches."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import QUIET, Regression, Tiny, fit, loader, regression
from torch import nn

from drivetrain import Callback, ConfigurationError, DataModule, Fit, NonFiniteError, TrainModule
from drivetrain._engine import launch
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

    def test_it_can_be_copied_and_pickled(self) -> None:
        runner = Fit(strategy="ddp", devices=2, accelerator="cpu", max_epochs=3, **QUIET)
        assert pickle.loads(pickle.dumps(runner)).max_epochs == copy.deepcopy(runner).max_epochs == 3

    def test_two_fits_are_independent(self, tmp_path: Path) -> None:
        """A-07."""
        first, second = fit(tmp_path, max_epochs=1, precision="64-true"), fit(tmp_path, max_epochs=2)
        modules = Tiny(), Tiny()
        first.fit(modules[0], loader(4))
        second.fit(modules[1], loader(4))
        assert (first.current_epoch, second.current_epoch) == (1, 2)
        assert (first.precision.name, second.precision.name) == ("64-true", "32-true")
        assert (modules[0].layer.weight.dtype, modules[1].layer.weight.dtype) == (torch.float64, torch.float32)
        assert first.callbacks == second.callbacks == []

    def test_a_strategy_used_by_two_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-07: a request of one run to its strategy does not carry over to the next."""
        synchronised = []

        class Noted(SingleDeviceStrategy):
            def setup_module(self, module: nn.Module) -> Any:
                synchronised.append(self.sync_batchnorm)
                return super().setup_module(module)

        strategy = Noted()
        # The refusal of this device is disabled, because only an accelerator is supported here.
        monkeypatch.setattr(launch, "asks_for_sync_batchnorm", lambda trainer, *others: trainer.sync_batchnorm)
        for asked in (True, False):
            fit(tmp_path, strategy=strategy, sync_batchnorm=asked).fit(Tiny(), loader(4))
        assert synchronised == [True, False]

    def test_a_run_within_another(self, tmp_path: Path) -> None:
        """A-07: a run inside a hook of another does not change that run's state."""

        class Nesting(Callback):
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                inner = Tiny()
                fit(tmp_path, max_epochs=2, seed=9).fit(inner, loader(4))
                assert module.trainer is trainer

        runner, module = fit(tmp_path, max_epochs=2, callbacks=Nesting()), Tiny()
        runner.fit(module, loader(4, shuffle=True))
        alone = Tiny()
        fit(tmp_path, max_epochs=2).fit(alone, loader(4, shuffle=True))
        assert module.seen == alone.seen
        assert runner.global_step == 4

    def test_settings_say_where_values_come_from(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-07: code > environment > file > default, also for a value that equals the default."""
        config = tmp_path / "mine.toml"
        config.write_text('max_epochs = 7\naccumulate_grad_batches = 3\nprecision = "bf16-mixed"\n')
        monkeypatch.setenv("DRIVETRAIN_CONFIG", str(config))
        monkeypatch.setenv("DRIVETRAIN_ACCUMULATE_GRAD_BATCHES", "2")
        monkeypatch.setenv("DRIVETRAIN_MAX_STEPS", "5")
        runner = Fit(max_steps=-1, **QUIET)
        sources = {name: str(runner.settings[name].source).split()[0] for name in runner.settings}
        assert (runner.max_epochs, runner.accumulate_grad_batches, runner.max_steps) == (7, 2, -1)
        assert [sources[name] for name in ("max_steps", "accumulate_grad_batches", "max_epochs", "devices")] == [
            "code",
            "environment",
            "file",
            "default",
        ]
        monkeypatch.setenv("DRIVETRAIN_MAX_EPOCH", "5")
        with pytest.raises(ConfigurationError, match="DRIVETRAIN_MAX_EPOCHS"):
            Fit()


class Disturbing(Tiny):
    """Fails in the given hook."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self._fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self._fail_at:
            raise ValueError("as planned")
        return super().training_step(batch, batch_idx)


class TestProcessState:
    @pytest.mark.parametrize("fail_at", [None, 1])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"deterministic": True},
            {"deterministic": "warn", "detect_anomaly": True},
            {"precision": "64-true"},
            {"precision": "bf16-true"},
            {"benchmark": True},
        ],
        ids=str,
    )
    def test_is_as_before(self, tmp_path: Path, options: dict[str, Any], fail_at: int | None) -> None:
        """A-03: once fit returns or raises."""
        module = Disturbing(fail_at)
        module.layer.eval()
        fit(tmp_path).fit(Tiny(), loader(2))  # what torch itself sets up at first use
        before, flags = _process(), [child.training for child in module.modules()]
        runner = fit(tmp_path, **options)
        if fail_at is None:
            runner.fit(module, loader(4), loader(4))
        else:
            with pytest.raises(ValueError, match="as planned"):
                runner.fit(module, loader(4), loader(4))
        assert _process() == before
        assert [child.training for child in module.modules()] == flags

    @pytest.mark.parametrize("verb", ["validate", "test", "predict"])
    def test_after_an_evaluation_too(self, tmp_path: Path, verb: str) -> None:
        module = Tiny()
        fit(tmp_path).fit(Tiny(), loader(2))
        before = _process()
        getattr(fit(tmp_path, deterministic=True), verb)(module, loader(4))
        assert _process() == before
        assert all(child.training for child in module.modules())

    def test_user_settings_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A-03: an environment variable is never overwritten."""
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        seen: list[str | None] = []

        class Watching(Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
                seen.append(str(torch.are_deterministic_algorithms_enabled()))

        fit(tmp_path, deterministic=True, callbacks=Watching()).fit(Tiny(), loader(2))
        assert seen == [":16:8", "True"]

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
        "read",
        [
            lambda module: module.trainer,
            lambda module: module.log("x", 1.0),
            lambda module: module.all_gather(torch.ones(1)),
            lambda module: module.optimizers(),
            lambda module: module.lr_schedulers(),
            lambda module: module.manual_backward(torch.ones(())),
            lambda module: module.print("x"),
        ],
    )
    def test_reading_run_attributes_outside_a_run_is_refused(self, read: Any) -> None:
        with pytest.raises(ConfigurationError, match="not in a run") as caught:
            read(Tiny())
        assert caught.value.fix

    @pytest.mark.parametrize(
        "call",
        [
            lambda module: module.log("x", 1.0),
            lambda module: module.all_gather(torch.ones(1)),
            lambda module: module.manual_backward(torch.ones(())),
        ],
    )
    def test_calls_that_need_a_running_fit_are_refused_after_it_too(self, tmp_path: Path, call: Any) -> None:
        module = Tiny()
        fit(tmp_path).fit(module, loader(2))
        with pytest.raises(ConfigurationError, match="not in a run"):
            call(module)

    def test_after_a_run_the_trainer_is_the_one_that_ran_it(self, tmp_path: Path) -> None:
        # L-10
        module, trainer = Tiny(), fit(tmp_path)
        trainer.fit(module, loader(4))
        assert module.trainer is trainer
        assert (module.current_epoch, module.global_step) == (1, 2)
        assert module.optimizers().param_groups
        assert module.loggers == []
        fit(tmp_path).fit(Tiny(), loader(2))
        assert module.trainer is trainer

    def test_a_trainer_may_be_set_before_a_run_and_not_in_one(self, tmp_path: Path) -> None:
        # L-10
        module, trainer = Tiny(), fit(tmp_path, max_epochs=3)
        module.trainer = trainer
        assert module.trainer.max_epochs == 3

        class Setting(Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                module.trainer = Fit()

        with pytest.raises(ConfigurationError, match=r"Tiny.trainer was set during a run"):
            fit(tmp_path, callbacks=Setting()).fit(module, loader(2))

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

    def test_an_unknown_attribute_is_a_plain_attribute_error(self, tmp_path: Path) -> None:
        module = Tiny()
        for name in ("unknown", "trainr"):
            with pytest.raises(AttributeError) as caught:
                getattr(module, name)
            assert "run" not in str(caught.value)
        assert not hasattr(module, "unknown")
        with pytest.raises(AttributeError):
            _ = module.hparams.unknown

    def test_counters_and_places_are_plain(self) -> None:
        module = Tiny()
        assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
        assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)

    def test_after_a_failure_too(self, tmp_path: Path) -> None:
        module = Disturbing(0)
        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path).fit(module, loader(4))
        with pytest.raises(ConfigurationError, match="not in a run"):
            module.log("x", 1.0)
        module.double()  # and no references remain

    def test_the_module_is_ordinary_afterwards(self, tmp_path: Path) -> None:
        module = Tiny()
        fit(tmp_path).fit(module, loader(2))
        copied = copy.deepcopy(module)
        for one in (copied, pickle.loads(pickle.dumps(module))):
            assert one.lr == 0.0
            assert "_last_trainer" not in vars(one)
        assert {
            name for name in module.__dict__ if name.startswith("_") and name in ("_trainer", "_is_locked")
        } == set()


class TestHeldModule:
    """A-09."""

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
    def test_moving_it_during_a_run_is_refused(self, tmp_path: Path, move: Any) -> None:
        class Moving(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                move(module)

        with pytest.raises(ConfigurationError, match=r"moved or re-cast.*during a run"):
            fit(tmp_path, callbacks=Moving()).fit(Tiny(), loader(2))

    def test_before_and_after_it_may_be_moved(self, tmp_path: Path) -> None:
        module = Tiny().double().float()
        fit(tmp_path).fit(module, loader(2))
        assert module.double().layer.weight.dtype == torch.float64


class TestFailing:
    def test_the_same_process_and_object_can_fit_again(self, tmp_path: Path) -> None:
        """G-07, in one process."""
        runner = fit(tmp_path)
        module = Disturbing(1)
        for _ in range(2):
            with pytest.raises(ValueError, match="as planned"):
                runner.fit(module, loader(8))
        module._fail_at = None
        module.seen.clear()
        runner.fit(module, loader(8))
        assert len(module.seen) == 4
        assert (runner.state, runner.global_step) == ("finished", 4)

    def test_a_refusal_leaves_it_usable(self, tmp_path: Path) -> None:
        runner = fit(tmp_path)
        with pytest.raises(ConfigurationError):
            runner.fit(Tiny())
        runner.fit(Tiny(), loader(4))
        assert runner.state == "finished"

    def test_loggers_are_told(self, tmp_path: Path) -> None:
        class Logging(Disturbing):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.log("it", 1.0)

        logger = CSVLogger(tmp_path, version="run")
        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path, logger=logger, log_every_n_steps=1).fit(Logging(2), loader(8))
        assert "it" in Path(logger.log_dir, "metrics.csv").read_text()

    def test_an_error_in_teardown_does_not_hide_the_first(self, tmp_path: Path) -> None:
        class Worse(Callback):
            def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
                raise RuntimeError("a second one")

        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path, callbacks=Worse()).fit(Disturbing(0), loader(4))


class TestNonFinite:
    """G-05: the error says where it happened."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("manual", [False, True])
    def test_a_loss(self, tmp_path: Path, value: float, manual: bool) -> None:
        class Exploding(Regression):
            automatic_optimization = not manual

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                if self.trainer.micro_batches == 8:
                    loss = loss * value
                return {"loss": loss}

        runner = fit(tmp_path, detect_anomaly=True, max_epochs=3)
        with pytest.raises(NonFiniteError, match=r"on rank 0 at batch index 2 of epoch 1, after 8 optimizer steps"):
            runner.fit(Exploding(), regression(24))
        assert runner.global_step == 8

    def test_an_operation_in_the_backward(self, tmp_path: Path) -> None:
        class Exploding(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                zero = self.layer.weight.sum() * 0
                return loss + (torch.sqrt(zero) * 0 if batch_idx == 1 else 0)

        with pytest.raises(NonFiniteError, match=r"'SqrtBackward0' returned nan values.* at batch index 1 of epoch 0"):
            fit(tmp_path, detect_anomaly=True).fit(Exploding(), regression(24))

    def test_other_errors_pass(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="as planned"):
            fit(tmp_path, detect_anomaly=True).fit(Disturbing(0), loader(4))

    def test_without_detect_anomaly_nothing_is_checked(self, tmp_path: Path) -> None:
        class Exploding(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch) * float("nan")

        module = Exploding()
        fit(tmp_path).fit(module, regression(8))
        assert bool(module.layer.weight.isnan().all())


class TestSwitches:
    @pytest.mark.parametrize("inference_mode", [True, False])
    def test_inference_mode(self, tmp_path: Path, inference_mode: bool) -> None:
        seen: list[tuple[bool, bool]] = []

        class Watching(Tiny):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

            test_step = validation_step

        runner, module = fit(tmp_path, inference_mode=inference_mode), Watching()
        runner.fit(module, loader(2), loader(2))
        # S-18: validation within fit, the sanity check included, is never in inference mode
        assert set(seen) == {(False, False)}
        seen.clear()
        runner.validate(module, loader(2), verbose=False)
        runner.test(module, loader(2), verbose=False)
        assert set(seen) == {(inference_mode, False)}

    def test_a_validation_within_fit_may_differentiate(self, tmp_path: Path) -> None:
        # S-18
        class Adapting(Tiny):
            adapted: Any = None

            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                torch.set_grad_enabled(True)
                weight = torch.ones(2, requires_grad=True)
                (weight * torch.tensor([3.0, 4.0])).sum().backward()
                self.adapted = weight.grad
                torch.set_grad_enabled(False)

        module = Adapting()
        fit(tmp_path).fit(module, loader(2), loader(2))
        assert module.adapted.tolist() == [3.0, 4.0]

    def test_barebones_runs_only_the_loop(self, tmp_path: Path) -> None:
        runner = Fit(barebones=True, max_epochs=1, default_root_dir=tmp_path)
        module = Tiny()
        runner.fit(module, loader(4), loader(4))
        assert (runner.callbacks, runner.loggers) == ([], [])
        assert len(module.seen) == 2
        assert list(tmp_path.iterdir()) == []

    def test_deterministic_reruns_are_equal(self, tmp_path: Path) -> None:
        """B-18: the same seed gives the same run, dropout included."""

        class Dropping(Regression):
            def loss(self, batch: Any) -> torch.Tensor:
                x, y = batch
                return nn.functional.mse_loss(self.layer(nn.functional.dropout(x, 0.5)), y)

        weights = []
        for seed in (1, 1, 2):
            module = Dropping()
            fit(tmp_path, seed=seed, deterministic=True).fit(module, regression())
            weights.append(module.layer.weight.detach().clone())
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])

    def test_compile(self, tmp_path: Path) -> None:
        """The compiled step computes the same, may log, and is removed afterwards."""

        class Logging(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                self.log("loss", loss)
                return loss

        module, plain = Logging(), Logging()
        runner = fit(tmp_path, compile={"backend": "eager"})
        runner.fit(module, regression())
        fit(tmp_path).fit(plain, regression())
        torch.testing.assert_close(module.layer.weight, plain.layer.weight)
        assert "loss" in runner.callback_metrics
        assert "training_step" not in module.__dict__
        pickle.dumps(module.state_dict())
        runner.fit(module, regression())

    def test_a_step_set_on_the_object_survives(self, tmp_path: Path) -> None:
        module = Regression()
        own = lambda batch, batch_idx: module.loss(batch) * 2  # noqa: E731
        module.training_step = own  # type: ignore[method-assign]
        for compiled in (False, {"backend": "eager"}):
            fit(tmp_path, compile=compiled).fit(module, regression(4))
            assert module.__dict__["training_step"] is own


class TestConfigureModel:
    def test_layers_built_there_are_trained_in_the_precision_s_dtype(self, tmp_path: Path) -> None:
        class Late(TrainModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer: nn.Module | None = None

            def configure_model(self) -> None:
                if self.layer is None:
                    self.layer = nn.Linear(2, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                assert self.layer is not None
                return self.layer(batch).mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module, runner = Late(), fit(tmp_path, precision="bf16-true")
        runner.fit(module, loader(4))
        layer = module.layer
        assert next(module.parameters()).dtype == torch.bfloat16
        runner.fit(module, loader(4))
        assert module.layer is layer

    def test_configure_callbacks_join_and_replace_those_of_their_class(self, tmp_path: Path) -> None:
        class First(Callback):
            def __init__(self, name: str, calls: list[str]) -> None:
                self._name, self._calls = name, calls

            def on_train_start(self, trainer: Any, module: Any) -> None:
                self._calls.append(self._name)

        class Second(First):
            pass

        calls: list[str] = []

        class Own(Tiny):
            def configure_callbacks(self) -> Any:
                return First("module's", calls)

        runner = fit(tmp_path, callbacks=[First("fit's", calls), Second("second", calls)])
        runner.fit(Own(), loader(2))
        assert calls == ["second", "module's"]

    @pytest.mark.parametrize("answer", [None, []])
    def test_configure_callbacks_may_return_nothing(self, tmp_path: Path, answer: Any) -> None:
        class Own(Tiny):
            def configure_callbacks(self) -> Any:
                return answer

        fit(tmp_path).fit(Own(), loader(2))

    def test_configure_callbacks_that_are_none_are_refused(self, tmp_path: Path) -> None:
        class Own(Tiny):
            def configure_callbacks(self) -> Any:
                return [Callback, 3]

        with pytest.raises(ConfigurationError, match="configure_callbacks returned the class Callback"):
            fit(tmp_path).fit(Own(), loader(2))


def test_states_of_a_run(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            seen.append(trainer.state)

    runner = fit(tmp_path, callbacks=Watching())
    assert runner.state == "idle"
    module = Tiny()
    runner.fit(module, loader(2))
    runner.validate(module, loader(2), verbose=False)
    runner.test(module, loader(2), verbose=False)
    runner.predict(module, loader(2))
    assert seen == ["fitting", "validating", "testing", "predicting"]
    assert runner.state == "finished"


def test_places_in_one_process(tmp_path: Path) -> None:
    runner = fit(tmp_path)
    runner.fit(Tiny(), loader(2))
    assert (runner.world_size, runner.global_rank, runner.local_rank, runner.node_rank) == (1, 0, 0, 0)
    assert runner.is_global_zero
    assert runner.strategy.name == "single_device"


def test_all_gather_has_a_leading_dimension_in_one_process_too(tmp_path: Path) -> None:
    shapes: list[Any] = []

    class Gathering(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gathered = self.all_gather({"a": torch.ones(3), "b": 2.0}, sync_grads=True)
            shapes.append((tuple(gathered["a"].shape), tuple(gathered["b"].shape)))
            return super().training_step(batch, batch_idx)

    fit(tmp_path).fit(Gathering(), loader(2))
    assert shapes == [((1, 3), (1,))]


def test_data_module_hooks_are_the_documented_ones() -> None:
    assert {"prepare_data", "setup", "teardown"} <= set(vars(DataModule))


def test_a_frozen_module_evaluates_and_an_unfrozen_one_trains() -> None:
    module = Tiny()
    module.freeze()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("profiler", [None, "simple", "advanced", "pytorch"])
def test_a_fit_that_ran_can_be_pickled(tmp_path: Path, profiler: str | None) -> None:
    # S-17
    runner = fit(tmp_path, profiler=profiler)
    runner.fit(Tiny(), loader(4))
    copied = pickle.loads(pickle.dumps(runner))
    assert (copied.state, copied.session, copied.max_epochs) == ("idle", None, runner.max_epochs)
    module = Tiny()
    copied.fit(module, loader(4))
    assert len(module.seen) == 2
