"""The trainable parameters may change within a run, under every strategy, and a resumed run has them: I-03."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from phased_training import Phased, Turns, by_hand, data_ranks, state, train
from small_runs import SaveAt, each, failing
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
BODY = "'net.body.weight', 'net.body.bias'"


def _ddp_with_a_state_of_the_users() -> DDPStrategy:
    return DDPStrategy(comm_hook=(powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook))


UNITS: dict[str, Any] = {"wrap": [nn.Linear]}
STRATEGIES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "ddp": (2, DDPStrategy, {}),
    "ddp, static graph": (2, DDPStrategy, {"static_graph": True}),
    "ddp, find unused": (2, DDPStrategy, {"find_unused_parameters": True}),
    "ddp, powersgd": (2, DDPStrategy, {"comm_hook": "powersgd"}),
    "ddp, a hook": (2, DDPStrategy, {"comm_hook": default_hooks.allreduce_hook}),
    "ddp, a state of the user's": (2, _ddp_with_a_state_of_the_users, {}),
    "fsdp, one unit": (2, FSDPStrategy, {}),
    "fsdp, a unit a layer": (2, FSDPStrategy, UNITS),
    "fsdp, grad_op": (2, FSDPStrategy, {"sharding": "grad_op", **UNITS}),
    "fsdp, a layer whole": (2, FSDPStrategy, {"ignored": ["net.body.*"]}),
    "hybrid": (4, FSDPStrategy, {"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": []}),
    "tensor parallel": (4, FSDPStrategy, {"tensor_parallel": 2, "wrap": []}),
}
"""By name, the number of ranks and the strategy; other names are those of `Fit`, on two ranks."""


class Result(NamedTuple):
    state: dict[str, torch.Tensor]
    error: str
    steps: int
    warned: list[str]


def _train(strategy: str, kind: type[Phased], turns: Turns, given: Any, settings: Any) -> Result:
    _, build, options = STRATEGIES.get(strategy, (2, None, {}))
    module = kind(turns, split="tensor_parallel" in options, **given)
    with captured_warnings() as lines, failing() as error:
        train(module, build(**options) if build else strategy, data_ranks(options), **settings)
    text = f"{error['type']}: {error['text']}" if error["text"] else ""
    return Result({} if text else state(module), text, module.global_step, lines)


def run(strategy: str, turns: Turns, given: Any = None, kind: Any = Phased, **settings: Any) -> Sequence[Result]:
    """Train on the strategy's ranks; return their results."""
    return run_each(strategy, (kind, turns, given or {}, settings))[0]


def run_each(strategy: str, *cases: tuple[type[Phased], Turns, Any, Any]) -> list[Sequence[Result]]:
    """Train for each case; return for each the results of the ranks."""
    calls = [(strategy, *case) for case in cases]
    if strategy == "single_device":
        return [[_train(*call)] for call in calls]
    ranks = STRATEGIES.get(strategy, (2,))[0]
    return list(zip(*on_ranks(each, ranks, _train, *calls, process_group=None, timeout=240), strict=True))


def assert_as_by_hand(found: Sequence[Result], module: Phased, what: object = "", atol: float = 1e-6) -> None:
    """Assert that all ranks have the weights of the hand-written loop, bit for bit the same ones."""
    first, *others = found
    assert first.error == "", what
    for name, value in by_hand(module).items():
        difference = float((first.state[name] - value).abs().max())
        assert torch.allclose(first.state[name], value, atol=atol, rtol=1e-5), f"{what}: {name}: {difference:.2e} off"
        assert all(torch.equal(first.state[name], other.state[name]) for other in others), f"{what}: {name}"


@pytest.mark.parametrize(
    ("turns", "given"),
    [
        *[pytest.param(*program, id=name) for name, program in PROGRAMS.items()],
        pytest.param({("training_step", 2): "+body", ("on_after_backward", 5): "-neck"}, {}, id="within a step"),
    ],
)
def test_one_device_equals_the_hand_written_loop(turns: Turns, given: dict[str, Any]) -> None:  # I-03
    assert_as_by_hand(run("single_device", turns, given), Phased(turns, **given))


