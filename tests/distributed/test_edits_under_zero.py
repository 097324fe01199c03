"""ZeRO: what a user's hook writes into gradients and weights takes effect, or is an error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import FEATURES, TIGHT, Regression, about, global_batches, loader, quiet, weights
from torch import nn

from drivetrain import Callback
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DeepSpeedStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8

NOTHING_GATHERED = "stage 3, nothing stays gathered"
SPREAD: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}

STRATEGIES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    NOTHING_GATHERED: SPREAD,
    "stage 2, offloaded": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, offloaded": {"stage": 3, "offload_optimizer": "cpu"},
}


def _by_hand(
    module: Regression,
    gradients: Callable[[Any], None] | None = None,
    edited: Callable[[Any], None] | None = None,
    starts: Callable[[Any], None] | None = None,
    batches: Any = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """Train on whole batches in a loop that edits gradients before each step, and weights around it."""
    optimizer = module.configure_optimizers()
    for batch in batches or loader(SAMPLES, BATCH):
        if starts is not None:
            starts(module)
        optimizer.zero_grad()
        module.loss(batch).backward()
        if gradients is not None:
            gradients(module.parameters())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        if edited is not None:
            edited(module)
    return weights(module)


def _attempt(module: Any, strategy: dict[str, Any], options: dict[str, Any]) -> torch.Tensor | str:
    """Train on two ranks; return the trained weights, or the text of the error."""
    try:
        quiet(strategy=DeepSpeedStrategy(**strategy), **options).fit(module, loader(SAMPLES, BATCH // 2))
    except ConfigurationError as error:
        return str(error)
    return weights(module)


def _attempts(cases: list[tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [_attempt(build(), strategy, options) for build, strategy, options in cases]


def _assert_same(found: Any, wanted: torch.Tensor, what: str) -> None:
    assert isinstance(found, torch.Tensor), f"{what}: {found}"
    torch.testing.assert_close(found, wanted, **TIGHT, msg=about(what))


# Gradients


def _squash(parameters: Any) -> None:
    """Edit gradients in a way that is wrong for this rank's part of a sum over the ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(3).clamp_(-0.2, 0.2)


