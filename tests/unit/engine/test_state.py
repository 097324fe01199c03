"""The state of the process and of a run (A rows), failing cleanly (G-05, G-07), switches, and `RunContext`."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import calling, linear, tiny
from torch import nn

from drivetrain import Callback, ConfigurationError, Fit, NonFiniteError, RunContext

# Private: a checkpoint holds these states.
from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain.loggers import CSVLogger
from drivetrain_strategies import SingleDeviceStrategy


def _process() -> dict[str, Any]:
    """Return what a run must restore of the process, besides what `tests/conftest.py` checks after each test."""
    return {
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "anomaly": torch.is_anomaly_enabled(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "excepthooks": (sys.excepthook, threading.excepthook),
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "python generator": random.getstate(),
        "torch generator": torch.get_rng_state().tolist(),
        "matmul": torch.get_float32_matmul_precision(),
    }


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for child in value.values():
            yield from leaves(child)
    else:
        yield value


def test_states_of_generators_are_plain_values_and_restore_every_generator() -> None:  # F-04
    def draw() -> Any:
        return random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(2).tolist()

    draw()  # leaves half a pair behind
    states = generator_states(torch.device("cpu"))
    assert all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves(states))
    first = draw()
    restore_generators(states, torch.device("cpu"))
    assert draw() == first


def test_building_a_fit_has_no_side_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-01: with the default loggers and callbacks, and every switch that changes the process in a run."""
    monkeypatch.chdir(tmp_path)
    before = _process()
    Fit()
    Fit(default_root_dir=tmp_path / "new", seed=3, deterministic=True, precision="16-mixed", detect_anomaly=True)
    Fit(strategy="ddp", devices=2, accelerator="cpu", precision="64-true", compile=True, logger=True)
    assert _process() == before
    assert list(tmp_path.iterdir()) == []


def test_a_request_to_a_strategy_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised = []

    class Recording(SingleDeviceStrategy):
        def setup_module(self, module: nn.Module) -> Any:
            synchronised.append(self.sync_batchnorm)
            return super().setup_module(module)

    strategy = Recording()
    # Private, because the CPU is refused: only an accelerator synchronises a BatchNorm.
    asks = "drivetrain._engine.ranks.run_entry_point.asks_for_sync_batchnorm"
    monkeypatch.setattr(asks, lambda asked, *others: asked)
    for asked in (True, False):
        fit(tmp_path, strategy=strategy, sync_batchnorm=asked).fit(Tiny(), loader(4))
    assert synchronised == [True, False]


def test_a_run_within_a_hook_does_not_change_the_state_of_the_outer_run(tmp_path: Path) -> None:
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
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fail_at:
            raise ValueError("as planned")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("verb", "options", "fail_at"),
    [
        ("fit", {}, None),
        ("fit", {"deterministic": True}, 1),
        ("fit", {"deterministic": "warn", "detect_anomaly": True}, None),
        ("fit", {"precision": "64-true"}, 1),
        ("fit", {"precision": "bf16-true"}, None),
        ("fit", {"benchmark": True}, None),
        ("validate", {"deterministic": True}, None),
        ("test", {"deterministic": True}, None),
        ("predict", {"deterministic": True}, None),
    ],
)
def test_a_run_restores_the_process_and_all_modes(tmp_path: Path, verb: str, options: Any, fail_at: Any) -> None:
    # once it returns or raises
    module = Failing(fail_at)
    module.layer.eval()
    fit(tmp_path).fit(Tiny(), loader(2))  # what torch itself sets up at first use
    before, flags = _process(), [child.training for child in module.modules()]
    loaders = [loader(4), loader(4)] if verb == "fit" else [loader(4)]
    with pytest.raises(ValueError, match="as planned") if fail_at is not None else nullcontext():
        getattr(fit(tmp_path, **options), verb)(module, *loaders)
    assert _process() == before
    assert [child.training for child in module.modules()] == flags


def test_settings_of_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-03: an environment variable is not overwritten, and a run that starts under no_grad trains and restores it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        seen.extend([os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()])

    module, before = Regression(), Regression()
    with torch.no_grad():
        fit(tmp_path, deterministic=True, callbacks=calling("on_train_start", look)).fit(module, regression())
        assert not torch.is_grad_enabled()
    assert seen == [":16:8", True]
    assert not torch.equal(module.layer.weight, before.layer.weight)


