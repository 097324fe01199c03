"""What user code writes into gradients and weights takes effect, or is refused by name. Rows S-07 to S-09, L-01."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_nets import trained_in_plain_torch
from small_runs import (
    FEATURES,
    SHARD_EVERYTHING,
    STRATEGIES,
    TIGHT,
    Regression,
    about,
    assert_near,
    data,
    each,
    failing,
    global_batches,
    loader,
    quiet,
    seeded,
    train_by_hand,
    trained,
    weights,
)
from torch import Tensor, nn

from drivetrain import TrainModule
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8
NOTHING_GATHERED = "stage 3, nothing stays gathered"
ZERO: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    NOTHING_GATHERED: SHARD_EVERYTHING,
}
Build = Callable[[], Regression]


def with_hooks(**hooks: Any) -> Regression:
    """A regression whose methods of these names are these functions."""
    return type("WithHooks", (Regression,), hooks)()


def _train(build: Build, strategy: str, options: dict[str, Any]) -> torch.Tensor | str:
    """Return the trained weights, or the text of the error."""
    with failing() as error:
        return trained(build(), loader(SAMPLES, BATCH // 2), strategy=DeepSpeedStrategy(**ZERO[strategy]), **options)
    return f"{error['type']}: {error['text']}"


def results(*cases: tuple[Build, str], **options: Any) -> list[Any]:
    """Train each module under a strategy of `ZERO`; return rank 0's results."""
    return on_ranks(each, 2, _train, *((*case, options) for case in cases), timeout=240)[0]


def assert_trained(wanted: torch.Tensor, *cases: tuple[Build, str], **options: Any) -> None:
    for case, found in zip(cases, results(*cases, **options), strict=True):
        assert isinstance(found, torch.Tensor), f"{case}: {found}"
        torch.testing.assert_close(found, wanted, **TIGHT, msg=about(case))


@torch.no_grad()
def clamp(module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.2, 0.2)