@pytest.mark.parametrize(
    ("strategy", "which"),
    [
        *[("ddp", "all"), ("ddp, static graph", "few"), ("ddp, find unused", "few"), ("ddp", "manual")],
        *[("fsdp, one unit", "few"), ("fsdp, a unit a layer", "all"), ("fsdp, grad_op", "few")],
        *[("fsdp, a layer whole", "few"), ("fsdp, a unit a layer", "manual")],
        *[("hybrid", "few"), ("tensor parallel", "few")],
    ],
)
def test_ranks_stay_equal_and_equal_the_hand_written_loop(strategy: str, which: str) -> None:  # I-03
    names = {"all": list(PROGRAMS), "few": FEW, "manual": MANUAL}[which]
    programs, manual = [PROGRAMS[name] for name in names], which == "manual"
    results = run_each(strategy, *[(Phased, turns, {**given, "manual": manual}, {}) for turns, given in programs])
    for name, (turns, given), found in zip(names, programs, results, strict=True):
        assert_as_by_hand(found, Phased(turns, **given), name)


UNFREEZING = Program(
    net=Net(frozen="body"),
    data=Data(samples=12),
    epochs=3,
    changes=(Change(part="body"), Change("freeze", "head", epoch=2)),
)
CHANGED: list[dict[str, Any]] = [
    {"accumulate": 2},
    *[{"precision": precision} for precision in ("bf16-mixed", "bf16-true", "16-mixed")],
]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_static_graph", "fsdp"])
@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_windows_and_lower_precisions_equal_the_plain_loop(strategy: str, changed: dict[str, Any]) -> None:  # I-03
    assert not check(replace(UNFREEZING, strategy=strategy, ranks=2, **changed))


