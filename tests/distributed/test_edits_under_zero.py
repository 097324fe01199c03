"""ZeRO: what a user's hook writes into gradients and weights takes effect, or is an error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import (
    FEATURES,
    SHARD_EVERYTHING,
    TIGHT,
    Regression,
    about,
    failing,
    global_batches,
    loader,
    quiet,
    refusal,
    train_by_hand,
    trained,
    weights,
)

from drivetrain import Callback
from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import DeepSpeedStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8
NOTHING_GATHERED = "stage 3, nothing stays gathered"
ZERO: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    NOTHING_GATHERED: SHARD_EVERYTHING,
    "stage 2, offloaded": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, offloaded": {"stage": 3, "offload_optimizer": "cpu"},
}
WHOLE = [name for name in ZERO if name != NOTHING_GATHERED]
"""Strategies under which hooks find whole weights."""


def _attempt(build: Callable[[], Any], strategy: dict[str, Any], options: dict[str, Any]) -> torch.Tensor | str:
    """Train on two ranks; return the trained weights, or the text of the error."""
    with failing() as error:
        return trained(build(), loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(**strategy), **options)
    return f"{error['type']}: {error['text']}"


def _attempts(cases: list[tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [_attempt(*case) for case in cases]


def _results(*cases: tuple[Callable[[], Any], str], **options: Any) -> list[tuple[str, Any]]:
    """Train each module under a strategy of `ZERO`; return rank 0's results, each with its name."""
    attempts = [(build, ZERO[strategy], options) for build, strategy in cases]
    found = on_ranks(_attempts, 2, attempts, timeout=240)[0]
    return [(f"{getattr(build, '__name__', '')}, {name}", one) for (build, name), one in zip(cases, found, strict=True)]


def _assert_same(found: Any, wanted: torch.Tensor, what: str) -> None:
    assert isinstance(found, torch.Tensor), f"{what}: {found}"
    torch.testing.assert_close(found, wanted, **TIGHT, msg=about(what))


def _by_hand(module: Any, window: int = 1, before_step: Any = None, after_step: Any = None, before: Any = None) -> Any:
    """Train on whole batches; the functions edit the module before and after the optimizer's step, and before the loss.

    Written by hand: programs of the oracle write once, and only the head.
    """
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(global_batches(SAMPLES, window * BATCH)):
        if before is not None:
            before(module, number)
        optimizer.zero_grad()
        module.loss(batch).backward()
        if before_step is not None:
            before_step(module)
        optimizer.step()
        if after_step is not None:
            after_step(module)
    return weights(module)


# Gradients


def _squash(module: Any) -> None:
    """Edit gradients in a way that is wrong for this rank's part of a sum over the ranks."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3).clamp_(-0.2, 0.2)


def _squash_and_clip(module: Any) -> None:
    _squash(module)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


class InPlace(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _squash(self)


class FromTheGroups(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = (parameter.grad * 3).clamp(-0.2, 0.2)


class AfterBackward(Regression):
    def on_after_backward(self) -> None:
        _squash(self)


class Manual(InPlace):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class WithCallback(Regression):
    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_before_optimizer_step=lambda trainer, module, optimizer: _squash(module))]


def test_gradients_that_a_hook_edits_are_those_of_the_step() -> None:  # S-09
    cases: list[Any] = [(InPlace, name) for name in ZERO]
    cases += [(edit, "stage 2") for edit in (FromTheGroups, AfterBackward, Manual, WithCallback)]
    cases += [(edit, NOTHING_GATHERED) for edit in (FromTheGroups, AfterBackward)]
    wanted = _by_hand(Regression(), before_step=_squash)
    for name, found in _results(*cases):
        _assert_same(found, wanted, name)
    clipped = _by_hand(Regression(), before_step=_squash_and_clip)
    for name, found in _results(*((InPlace, name) for name in ZERO), gradient_clip_val=0.1):
        _assert_same(found, clipped, f"clipped, {name}")


def test_gradients_of_a_window_are_edited_once_it_is_complete() -> None:  # S-09
    results = _results((InPlace, "stage 2"), (AfterBackward, "stage 2"), accumulate_grad_batches=2)
    (_, edited), (_, refused) = results
    _assert_same(edited, _by_hand(Regression(), window=2, before_step=_squash), "a window of two batches")
    assert "the gradient of 'net.0.weight'" in refused
    assert "on_before_optimizer_step" in refused


# Weights


@torch.no_grad()
def _clamp(module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.2, 0.2)


def _assign_clamped(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


class ClampsData(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class AssignsData(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _assign_clamped(self)


class ClampsInStep(Regression):
    """Clamps its weights at the beginning of the step, from the second step on."""

    edit = staticmethod(_clamp)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            self.edit(self)
        return super().training_step(batch, batch_idx)


class AssignsInStep(ClampsInStep):
    edit = staticmethod(_assign_clamped)


class ClampsAtTheEnd(Callback):
    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.clamp_(-0.1, 0.1)


def test_weights_that_a_hook_writes_are_those_of_the_next_step() -> None:  # S-09
    clamped_after = _by_hand(Regression(), after_step=_clamp)
    wanted = {ClampsData: clamped_after, AssignsData: _by_hand(Regression(), before=_clamp)}
    for edit, expected in wanted.items():
        for name, found in _results(*((edit, strategy) for strategy in WHOLE)):
            _assert_same(found, expected, name)
    for name, found in _results(*((ClampsData, strategy) for strategy in WHOLE), callbacks=[ClampsAtTheEnd()]):
        _assert_same(found, clamped_after.clamp(-0.1, 0.1), f"clamped at the end, {name}")


def test_weights_that_a_step_writes_are_those_of_its_optimizer_step() -> None:  # S-09
    wanted = _by_hand(Regression(), before=lambda module, number: _clamp(module) if number else None)
    for name, found in _results(*((kind, f"stage {at}") for kind in (ClampsInStep, AssignsInStep) for at in (1, 2))):
        _assert_same(found, wanted, name)


class ClampsAndSaves(ClampsData):
    """Keeps the weights of a checkpoint that is written after the edit."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        state = [_whole(value).flatten() for value in self.trainer.strategy.model_state().values()]
        self.saved = torch.cat(state)


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def _saved_and_trained(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    module = ClampsAndSaves()
    return trained(module, loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(stage=stage)), module.saved


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_weights_that_a_hook_wrote(stage: int) -> None:  # S-09
    assert torch.equal(*on_ranks(_saved_and_trained, 2, stage)[0])


class WritesNothing(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.data.mul_(1.0)


class ClampsAtTheStart(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _clamp(self)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Regression, WritesNothing, id="master weights stay as exact as they were"),
        pytest.param(ClampsAtTheStart, AssignsData, id="a hook assigns"),
        pytest.param(ClampsInStep, AssignsInStep, id="a step assigns"),
    ],
)
def test_half_precision_trains_on_from_what_was_written(one: Any, other: Any) -> None:  # S-09
    cases = [(kind, f"stage {stage}") for stage in (1, 2) for kind in (one, other)]
    found = [actual for _, actual in _results(*cases, precision="bf16-mixed")]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


