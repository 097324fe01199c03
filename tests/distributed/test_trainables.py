"""The trainable parameters may change within a run, under every strategy: I-03."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from phased_training import Phased, Turns, by_hand, dealt, state, train
from small_runs import failing
from torch import nn

from captured_warnings import captured_warnings
from drivetrain.precision import MixedPrecision
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks

NEAR: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
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
    "as the run begins": (
        {("on_fit_start", 0): "+body", ("on_train_start", 0): "-neck", ("on_train_epoch_end", 3): "+neck"},
        {},
    ),
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


# One device


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_equals_the_hand_written_loop(name: str) -> None:  # I-03
    turns, given = PROGRAMS[name]
    module = Phased(turns, **given)
    train(module, "single_device", 1)
    assert_near(state(module), reference(name), name)


def test_on_one_device_a_step_may_freeze() -> None:  # I-03: single device only
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
def test_replicas_stay_equal_and_equal_the_hand_written_loop(kind: str) -> None:  # I-03
    """Previously replicas differed by 0.28 at the end: DDP only knew what trained when it was built."""
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


def _windows(kind: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = Phased({("on_train_epoch_start", 2): "+body", ("on_train_epoch_start", 4): "-neck"})
    train(module, kind(**options), 2, accumulate_grad_batches=2)
    return state(module)


WINDOWED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{kind: (DDPStrategy, options) for kind, options in KINDS.items()},
    "shards": (FSDPStrategy, {"wrap": [nn.Linear]}),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_under_accumulation(kind: str) -> None:  # I-03
    """Windows of two micro-batches; an epoch's last window has one."""
    module = Phased({("on_train_epoch_start", 2): "+body", ("on_train_epoch_start", 4): "-neck"})
    train(module, "single_device", 1, accumulate_grad_batches=2)
    first, second = on_ranks(_windows, 2, *WINDOWED[kind])
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert_near(first, state(module), kind)


# FSDP


FEW = ["there and back", "before a step", "at a batch's end", "nothing trains at first", "two groups, in two hooks"]
"""Both directions, within steps and between epochs, and groups: the hooks are the engine's, whatever shards."""

SHARDED: dict[str, tuple[list[str], dict[str, Any], int, bool]] = {
    "one unit": (FEW, {}, 2, False),
    "a unit a layer": (list(PROGRAMS), {"wrap": [nn.Linear]}, 2, False),
    "grad_op": (FEW, {"sharding": "grad_op", "wrap": [nn.Linear]}, 2, False),
    "a layer whole": (FEW, {"ignored": ["net.body.*"]}, 2, False),
    "hybrid": (FEW, {"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": []}, 4, False),
    "tensor parallel": (FEW, {"tensor_parallel": 2, "wrap": []}, 4, True),
}


def _sharded(names: list[str], options: dict[str, Any], split: bool, more: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in names:
        turns, given = PROGRAMS[name]
        module = Phased(turns, split=split, **{**given, **more})
        train(module, FSDPStrategy(**options), dealt(options))
        found[name] = state(module)
    return found


@pytest.mark.parametrize("kind", SHARDED)
def test_shards_equal_the_hand_written_loop(kind: str) -> None:  # I-03
    names, options, ranks, split = SHARDED[kind]
    results = on_ranks(_sharded, ranks, names, options, split, {}, timeout=220)
    for name in names:
        assert_near(results[0][name], reference(name), f"{kind}, {name}")
        for found in results[1:]:
            assert all(torch.equal(value, found[name][key]) for key, value in results[0][name].items()), name


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
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # so that no step is skipped
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler) if precision == "16-mixed" else precision
    train(module, strategy, ranks, precision=plugin)
    return state(module), dtypes


def _on_two_in_half(precision: str) -> dict[str, tuple[dict[str, torch.Tensor], set[torch.dtype]]]:
    strategies = {"shards": FSDPStrategy(wrap=[nn.Linear]), "replicas": DDPStrategy()}
    return {name: _in_half(strategy, 2, precision) for name, strategy in strategies.items()}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("16-mixed", torch.float32)],
)
def test_in_lower_precisions(precision: str, dtype: torch.dtype) -> None:  # I-03
    """A unit that was frozen is reduced in the dtype of the others, which torch derives at the first forward."""
    expected, _ = _in_half("single_device", 1, precision)
    first, second = on_ranks(_on_two_in_half, 2, precision)
    for kind, (found, dtypes) in first.items():
        assert dtypes == {dtype}, kind
        for name, value in expected.items():
            assert torch.equal(found[name], second[kind][0][name]), (kind, name)
            assert torch.allclose(found[name].float(), value.float(), atol=2e-2), (kind, name)


# Refusals


