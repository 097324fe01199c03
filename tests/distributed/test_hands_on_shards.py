"""What hooks, steps and optimizers read and write of sharded parameters means what it means for whole ones."""

from __future__ import annotations

from collections.abc import Callable
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


PENALTIES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "squares": lambda module, x: sum(one.square().sum() for one in module.parameters()),
    "norms": lambda module, x: sum(one.norm() for one in module.parameters()),
    "stacked means": lambda module, x: torch.stack([one.abs().mean() for one in module.parameters()]).mean(),
    "a weight used again": lambda module, x: nn.functional.linear(x, module.net[0].weight).square().mean(),
    "orthogonality": lambda module, x: (module.net[0].weight.T @ module.net[0].weight - torch.eye(4)).square().sum(),
    "a layer that is not called": lambda module, x: module.spare.weight.square().sum(),
}


class Penalized(Regression):
    """Adds a penalty to the loss. Its head is smaller than the number of ranks, and one of its layers is not called."""

    def __init__(self, penalty: str) -> None:
        super().__init__()
        self.spare = seeded(lambda: nn.Linear(4, 4))
        self.penalty = penalty

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.5 * PENALTIES[self.penalty](self, batch[0])


class Bare(Penalized):
    """Its loss is a penalty alone."""

    def loss(self, batch: Any) -> torch.Tensor:
        return sum(one.square().sum() for one in self.net.parameters())


class Kept(Penalized):
    """Keeps its parameters in a list from the beginning."""

    def __init__(self) -> None:
        super().__init__("squares")
        self.kept = [list(self.net.parameters())]

    def loss(self, batch: Any) -> torch.Tensor:
        return Regression.loss(self, batch) + 0.5 * sum(one.square().sum() for one in self.kept[0])


class Gathering(Penalized):
    """Gathers a weight by torch's own method, and uses it with its batch."""

    def loss(self, batch: Any) -> torch.Tensor:
        weight: Any = self.spare.weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return super().loss(batch) + (batch[0] @ weight).square().mean()


def _train(build: Callable[[], Regression], strategy: Any) -> torch.Tensor:
    return trained(build(), loader(32, 4), strategy=strategy)


class HookedLate(Regression):
    """Registers a gradient hook as the run starts."""

    def on_fit_start(self) -> None:
        self.mark()

    def mark(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient / 2)


USES: dict[str, Callable[[], Regression]] = {
    **{f"S-07 {name}": partial(Penalized, name) for name in PENALTIES},
    "S-07 a loss of a penalty alone": partial(Bare, "squares"),
    "S-07 parameters in a list": Kept,
    "S-07 gathered by torch": partial(Gathering, "squares"),
    "S-08 a hook of on_fit_start": HookedLate,
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
        if isinstance(reference, HookedLate):
            reference.mark()
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
        self.manual_backward(PENALTIES["squares"](self, batch[0]))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad.add_(torch.full(parameter.shape, 0.01))
        optimizer.step()


def test_gradients_of_two_backwards_are_edited() -> None:  # S-07, S-09: 1e-2 off
    build = partial(Manual, "orthogonality")
    cases = [(build, "ddp_find_unused_parameters_true"), (build, "fsdp")]
    for expected, found in on_ranks(each, 2, _train, *cases):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


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


def test_data_assigned_in_a_step_is_kept_within_units() -> None:  # S-09
    reference = train_by_hand(Teaching(), global_batches(32, 8))
    for found in on_ranks(_train, 2, Teaching, UNITS):
        torch.testing.assert_close(found, weights(reference), atol=1e-6, rtol=0)


class WritesRows(Regression):
    """Writes rows of a weight after each batch."""

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        weight: Any = self.net[0].weight
        weight[1] = 0.25
        weight[2:4] = 0.5 * weight[2:4]
        assert weight.max() >= 0.25


def test_rows_of_a_shard_are_written() -> None:  # S-09: 0.2 to 0.6 off
    for expected, found in on_ranks(each, 2, _train, (WritesRows, "ddp"), (WritesRows, ROOT_ONLY)):
        assert torch.equal(found, expected)


class HookAfterAccumulation(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


class LateHookAfterAccumulation(Regression):
    def on_fit_start(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


class AddedUp(Penalized):
    """Adds to a sum of penalties in place."""

    def loss(self, batch: Any) -> torch.Tensor:
        total = sum(one.square().sum() for one in self.net.parameters())
        total += super().loss(batch)
        return total


class EditsEarly(Regression):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class WritesAView(Regression):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.net[0].weight[1].zero_()


class WritesLate(Regression):
    """Writes a gathered weight in a step, from the third one on."""

    @torch.no_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 1:
            self.net[2].weight.mul_(0.5)
        with torch.enable_grad():
            return self.loss(batch)


def _refusal(build: Callable[[], Any], settings: dict[str, Any]) -> str:
    try:
        quiet(**settings).fit(build(), loader(32, 4))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing was raised"


LATE_HOOK = "net.0.weight has a hook of register_post_accumulate_grad_hook"


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        pytest.param(HookAfterAccumulation, {}, [LATE_HOOK], id="S-08 a hook after accumulation"),
        pytest.param(LateHookAfterAccumulation, {}, [LATE_HOOK], id="S-08 such a hook of on_fit_start"),
        pytest.param(partial(AddedUp, "squares"), {}, ["total = total + loss"], id="S-12 a sum in place"),
        pytest.param(Teaching, {}, ["'teacher.weight'", "on_train_batch_end"], id="S-09 data of the root unit"),
        pytest.param(
            EditsEarly,
            *({"accumulate_grad_batches": 2}, ["'net.0.weight'", "on_before_optimizer_step"]),
            id="S-09 gradients within a window",
        ),
        pytest.param(WritesAView, {"strategy": ROOT_ONLY}, ["'net.0.weight'"], id="S-09 a view"),
        pytest.param(WritesLate, {"strategy": ROOT_ONLY}, ["'net.2.weight'"], id="S-09 a later step"),
        pytest.param(
            partial(Penalized, "a weight used again"),
            *({"strategy": UNITS, "compile": {"backend": "eager"}}, ["parameter.full_tensor()"]),
            id="S-12 a compiled step",
        ),
    ],
)
def test_what_cannot_be_done_to_shards_is_refused_by_name(build: Any, settings: Any, words: list[str]) -> None:
    # S-08, S-09, S-12
    for text in on_ranks(_refusal, 2, build, {"strategy": "fsdp", **settings}):
        for one in words:
            assert one in text, text
