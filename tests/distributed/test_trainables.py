"""The trainable parameters may change within a run, under every strategy, and a resumed run has them: I-03."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import Phased, Turns, by_hand, dealt, state, train
from small_runs import each, failing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim import lr_scheduler

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain._loops import trainables  # a rank that changes alone waits half a minute, and no setting shortens it
from drivetrain.checkpoint import load
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from oracle.check import check
from oracle.program import Change, Data, Net, Program
from worlds import on_ranks

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
BODY = "'net.body.weight', 'net.body.bias'"


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object, atol: float = 1e-6
) -> None:
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max())
        assert torch.allclose(found[name], value, atol=atol, rtol=1e-5), f"{what}: {name} is {difference:.2e} off"


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], what: object) -> None:
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
    "a group": ({("training_step", 3): "body"}, {"held": "neck head"}, {}),
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
        pytest.param(2, DDPStrategy, {"find_unused_parameters": True}, list(WITHIN)[-4:], id="ddp, find unused"),
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
            named = "add_param_group" if name == "a group" else f"'net.{layer}.weight', 'net.{layer}.bias'"
            assert named in error["text"], (name, error)
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
        assert f"a change of the trainable parameters ({BODY} unfrozen" in error["text"], error
        assert f"rank(s) {absent}" in error["text"], error


UNFROZEN_UNDER_ZERO = f"2 parameter(s) were unfrozen within a run, under DeepSpeed: {BODY}"
CREATED = "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'"
NEW: Turns = {("on_train_epoch_start", 3): "new"}
DIFFERENT = (
    "\"a change of the trainable parameters ('net.body.weight'",
    "on rank(s) [0]; \"a change of the trainable parameters ('net.neck.weight'",
    "on rank(s) [1]",
)
ZERO: list[Any] = [
    (UNFROZEN, {}, UNFROZEN_UNDER_ZERO),
    ({("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}, "2 parameter(s) were frozen within a run"),
    ({("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}, "add_param_group on "),
    (NEW, {}, "A layer was created within a run, under DeepSpeed"),
    ({("training_step", 3): "+body"}, {}, "was changed within training_step or an open"),
]


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "cases"),
    [
        pytest.param(2, DDPStrategy, {}, [(UNFROZEN, {"differ": True}, *DIFFERENT)], id="ddp, ranks differ"),
        pytest.param(2, FSDPStrategy, {}, [(NEW, {}, CREATED)], id="fsdp"),
        pytest.param(4, FSDPStrategy, HYBRID, [(NEW, {}, CREATED)], id="hybrid"),
        pytest.param(4, FSDPStrategy, TENSOR_PARALLEL, [(NEW, {}, CREATED)], id="tensor parallel"),
        *[pytest.param(2, f"deepspeed_stage_{stage}", {}, ZERO, id=f"zero {stage}") for stage in (1, 2, 3)],
    ],
)
def test_a_change_that_a_strategy_cannot_follow_is_refused_before_a_wrong_step(
    ranks: int, strategy: Any, options: dict[str, Any], cases: list[Any]
) -> None:  # I-03
    calls = [(strategy, options, turns, given, {}) for turns, given, *_ in cases]
    for found in on_ranks(each, ranks, _refused, *calls, process_group=None, timeout=120):
        for (error, steps), (_, _, *words) in zip(found, cases, strict=True):
            assert error["type"] in ("ConfigurationError", "RankFailedError", "DistributedError"), error
            assert all(part in error["text"] for part in words), error
            assert steps == 3


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


def test_a_layer_created_in_mid_run_has_the_values_of_rank_0() -> None:  # I-03
    expected, cases = by_hand(Headed(UNFROZEN)), [({},), (STATIC,), ({"find_unused_parameters": True},)]
    for options, first, second in zip(cases, *on_ranks(each, 2, _train_headed, *cases), strict=True):
        assert_equal(first, second, options)
        assert_near(first, expected, options)


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


def test_a_trainable_parameter_in_no_optimizer_is_named_once_and_nothing_is_left_in_torch() -> None:  # I-03
    registered = (
        torch.nn.modules.module._global_module_registration_hooks,
        torch.nn.modules.module._global_parameter_registration_hooks,
    )
    before = [len(hooks) for hooks in registered]
    module = Phased({**UNFROZEN, ("on_train_epoch_start", 6): "-neck"}, held="neck head")
    with captured_warnings() as lines:
        fit = train(module, "single_device", 1)
    (found,) = [line for line in lines if "in no optimizer" in line]
    assert BODY in found
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


RESUMED: dict[str, tuple[Turns, dict[str, Any]]] = {
    "unfrozen": ({("on_train_epoch_start", 3): "+body"}, {}),
    "frozen": ({("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}),
    "a group": ({("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}),
    "two groups": ({("on_train_epoch_start", 3): "+body body +neck neck"}, {"held": "head", "frozen": "body neck"}),
    "what trains, as a filter": ({("on_train_epoch_start", 3): "+body body"}, {"held": "filter"}),
    "a group, by the step": ({("on_train_batch_end", 4): "+body body"}, {"held": "neck head"}),
}
"""The turn is taken before the save, in the second epoch, and the resumed run knows nothing of it."""

STEPS = (6, 5)
"""Steps at which a checkpoint is saved: at the epoch's end, and within it."""