WITHIN: dict[str, tuple[Turns, dict[str, Any], dict[str, Any]]] = {
    "unfrozen in training_step": ({("training_step", 1): "+body"}, {}, {}),
    "frozen in the first training_step": ({("training_step", 0): "-neck"}, {"frozen": ""}, {}),
    "frozen in a later training_step": ({("training_step", 2): "-neck"}, {"frozen": ""}, {}),
    "before backward": ({("on_before_backward", 2): "-neck"}, {"frozen": ""}, {}),
    "after backward": ({("on_after_backward", 2): "+body"}, {}, {}),
    "a layer created in training_step": ({("training_step", 1): "new"}, {}, {}),
    "in an open window": ({("on_train_batch_end", 0): "+body"}, {}, {"accumulate_grad_batches": 2}),
    "by hand": ({("training_step", 1): "+body"}, {"manual": True}, {}),
    "frozen by hand, and left so": ({("training_step", 1): "-neck"}, {"manual": True, "frozen": ""}, {}),
}


class Counted(Phased):
    """Counts the steps."""

    steps = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = self.global_step
        super().on_train_batch_end(outputs, batch, batch_idx)


def _refused(strategies: dict[str, Any], names: list[str]) -> dict[tuple[str, str], tuple[dict[str, str], int]]:
    found = {}
    for label, (kind, options) in strategies.items():
        for name in names:
            turns, given, settings = WITHIN[name]
            if options.get("static_graph") and given.get("manual"):
                continue
            module = Counted(turns, split="tensor_parallel" in options, **given)
            with failing() as error:
                train(module, kind(**options), dealt(options), **settings)
            found[label, name] = error, module.steps
    return found


def _check_refused(strategies: dict[str, Any], ranks: int = 2, names: Iterable[str] = ()) -> None:
    every = list(names) or list(WITHIN)
    for found in on_ranks(_refused, ranks, strategies, every, process_group=None, timeout=200):
        for (label, name), (error, steps) in found.items():
            assert error["type"] in ("ConfigurationError", "RankFailedError"), (label, name, error)
            assert "within training_step or an open accumulation window" in error["text"], (label, name, error)
            ((place, step), turn), *_ = WITHIN[name][0].items()
            layer = "head" if turn == "new" else turn[1:]
            assert f"'net.{layer}.weight', 'net.{layer}.bias'" in error["text"], (label, name, error)
            assert steps == step, (label, name, place)


def test_a_change_within_a_window_is_refused_under_ddp() -> None:  # I-03
    _check_refused({kind: (DDPStrategy, options) for kind, options in KINDS.items()})


def _on_one_rank(kind: Any, options: dict[str, Any], turns: Turns) -> dict[str, str]:
    from datetime import timedelta

    from drivetrain._loops import trainables

    before, trainables._CHANGE_TIMEOUT = trainables._CHANGE_TIMEOUT, timedelta(seconds=2)
    try:
        with failing() as error:
            train(Phased(turns, only_on=1, split="tensor_parallel" in options), kind(**options), dealt(options))
    finally:
        trainables._CHANGE_TIMEOUT = before
    return error


@pytest.mark.parametrize("place", ["on_train_epoch_start", "on_train_batch_end"])
def test_a_change_on_one_rank_is_named_under_ddp(place: str) -> None:  # I-03
    for error in on_ranks(_on_one_rank, 2, DDPStrategy, {}, {(place, 3): "+body"}, process_group=None):
        assert error["type"] in ("AbsentRanksError", "RankFailedError", "DistributedError"), error
        assert "a change of the trainable parameters ('net.body.weight', 'net.body.bias' unfrozen" in error["text"], (
            error
        )
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
        assert "\"a change of the trainable parameters ('net.body.weight'" in error["text"], error
        assert "on rank(s) [0]; \"a change of the trainable parameters ('net.neck.weight'" in error["text"], error
        assert "on rank(s) [1]" in error["text"], error


# Layers created during the run


class Headed(Phased):
    """Gets another head during the run, with different values on each rank."""

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


def test_a_named_hook_restarts_and_a_user_defined_state_is_refused() -> None:  # I-03
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in ("powersgd", default_hooks.allreduce_hook):
        (first, error), (second, _) = on_ranks(_hooked, 2, hook)
        assert error["text"] == ""
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        assert_near(first, by_hand(Phased({("on_train_epoch_start", 3): "+body"})), str(hook))
    for _, error in on_ranks(_hooked, 2, "a state of one's own", process_group=None):
        assert "with a comm_hook that has a PowerSGDState" in error["text"], error


# Messages


def test_a_trainable_parameter_in_no_optimizer_is_named_once() -> None:  # I-03
    with captured_warnings() as lines:
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


def test_a_change_on_one_rank_is_named_under_fsdp() -> None:  # I-03: previously a hang
    for error in on_ranks(
        _on_one_rank, 2, FSDPStrategy, {}, {("on_train_epoch_start", 3): "+body"}, process_group=None
    ):
        assert "a change of the trainable parameters ('net.body.weight', 'net.body.bias' unfrozen" in error["text"], (
            error
        )
        assert "rank(s) [0]" in error["text"], error


def _created_under(kind: Any, options: dict[str, Any]) -> dict[str, str]:
    with failing() as error:
        split = "tensor_parallel" in options
        train(Phased({("on_train_epoch_start", 3): "new"}, split=split), kind(**options), dealt(options))
    return error


def test_a_layer_created_in_mid_run_is_refused_under_fsdp() -> None:  # I-03: previously each rank trained its own
    for error in on_ranks(_created_under, 2, FSDPStrategy, {}, process_group=None):
        assert error["type"] in ("ConfigurationError", "RankFailedError")
        assert "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'" in error["text"]