class InPlace(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _squash(self.parameters())


class Rebound(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad = (parameter.grad * 3).clamp(-0.2, 0.2)


class FromTheGroups(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            _squash(group["params"])


class AfterBackward(Regression):
    def on_after_backward(self) -> None:
        _squash(self.parameters())


class ByHand(Regression):
    """Trains with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _squash(self.parameters())


class Squashing(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        _squash(module.parameters())


class WithCallback(Regression):
    def configure_callbacks(self) -> Any:
        return [Squashing()]


EDITS_OF_GRADIENTS: tuple[type[Regression], ...] = (
    InPlace,
    Rebound,
    FromTheGroups,
    AfterBackward,
    ByHand,
    WithCallback,
)


def test_gradients_that_a_hook_edits_are_those_of_the_step() -> None:  # S-09
    cases = [(edit, "stage 2") for edit in EDITS_OF_GRADIENTS]
    cases += [(edit, NOTHING_GATHERED) for edit in (Rebound, FromTheGroups, AfterBackward)]
    cases += [(InPlace, strategy) for strategy in STRATEGIES]
    attempts: list[Any] = [(edit, STRATEGIES[strategy], {}) for edit, strategy in cases]
    attempts += [(InPlace, STRATEGIES[strategy], {"gradient_clip_val": 0.1}) for strategy in STRATEGIES]
    found = on_ranks(_attempts, 2, attempts, timeout=240)[0]
    wanted, clipped = _by_hand(Regression(), _squash), _by_hand(Regression(), _squash, max_norm=0.1)
    for (edit, strategy), one in zip(cases, found, strict=False):
        _assert_same(one, wanted, f"{edit.__name__}, {strategy}")
    for strategy, one in zip(STRATEGIES, found[len(cases) :], strict=True):
        _assert_same(one, clipped, f"clipped, {strategy}")


def test_gradients_of_a_window_are_edited_once_it_is_complete() -> None:  # S-09
    settings = {"accumulate_grad_batches": 2}
    attempts = [(edit, STRATEGIES["stage 2"], settings) for edit in (InPlace, AfterBackward)]
    edited, refused = on_ranks(_attempts, 2, attempts)[0]
    batches = global_batches(SAMPLES, 2 * BATCH)
    _assert_same(edited, _by_hand(Regression(), _squash, batches=batches), "a window of two batches")
    assert "the gradient of 'net.0.weight'" in refused
    assert "on_before_optimizer_step" in refused


# Weights


class ClampsData(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class AssignsData(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class ClampsInStep(Regression):
    """Clamps its weights at the beginning of the step, from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            _clamp(self)
        return super().training_step(batch, batch_idx)


class AssignsInStep(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            for parameter in self.parameters():
                parameter.data = parameter.data.clamp(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class WritesBeforeTheStep(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _clamp(self)


class ReadsAfterBackward(Regression):
    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.detach().norm())


class ClampsAtTheEnd(Callback):
    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.clamp_(-0.1, 0.1)


class ClampsAndSaves(ClampsData):
    """Gives the weights of a checkpoint that is written after the edit to the module that is compared."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        state = {name: _whole(value) for name, value in self.trainer.strategy.model_state().items()}
        self.saved = torch.cat([value.flatten() for value in state.values()])


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


@torch.no_grad()
def _clamp(module: Any, limit: float = 0.2) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-limit, limit)


def test_weights_that_a_hook_writes_are_those_of_the_next_step() -> None:  # S-09
    held = [name for name in STRATEGIES if name != NOTHING_GATHERED]
    cases = [(edit, strategy) for edit in (ClampsData, AssignsData) for strategy in held]
    attempts: list[Any] = [(edit, STRATEGIES[strategy], {}) for edit, strategy in cases]
    last = {"callbacks": [ClampsAtTheEnd()]}
    attempts += [(ClampsData, STRATEGIES[strategy], last) for strategy in held]
    found = on_ranks(_attempts, 2, attempts, timeout=240)[0]
    wanted = {ClampsData: _by_hand(Regression(), edited=_clamp), AssignsData: _by_hand(Regression(), starts=_clamp)}
    for (edit, strategy), one in zip(cases, found, strict=False):
        _assert_same(one, wanted[edit], f"{edit.__name__}, {strategy}")
    for strategy, one in zip(held, found[len(cases) :], strict=True):
        _assert_same(one, wanted[ClampsData].clamp(-0.1, 0.1), f"clamped at the end, {strategy}")


def test_weights_that_a_step_writes_are_those_of_its_optimizer_step() -> None:  # S-09: 0.2 to 0.5 off
    stages = ["stage 1", "stage 2"]
    attempts: list[Any] = [
        (kind, {"stage": int(stage[-1])}, {}) for kind in (ClampsInStep, AssignsInStep) for stage in stages
    ]
    module = Regression()
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(global_batches(SAMPLES, BATCH)):
        if number:
            _clamp(module)
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    for attempt, found in zip(attempts, on_ranks(_attempts, 2, attempts)[0], strict=True):
        _assert_same(found, weights(module), str(attempt))


def _saved_and_trained(strategy: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    module = ClampsAndSaves()
    return _attempt(module, strategy, {}), module.saved  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", ["stage 2", "stage 3"])
def test_a_checkpoint_holds_weights_that_a_hook_wrote(strategy: str) -> None:  # S-09
    trained, saved = on_ranks(_saved_and_trained, 2, STRATEGIES[strategy])[0]
    assert torch.equal(trained, saved)


def test_half_precision_keeps_master_weights_that_a_hook_did_not_change() -> None:  # S-09
    """A hook that writes nothing leaves the master weights as exact as they were."""
    settings = {"precision": "bf16-mixed"}
    attempts = [(kind, STRATEGIES["stage 2"], settings) for kind in (Regression, WritesNothing)]
    plain, watched = on_ranks(_attempts, 2, attempts)[0]
    assert torch.equal(plain, watched)


class ClampsAtTheStart(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _clamp(self)


def test_half_precision_trains_on_from_weights_that_were_assigned() -> None:  # S-09: 0.1 off at stage 1
    settings = {"precision": "bf16-mixed"}
    pairs = [(ClampsAtTheStart, AssignsData), (ClampsInStep, AssignsInStep)]
    attempts: list[Any] = [
        (kind, {"stage": stage}, settings)
        for stage in (1, 2)
        for in_place, assigned in pairs
        for kind in (in_place, assigned)
    ]
    found = on_ranks(_attempts, 2, attempts)[0]
    for in_place, assigned in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(in_place, assigned)


class WritesNothing(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.data.mul_(1.0)


# Values of parameters that stage 3 has partitioned


def test_a_hook_that_writes_partitioned_weights_is_refused_by_name() -> None:  # S-07, S-09
    attempts: list[Any] = [(edit, SPREAD, {}) for edit in (ClampsData, AssignsData)]
    attempts.append((Regression, SPREAD, {"callbacks": [ClampsAtTheEnd()]}))
    attempts += [(kind, SPREAD, {}) for kind in (WritesBeforeTheStep, ReadsAfterBackward)]
    for found in on_ranks(_attempts, 2, attempts)[0]:
        assert isinstance(found, str)
        assert "'net.0.weight' is partitioned" in found
        assert "gathered(" in found


class Reads(Regression):
    """Reads what a hook may ask of a parameter, and keeps the answers."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        self.shape, self.elements = weight.shape, sum(parameter.numel() for parameter in self.parameters())
        self.size = weight.size(0), weight.size(), weight.dim(), len(weight)
        strategy: Any = self.trainer.strategy
        with strategy.gathered(weight, write=False):
            self.norm = float(weight.norm())


class Norms(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("norm", self.net[0].weight.norm())


def _reading() -> Any:
    module = Reads()
    quiet(strategy=DeepSpeedStrategy(**SPREAD)).fit(module, loader(SAMPLES, BATCH // 2))
    return module.shape, module.elements, module.size, module.norm, float(module.net[0].weight.norm())


def test_hooks_find_the_shapes_of_partitioned_weights_and_gather_their_values() -> None:  # S-07
    shape, elements, size, norm, wanted = on_ranks(_reading, 2)[0]
    assert tuple(shape) == (8, FEATURES)
    assert size == (8, torch.Size((8, FEATURES)), 2, 8)
    assert elements == sum(parameter.numel() for parameter in Regression().parameters())
    assert norm == pytest.approx(wanted)


class Penalised(Regression):
    """Adds an L2 penalty, before or after the forward of the layers."""

    before = False

    def loss(self, batch: Any) -> torch.Tensor:
        penalty = self.penalty() if self.before else None
        loss = super().loss(batch)
        return loss + 0.5 * (self.penalty() if penalty is None else penalty)

    def penalty(self) -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()


class PenalisedBefore(Penalised):
    before = True


class PenalisedInTurn(Penalised):
    """Penalizes another parameter in each step, also after DeepSpeed has recorded the order of its gathers."""

    turn = -1

    def penalty(self) -> torch.Tensor:
        self.turn += 1
        return list(self.parameters())[self.turn % 4].square().sum()


class PenalisedInTurnBefore(PenalisedInTurn):
    before = True


class PenalisedAndValidated(PenalisedBefore):
    """Reads in validation a parameter that training does not read outside of its layer."""

    def penalty(self) -> torch.Tensor:
        return self.net[0].weight.square().sum()

    def val_dataloader(self) -> Any:
        return loader(BATCH, BATCH // 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch) + list(self.parameters())[2].norm()


def test_a_penalty_over_partitioned_weights_has_the_value_and_gradient_of_the_whole() -> None:  # S-07
    kinds = (Penalised, PenalisedBefore)
    cases = [(kind, strategy) for kind in kinds for strategy in ("stage 2", "stage 3", NOTHING_GATHERED)]
    cases += [(kind, NOTHING_GATHERED) for kind in (PenalisedInTurn, PenalisedInTurnBefore, PenalisedAndValidated)]
    attempts: list[Any] = [(kind, STRATEGIES[strategy], {"val_check_interval": 2}) for kind, strategy in cases]
    attempts.append((Norms, SPREAD, {}))
    *found, refused = on_ranks(_attempts, 2, attempts, timeout=120)[0]
    for (kind, strategy), one in zip(cases, found, strict=True):
        _assert_same(one, _by_hand(kind()), f"{kind.__name__}, {strategy}")
    assert "'net.0.weight' is partitioned" in refused


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
    strategy = DeepSpeedStrategy(**SPREAD, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    quiet(strategy=strategy).fit(module, loader(SAMPLES, BATCH // 2))
    return module.norm, module.most


def test_a_parameter_that_a_step_reads_without_gradients_does_not_stay_gathered() -> None:  # S-07
    module = Regression()
    _by_hand(module, batches=list(loader(SAMPLES, BATCH))[:-1])  # the last norm is read before the last step
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
    config = {"zero_allow_untested_optimizer": True}
    trainer = quiet(strategy=DeepSpeedStrategy(**strategy, config=config))
    module = Swapped()
    trainer.fit(module, loader(SAMPLES, BATCH // 2), loader(SAMPLES, BATCH // 2))
    return float(trainer.callback_metrics["val"]), weights(module)


@pytest.mark.parametrize("strategy", ["stage 2", "stage 3", NOTHING_GATHERED])
def test_validation_sees_the_weights_that_the_eval_of_an_optimizer_wrote(strategy: str) -> None:  # S-09
    value, trained = on_ranks(_validated, 2, STRATEGIES[strategy])[0]
    module = Swapped()
    torch.testing.assert_close(trained, _by_hand(module), **TIGHT)
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
    cases: list[Any] = [(partial(Marked, hook), strategy, {}) for strategy in STRATEGIES.values()]
    wanted = Marked(hook)
    wanted.configure_model()
    expected = _by_hand(wanted)
    for strategy, found in zip(STRATEGIES, on_ranks(_attempts, 2, cases, timeout=120)[0], strict=True):
        _assert_same(found, expected, f"{hook}, {strategy}")


class Mistaken(Regression):
    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) @ torch.ones(3, 3)).mean()


def _raised(strategy: dict[str, Any]) -> tuple[str, str]:
    try:
        quiet(strategy=DeepSpeedStrategy(**strategy)).fit(Mistaken(), loader(SAMPLES, BATCH // 2))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("strategy", ["stage 2", "stage 3", NOTHING_GATHERED])
def test_a_mistake_in_training_step_is_raised_as_it_is(strategy: str) -> None:  # S-12
    kind, text = on_ranks(_raised, 2, STRATEGIES[strategy])[0]
    assert kind == "RuntimeError"
    assert "shapes cannot be multiplied" in text