# Values of parameters that stage 3 has partitioned


class WritesBeforeTheStep(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _clamp(self)


class ReadsAfterBackward(Regression):
    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.detach().norm())


class LogsANorm(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("norm", self.net[0].weight.norm())


def test_a_hook_that_touches_partitioned_weights_is_refused_by_name() -> None:  # S-07, S-09
    kinds = (ClampsData, AssignsData, WritesBeforeTheStep, ReadsAfterBackward, LogsANorm)
    found = _results(*((kind, NOTHING_GATHERED) for kind in kinds))
    for name, text in [*found, *_results((Regression, NOTHING_GATHERED), callbacks=[ClampsAtTheEnd()])]:
        assert isinstance(text, str), name
        assert "'net.0.weight' is partitioned" in text, name
        assert "gathered(" in text, name


class Reads(Regression):
    """Reads what a hook may ask of a parameter, and keeps the answers."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        self.elements = sum(parameter.numel() for parameter in self.parameters())
        self.sizes = tuple(weight.shape), weight.size(0), tuple(weight.size()), weight.dim(), len(weight)
        strategy: Any = self.trainer.strategy
        with strategy.gathered(weight, write=False):
            self.norm = float(weight.norm())


def _reading() -> Any:
    module = Reads()
    trained(module, loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(**SHARD_EVERYTHING))
    return module.elements, module.sizes, module.norm, float(module.net[0].weight.norm())


def test_hooks_find_the_shapes_of_partitioned_weights_and_gather_their_values() -> None:  # S-07
    elements, sizes, norm, wanted = on_ranks(_reading, 2)[0]
    assert sizes == ((8, FEATURES), 8, (8, FEATURES), 2, 8)
    assert elements == sum(parameter.numel() for parameter in Regression().parameters())
    assert norm == pytest.approx(wanted)


class Penalized(Regression):
    """Adds an L2 penalty of all weights, after the forward of the layers."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.5 * self.penalty()

    def penalty(self) -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()


class PenalizedBefore(Penalized):
    """The same before the forward."""

    def loss(self, batch: Any) -> torch.Tensor:
        penalty = self.penalty()
        return Regression.loss(self, batch) + 0.5 * penalty


class InTurn(Penalized):
    """Penalizes another parameter in each step, also after DeepSpeed has recorded the order of its gathers."""

    turn = -1

    def penalty(self) -> torch.Tensor:
        self.turn += 1
        return list(self.parameters())[self.turn % 4].square().sum()


class InTurnBefore(InTurn, PenalizedBefore):
    pass


class PenalizedAndValidated(PenalizedBefore):
    """Reads in validation a parameter that training does not read outside of its layer."""

    def penalty(self) -> torch.Tensor:
        return self.net[0].weight.square().sum()

    def val_dataloader(self) -> Any:
        return loader(BATCH, BATCH // 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch) + list(self.parameters())[2].norm()


def test_a_penalty_over_partitioned_weights_has_the_value_and_gradient_of_the_whole() -> None:  # S-07
    cases: list[Any] = [(Penalized, "stage 2"), (PenalizedBefore, "stage 3")]
    kinds = (Penalized, PenalizedBefore, InTurn, InTurnBefore, PenalizedAndValidated)
    cases += [(kind, NOTHING_GATHERED) for kind in kinds]
    for (kind, _), (name, found) in zip(cases, _results(*cases, val_check_interval=2), strict=True):
        _assert_same(found, weights(train_by_hand(kind(), global_batches(SAMPLES, BATCH))), name)


class Measured(Regression):
    """Reads all parameters without gradients, and counts the bytes that they occupy then."""

    norm, most = 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parameters = list(self.parameters())
        with torch.no_grad():
            self.norm = float(sum(parameter.norm() for parameter in parameters))
        self.most = max(self.most, sum(parameter.untyped_storage().nbytes() for parameter in parameters))
        return self.loss(batch)


def _measuring() -> Any:
    module = Measured()
    options = {**SHARD_EVERYTHING, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    trained(module, loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(**options))
    return module.norm, module.most


def test_a_parameter_that_a_step_reads_without_gradients_does_not_stay_gathered() -> None:  # S-07
    before_the_last_step = global_batches(SAMPLES, BATCH)[:-1]
    module = train_by_hand(Regression(), before_the_last_step)
    norm, most = on_ranks(_measuring, 2)[0]
    assert norm == pytest.approx(float(sum(parameter.detach().norm() for parameter in module.parameters())))
    assert most == 0


# Optimizers that write weights outside of their step


class Swapping(torch.optim.SGD):
    """Holds half of the weights in evaluation."""

    def eval(self) -> None:
        self._scale(0.5)

    def train(self) -> None:
        self._scale(2.0)

    def _scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(factor)


class Swapped(Regression):
    def configure_optimizers(self) -> Any:
        return Swapping(self.parameters(), lr=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_validation_start(self) -> None:
        self.optimizers().optimizer.eval()

    def on_validation_end(self) -> None:
        self.optimizers().optimizer.train()


def _validated(strategy: dict[str, Any]) -> tuple[float, torch.Tensor]:
    given = DeepSpeedStrategy(**strategy, config={"zero_allow_untested_optimizer": True})
    module, batches, trainer = Swapped(), loader(SAMPLES, BATCH // 2), quiet(strategy=given)
    trainer.fit(module, batches, batches)
    return float(trainer.callback_metrics["val"]), weights(module)


@pytest.mark.parametrize("strategy", ["stage 2", NOTHING_GATHERED])
def test_validation_sees_the_weights_that_an_optimizer_swapped_in(strategy: str) -> None:  # S-09
    value, found = on_ranks(_validated, 2, ZERO[strategy])[0]
    module = train_by_hand(Swapped(), global_batches(SAMPLES, BATCH))
    torch.testing.assert_close(found, weights(module), **TIGHT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
        wanted = module.loss(next(iter(loader(SAMPLES, SAMPLES))))
    assert value == pytest.approx(float(wanted), abs=1e-5)


# What is hung on a parameter, and errors of the user's own


def _clear(parameter: Any) -> None:
    parameter.grad.zero_()


class Marked(Regression):
    """Builds its layers late; the gradient of the first one is zero, and an attribute says so."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Regression().net
            weight = self.net[0].weight
            weight.is_fixed = True
            if self.hook == "register_hook":
                weight.register_hook(torch.zeros_like)
            else:
                weight.register_post_accumulate_grad_hook(_clear)

    def configure_optimizers(self) -> Any:
        assert self.net[0].weight.is_fixed
        return super().configure_optimizers()

    def on_train_end(self) -> None:
        assert self.net[0].weight.is_fixed


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_and_attributes_of_parameters_of_configure_model_stay(hook: str) -> None:  # S-08
    module = Marked(hook)
    module.configure_model()
    expected = weights(train_by_hand(module, global_batches(SAMPLES, BATCH)))
    for name, found in _results(*((partial(Marked, hook), strategy) for strategy in ZERO)):
        _assert_same(found, expected, name)


class Mistaken(Regression):
    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) @ torch.ones(3, 3)).mean()


def _mistaken(strategy: dict[str, Any]) -> str:
    return refusal(Mistaken(), loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(**strategy))


@pytest.mark.parametrize("strategy", ["stage 2", NOTHING_GATHERED])
def test_a_mistake_in_training_step_is_raised_as_it_is(strategy: str) -> None:  # S-12
    text = on_ranks(_mistaken, 2, ZERO[strategy])[0]
    assert text.startswith("RuntimeError")
    assert "shapes cannot be multiplied" in text