class Filtered(Phased):
    """Its optimizer gets the parameters that are trainable when ``configure_optimizers`` is called."""

    def configure_optimizers(self) -> Any:
        if self.held != "filter":
            return super().configure_optimizers()
        trainable = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.AdamW(trainable, lr=0.02, eps=1e-5, weight_decay=0.1)


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


STRATEGIES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "ddp": (2, DDPStrategy, {}),
    "static graph": (2, DDPStrategy, STATIC),
    "fsdp": (2, FSDPStrategy, UNITS),
    "hybrid": (4, FSDPStrategy, HYBRID),
    "fsdp x tp": (4, FSDPStrategy, TENSOR_PARALLEL),
}
"""By name, the number of ranks and the strategy; other names are those of `Fit`."""


def _run(
    name: str, turns: Turns, given: dict[str, Any], save: tuple[int, str] | None = None, resume: str | None = None
) -> dict[str, torch.Tensor]:
    """Train and save at a step, or resume and train to the end."""
    _, kind, options = STRATEGIES.get(name, (0, None, {}))
    module = Filtered(turns, split="tp" in name, **given)
    stop, callbacks = (-1, []) if save is None else (save[0], [SaveAt(*save)])
    settings: dict[str, Any] = {"max_steps": stop, "callbacks": callbacks}
    fit = train(module, kind(**options) if kind else name, dealt(options), resume, **settings)
    assert fit.global_step == (9 if save is None else stop)
    return state(module)


def _saved(names: list[str], strategy: str, folder: str) -> None:
    for name in names:
        for step in STEPS:
            turns, given = RESUMED[name]
            _run(strategy, turns, given, (step, f"{folder}/{name} {step}"))


def _resumed(names: list[str], strategy: str, folder: str) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    return {
        (name, step): _run(strategy, {}, RESUMED[name][1], None, f"{folder}/{name} {step}")
        for name in names
        for step in STEPS
    }


