"""A resumed run has the trainable parameters and the parameter groups of the saved one: I-03."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import EPOCHS, GLOBAL, SAMPLES, Phased, Turns, by_hand, dealt, state, train
from small_runs import loader, quiet
from test_trainables import NEAR, assert_near
from torch import nn

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain.checkpoint import load
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks

PROGRAMS: dict[str, tuple[Turns, dict[str, Any]]] = {
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
    "static graph": (2, DDPStrategy, {"static_graph": True}),
    "fsdp": (2, FSDPStrategy, {"wrap": [nn.Linear]}),
    "hybrid": (4, FSDPStrategy, {"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": []}),
    "fsdp x tp": (4, FSDPStrategy, {"tensor_parallel": 2, "wrap": []}),
}
"""By name, the number of ranks and the strategy; other names are those of `Fit`."""


def _run(
    name: str, turns: Turns, given: dict[str, Any], save: tuple[int, str] | None = None, resume: str | None = None
) -> dict[str, torch.Tensor]:
    """Train and save at a step, or resume and train to the end."""
    _, kind, options = STRATEGIES.get(name, (0, None, {}))
    module = Filtered(turns, split="tp" in name, **given)
    stop, callbacks = (-1, []) if save is None else (save[0], [SaveAt(*save)])
    fit = quiet(strategy=kind(**options) if kind else name, max_epochs=EPOCHS, max_steps=stop, callbacks=callbacks)
    fit.fit(module, loader(SAMPLES, GLOBAL // dealt(options)), ckpt_path=resume)
    assert fit.global_step == (9 if save is None else stop)
    return state(module)


def _saved(names: list[str], strategy: str, folder: str) -> None:
    for name in names:
        for step in STEPS:
            turns, given = PROGRAMS[name]
            _run(strategy, turns, given, (step, f"{folder}/{name} {step}"))


def _resumed(names: list[str], strategy: str, folder: str) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    return {
        (name, step): _run(strategy, {}, PROGRAMS[name][1], None, f"{folder}/{name} {step}")
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
        ("single_device", "single_device", list(PROGRAMS)),
        ("single_device", "fsdp x tp", ["frozen", "two groups"]),
        ("ddp", "fsdp", ["frozen", "two groups", "what trains, as a filter"]),
        ("fsdp", "ddp", ["frozen", "two groups", "a group, by the step"]),
        ("fsdp x tp", "hybrid", ["frozen", "two groups"]),
        ("hybrid", "static graph", ["frozen", "two groups"]),
    ],
)
def test_a_resumed_run_has_the_trainable_parameters_of_the_saved_one(
    before: str, after: str, names: list[str], tmp_path: Path
) -> None:  # I-03
    _on(before, _saved, names, before, str(tmp_path))
    for (name, step), weights in _on(after, _resumed, names, after, str(tmp_path)).items():
        turns, given = PROGRAMS[name]
        assert_near(weights, by_hand(Filtered(turns, **given)), f"{before} to {after}, {name}, {step}")


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
    assert "froze or unfroze 2 parameter(s): 'net.body.weight', 'net.body.bias'" in line
    assert_near(added, expected, "resumed, the group added again")
    assert any("was not added again" in line for line in more)


def test_groups_of_zero_resume_under_other_strategies(tmp_path: Path) -> None:
    """Frozen parameters are not in ZeRO's flat tensors, and are in the optimizer of the resumed run."""
    path = str(tmp_path / "saved")
    _on("deepspeed_stage_2", _run, "deepspeed_stage_2", {}, {}, (6, path))
    (group,) = load(path).optimizer_settings(0)
    assert group["params"] == ["net.neck.weight", "net.neck.bias", "net.head.weight", "net.head.bias"]
    found = _run("single_device", {("on_train_epoch_start", 6): "+body"}, {}, None, path)
    expected = by_hand(Phased({("on_train_epoch_start", 6): "+body"}))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, **{**NEAR, "atol": 1e-5}), name


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_resumes_with_a_group_added_under_another_strategy(stage: int, tmp_path: Path) -> None:  # I-03
    turns: Turns = {("on_train_epoch_start", 3): "+body body"}
    path = str(tmp_path / "saved")
    _run("single_device", turns, {"held": "neck head"}, (6, path))
    zero = f"deepspeed_stage_{stage}"
    found = _on(zero, _run, zero, {}, {"held": "neck head"}, None, path)
    for name, value in by_hand(Phased(turns, held="neck head")).items():
        assert torch.allclose(found[name], value, atol=1e-5, rtol=1e-5), name


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
