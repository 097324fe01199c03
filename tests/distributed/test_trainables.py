"""What trains may change within a run, under every strategy: I-03."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from phased_training import Phased, Turns, by_hand, state, train
from small_runs import failing
from torch import nn

from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks

NEAR = {"atol": 1e-6, "rtol": 1e-5}
"""How near to the reference float32 comes (I-03)."""

PROGRAMS: dict[str, tuple[Turns, dict[str, Any]]] = {
    "unfrozen at an epoch's start": ({("on_train_epoch_start", 3): "+body"}, {}),
    "frozen at an epoch's start": ({("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}),
    "there and back": ({("on_train_epoch_start", 3): "-neck +body", ("on_train_epoch_start", 6): "+neck -body"}, {}),
    "before a step": ({("on_before_optimizer_step", 2): "+body", ("on_before_optimizer_step", 5): "-neck"}, {}),
    "at a batch's start": ({("on_train_batch_start", 4): "+body -head"}, {}),
    "before the gradients go": ({("on_before_zero_grad", 4): "+body", ("on_before_zero_grad", 7): "-body"}, {}),
    "at a batch's end": ({("on_train_batch_end", 2): "+body", ("on_train_batch_end", 4): "-neck"}, {}),
    "after validation": ({("on_validation_epoch_end", 3): "+body"}, {}),
    "as the run begins": ({("on_train_start", 0): "+body -neck", ("on_train_epoch_end", 3): "+neck"}, {}),
    "nothing trains at first": (
        {("on_train_start", 0): "+head", ("on_train_epoch_start", 3): "+body +neck"},
        {"frozen": "body neck head"},
    ),
    "a group is added": ({("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}),
    "two groups, in two hooks": (
        {("on_train_batch_end", 2): "+body body", ("on_before_optimizer_step", 5): "+neck neck"},
        {"held": "head", "frozen": "body neck"},
    ),
}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


def reference(name: str, **options: Any) -> dict[str, torch.Tensor]:
    turns, given = PROGRAMS[name]
    return by_hand(Phased(turns, **{**given, **options}))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max())
        assert torch.allclose(found[name], value, **NEAR), f"{what}: {name} is {difference:.2e} off"


@contextmanager
def told(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the engine says."""
    lines: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Listening(level), logging.getLogger("drivetrain")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# One device


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_gives_the_numbers_of_the_loop_by_hand(name: str) -> None:  # I-03
    turns, given = PROGRAMS[name]
    module = Phased(turns, **given)
    train(module, "single_device", 1)
    assert_near(state(module), reference(name), name)


def test_one_device_lets_a_step_itself_freeze() -> None:  # I-03: single device alone
    turns: Turns = {("training_step", 2): "+body", ("on_after_backward", 5): "-neck"}
    module = Phased(turns)
    train(module, "single_device", 1)
    assert_near(state(module), by_hand(Phased(turns)), "within a step")


# DDP