@pytest.mark.parametrize(
    ("call", "refused_after"),
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
def test_outside_a_run_what_needs_one_is_refused(tmp_path: Path, call: Any, refused_after: bool) -> None:
    with pytest.raises(ConfigurationError, match="not in a run") as caught:
        call(Tiny())
    assert caught.value.fix
    finished, failed = Tiny(), Failing(0)
    fit(tmp_path).fit(finished, loader(2))
    with pytest.raises(ValueError, match="as planned"):
        fit(tmp_path).fit(failed, loader(2))
    for module in (finished, failed):
        with pytest.raises(ConfigurationError, match="not in a run") if refused_after else nullcontext():
            call(module)


def test_the_trainer_of_a_module_and_of_those_within_is_the_last_that_ran_it(tmp_path: Path) -> None:  # A-04, L-10
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.inner.log("inner", float(self.inner.global_step))
        return Tiny.training_step(self, batch, batch_idx)

    module, trainer = tiny(training_step=step), fit(tmp_path)
    inner = module.inner = Tiny()
    assert (module.current_epoch, module.global_step, module.global_rank) == (0, 0, 0)
    module.trainer = fit(tmp_path, max_epochs=3)
    assert module.trainer.max_epochs == 3
    trainer.fit(module, loader(4))
    assert (module.current_epoch, module.global_step) == (1, 2)
    assert module.optimizers().param_groups
    assert module.loggers == []
    assert float(trainer.callback_metrics["inner"]) == 1.0
    fit(tmp_path).fit(Tiny(), loader(2))
    assert module.trainer is inner.trainer is trainer
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        with pytest.raises(ConfigurationError, match="not in a run"):
            _ = copied.trainer
    assert module.double().layer.weight.dtype == torch.float64


def test_an_unknown_attribute_is_a_plain_attribute_error() -> None:
    for owner in (Tiny(), Tiny().hparams):
        with pytest.raises(AttributeError) as caught:
            _ = owner.trainr
        assert "run" not in str(caught.value)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda module: module.to(torch.float64), r"moved or re-cast.*during a run"),
        (lambda module: module.half(), r"moved or re-cast.*during a run"),
        (lambda module: module.to("cpu"), r"moved or re-cast.*during a run"),
        (lambda module: module.float(), r"moved or re-cast.*during a run"),
        (lambda module: module.to_empty(device="cpu"), r"moved or re-cast.*during a run"),
        (lambda module: setattr(module, "trainer", Fit()), r"Tiny.trainer was set during a run"),
    ],
)
def test_what_would_change_a_module_during_a_run_is_refused(tmp_path: Path, act: Any, error: str) -> None:  # A-09, L-10
    module = Tiny()
    with pytest.raises(ConfigurationError, match=error):
        fit(tmp_path, callbacks=calling("on_train_batch_start", lambda trainer: act(module))).fit(module, loader(2))


def test_after_a_failure_logged_values_are_written_and_the_same_objects_fit_again(tmp_path: Path) -> None:
    """G-07, in one process; an error in ``on_exception`` does not hide the first."""

    def fail(trainer: Any) -> None:
        raise RuntimeError("a second one")

    module = Failing(2)
    logger = CSVLogger(tmp_path, version="run")
    logging = calling("on_train_batch_start", lambda trainer: module.log("it", 1.0))
    runner = fit(tmp_path, logger=logger, log_every_n_steps=1, callbacks=[logging, calling("on_exception", fail)])
    for _ in range(2):
        with pytest.raises(ValueError, match="as planned"):
            runner.fit(module, loader(8))
        assert "it" in Path(str(logger.log_dir), "metrics.csv").read_text()
    with pytest.raises(ConfigurationError):
        runner.fit(module)
    module.fail_at = None
    module.seen.clear()
    runner.fit(module, loader(8))
    assert len(module.seen) == 4
    assert (runner.state, runner.global_step) == ("finished", 4)


@pytest.mark.parametrize(
    ("factor", "manual", "error"),
    [
        (lambda weight: float("nan"), False, ", after 8 optimizer steps"),
        (lambda weight: float("inf"), True, ", after 8 optimizer steps"),
        (lambda weight: 1 + torch.sqrt(weight.sum() * 0) * 0, False, "'SqrtBackward0' returned nan values"),
    ],
)
def test_detect_anomaly_names_the_batch_and_operation(tmp_path: Path, factor: Any, manual: bool, error: str) -> None:
    # G-05
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch) * (factor(self.layer.weight) if self.trainer.micro_batches == 8 else 1)}

    runner = fit(tmp_path, detect_anomaly=True, max_epochs=3)
    with pytest.raises(NonFiniteError, match=error) as caught:
        runner.fit(linear(training_step=step, automatic_optimization=not manual), regression(24))
    assert "on rank 0 at batch index 2 of epoch 1" in str(caught.value)
    assert runner.global_step == 8


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validation_within_fit_is_never_in_inference_mode(tmp_path: Path, inference_mode: bool) -> None:
    # S-18: the sanity check included, so that a step may differentiate
    seen: list[tuple[bool, bool]] = []
    gradients: list[Any] = []

    def look(self: Any, batch: Any, batch_idx: int) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        if self.trainer.state == "fitting":
            with torch.enable_grad():
                weight = torch.ones(2, requires_grad=True)
                (weight * torch.tensor([3.0, 4.0])).sum().backward()
            gradients.append(weight.grad)

    runner, module = fit(tmp_path, inference_mode=inference_mode), tiny(validation_step=look, test_step=look)
    runner.fit(module, loader(2), loader(2))
    assert seen == [(False, False)] * 2
    assert [one.tolist() for one in gradients] == [[3.0, 4.0]] * 2
    runner.validate(module, loader(2), verbose=False)
    runner.test(module, loader(2), verbose=False)
    assert seen[2:] == [(inference_mode, False)] * 2