class Looking(Phased):
    """Accepts gradients in float32 only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert {one.grad.dtype for one in self.parameters() if one.grad is not None} == {torch.float32}


def test_a_unit_that_was_frozen_is_reduced_in_the_dtype_of_the_others() -> None:  # I-03
    for result in run("fsdp, a unit a layer", UNFROZEN, kind=Looking, precision="bf16-mixed"):
        assert (result.error, result.steps) == ("", 9)


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


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", list(WITHIN)),
        ("ddp, static graph", list(WITHIN)[:-2]),
        ("ddp, find unused", list(WITHIN)[-4:]),
        ("fsdp, one unit", list(WITHIN)[:-2]),
        ("fsdp, a unit a layer", list(WITHIN)),
        ("hybrid", ["unfrozen in training_step", "in an open window"]),
        ("tensor parallel", ["unfrozen in training_step"]),
    ],
)
def test_a_change_within_a_window_is_refused(strategy: str, names: list[str]) -> None:  # I-03
    results = run_each(strategy, *[(Phased, *WITHIN[name]) for name in names])
    for name, found in zip(names, results, strict=True):
        ((_, step), turn), *_ = WITHIN[name][0].items()
        layer = "head" if turn == "new" else turn[1:]
        named = "add_param_group" if name == "a group" else f"'net.{layer}.weight', 'net.{layer}.bias'"
        for result in found:
            assert result.error.startswith(("ConfigurationError", "RankFailedError")), (name, result.error)
            assert "within training_step or an open accumulation window" in result.error, (name, result.error)
            assert named in result.error, (name, result.error)
            assert result.steps == step, name


def _train_hurried(*call: Any) -> Result:
    with mock.patch.object(trainables, "_CHANGE_TIMEOUT", timedelta(seconds=1)):
        return _train(*call)


@pytest.mark.parametrize(
    ("strategy", "place", "absent"),
    [
        ("ddp", "on_train_epoch_start", "[0]"),
        ("ddp", "on_train_batch_end", "[0]"),
        ("fsdp, one unit", "on_train_epoch_start", "[0]"),
        ("hybrid", "on_train_epoch_start", "[0, 2, 3]"),
    ],
)
def test_a_change_on_one_rank_is_named(strategy: str, place: str, absent: str) -> None:  # I-03
    call: Any = (strategy, Phased, {(place, 3): "+body"}, {"only_on": 1}, {})
    for result in on_ranks(_train_hurried, STRATEGIES[strategy][0], *call, process_group=None):
        assert result.error.startswith(("AbsentRanksError", "RankFailedError", "DistributedError")), result.error
        assert f"a change of the trainable parameters ({BODY} unfrozen" in result.error
        assert f"rank(s) {absent}" in result.error


class Differing(Phased):
    """Freezes another layer on rank 1."""

    def turn(self, turn: str, optimizer: Any) -> None:
        super().turn("-neck" if self.global_rank == 1 else turn, optimizer)


DIFFERENT = (
    "\"a change of the trainable parameters ('net.body.weight'",
    "on rank(s) [0]; \"a change of the trainable parameters ('net.neck.weight'",
    "on rank(s) [1]",
)
NEW: Turns = {("on_train_epoch_start", 3): "new"}
CREATED = "A layer was created within a run, under FSDP: 'net.head.weight', 'net.head.bias'"
ZERO: list[Any] = [
    (Phased, UNFROZEN, {}, f"2 parameter(s) were unfrozen within a run, under DeepSpeed: {BODY}"),
    (Phased, {("on_train_epoch_start", 3): "-neck"}, {"frozen": ""}, "2 parameter(s) were frozen within a run"),
    (Phased, {("on_train_epoch_start", 3): "+body body"}, {"held": "neck head"}, "add_param_group on "),
    (Phased, NEW, {}, "parameter(s) were created within a run, under DeepSpeed"),
    (Phased, {("training_step", 3): "+body"}, {}, "was changed within training_step or an open"),
]


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("ddp", [(Differing, UNFROZEN, {}, *DIFFERENT)]),
        *[(strategy, [(Phased, NEW, {}, CREATED)]) for strategy in ("fsdp, one unit", "hybrid", "tensor parallel")],
        *[(f"deepspeed_stage_{stage}", ZERO) for stage in (1, 2, 3)],
    ],
)
def test_a_change_that_a_strategy_cannot_follow_is_refused_before_a_step(strategy: str, cases: Any) -> None:  # I-03
    results = run_each(strategy, *[(*case[:3], {}) for case in cases])
    for (_, _, _, *words), found in zip(cases, results, strict=True):
        for result in found:
            assert result.error.startswith(("ConfigurationError", "RankFailedError", "DistributedError"))
            assert all(part in result.error for part in words), result.error
            assert result.steps == 3


class Headed(Phased):
    """Gets another head during the run, with different values on each rank."""

    def turn(self, turn: str, optimizer: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(100 + (0 if self._trainer is None else self.global_rank))
            super().turn("new", optimizer)
        optimizer = self.optimizers() if optimizer is None else optimizer
        optimizer.add_param_group({"params": list(self.net.head.parameters()), "lr": 0.01})


@pytest.mark.parametrize("strategy", ["ddp", "ddp, static graph", "ddp, find unused"])
def test_a_layer_created_in_mid_run_has_the_values_of_rank_0(strategy: str) -> None:  # I-03
    assert_as_by_hand(run(strategy, UNFROZEN, kind=Headed), Headed(UNFROZEN))


def test_a_communication_hook_restarts_after_a_change_unless_the_user_holds_its_state() -> None:  # I-03
    for strategy in ("ddp, powersgd", "ddp, a hook"):
        assert_as_by_hand(run(strategy, UNFROZEN), Phased(UNFROZEN), strategy)
    for result in run("ddp, a state of the user's", UNFROZEN):
        assert "with a comm_hook that has a PowerSGDState" in result.error


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
        (lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=20), "OneCycleLR"),
        (lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3), "CosineAnnealingWarmRestarts"),
        (lambda one: lr_scheduler.SequentialLR(one, [lr_scheduler.StepLR(one, 2)] * 2, [2]), "SequentialLR"),
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


class Stray(Phased):
    """Adds a group of foreign parameters."""

    def turn(self, turn: str, optimizer: Any) -> None:
        before = len(self.optimizers().param_groups)
        with failing() as error:
            self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert "a parameter of shape (3,) that is not the module's" in error["text"]
        assert len(self.optimizers().param_groups) == before


def test_a_group_of_foreign_parameters_is_refused_and_not_added() -> None:
    (result,) = run("single_device", {("on_train_epoch_start", 3): "."}, kind=Stray)
    assert (result.error, result.steps) == ("", 9)


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


def saving(step: int, path: object) -> dict[str, Any]:
    return {"max_steps": step, "callbacks": [SaveAt(step, str(path))]}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("single_device", "single_device", list(RESUMED)),
        ("single_device", "tensor parallel", ["frozen", "two groups"]),
        ("ddp", "fsdp, a unit a layer", ["frozen", "two groups", "what trains, as a filter"]),
        ("fsdp, a unit a layer", "ddp", ["frozen", "two groups", "a group, by the step"]),
        ("tensor parallel", "hybrid", ["frozen", "two groups"]),
        ("hybrid", "ddp, static graph", ["frozen", "two groups"]),
        ("single_device", "deepspeed_stage_1", ["a group"]),
        ("single_device", "deepspeed_stage_3", ["a group"]),
    ],
)
def test_a_resumed_run_has_the_trainable_parameters_of_the_saved_one(
    before: str, after: str, names: list[str], tmp_path: Path
) -> None:  # I-03
    cases = [(*RESUMED[name], step, str(tmp_path / f"{name} {step}")) for name in names for step in STEPS]
    run_each(before, *[(Filtered, turns, given, saving(step, path)) for turns, given, step, path in cases])
    resumed = run_each(after, *[(Filtered, {}, given, {"resume": path}) for _, given, _, path in cases])
    for (turns, given, _, path), found in zip(cases, resumed, strict=True):
        assert found[0].steps == 9
        assert_as_by_hand(found, Filtered(turns, **given), path, 1e-5 if after.startswith("deepspeed") else 1e-6)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp, a unit a layer"])
def test_freezing_at_the_start_of_a_resumed_run_is_undone_with_a_warning(strategy: str, tmp_path: Path) -> None:  # I-03
    turns: Turns = {("on_train_start", 0): "-body", ("on_train_epoch_start", 3): "+body body"}
    given: Any = {"held": "neck head", "frozen": ""}
    path = str(tmp_path / "saved")
    run(strategy, turns, given, **saving(6, path))
    again: list[Turns] = [{("on_train_start", 6): turn} for turn in ("-body", "body")]
    frozen, added = run_each(strategy, *[(Phased, turn, given, {"resume": path}) for turn in again])
    for found in (frozen, added):
        assert_as_by_hand(found, Phased(turns, **given))
    (line,) = [line for line in frozen[0].warned if "This was undone" in line]
    assert f"froze or unfroze 2 parameter(s): {BODY}" in line
    assert any("was not added again" in line for line in added[0].warned)


def test_groups_of_zero_resume_under_other_strategies(tmp_path: Path) -> None:
    # Frozen parameters are not in ZeRO's flat tensors, and are in the optimizer of the resumed run.
    path, turns = str(tmp_path / "saved"), {("on_train_epoch_start", 6): "+body"}
    run("deepspeed_stage_2", {}, **saving(6, path))
    (group,) = load(path).optimizer_settings(0)
    assert group["params"] == ["net.neck.weight", "net.neck.bias", "net.head.weight", "net.head.bias"]
    assert_as_by_hand(run("single_device", turns, resume=path), Phased(turns), atol=1e-5)


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

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert len(trainer.optimizers[0].param_groups) == 1


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp, a unit a layer"])
def test_going_back_restores_the_trainable_parameters(strategy: str, tmp_path: Path) -> None:  # I-03
    found = run(strategy, {}, {"held": "neck head"}, callbacks=[RollBack(str(tmp_path / "before"))])
    assert found[0].steps == 9
    assert_as_by_hand(found, Phased({}, held="neck head"))
