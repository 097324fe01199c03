"""Random numbers that hooks between steps draw are the same on all ranks of DDP; those within steps differ (S-10)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small_runs import Regression, loader, quiet

from drivetrain import Callback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"]
HOOKS += ["on_validation_end", "on_train_end"]


class Draws(Callback):
    """Initializes the layer again in one hook, and keeps what it draws in Python and NumPy."""

    def __init__(self, hook: str, seeds: bool = False) -> None:
        self.drawn: list[tuple[float, ...]] = []

        def draw(trainer: Any, module: Any, *arguments: Any) -> None:
            if seeds:
                torch.manual_seed(100 + trainer.global_rank)
            if module.layer is not None:
                torch.nn.init.normal_(module.layer.weight)
                self.initial = module.layer.weight.detach().clone()
            self.drawn.append((random.random(), float(numpy.random.rand())))

        setattr(self, hook, draw)


class Noisy(Regression):
    """Draws in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.net[0]
        self.noise: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.noise.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _run(strategy: str, hook: str, seeds: bool = False) -> dict[str, Any]:
    module, draws, other = Noisy(), Draws(hook, seeds), Draws(hook)
    before = module.layer.weight.detach().clone()
    trainer = quiet(strategy=strategy, callbacks=[draws, other], max_epochs=2, seed=3)
    trainer.fit(module, loader(32, 4), loader(8, 4))
    changed = not torch.equal(before, module.layer.weight.detach())
    return {
        "weights": module.layer.weight.detach(),
        "initial": getattr(other, "initial", None),
        "drawn": draws.drawn,
        "other": other.drawn,
        "noise": module.noise,
    } | {"changed": changed}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_layer_that_a_hook_initializes_is_the_same_on_all_ranks(hook: str) -> None:
    first, second = on_ranks(_run, 2, "ddp", hook)
    assert first["changed"]
    assert torch.equal(first["weights"], second["weights"])
    assert first["drawn"] == second["drawn"]
    assert len(set(first["drawn"])) == len(first["drawn"])  # of every call others
    assert not set(first["drawn"]) & set(first["other"])  # and of every callback
    assert not set(first["noise"]) & set(second["noise"])


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_layer_that_a_hook_initializes_before_the_first_batch_is_that_of_one_process(hook: str) -> None:
    def first(run: dict[str, Any]) -> tuple[Any, Any]:
        return run["drawn"][0], run["other"][0]

    (one,) = on_ranks(_run, 1, "single_device", hook)
    assert [first(each) for each in on_ranks(_run, 2, "ddp", hook)] == [first(one)] * 2
    if hook != "on_train_epoch_start":  # later epochs draw other numbers
        assert torch.equal(one["initial"], on_ranks(_run, 2, "ddp", hook)[1]["initial"])


def test_steps_draw_as_without_hooks() -> None:
    plain = on_ranks(_run, 2, "ddp", "on_nothing")
    drawing = on_ranks(_run, 2, "ddp", "on_train_batch_end")
    assert [each["noise"] for each in plain] == [each["noise"] for each in drawing]


def test_a_hook_that_seeds_is_obeyed() -> None:
    seeding = on_ranks(_run, 2, "ddp", "on_train_start", True)
    drawing = on_ranks(_run, 2, "ddp", "on_train_start")
    for one, other in zip(seeding, drawing, strict=True):
        assert not set(one["noise"]) & set(other["noise"])


def _resume(path: str) -> list[torch.Tensor]:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
            if trainer.global_step == 5:
                trainer.defer_save(lambda: trainer.write_checkpoint(path))

    found = []
    for callbacks, ckpt_path in (([Saves()], None), ([], path)):
        module = Noisy()
        quiet(strategy="ddp", callbacks=[Draws("on_train_batch_end"), *callbacks], max_epochs=2, seed=3).fit(
            module, loader(32, 4), ckpt_path=ckpt_path
        )
        found.append(module.layer.weight.detach())
    return found


def test_draws_in_hooks_are_the_same_after_a_resume(tmp_path: Path) -> None:
    for whole, resumed in on_ranks(_resume, 2, str(tmp_path / "saved")):
        assert torch.equal(whole, resumed)


def _local_parts(strategy: str, hook: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts: list[torch.Tensor] = []

    class Keeps(Callback):
        priority = -1

        def on_train_end(self, trainer: Any, module: Any) -> None:
            weight: Any = module.layer.weight
            parts.extend((weight.to_local().detach().clone(), weight.full_tensor().detach()))

    options: dict[str, Any] = {"replicate_size": 2} if strategy == "hsdp" else {}
    quiet(
        strategy=FSDPStrategy(sharding="hybrid" if options else "full", **options),
        callbacks=[Draws(hook), Keeps()],
        seed=3,
    ).fit(Noisy(), loader(16, 1))
    return parts[0], parts[1]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end"])
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_shards_are_drawn_apart_and_their_replicas_alike(strategy: str, ranks: int, hook: str) -> None:
    # S-10
    parts = on_ranks(_local_parts, ranks, strategy, hook)
    whole = parts[0][1]
    assert all(torch.equal(other, whole) for _, other in parts)
    assert len({tuple(row) for row in whole.tolist()}) == len(whole)
    assert len({tuple(local.flatten().tolist()) for local, _ in parts}) == 2