def test_a_compiled_step_computes_the_same_and_is_removed_afterwards(tmp_path: Path) -> None:
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

    def set_on_the_instance(batch: Any, batch_idx: int) -> Any:
        return module.loss(batch) * 2

    module.training_step = set_on_the_instance  # type: ignore[method-assign]
    for compiled in (False, {"backend": "eager"}):
        fit(tmp_path, compile=compiled).fit(module, regression())
        assert module.__dict__["training_step"] is set_on_the_instance


def test_callbacks_of_the_module_replace_those_of_their_class(tmp_path: Path) -> None:
    class First(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_start(self, trainer: Any, module: Any) -> None:
            calls.append(self.name)

    class Second(First):
        pass

    calls: list[str] = []
    returned: Any
    for returned in (First("module's"), None, []):
        module = tiny(configure_callbacks=lambda self, returned=returned: returned)
        fit(tmp_path, callbacks=[First("fit's"), Second("second")]).fit(module, loader(2))
    assert calls == ["second", "module's", *["fit's", "second"] * 2]
    with pytest.raises(ConfigurationError, match="configure_callbacks returned the class Callback"):
        fit(tmp_path).fit(tiny(configure_callbacks=lambda self: [Callback, 3]), loader(2))


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
def test_a_fit_that_ran_can_be_pickled(tmp_path: Path, profiler: str | None) -> None:  # S-17
    runner = fit(tmp_path, profiler=profiler)
    runner.fit(Tiny(), loader(4))
    copied = pickle.loads(pickle.dumps(runner))
    assert (copied.state, copied.module, copied.max_epochs) == ("idle", None, runner.max_epochs)
    module = Tiny()
    copied.fit(module, loader(4))
    assert len(module.seen) == 2


def test_a_hook_that_starts_a_run_of_another_module_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    def start_another(trainer: Any) -> None:
        with pytest.raises(ConfigurationError, match="validate was called while a run of Tiny is under way"):
            trainer.validate(Tiny(), loader(2))

    trainer, module = fit(tmp_path, callbacks=[calling("on_train_epoch_end", start_another)], max_epochs=2), Tiny()
    trainer.fit(module, loader(4))
    assert (trainer.module, trainer.global_step, trainer.state) == (module, 4, "finished")


def test_what_hooks_see_of_a_run_is_documented_and_fit_adds_only_its_entry_points() -> None:
    def public(owner: type) -> set[str]:
        annotated = (name for base in owner.__mro__[:-1] for name in base.__annotations__)
        return {name for name in {*dir(owner), *annotated} if not name.startswith("_")}

    assert public(Fit) - public(RunContext) == {"fit", "validate", "test", "predict"}
    assert {name for name in vars(Fit()) if not name.startswith("_")} <= public(RunContext)
    members = [member for name, member in vars(RunContext).items() if name in public(RunContext)]
    assert not [member for member in members if isinstance(member, property) or callable(member) if not member.__doc__]


def test_every_value_of_a_run_is_available_in_the_hooks_of_every_stage(tmp_path: Path) -> None:
    public = {name for name in {*dir(RunContext), *RunContext.__annotations__} if not name.startswith("_")}
    names = [name for name in public if not inspect.isfunction(vars(RunContext).get(name))]
    values: dict[str, Any] = {}
    states: list[str] = []

    def read(trainer: Any) -> None:
        values.update({name: getattr(trainer, name) for name in names})

    def note(trainer: Any) -> None:
        read(trainer)
        states.append(trainer.state)

    noting = calling("setup", note)
    trainer, module = fit(tmp_path, callbacks=[calling("on_train_batch_end", read), noting], max_steps=3), Tiny()
    assert trainer.state == "idle"
    trainer.fit(module, loader())
    assert values["global_step"] == values["batch_idx"] == trainer.global_step == 3
    assert values["state"] == "fitting"
    assert values["num_training_batches"] == 4
    assert values["strategy"] is trainer.strategy
    assert values["precision"] is trainer.strategy.precision
    trainer.validate(module, loader(2), verbose=False)
    trainer.test(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
    assert states == ["fitting", "validating", "testing", "predicting"]
    assert trainer.state == "finished"
