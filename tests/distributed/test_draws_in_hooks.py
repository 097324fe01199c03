"""Random numbers that hooks between steps draw are the same on all ranks of DDP; those within steps differ (S-10)."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small_runs import Regression, each, loader, quiet, trained

from drivetrain import Callback
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import SaveRequest
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

BEFORE = ["on_fit_start", "on_train_start", "on_train_epoch_start"]


class Draws(Callback):
    """Initializes the layer again in one hook, and keeps what it draws in Python and NumPy."""

    def __init__(self, hook: str, seeds: bool = False) -> None:
        self.drawn: list[tuple[float, ...]] = []

        def draw(trainer: Any, module: Any, *arguments: Any) -> None:
            if seeds:
                torch.manual_seed(100 + trainer.global_rank)
            torch.nn.init.normal_(module.net[0].weight)
            self.initial = module.net[0].weight.detach().clone()
            self.drawn.append((random.random(), float(numpy.random.rand())))

        setattr(self, hook, draw)


class Noisy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.noise: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.noise.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _run(strategy: str, hook: str, seeds: bool = False) -> dict[str, Any]:
    module, draws, other = Noisy(), Draws(hook, seeds), Draws(hook)
    trainer = quiet(strategy=strategy, callbacks=[draws, other], max_epochs=2, seed=3)
    trainer.fit(module, loader(32, 4), loader(8, 4))
    found = {"drawn": draws.drawn, "other": other.drawn, "noise": module.noise}
    return {**found, "weights": module.net[0].weight.detach(), "initial": getattr(other, "initial", None)}


def _stacks_of_a_run(batches: int) -> int:
    formatted: list[Any] = []

    def format_stack(*arguments: Any) -> list[str]:
        formatted.append(arguments)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "format_stack", format_stack)
        trained(Regression(), loader(4 * batches, 4), strategy="ddp", callbacks=[Draws("on_train_batch_end")])
    return len(formatted)


def test_seeding_for_a_hook_of_a_step_formats_no_stack() -> None:  # H-01
    # `torch.manual_seed` does, for each kind of accelerator that is not initialised.
    for few, many in on_ranks(each, 2, _stacks_of_a_run, (4,), (12,)):
        assert few == many


@pytest.mark.parametrize("hook", [*BEFORE, "on_train_batch_end", "on_validation_end", "on_train_end"])
def test_a_layer_that_a_hook_initializes_is_the_same_on_all_ranks(hook: str) -> None:  # S-10
    first, second = on_ranks(_run, 2, "ddp", hook)
    assert first["initial"] is not None
    assert torch.equal(first["initial"], second["initial"])
    assert torch.equal(first["weights"], second["weights"])
    assert first["drawn"] == second["drawn"]
    assert len(set(first["drawn"])) == len(first["drawn"])  # of every call others
    assert not set(first["drawn"]) & set(first["other"])  # and of every callback
    assert not set(first["noise"]) & set(second["noise"])
    if hook in BEFORE:  # those of one process
        (one,) = on_ranks(_run, 1, "single_device", hook)
        assert (first["drawn"][0], first["other"][0]) == (one["drawn"][0], one["other"][0])
        if hook != "on_train_epoch_start":  # later epochs draw other numbers
            assert torch.equal(one["initial"], first["initial"])


def test_steps_draw_as_without_hooks_unless_a_hook_seeds() -> None:  # S-10
    plain, drawing = (on_ranks(_run, 2, "ddp", hook) for hook in ("on_nothing", "on_train_batch_end"))
    assert [each["noise"] for each in plain] == [each["noise"] for each in drawing]
    for one, other in zip(on_ranks(_run, 2, "ddp", "on_train_start", True), plain, strict=True):
        assert not set(one["noise"]) & set(other["noise"])


def _trained(path: str, ckpt_path: str | None) -> torch.Tensor:
    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save(SaveRequest(path))

    callbacks = [Draws("on_train_batch_end"), LambdaCallback(on_train_batch_end=save)]
    options: dict[str, Any] = {"strategy": "ddp", "callbacks": callbacks, "max_epochs": 2, "seed": 3}
    return trained(Noisy(), loader(32, 4), ckpt_path=ckpt_path, **options)


def test_draws_in_hooks_are_the_same_after_a_resume(tmp_path: Path) -> None:  # S-10
    path = str(tmp_path / "saved")
    for whole, resumed in on_ranks(each, 2, _trained, (path, None), (path, path)):
        assert torch.equal(whole, resumed)


def _parts(hook: str, options: dict[str, Any]) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []

    def keep(trainer: Any, module: Any) -> None:
        weight = module.net[0].weight
        parts.extend([weight.to_local().detach().clone(), weight.full_tensor().detach()])

    callbacks = [Draws(hook), LambdaCallback(priority=-1, on_train_end=keep)]
    quiet(strategy=FSDPStrategy(**options), callbacks=callbacks, seed=3).fit(Noisy(), loader(16, 1))
    return parts


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {"sharding": "hybrid", "replicate_size": 2})])
def test_shards_are_drawn_apart_and_their_replicas_alike(ranks: int, options: Any) -> None:  # S-10
    cases = [(hook, options) for hook in ("on_fit_start", "on_train_end")]
    for parts in zip(*on_ranks(each, ranks, _parts, *cases), strict=True):
        whole = parts[0][1]
        assert all(torch.equal(other, whole) for _, other in parts)
        assert len({tuple(row) for row in whole.tolist()}) == len(whole)
        assert len({tuple(local.flatten().tolist()) for local, _ in parts}) == 2
