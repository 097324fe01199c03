"""What hooks, steps and optimizers read and write of sharded parameters means what it means for whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import Regression, about, each, global_batches, loader, quiet, seeded, train_by_hand, trained, weights
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain_strategies import FSDPStrategy
from oracle.check import check
from oracle.program import Log, Net, Program, Turn, Validation, Write
from worlds import on_ranks

SHARDED = ["fsdp", "fsdp_grad_op"]
FORWARDS = [
    Log(hook, "forward", on_step=False, on_epoch=True) for hook in ("on_train_epoch_end", "on_validation_epoch_end")
]
UNITS = FSDPStrategy(wrap=[nn.Linear])
ROOT_ONLY = FSDPStrategy(wrap=[nn.Tanh])


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(Program(net=Net(hooked=True), accumulate=2), id="S-08 a hook and an attribute"),
        pytest.param(Program(net=Net(hooked=True), configure_model=True), id="S-08 those of configure_model"),
        *[
            pytest.param(Program(writes=Write(what, at=1)), id=f"S-09 {what}")
            for what in ("weights", "data", "assigned")
        ],
        pytest.param(
            Program(validation=Validation(), epochs=2, logs=(*FORWARDS, Log("on_train_batch_end", "forward"))),
            id="S-18 forwards in hooks",
        ),
        *[
            pytest.param(Program(manual=(Turn(),), writes=Write("gradients", hook)), id=f"S-09 gradients in {hook}")
            for hook in ("on_after_backward", "on_before_optimizer_step")
        ],
    ],
)
def test_what_is_done_to_shards_equals_the_plain_loop(strategy: str, program: Program) -> None:  # S-08, S-09, S-18
    assert not check(replace(program, strategy=strategy, ranks=2)), "the engine refused the program"


class Reading(Regression):
    """Reads norms of weights and gradients in steps and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weight = self.net[0].weight
        self.log("in step", float(weight.detach().norm()), on_step=False, on_epoch=True)
        self.found["in step"] = weight.detach().norm().item()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad
        assert gradient is not None
        self.found["gradient"] = float(gradient.norm())
        self.found["is larger"] = float(bool(gradient.norm() > 0.75 * float(gradient.norm())))

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.log("in hook", self.net[0].weight.detach().norm().item(), on_step=True, on_epoch=False)
        self.found["of a layer"] = float(self.net[0](torch.ones(2, 4)).mean())  # with gradients, which are not used
        self.found["state"] = sum(
            float(value["momentum_buffer"].norm()) for value in self.trainer.optimizers[0].state.values()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _read(strategy: str) -> dict[str, float]:
    module, trainer = Reading(), quiet(strategy=strategy, max_steps=2)
    trainer.fit(module, loader(32, 4))
    logged = {name: float(trainer.callback_metrics[name]) for name in ("in step", "in hook")}
    return {**module.found, **{f"logged {name}": value for name, value in logged.items()}}


def test_a_part_is_never_read_as_the_whole() -> None:  # S-07
    for expected, *sharded in on_ranks(each, 2, _read, ("ddp",), *[(strategy,) for strategy in SHARDED]):
        for found in sharded:
            assert found == pytest.approx(expected, rel=1e-5)


class Odd(Regression):
    """Has parameters that are not contiguous or have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight = nn.Parameter(self.net[0].weight.detach().t().contiguous().t())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.empty.sum()


def squares(parameters: Iterable[torch.Tensor]) -> Any:
    return sum(one.square().sum() for one in parameters)


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


PENALTIES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "squares": lambda module, x: squares(module.parameters()),
    "squares of a list": lambda module, x: squares(module.kept),
    "norms": lambda module, x: sum(one.norm() for one in module.parameters()),
    "stacked means": lambda module, x: torch.stack([one.abs().mean() for one in module.parameters()]).mean(),
    "a weight used again": lambda module, x: nn.functional.linear(x, module.net[0].weight).square().mean(),
    "orthogonality": lambda module, x: (module.net[0].weight.T @ module.net[0].weight - torch.eye(4)).square().sum(),
    "a layer that is not called": lambda module, x: module.spare.weight.square().sum(),
    "a weight gathered by torch": lambda module, x: (x @ whole(module.spare.weight)).square().mean(),
}


class Penalized(Regression):
    """The loss is a penalty, and by default an error too. The head is smaller than the number of ranks."""

    def __init__(self, penalty: str, alone: bool = False) -> None:
        super().__init__()
        self.spare = seeded(lambda: nn.Linear(4, 4))  # is never called
        self.kept = list(self.net.parameters())
        self.penalty, self.alone = penalty, alone

    def loss(self, batch: Any) -> torch.Tensor:
        penalty = 0.5 * PENALTIES[self.penalty](self, batch[0])
        return penalty if self.alone else super().loss(batch) + penalty


def with_hooks(kind: type[Regression] = Regression, **hooks: Any) -> Regression:
    """A module of this kind whose methods of these names are these functions."""
    return type("WithHooks", (kind,), hooks)()


def halve_gradients(module: Any) -> None:
    module.net[0].weight.register_hook(lambda gradient: gradient / 2)


USES: dict[str, Callable[[], Regression]] = {
    **{f"S-07 {name}": partial(Penalized, name) for name in PENALTIES},
    "S-07 a loss of a penalty alone": partial(Penalized, "squares", alone=True),
    "S-08 a hook of on_fit_start": partial(with_hooks, on_fit_start=halve_gradients),
    "S-12 parameters that are not contiguous or empty": Odd,
}


def _use(use: str, wraps: bool, window: int) -> torch.Tensor:
    module = USES[use]()
    stride = module.net[0].weight.stride()
    strategy = FSDPStrategy(wrap=[nn.Linear] if wraps else None)
    found = trained(module, loader(32, 4 // window), strategy=strategy, accumulate_grad_batches=window)
    assert module.net[0].weight.stride() == stride
    return found


@pytest.mark.parametrize(("wraps", "window"), [(False, 1), (True, 2)])
def test_steps_that_use_shards_equal_one_process(wraps: bool, window: int) -> None:  # S-07, S-08, S-12
    ranks = on_ranks(each, 2, _use, *[(use, wraps, window) for use in USES])
    for number, (use, build) in enumerate(USES.items()):
        reference = build()
        reference.on_fit_start()
        train_by_hand(reference, global_batches(32, 8 // window), window)
        for found in ranks:
            torch.testing.assert_close(found[number], weights(reference), atol=1e-6, rtol=0, msg=about(use))


class Manual(Penalized):
    """Manual optimization with a second backward, after which the step edits the gradients."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(squares(self.parameters()))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad.add_(torch.full(parameter.shape, 0.01))
        optimizer.step()


class Teaching(Regression):
    """Moves a teacher within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = seeded(lambda: nn.Linear(4, 8)).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch) + (self.net[0](batch[0]) - self.teacher(batch[0])).square().mean()
        for mine, its in zip(self.net[0].parameters(), self.teacher.parameters(), strict=True):
            its.data = 0.9 * its.data + 0.1 * mine.data + 0.01
        return loss


@torch.no_grad()
def write_rows(module: Any, *_: Any) -> None:
    weight = module.net[0].weight
    weight[1] = 0.25
    weight[2:4] = 0.5 * weight[2:4]
    assert weight.max() >= 0.25


def _train(build: Callable[[], Regression], strategy: Any) -> torch.Tensor:
    return trained(build(), loader(32, 4), strategy=strategy)


@pytest.mark.parametrize(
    ("build", "ddp", "fsdp"),
    [
        pytest.param(
            *(partial(Manual, "orthogonality"), "ddp_find_unused_parameters_true", "fsdp"),
            id="gradients of two backwards",
        ),
        pytest.param(Teaching, "ddp", UNITS, id="data assigned in a step, within units"),
        pytest.param(partial(with_hooks, on_train_batch_end=write_rows), "ddp", ROOT_ONLY, id="rows of a shard"),
    ],
)
def test_what_is_written_takes_effect_as_under_ddp(build: Any, ddp: str, fsdp: Any) -> None:  # S-07, S-09
    for expected, found in on_ranks(each, 2, _train, (build, ddp), (build, fsdp)):
        torch.testing.assert_close(found, expected, atol=0 if fsdp is ROOT_ONLY else 1e-6, rtol=0)


class Halving(Regression):
    """Validates with half of the weights, and trains on from the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    @torch.no_grad()
    def on_validation_start(self) -> None:
        self.kept = [parameter.clone() for parameter in self.parameters()]
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.copy_(0.5 * kept)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    @torch.no_grad()
    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.copy_(kept)


def _validate_swapped(strategy: Any) -> tuple[torch.Tensor, list[float]]:
    module = Halving()
    found = trained(module, loader(32, 4), loader(32, 4), strategy=strategy, max_epochs=2)
    return found, module.validated


def test_validation_sees_the_weights_that_a_hook_swapped_in() -> None:  # S-09
    module, validated = Halving(), []
    for _ in range(2):
        train_by_hand(module, global_batches(32, 8))
        halved = Halving()
        halved.load_state_dict({name: 0.5 * value for name, value in module.state_dict().items()})
        validated.append(float(halved.loss(global_batches(32, 32)[0]).detach()))
    for cases in on_ranks(each, 2, _validate_swapped, ("fsdp",), (UNITS,)):
        for found, values in cases:
            torch.testing.assert_close(found, weights(module), atol=1e-6, rtol=1e-5)
            assert values == pytest.approx(validated, rel=1e-5)


def hook_after_accumulation(module: Any) -> None:
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


class HookedAfterAccumulation(Regression):
    def __init__(self) -> None:
        super().__init__()
        hook_after_accumulation(self)


def add_in_place(module: Any, batch: Any) -> torch.Tensor:
    total = squares(module.net.parameters())
    total += Regression.loss(module, batch)
    return total


def edit_gradients(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@torch.no_grad()
def write_a_view(module: Any, *_: Any) -> None:
    module.net[0].weight[1].zero_()


def write_late(module: Any, batch: Any, batch_idx: int) -> Any:
    if batch_idx > 1:
        with torch.no_grad():
            module.net[2].weight.mul_(0.5)
    return module.loss(batch)


def use_again(module: Any, batch: Any) -> torch.Tensor:
    return Regression.loss(module, batch) + PENALTIES["a weight used again"](module, batch[0])


def _refusal(kind: type[Regression], hooks: dict[str, Any], settings: dict[str, Any]) -> str:
    try:
        quiet(**{"strategy": "fsdp", **settings}).fit(with_hooks(kind, **hooks), loader(32, 4))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing was raised"


LATE_HOOK = ["net.0.weight has a hook of register_post_accumulate_grad_hook"]
WINDOW = {"accumulate_grad_batches": 2}
COMPILED = {"strategy": UNITS, "compile": {"backend": "eager"}}
OF_ROOT = {"strategy": ROOT_ONLY}
REFUSED: dict[str, tuple[type[Regression], dict[str, Any], dict[str, Any], list[str]]] = {
    "S-08 a hook after accumulation": (HookedAfterAccumulation, {}, {}, LATE_HOOK),
    "S-08 such a hook of on_fit_start": (Regression, {"on_fit_start": hook_after_accumulation}, {}, LATE_HOOK),
    "S-09 data of the root unit": (Teaching, {}, {}, ["'teacher.weight'", "on_train_batch_end"]),
    "S-09 gradients of a window": (
        *(Regression, {"on_after_backward": edit_gradients}, WINDOW),
        ["'net.0.weight'", "on_before_optimizer_step"],
    ),
    "S-09 a view": (Regression, {"on_train_batch_end": write_a_view}, OF_ROOT, ["'net.0.weight'"]),
    "S-09 a later step": (Regression, {"training_step": write_late}, OF_ROOT, ["'net.2.weight'"]),
    "S-12 a sum in place": (Regression, {"loss": add_in_place}, {}, ["total = total + loss"]),
    "S-12 a compiled step": (Regression, {"loss": use_again}, COMPILED, ["parameter.full_tensor()"]),
}


@pytest.mark.parametrize(("kind", "hooks", "settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_to_shards_is_refused_by_name(kind: Any, hooks: Any, settings: Any, words: Any) -> None:
    # S-08, S-09, S-12
    for text in on_ranks(_refusal, 2, kind, hooks, settings):
        assert all(word in text for word in words), text