def _replicas(names: list[str], kind: str, options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        turns, given = PROGRAMS[name]
        module = Phased(turns, **{**given, **options})
        train(module, DDPStrategy(**KINDS[kind]), 2)
        found[name] = state(module)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_stay_equal_and_give_the_numbers_of_the_loop_by_hand(kind: str) -> None:  # I-03
    """Replicas ended 0.28 apart: DDP knew what trained when it was built, and no more."""
    first, second = on_ranks(_replicas, 2, list(PROGRAMS), kind, {}, timeout=200)
    for name in PROGRAMS:
        for key, value in first[name].items():
            difference = float((value - second[name][key]).abs().max())
            assert torch.equal(value, second[name][key]), (
                f"{kind}, {name}: replicas are {difference:.2e} apart in {key}"
            )
        assert_near(first[name], reference(name), f"{kind}, {name}")


def test_replicas_in_manual_optimization() -> None:  # I-03
    names = ["unfrozen at an epoch's start", "there and back", "at a batch's end", "a group is added"]
    first, second = on_ranks(_replicas, 2, names, "plain", {"manual": True}, timeout=120)
    for name in names:
        assert all(torch.equal(value, second[name][key]) for key, value in first[name].items()), name
        assert_near(first[name], reference(name), f"manual, {name}")


def _windows(kind: str) -> dict[str, torch.Tensor]:
    module = Phased({("on_train_epoch_start", 2): "+body", ("on_train_epoch_start", 4): "-neck"})
    train(module, DDPStrategy(**KINDS[kind]), 2, accumulate_grad_batches=2)
    return state(module)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_under_accumulation(kind: str) -> None:  # I-03
    """Windows of two micro-batches, the last of an epoch of one."""
    module = Phased({("on_train_epoch_start", 2): "+body", ("on_train_epoch_start", 4): "-neck"})
    train(module, "single_device", 1, accumulate_grad_batches=2)
    first, second = on_ranks(_windows, 2, kind)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert_near(first, state(module), kind)


# FSDP


SHARDED: dict[str, tuple[dict[str, Any], int, bool]] = {
    "one unit": ({}, 2, False),
    "a unit a layer": ({"wrap": [nn.Linear]}, 2, False),
    "grad_op": ({"sharding": "grad_op", "wrap": [nn.Linear]}, 2, False),
    "a layer whole": ({"ignored": ["net.body.*"]}, 2, False),
    "hybrid": ({"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": [nn.Linear]}, 4, False),
    "tensor parallel": ({"tensor_parallel": 2}, 4, True),
}


def _sharded(names: list[str], options: dict[str, Any], split: bool, more: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in names:
        turns, given = PROGRAMS[name]
        module = Phased(turns, split=split, **{**given, **more})
        strategy = FSDPStrategy(**options)
        train(module, strategy, torch.distributed.get_world_size() // options.get("tensor_parallel", 1))
        found[name] = state(module)
    return found


@pytest.mark.parametrize("kind", SHARDED)
def test_shards_give_the_numbers_of_the_loop_by_hand(kind: str) -> None:  # I-03
    options, ranks, split = SHARDED[kind]
    results = on_ranks(_sharded, ranks, list(PROGRAMS), options, split, {}, timeout=220)
    for name in PROGRAMS:
        for found in results:
            assert_near(found[name], reference(name), f"{kind}, {name}")


def test_shards_in_manual_optimization() -> None:  # I-03
    names = ["unfrozen at an epoch's start", "there and back", "at a batch's end", "a group is added"]
    for found in on_ranks(_sharded, 2, names, {"wrap": [nn.Linear]}, False, {"manual": True}, timeout=120):
        for name in names:
            assert_near(found[name], reference(name), f"manual, {name}")


def _in_half(strategy: Any, ranks: int, precision: str) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
    class Looking(Phased):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            dtypes.update(one.grad.dtype for one in self.parameters() if one.grad is not None)

    dtypes: set[torch.dtype] = set()
    module = Looking({("on_train_epoch_start", 3): "+body", ("on_train_epoch_start", 6): "-neck"}, adam=False)
    train(module, strategy, ranks, precision=precision)
    return state(module), dtypes


def _sharded_in_half(precision: str) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
    return _in_half(FSDPStrategy(wrap=[nn.Linear]), 2, precision)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_a_unit_that_was_frozen_is_reduced_in_the_dtype_of_the_others(precision: str, dtype: torch.dtype) -> None:
    """I-03: torch derives it at the first forward, from what trains there."""
    expected, _ = _in_half("single_device", 1, precision)
    for found, dtypes in on_ranks(_sharded_in_half, 2, precision):
        assert dtypes == {dtype}
        for name, value in expected.items():
            assert torch.allclose(found[name].float(), value.float(), atol=2e-2), name


# Refusals


WITHIN: dict[str, tuple[Turns, dict[str, Any], dict[str, Any]]] = {
    "unfrozen in training_step": ({("training_step", 1): "+body"}, {}, {}),
    "frozen in the first training_step": ({("training_step", 0): "-neck"}, {"frozen": ""}, {}),
    "frozen in a later training_step": ({("training_step", 2): "-neck"}, {"frozen": ""}, {}),
    "after backward": ({("on_after_backward", 2): "+body"}, {}, {}),
    "in an open window": ({("on_train_batch_end", 0): "+body"}, {}, {"accumulate_grad_batches": 2}),
    "by hand": ({("training_step", 1): "+body"}, {"manual": True}, {}),
    "frozen by hand, and left so": ({("training_step", 1): "-neck"}, {"manual": True, "frozen": ""}, {}),
}


def _refused(strategies: dict[str, Any]) -> dict[tuple[str, str], tuple[str, str, int]]:
    found = {}
    for label, (kind, options) in strategies.items():
        for name, (turns, given, settings) in WITHIN.items():
            if options.get("static_graph") and given.get("manual"):
                continue
            module = Phased(turns, **given)
            before: list[int] = []
            with failing() as error:
                fit = None
                try:
                    fit = train(module, kind(**options), 2, **settings)
                finally:
                    before.append(0 if fit is None else fit.global_step)
            found[label, name] = (error["type"], error["text"], before[0])
    return found


def _check_refused(strategies: dict[str, Any], ranks: int = 2) -> None:
    for found in on_ranks(_refused, ranks, strategies, process_group=None, timeout=200):
        for (label, name), (kind, text, _) in found.items():
            assert kind in ("ConfigurationError", "RankFailedError"), (label, name, kind, text)
            assert "was changed within training_step or an open accumulation window" in text, (label, name, text)
            layer = "body" if "+body" in str(WITHIN[name][0]) else "neck"
            assert f"'net.{layer}.weight', 'net.{layer}.bias'" in text, (label, name, text)


def test_a_change_within_a_window_is_refused_under_ddp() -> None:  # I-03
    _check_refused({kind: (DDPStrategy, options) for kind, options in KINDS.items()})


def _on_one_rank(kind: Any, options: dict[str, Any], turns: Turns) -> dict[str, str]:
    from datetime import timedelta

    from drivetrain.loops import trainables

    before, trainables._CHANGE_TIMEOUT = trainables._CHANGE_TIMEOUT, timedelta(seconds=2)
    try:
        with failing() as error:
            train(Phased(turns, only_on=1), kind(**options), 2)
    finally:
        trainables._CHANGE_TIMEOUT = before
    return error


@pytest.mark.parametrize("place", ["on_train_epoch_start", "on_train_batch_end"])
def test_a_change_on_one_rank_is_named_under_ddp(place: str) -> None:  # I-03
    for error in on_ranks(_on_one_rank, 2, DDPStrategy, {}, {(place, 3): "+body"}, process_group=None):
        assert error["type"] in ("AbsentRanksError", "RankFailedError", "DistributedError"), error
        assert "a change of what trains ('net.body.weight', 'net.body.bias' now train(s)" in error["text"], error
        assert "rank(s) [0]" in error["text"], error


def _differently(kind: Any, options: dict[str, Any]) -> dict[str, str]:
    class Differing(Phased):
        def turn(self, turn: str, optimizer: Any) -> None:
            super().turn("+body" if self.global_rank == 0 else "-neck", optimizer)

    with failing() as error:
        train(Differing({("on_train_epoch_start", 3): "."}), kind(**options), 2)
    return error


def test_different_changes_are_named_with_their_ranks() -> None:  # I-03
    for error in on_ranks(_differently, 2, DDPStrategy, {}, process_group=None):
        assert "rank(s) [0] came to a change of what trains ('net.body.weight'" in error["text"], error
        assert "rank(s) [1] came to a change of what trains ('net.neck.weight'" in error["text"], error


# Layers that are created in mid-run


class Headed(Phased):
    """Gets another head in mid-run, of each rank's own values."""

    def turn(self, turn: str, optimizer: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.rank_of_values)
            super().turn("new", optimizer)
        optimizer = self.optimizers() if optimizer is None else optimizer
        optimizer.add_param_group({"params": list(self.net.head.parameters()), "lr": 0.01})

    @property
    def rank_of_values(self) -> int:
        return self.global_rank if self._trainer is not None else 0


def _created(kind: str) -> dict[str, torch.Tensor]:
    module = Headed({("on_train_epoch_start", 3): "."})
    train(module, DDPStrategy(**KINDS[kind]), 2)
    return state(module)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_created_in_mid_run_is_rank_0s(kind: str) -> None:  # I-03
    first, second = on_ranks(_created, 2, kind)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert_near(first, by_hand(Headed({("on_train_epoch_start", 3): "."})), kind)


# Communication hooks


def _hooked(hook: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    module = Phased({("on_train_epoch_start", 3): "+body"})
    with failing() as error:
        if hook == "a state of one's own":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            hook = (powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook)
        train(module, DDPStrategy(comm_hook=hook), 2)
    return state(module), error


def test_a_named_hook_begins_anew_and_a_state_of_ones_own_is_refused() -> None:  # I-03
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in ("powersgd", default_hooks.allreduce_hook):
        (first, error), (second, _) = on_ranks(_hooked, 2, hook)
        assert error["text"] == ""
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        assert_near(first, by_hand(Phased({("on_train_epoch_start", 3): "+body"})), str(hook))
    for _, error in on_ranks(_hooked, 2, "a state of one's own", process_group=None):
        assert "under a comm_hook with a PowerSGDState" in error["text"], error


# What is said


def test_a_trainable_parameter_in_no_optimizer_is_named_once() -> None:  # I-03
    with told() as lines:
        train(
            Phased({("on_train_epoch_start", 3): "+body", ("on_train_epoch_start", 6): "-neck"}, held="neck head"),
            "single_device",
            1,
        )
    found = [line for line in lines if "in no optimizer" in line]
    assert len(found) == 1
    assert "'net.body.weight', 'net.body.bias'" in found[0]


def test_nothing_is_left_on_the_optimizer_or_in_torch() -> None:
    registered = (
        torch.nn.modules.module._global_module_registration_hooks,
        torch.nn.modules.module._global_parameter_registration_hooks,
    )
    before = [len(hooks) for hooks in registered]
    module = Phased({})
    fit = train(module, "single_device", 1)
    assert [len(hooks) for hooks in registered] == before
    assert "add_param_group" not in vars(fit.optimizers[0])


def test_a_change_within_a_window_is_refused_under_fsdp() -> None:  # I-03
    _check_refused({"one unit": (FSDPStrategy, {}), "units": (FSDPStrategy, {"wrap": [nn.Linear]})})


def test_a_change_on_one_rank_is_named_under_fsdp() -> None:  # I-03: it hung
    for error in on_ranks(
        _on_one_rank, 2, FSDPStrategy, {}, {("on_train_epoch_start", 3): "+body"}, process_group=None
    ):
        assert "a change of what trains ('net.body.weight', 'net.body.bias' now train(s)" in error["text"], error
        assert "rank(s) [0]" in error["text"], error


def _created_under(kind: Any, options: dict[str, Any]) -> dict[str, str]:
    with failing() as error:
        train(Phased({("on_train_epoch_start", 3): "new"}), kind(**options), 2)
    return error


def test_a_layer_created_in_mid_run_is_refused_under_fsdp() -> None:  # I-03: ranks trained each its own
    for error in on_ranks(_created_under, 2, FSDPStrategy, {}, process_group=None):
        assert error["type"] in ("ConfigurationError", "RankFailedError")
        assert "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'" in error["text"]


# Groups


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda one: torch.optim.lr_scheduler.MultiplicativeLR(one, lambda epoch: 0.9),
    "OneCycleLR": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=20),
    "CyclicLR": lambda one: torch.optim.lr_scheduler.CyclicLR(one, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "SequentialLR": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one, [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
    "StepLR": lambda one: torch.optim.lr_scheduler.StepLR(one, 2),
    "ExponentialLR": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_cannot_take_a_group_is_told_as_the_group_is_added(name: str) -> None:  # I-03
    class Scheduled(Phased):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}]

    module = Scheduled({("on_train_epoch_start", 3): "+body body"}, held="neck head")
    steps: list[int] = []
    with failing() as error:
        steps.append(train(module, "single_device", 1).global_step)
    if name in ("StepLR", "ExponentialLR"):
        assert (error["text"], steps) == ("", [9])
    else:
        assert f"add_param_group on AdamW, whose scheduler is a {name}." in error["text"]


def test_a_group_that_is_not_the_modules_is_refused_and_not_added() -> None:
    class Stray(Phased):
        def turn(self, turn: str, optimizer: Any) -> None:
            before = len(self.optimizers().param_groups)
            with failing() as error:
                self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            assert "a parameter of shape (3,) is not the module's" in error["text"]
            assert len(self.optimizers().param_groups) == before

    assert train(Stray({("on_train_epoch_start", 3): "."}), "single_device", 1).global_step == 9


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
def test_a_group_within_a_window_is_refused(kind: Any) -> None:  # I-03
    for error in on_ranks(_adding_within, 2, kind, process_group=None):
        assert "add_param_group within training_step or an open accumulation window" in error["text"], error


def _adding_within(kind: Any) -> dict[str, str]:
    with failing() as error:
        train(Phased({("training_step", 3): "body"}, held="neck head"), kind(), 2)
    return error