def _on(strategy: str, fn: Any, *args: Any) -> Any:
    if strategy == "single_device":
        return fn(*args)
    return on_ranks(fn, STRATEGIES.get(strategy, (2,))[0], *args, process_group=None, timeout=240)[0]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("single_device", "single_device", list(RESUMED)),
        ("single_device", "fsdp x tp", ["frozen", "two groups"]),
        ("ddp", "fsdp", ["frozen", "two groups", "what trains, as a filter"]),
        ("fsdp", "ddp", ["frozen", "two groups", "a group, by the step"]),
        ("fsdp x tp", "hybrid", ["frozen", "two groups"]),
        ("hybrid", "static graph", ["frozen", "two groups"]),
        ("single_device", "deepspeed_stage_1", ["a group"]),
        ("single_device", "deepspeed_stage_3", ["a group"]),
    ],
)
def test_a_resumed_run_has_the_trainable_parameters_of_the_saved_one(
    before: str, after: str, names: list[str], tmp_path: Path
) -> None:  # I-03
    _on(before, _saved, names, before, str(tmp_path))
    for (name, step), weights in _on(after, _resumed, names, after, str(tmp_path)).items():
        turns, given = RESUMED[name]
        tolerance = 1e-5 if after.startswith("deepspeed") else 1e-6
        assert_near(weights, by_hand(Filtered(turns, **given)), f"{before} to {after}, {name}, {step}", tolerance)


# As in a run that freezes at the start, and unfreezes later.
BEGUN: Turns = {("on_train_start", 0): "-body", ("on_train_epoch_start", 3): "+body body"}
GIVEN: dict[str, Any] = {"held": "neck head", "frozen": ""}


def _frozen_again(strategy: str, path: str) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Save; resume with a hook that freezes again, and with one that adds an existing group."""
    _run(strategy, BEGUN, GIVEN, (6, path))
    found = []
    for turn in ("-body", "body"):
        with captured_warnings() as lines:
            weights = _run(strategy, {("on_train_start", 6): turn}, GIVEN, None, path)
        found.append((weights, lines))
    return found


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_freezing_at_the_start_of_a_resumed_run_is_undone_with_a_warning(strategy: str, tmp_path: Path) -> None:  # I-03
    (frozen, lines), (added, more) = _on(strategy, _frozen_again, strategy, str(tmp_path / "saved"))
    expected = by_hand(Phased(BEGUN, **GIVEN))
    assert_near(frozen, expected, "resumed")
    (line,) = [line for line in lines if "This was undone" in line]
    assert f"froze or unfroze 2 parameter(s): {BODY}" in line
    assert_near(added, expected, "resumed, the group added again")
    assert any("was not added again" in line for line in more)


def test_groups_of_zero_resume_under_other_strategies(tmp_path: Path) -> None:
    # Frozen parameters are not in ZeRO's flat tensors, and are in the optimizer of the resumed run.
    path = str(tmp_path / "saved")
    _on("deepspeed_stage_2", _run, "deepspeed_stage_2", {}, {}, (6, path))
    (group,) = load(path).optimizer_settings(0)
    assert group["params"] == ["net.neck.weight", "net.neck.bias", "net.head.weight", "net.head.bias"]
    found = _run("single_device", {("on_train_epoch_start", 6): "+body"}, {}, None, path)
    assert_near(found, by_hand(Phased({("on_train_epoch_start", 6): "+body"})), "resumed", 1e-5)


class RollBack(Callback):
    """Saves, unfreezes and adds a group, and goes back to the state before, once."""

    done = False

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.done:
            return
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 4:
            module.turn("+body", None)
            module.turn("body", None)
        if trainer.global_step == 6:
            self.done = True
            trainer.roll_back(self.path)


def _rolled_back(strategy: str, path: str) -> dict[str, torch.Tensor]:
    _, kind, options = STRATEGIES.get(strategy, (0, None, {}))
    module = Phased({}, held="neck head")
    fit = train(module, kind(**options) if kind else strategy, dealt({}), callbacks=[RollBack(path)])
    assert fit.global_step == 9
    assert len(fit.optimizers[0].param_groups) == 1
    return state(module)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_going_back_restores_the_trainable_parameters(strategy: str, tmp_path: Path) -> None:  # I-03
    found = _on(strategy, _rolled_back, strategy, str(tmp_path / "before"))
    assert_near(found, by_hand(Phased({}, held="neck head")), strategy)