def assign_clamped(module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def clamp_in_step(module: Any, batch: Any, batch_idx: int) -> Any:
    if batch_idx:
        clamp(module)
    return module.loss(batch)


def assign_in_step(module: Any, batch: Any, batch_idx: int) -> Any:
    if batch_idx:
        assign_clamped(module)
    return module.loss(batch)


CLAMPS = partial(with_hooks, on_train_batch_start=clamp)
ASSIGNS = partial(with_hooks, on_train_batch_start=assign_clamped)
CLAMPS_IN_STEP = partial(with_hooks, training_step=clamp_in_step)
ASSIGNS_IN_STEP = partial(with_hooks, training_step=assign_in_step)


def test_weights_that_a_step_writes_are_those_of_the_step() -> None:  # S-09
    wanted = trained_in_plain_torch(CLAMPS_IN_STEP(), SAMPLES)
    cases: Any = [(kind, f"stage {stage}") for kind in (CLAMPS_IN_STEP, ASSIGNS_IN_STEP) for stage in (1, 2)]
    assert_trained(wanted, *cases)


def test_weights_that_the_last_hook_writes_stay() -> None:  # S-09
    cases: Any = [(partial(with_hooks, on_train_epoch_end=clamp), f"stage {stage}") for stage in (1, 2)]
    assert all(float(found.abs().max()) < 0.2001 for found in results(*cases))


def write_nothing(module: Any, *_: Any) -> None:
    module.net[0].weight.data.mul_(1.0)


@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
def test_half_precision_trains_on_from_what_was_written(stage: str) -> None:  # S-09
    writes_nothing = partial(with_hooks, on_train_batch_end=write_nothing)
    kinds: Any = (Regression, writes_nothing, CLAMPS, ASSIGNS, CLAMPS_IN_STEP, ASSIGNS_IN_STEP)
    found = results(*((kind, stage) for kind in kinds), precision="bf16-mixed")
    for one, other in zip(found[::2], found[1::2], strict=True):  # master weights stay as exact as they were
        assert torch.equal(one, other)


def log_norm(module: Any, *_: Any) -> None:
    module.log("norm", module.net[0].weight.detach().norm())


@torch.no_grad()
def clear_row(module: Any, batch: Any, batch_idx: int) -> Any:
    module.net[0].weight[0] = 0.0
    return torch.enable_grad()(module.loss)(batch)


def halve_gradients(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


def test_a_hook_that_touches_partitioned_weights_is_refused() -> None:  # S-07, S-09
    hooks: Any = {"on_before_optimizer_step": clamp, "on_after_backward": log_norm, "on_train_epoch_end": log_norm}
    hooks["training_step"] = clear_row
    kinds = [CLAMPS, ASSIGNS, *(partial(with_hooks, **{name: hook}) for name, hook in hooks.items())]
    for text in results(*((kind, NOTHING_GATHERED) for kind in kinds), accumulate_grad_batches=2):
        assert "'net.0.weight' is partitioned" in text
        assert "gathered(" in text


def rebind_gradients(module: Any, *_: Any) -> None:
    for parameter in module.trainer.optimizers[0].param_groups[0]["params"]:
        parameter.grad = None


def test_a_hook_that_uses_gradients_is_refused() -> None:  # S-07, S-09
    hooks: Any = {"on_after_backward": halve_gradients, "on_before_optimizer_step": rebind_gradients}
    cases: Any = [
        (partial(with_hooks, **{name: hook}), strategy)
        for name, hook in hooks.items()
        for strategy in ("stage 1", "stage 2", NOTHING_GATHERED)
    ]
    for (kind, _), text in zip(cases, results(*cases), strict=True):
        assert text.startswith("ConfigurationError")
        assert f"{next(iter(kind.keywords))} used the gradient of 'net.0.weight'" in text


def train_and_return(build: Build, *names: str, **options: Any) -> list[Any]:
    """Train, by default without gathered parameters; return these attributes of the module, and its weights."""
    module, strategy = build(), DeepSpeedStrategy(**({} if "stage" in options else SHARD_EVERYTHING), **options)
    trained(module, loader(SAMPLES, BATCH // 2), strategy=strategy)
    return [*(getattr(module, name) for name in names), weights(module)]


class Reads(Regression):
    """Reads all parameters in a step, without gradients, and counts the bytes that they occupy then; and in a hook."""

    norm, most = 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parameters = list(self.parameters())
        with torch.no_grad():
            self.norm = float(sum(parameter.norm() for parameter in parameters))
        self.most = max(self.most, sum(parameter.untyped_storage().nbytes() for parameter in parameters))
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        self.elements = sum(parameter.numel() for parameter in self.parameters())
        self.sizes = tuple(weight.shape), weight.size(0), tuple(weight.size()), weight.dim(), len(weight)
        strategy: Any = self.trainer.strategy
        with strategy.gathered(weight, write=False):
            self.values = weight.detach().clone().flatten()


def test_partitioned_weights_have_shapes_in_hooks_and_values_where_gathered_and_in_steps() -> None:  # S-07
    run = partial(train_and_return, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    names = ("elements", "sizes", "values", "norm", "most")
    elements, sizes, values, norm, most, after = on_ranks(run, 2, Reads, *names)[0]
    assert sizes == ((8, FEATURES), 8, (8, FEATURES), 2, 8)
    assert elements == len(after)
    assert torch.equal(values, after[: len(values)])
    before_the_last_step = train_by_hand(Regression(), global_batches(SAMPLES, BATCH)[:-1])
    assert norm == pytest.approx(float(sum(one.detach().norm() for one in before_the_last_step.parameters())))
    assert most == 0  # a parameter that a step has read does not stay gathered


class Penalized(Regression):
    """Penalizes another parameter in each step, also after DeepSpeed has recorded the order of its gathers."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.before = before
        self.turn = 0

    def penalty(self) -> torch.Tensor:
        self.turn += 1
        return 0.5 * list(self.parameters())[self.turn % 4].square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.before:
            penalty = self.penalty()
            return self.loss(batch) + penalty
        return self.loss(batch) + self.penalty()

    def val_dataloader(self) -> Any:
        return loader(BATCH, BATCH // 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch) + list(self.parameters())[2].norm()


def test_a_penalty_over_partitioned_weights_has_the_value_and_gradient_of_the_whole() -> None:  # S-07
    wanted = trained_in_plain_torch(Penalized(), SAMPLES)
    cases: list[Any] = [
        (partial(Penalized, before), name) for name in ("stage 3", NOTHING_GATHERED) for before in (False, True)
    ]
    assert_trained(wanted, *cases, val_check_interval=2)


class Swapping(torch.optim.SGD):
    """Holds half of the weights in evaluation."""

    def eval(self) -> None:
        self.scale(0.5)

    def train(self) -> None:
        self.scale(2.0)

    def scale(self, factor: float) -> None:
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

    def val_dataloader(self) -> Any:
        return loader(SAMPLES, BATCH // 2)

    def on_train_end(self) -> None:
        self.value = float(self.trainer.callback_metrics["val"])


@pytest.mark.parametrize("strategy", ["stage 2", NOTHING_GATHERED])
def test_validation_sees_the_weights_that_an_optimizer_swapped_in(strategy: str) -> None:  # S-09
    run = partial(train_and_return, **ZERO[strategy], config={"zero_allow_untested_optimizer": True})
    value, found = on_ranks(run, 2, Swapped, "value")[0]
    module = train_by_hand(Swapped(), global_batches(SAMPLES, BATCH))
    torch.testing.assert_close(found, weights(module), **TIGHT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
        wanted = module.loss(next(iter(loader(SAMPLES, SAMPLES))))
    assert value == pytest.approx(float(wanted), abs=1e-5)


def clear_gradient(parameter: Any) -> None:
    parameter.grad.zero_()


class Marked(Regression):
    """Builds its layers late; the gradients of two weights become zero, and an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Regression().net
            self.net[0].weight.is_fixed = True
            self.net[0].weight.register_hook(torch.zeros_like)
            self.net[2].weight.register_post_accumulate_grad_hook(clear_gradient)

    def configure_optimizers(self) -> Any:
        assert self.net[0].weight.is_fixed
        return super().configure_optimizers()

    def on_train_end(self) -> None:
        assert self.net[0].weight.is_fixed


def test_hooks_and_attributes_of_parameters_of_configure_model_stay() -> None:  # S-08
    module = Marked()
    module.configure_model()
    wanted = trained_in_plain_torch(module, SAMPLES)
    assert_trained(wanted, *((Marked, strategy) for strategy in ZERO))


KEPT_WHOLE = "fsdp, kept whole"


class Student(TrainModule):
    """Distils a teacher that is updated in a "step", in a "hook", or "gathered" there, as ZeRO requires."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.student = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.where = where

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        found = self.student(x).float()
        return (found - target.float()).square().mean() + found.square().mean()

    @torch.no_grad()
    def update_teacher(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            teacher.lerp_(student.detach(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        if self.where == "step":
            self.update_teacher()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook":
            self.update_teacher()
        elif self.where == "gathered":
            import deepspeed

            weights = [*self.teacher.parameters(), *self.student.parameters()]
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
                self.update_teacher()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def updated_by_hand(where: str) -> dict[str, Tensor]:
    """Written by hand: programs of the oracle have no teacher."""
    model = Student(where)
    optimizer = model.configure_optimizers()
    for x in data(SAMPLES).tensors[0].split(BATCH):
        optimizer.zero_grad()
        loss = model.loss(x)
        if where == "step":
            model.update_teacher()
        loss.backward()
        optimizer.step()
        if where != "step":
            model.update_teacher()
    return model.state_dict()


def _distil(strategy: str, world: int, where: str, precision: str) -> dict[str, Tensor] | str:
    module = Student(where)
    chosen = FSDPStrategy(reshard_after_forward=False) if strategy == KEPT_WHOLE else STRATEGIES[strategy]()
    try:
        fit = quiet(strategy=chosen, devices=world, precision=precision)
        fit.fit(module, loader(SAMPLES, BATCH // world), loader(SAMPLES, BATCH))
    except ConfigurationError as error:
        return str(error)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


LOST = ("User code updated weights", "'teacher.0.weight'")
IN_A_STEP = (*LOST, "update the weights in on_train_batch_end")
IN_HALF_PRECISION = (*LOST, "the update changed half-precision copies")
PARTITIONED = ("'student.0.weight' is partitioned", "strategy.gathered(")  # S-07
FULL, HALF = "32-true", "bf16-mixed"
UPDATES: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    "single": {("step", FULL): (), ("hook", FULL): ()},
    "ddp": {("step", FULL): (), ("nowhere", HALF): ()},
    "fsdp": {("hook", FULL): (), ("nowhere", HALF): ()},
    KEPT_WHOLE: {("hook", FULL): (), ("nowhere", HALF): (), ("step", FULL): IN_A_STEP, ("step", HALF): IN_A_STEP},
    "zero 1": {("step", FULL): (), ("nowhere", HALF): (), ("hook", HALF): IN_HALF_PRECISION},
    "zero 2": {("hook", FULL): (), ("nowhere", HALF): (), ("step", HALF): IN_HALF_PRECISION},
    "zero 3": {
        ("gathered", FULL): (),
        ("nowhere", HALF): (),
        ("gathered", HALF): IN_HALF_PRECISION,
        ("hook", FULL): PARTITIONED,
    },
}
"""Where a strategy's teacher is updated, in which precision, and parts of the error if that would be lost."""


@pytest.mark.parametrize("strategy", UPDATES)
def test_a_teacher_that_is_updated_by_hand_is_exact_or_refused_by_name(strategy: str) -> None:  # L-01, S-07
    cases, world = UPDATES[strategy], 1 if strategy == "single" else 2
    for ranks in on_ranks(each, world, partial(_distil, strategy, world), *cases, process_group=None, timeout=120):
        for ((where, precision), parts), found in zip(cases.items(), ranks, strict=True):
            assert isinstance(found, str) == bool(parts), (where, precision, found)
            assert all(part in found for part in parts), found
            if precision == FULL and not parts:
                assert_near(found, updated_by_hand(where))