def _refused_on_four(kinds: list[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    options = [SHARDED[kind][1] for kind in kinds]
    created = [_created_under(FSDPStrategy, one) for one in options]
    return created, [_on_one_rank(FSDPStrategy, one, {("on_train_epoch_start", 3): "+body"}) for one in options]


def test_fsdps_refusals_apply_to_hybrids_and_tensor_parallelism() -> None:  # I-03
    kinds = ["hybrid", "tensor parallel"]
    names = ["unfrozen in training_step", "in an open window"]
    _check_refused({kind: (FSDPStrategy, SHARDED[kind][1]) for kind in kinds}, 4, names)
    for every, alone in on_ranks(_refused_on_four, 4, kinds, process_group=None, timeout=120):
        for created in every:
            assert "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'" in created["text"]
        for differing in alone:
            assert (
                "a change of the trainable parameters ('net.body.weight', 'net.body.bias' unfrozen" in differing["text"]
            )


# Toggling


class Toggling(Phased):
    """Two optimizers that take turns; with ``leaves``, the second one's toggle is left open at the second step."""

    def __init__(self, leaves: bool) -> None:
        super().__init__({}, manual=True, frozen="")
        self.leaves, self.steps = leaves, 0

    def configure_optimizers(self) -> Any:
        halves = ([*self.net.body.parameters(), *self.net.neck.parameters()], [*self.net.head.parameters()])
        return [torch.optim.SGD(half, lr=0.05) for half in halves]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle = toggle = self.toggled_optimizer(optimizer)
            toggle.__enter__()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.steps += 1
            if not (self.leaves and self.steps == 4):
                toggle.__exit__(None, None, None)


def _toggled(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str], int]:
    strategies = {"replicas": DDPStrategy, "shards": FSDPStrategy}
    whole, left = Toggling(False), Toggling(True)
    train(whole, strategies[kind](), 2)
    with failing() as error:
        train(left, strategies[kind](), 2)
    return state(whole), error, left.steps


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_toggles_may_change_what_trains_but_must_be_closed(kind: str) -> None:  # I-03
    expected = Toggling(False)
    train(expected, "single_device", 1)
    for weights, error, steps in on_ranks(_toggled, 2, kind, process_group=None):
        assert_near(weights, state(expected), kind)
        assert "'net.body.weight', 'net.body.bias', 'net.neck.weight', 'net.neck.bias' was changed" in error["text"]
        assert "toggle" in error["text"].split("Fix:")[1], error
        assert steps == 4


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
    "ReduceLROnPlateau": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, min_lr=[1e-4]),
    "StepLR": lambda one: torch.optim.lr_scheduler.StepLR(one, 2),
    "ExponentialLR": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_cannot_handle_a_new_group_is_refused(name: str) -> None:  # I-03
    class Scheduled(Phased):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step", "monitor": "loss"}]

    module = Scheduled({("on_train_epoch_start", 3): "+body body"}, held="neck head")
    steps: list[int] = []
    with failing() as error:
        steps.append(train(module, "single_device", 1).global_step)
    if name in ("StepLR", "ExponentialLR"):
        assert (error["text"], steps) == ("", [9])
    else:
        assert f"add_param_group on AdamW, whose scheduler is a {name}." in error["text"]


def test_a_group_of_foreign_parameters_is_refused_and_not_added() -> None:
    class Stray(Phased):
        def turn(self, turn: str, optimizer: Any) -> None:
            before = len(self.optimizers().param_groups)
            with failing() as error:
                self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            assert "a parameter of shape (3,) that is not the module's" in error["text"]
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


# ZeRO


def _by_zero(stage: int, turns: Turns, given: dict[str, Any]) -> tuple[dict[str, str], int]:
    module = Counted(turns, **given)
    with failing() as error:
        train(module, f"deepspeed_stage_{stage}", 2)
    return error, module.steps


ZERO: dict[str, tuple[Turns, dict[str, Any], str]] = {
    "unfrozen": (
        {("on_train_epoch_start", 3): "+body"},
        {},
        "2 parameter(s) were unfrozen within a run, under DeepSpeed: 'net.body.weight', 'net.body.bias'",
    ),
    "frozen": ({("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}, "2 parameter(s) were frozen within a run"),
    "a group": ({("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}, "add_param_group on "),
    "a layer": ({("on_train_epoch_start", 3): "new"}, {}, "A layer was created within a run, under DeepSpeed"),
    "within a step": ({("training_step", 3): "+body"}, {}, "was changed within training_step or an open"),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_a_change_by_name_before_a_wrong_step(stage: int) -> None:  # I-03
    """Previously its engine silently did not train the layer, and a group ended in an IndexError when the engine was
    destroyed.
    """
    for turns, given, words in ZERO.values():
        for error, steps in on_ranks(_by_zero, 2, stage, turns, given, process_group=None, timeout=120):
            assert error["type"] in ("ConfigurationError", "RankFailedError"), error
            assert words in error["text"], error
            assert steps == 3
