"""The trainable parameters may change within a run, under every strategy: I-03."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from phased_training import Phased, Turns, by_hand, dealt, state, train
from small_runs import each, failing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim import lr_scheduler

from captured_warnings import captured_warnings
from drivetrain._loops import trainables  # a rank that changes alone waits half a minute, and no setting shortens it
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from oracle.check import check
from oracle.program import Change, Data, Net, Program
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

UNFROZEN: Turns = {("on_train_epoch_start", 3): "+body"}
FEW = ["there and back", "before a step", "at a batch's end", "nothing trains at first", "two groups, in two hooks"]
"""Both directions, within steps and between epochs, and groups."""
MANUAL = ["unfrozen at an epoch's start", "there and back", "at a batch's end", "a group is added"]

UNITS: dict[str, Any] = {"wrap": [nn.Linear]}
HYBRID: dict[str, Any] = {"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": []}
TENSOR_PARALLEL: dict[str, Any] = {"tensor_parallel": 2, "wrap": []}
STATIC: dict[str, Any] = {"static_graph": True}
BODY = "('net.body.weight', 'net.body.bias' unfrozen"


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max())
        assert torch.allclose(found[name], value, **NEAR), f"{what}: {name} is {difference:.2e} off"


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], what: str) -> None:
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{what}: {name} differs between ranks"


@pytest.mark.parametrize(
    ("turns", "given"),
    [
        *[pytest.param(*program, id=name) for name, program in PROGRAMS.items()],
        pytest.param({("training_step", 2): "+body", ("on_after_backward", 5): "-neck"}, {}, id="within a step"),
    ],
)
def test_one_device_equals_the_hand_written_loop(turns: Turns, given: dict[str, Any]) -> None:  # I-03
    module = Phased(turns, **given)
    train(module, "single_device", 1)
    assert_near(state(module), by_hand(Phased(turns, **given)), "one device")


def _trained(
    kind: Any, options: dict[str, Any], names: list[str], manual: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        turns, given = PROGRAMS[name]
        module = Phased(turns, split="tensor_parallel" in options, manual=manual, **given)
        train(module, kind(**options), dealt(options))
        found[name] = state(module)
    return found


@pytest.mark.parametrize(
    ("ranks", "kind", "options", "names", "manual"),
    [
        pytest.param(2, DDPStrategy, {}, list(PROGRAMS), False, id="ddp"),
        pytest.param(2, DDPStrategy, STATIC, FEW, False, id="ddp, static graph"),
        pytest.param(2, DDPStrategy, {"find_unused_parameters": True}, FEW, False, id="ddp, find unused"),
        pytest.param(2, DDPStrategy, {}, MANUAL, True, id="ddp, manual"),
        pytest.param(2, FSDPStrategy, {}, FEW, False, id="fsdp, one unit"),
        pytest.param(2, FSDPStrategy, UNITS, list(PROGRAMS), False, id="fsdp, a unit a layer"),
        pytest.param(2, FSDPStrategy, {"sharding": "grad_op", **UNITS}, FEW, False, id="fsdp, grad_op"),
        pytest.param(2, FSDPStrategy, {"ignored": ["net.body.*"]}, FEW, False, id="fsdp, a layer whole"),
        pytest.param(2, FSDPStrategy, UNITS, MANUAL, True, id="fsdp, manual"),
        pytest.param(4, FSDPStrategy, HYBRID, FEW, False, id="hybrid"),
        pytest.param(4, FSDPStrategy, TENSOR_PARALLEL, FEW, False, id="tensor parallel"),
    ],
)
def test_ranks_stay_equal_and_equal_the_hand_written_loop(
    ranks: int, kind: Any, options: dict[str, Any], names: list[str], manual: bool
) -> None:  # I-03
    first, *others = on_ranks(_trained, ranks, kind, options, names, manual, timeout=220)
    for name in names:
        turns, given = PROGRAMS[name]
        assert_near(first[name], by_hand(Phased(turns, **given)), name)
        for found in others:
            assert_equal(first[name], found[name], name)


UNFREEZING = Program(
    net=Net(frozen="body"),
    data=Data(samples=12),
    epochs=3,
    changes=(Change(part="body"), Change("freeze", "head", epoch=2)),
)


@pytest.mark.parametrize(
    ("strategy", "program"),
    [
        *[
            pytest.param(strategy, replace(UNFREEZING, accumulate=2), id=f"{strategy}, windows")
            for strategy in ("ddp", "ddp_static_graph", "fsdp")
        ],
        *[
            pytest.param(strategy, replace(UNFREEZING, precision=precision), id=f"{strategy}, {precision}")
            for strategy in ("ddp", "fsdp")
            for precision in ("bf16-mixed", "bf16-true", "16-mixed")
        ],
    ],
)
def test_windows_and_lower_precisions_equal_the_plain_loop(strategy: str, program: Program) -> None:  # I-03
    assert not check(replace(program, strategy=strategy, ranks=2))


def _dtypes_of_gradients() -> set[torch.dtype]:
    class Looking(Phased):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            dtypes.update(one.grad.dtype for one in self.parameters() if one.grad is not None)

    dtypes: set[torch.dtype] = set()
    train(Looking(UNFROZEN), FSDPStrategy(**UNITS), 2, precision="bf16-mixed")
    return dtypes


def test_a_unit_that_was_frozen_is_reduced_in_the_dtype_of_the_others() -> None:  # I-03
    assert on_ranks(_dtypes_of_gradients, 2) == [{torch.float32}] * 2


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
    """Counts the steps; with ``differ``, each rank makes another change."""

    steps = 0

    def __init__(self, turns: Turns, differ: bool = False, **given: Any) -> None:
        super().__init__(turns, **given)
        self.differ = differ

    def turn(self, turn: str, optimizer: Any) -> None:
        super().turn("-neck" if self.differ and self.global_rank == 1 else turn, optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = self.global_step
        super().on_train_batch_end(outputs, batch, batch_idx)


def _refused(strategy: Any, options: dict[str, Any], turns: Turns, given: Any, settings: Any) -> Any:
    """Train; return the error and the number of steps made."""
    module = Counted(turns, split="tensor_parallel" in options, **given)
    with failing() as error:
        train(module, strategy if isinstance(strategy, str) else strategy(**options), dealt(options), **settings)
    return error, module.steps


@pytest.mark.parametrize(
    ("ranks", "kind", "options", "names"),
    [
        pytest.param(2, DDPStrategy, {}, list(WITHIN), id="ddp"),
        pytest.param(2, DDPStrategy, STATIC, list(WITHIN)[:-2], id="ddp, static graph"),
        pytest.param(2, DDPStrategy, {"find_unused_parameters": True}, list(WITHIN)[-3:], id="ddp, find unused"),
        pytest.param(2, FSDPStrategy, {}, list(WITHIN)[:-2], id="fsdp, one unit"),
        pytest.param(2, FSDPStrategy, UNITS, list(WITHIN), id="fsdp, a unit a layer"),
        pytest.param(4, FSDPStrategy, HYBRID, ["unfrozen in training_step", "in an open window"], id="hybrid"),
        pytest.param(4, FSDPStrategy, TENSOR_PARALLEL, ["unfrozen in training_step"], id="tensor parallel"),
    ],
)
def test_a_change_within_a_window_is_refused(
    ranks: int, kind: Any, options: dict[str, Any], names: list[str]
) -> None:  # I-03
    cases = [(kind, options, *WITHIN[name]) for name in names]
    for found in on_ranks(each, ranks, _refused, *cases, process_group=None, timeout=200):
        for name, (error, steps) in zip(names, found, strict=True):
            assert error["type"] in ("ConfigurationError", "RankFailedError"), (name, error)
            assert "within training_step or an open accumulation window" in error["text"], (name, error)
            ((_, step), turn), *_ = WITHIN[name][0].items()
            layer = "head" if turn == "new" else turn[1:]
            assert f"'net.{layer}.weight', 'net.{layer}.bias'" in error["text"], (name, error)
            assert steps == step, name


def _on_one_rank(kind: Any, options: dict[str, Any], place: str) -> dict[str, str]:
    before, trainables._CHANGE_TIMEOUT = trainables._CHANGE_TIMEOUT, timedelta(seconds=1)
    module = Phased({(place, 3): "+body"}, only_on=1, split="tensor_parallel" in options)
    try:
        with failing() as error:
            train(module, kind(**options), dealt(options))
    finally:
        trainables._CHANGE_TIMEOUT = before
    return error


@pytest.mark.parametrize(
    ("kind", "options", "place", "absent"),
    [
        pytest.param(DDPStrategy, {}, "on_train_epoch_start", "[0]", id="ddp, epoch"),
        pytest.param(DDPStrategy, {}, "on_train_batch_end", "[0]", id="ddp, batch"),
        pytest.param(FSDPStrategy, {}, "on_train_epoch_start", "[0]", id="fsdp"),
        pytest.param(FSDPStrategy, HYBRID, "on_train_epoch_start", "[0, 2, 3]", id="hybrid"),
    ],
)
def test_a_change_on_one_rank_is_named(kind: Any, options: dict[str, Any], place: str, absent: str) -> None:  # I-03
    ranks = 4 if options else 2
    for error in on_ranks(_on_one_rank, ranks, kind, options, place, process_group=None):
        assert error["type"] in ("AbsentRanksError", "RankFailedError", "DistributedError"), error
        assert f"a change of the trainable parameters {BODY}" in error["text"], error
        assert f"rank(s) {absent}" in error["text"], error


def test_different_changes_are_named_with_their_ranks() -> None:  # I-03
    for error, _ in on_ranks(_refused, 2, DDPStrategy, {}, UNFROZEN, {"differ": True}, {}, process_group=None):
        assert "\"a change of the trainable parameters ('net.body.weight'" in error["text"], error
        assert "on rank(s) [0]; \"a change of the trainable parameters ('net.neck.weight'" in error["text"], error
        assert "on rank(s) [1]" in error["text"], error


class Headed(Phased):
    """Gets another head during the run, with different values on each rank."""

    def turn(self, turn: str, optimizer: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(100 + (0 if self._trainer is None else self.global_rank))
            super().turn("new", optimizer)
        optimizer = self.optimizers() if optimizer is None else optimizer
        optimizer.add_param_group({"params": list(self.net.head.parameters()), "lr": 0.01})


def _train_headed(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = Headed(UNFROZEN)
    train(module, DDPStrategy(**options), 2)
    return state(module)


@pytest.mark.parametrize("options", [{}, STATIC, {"find_unused_parameters": True}], ids=str)
def test_a_layer_created_in_mid_run_has_the_values_of_rank_0(options: dict[str, Any]) -> None:  # I-03
    first, second = on_ranks(_train_headed, 2, options)
    assert_equal(first, second, "created")
    assert_near(first, by_hand(Headed(UNFROZEN)), "created")


@pytest.mark.parametrize("options", [{}, HYBRID, TENSOR_PARALLEL], ids=["fsdp", "hybrid", "tensor parallel"])
def test_a_layer_created_in_mid_run_is_refused_under_fsdp(options: dict[str, Any]) -> None:  # I-03
    turns: Turns = {("on_train_epoch_start", 3): "new"}
    for error, _ in on_ranks(_refused, 4 if options else 2, FSDPStrategy, options, turns, {}, {}, process_group=None):
        assert error["type"] in ("ConfigurationError", "RankFailedError")
        assert "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'" in error["text"]


def _train_hooked(hook: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if hook == "a state of the user's":
        hook = (powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook)
    module = Phased(UNFROZEN)
    with failing() as error:
        train(module, DDPStrategy(comm_hook=hook), 2)
    return state(module), error


def test_a_communication_hook_restarts_after_a_change_unless_the_user_holds_its_state() -> None:  # I-03
    cases = [("powersgd",), (default_hooks.allreduce_hook,), ("a state of the user's",)]
    first, second = on_ranks(each, 2, _train_hooked, *cases, process_group=None)
    for (found, error), (other, _) in list(zip(first, second, strict=True))[:2]:
        assert error["text"] == ""
        assert_equal(found, other, "hooked")
        assert_near(found, by_hand(Phased(UNFROZEN)), "hooked")
    for *_, (_, error) in (first, second):
        assert "with a comm_hook that has a PowerSGDState" in error["text"], error


def test_a_trainable_parameter_in_no_optimizer_is_named_once() -> None:  # I-03
    module = Phased({**UNFROZEN, ("on_train_epoch_start", 6): "-neck"}, held="neck head")
    with captured_warnings() as lines:
        train(module, "single_device", 1)
    (found,) = [line for line in lines if "in no optimizer" in line]
    assert "'net.body.weight', 'net.body.bias'" in found


def test_nothing_is_left_on_the_optimizer_or_in_torch() -> None:
    registered = (
        torch.nn.modules.module._global_module_registration_hooks,
        torch.nn.modules.module._global_parameter_registration_hooks,
    )
    before = [len(hooks) for hooks in registered]
    fit = train(Phased({}), "single_device", 1)
    assert [len(hooks) for hooks in registered] == before
    assert "add_param_group" not in vars(fit.optimizers[0])


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch), "LambdaLR"),
        (lambda one: lr_scheduler.MultiplicativeLR(one, lambda epoch: 0.9), "MultiplicativeLR"),
        (lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=20), "OneCycleLR"),
        (lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, cycle_momentum=False), "CyclicLR"),
        (lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3), "CosineAnnealingWarmRestarts"),
        (lambda one: lr_scheduler.SequentialLR(one, [lr_scheduler.StepLR(one, 2)] * 2, [2]), "SequentialLR"),
        (lambda one: lr_scheduler.ReduceLROnPlateau(one, min_lr=[1e-4]), "ReduceLROnPlateau"),
        (lambda one: lr_scheduler.StepLR(one, 2), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scheduler_that_cannot_handle_a_new_group_is_refused(build: Any, refused: str) -> None:  # I-03
    class Scheduled(Phased):
        def on_after_backward(self) -> None:
            self.log("loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": build(optimizer), "interval": "step", "monitor": "loss"}]

    module = Scheduled({("on_train_epoch_start", 3): "+body body"}, held="neck head")
    steps = 0
    with failing() as error:
        steps = train(module, "single_device", 1).global_step
    assert (f"add_param_group on AdamW, whose scheduler is a {refused}." in error["text"]) == bool(refused)
    assert steps == (0 if refused else 9)


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
    case: Any = (kind, {}, {("training_step", 3): "body"}, {"held": "neck head"}, {})
    for error, _ in on_ranks(_refused, 2, *case, process_group=None):
        assert "add_param_group within training_step or an open accumulation window" in error["text"], error


ZERO: list[tuple[Turns, dict[str, Any], str]] = [
    (UNFROZEN, {}, "2 parameter(s) were unfrozen within a run, under DeepSpeed: 'net.body.weight', 'net.body.bias'"),
    ({("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}, "2 parameter(s) were frozen within a run"),
    ({("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}, "add_param_group on "),
    ({("on_train_epoch_start", 3): "new"}, {}, "A layer was created within a run, under DeepSpeed"),
    ({("training_step", 3): "+body"}, {}, "was changed within training_step or an open"),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_a_change_by_name_before_a_wrong_step(stage: int) -> None:  # I-03
    cases: Any = [(f"deepspeed_stage_{stage}", {}, turns, given, {}) for turns, given, _ in ZERO]
    for found in on_ranks(each, 2, _refused, *cases, process_group=None, timeout=120):
        for (error, steps), (*_, words) in zip(found, ZERO, strict=True):
            assert error["type"] in ("ConfigurationError", "RankFailedError"), error
            assert words in error["text"], error
            assert steps == 3
