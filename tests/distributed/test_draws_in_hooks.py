"""What hooks draw at random is the same on all ranks, and steps draw as before: S-10."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import loader, quiet
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)


class Net(TrainModule):
    """Records the numbers that its steps draw."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.draws = draws
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.draws:
            self.drawn.append(float(torch.rand(()) + random.random() + np.random.rand()))
        return nn.functional.mse_loss(self.head(self.body(batch[0]).tanh()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def again(module: Any) -> None:
    """Draw the head again from the generators of torch, Python and NumPy."""
    with torch.no_grad():
        nn.init.normal_(module.head.weight).mul_(random.random() + float(np.random.rand()))


class Reset(Callback):
    """Draws the head again in the hooks with the given names."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, lambda trainer, module, *_: again(module))


def _whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
    }


def _trained(
    names: tuple[str, ...], seed: int | None = 0, strategy: str = "ddp", devices: int = 2, draws: bool = True
) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = Net(draws)
    batch_size = 4 // devices
    fit = quiet(strategy=strategy, devices=devices, seed=seed, max_epochs=2, callbacks=[Reset(*names)])
    fit.fit(module, loader(16, batch_size), loader(4, batch_size))
    return _whole(module), module.drawn


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("name", HOOKS)
def test_a_layer_drawn_again_in_a_hook_is_the_same_on_all_ranks(name: str, seed: int | None) -> None:  # S-10
    (first, drawn), (second, other_drawn) = on_ranks(_trained, 2, (name,), seed, process_group=None)
    assert all(torch.equal(first[key], second[key]) for key in first)
    if seed is not None:
        assert not set(drawn) & set(other_drawn)


def test_a_layer_drawn_before_the_first_batch_is_that_of_a_single_process() -> None:  # S-10
    names = ("on_fit_start", "on_train_start")  # before loaders have drawn, which do so from the numbers of steps
    ((alone, _),) = on_ranks(_trained, 1, names, 0, "auto", 1, False, process_group=None)
    for found, _ in on_ranks(_trained, 2, names, 0, "ddp", 2, False, process_group=None):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)


def test_steps_draw_what_they_draw_without_hooks() -> None:  # S-10
    with_hooks = on_ranks(_trained, 2, HOOKS, process_group=None)
    without = on_ranks(_trained, 2, (), process_group=None)
    assert [drawn for _, drawn in with_hooks] == [drawn for _, drawn in without]


def _seeded(seed: int) -> list[float]:
    drawn: list[float] = []

    class Drawing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn.append(float(torch.rand(())))
            return super().training_step(batch, batch_idx)

    seeding = LambdaCallback(on_train_start=lambda trainer, module: torch.manual_seed(9))
    quiet(strategy="ddp", devices=2, callbacks=[seeding], seed=seed).fit(Drawing(False), loader(8, 2))
    return drawn


def test_a_hook_that_seeds_the_generators_seeds_the_steps() -> None:  # S-10
    assert on_ranks(_seeded, 2, 0, process_group=None) == on_ranks(_seeded, 2, 1, process_group=None)


@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", "deepspeed_stage_2"])
def test_replicas_of_zero_are_drawn_alike(strategy: str) -> None:  # S-10
    (first, _), (second, _) = on_ranks(_trained, 2, ("on_fit_start",), 0, strategy, process_group=None)
    assert all(torch.equal(first[key], second[key]) for key in first)


def _local_parts(sharding: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []

    class Kept(Callback):
        priority = -100

        def on_train_end(self, trainer: Any, module: Any) -> None:
            parts.append(module.body.weight.to_local().clone())
            parts.append(module.body.weight.full_tensor().clone())

    def draw(trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            nn.init.normal_(module.body.weight)

    reset = LambdaCallback(**{name: draw})  # type: ignore[arg-type]
    fit = quiet(
        strategy=FSDPStrategy(sharding=sharding, replicate_size=2), devices=4, seed=0, callbacks=[reset, Kept()]
    )
    fit.fit(Net(), loader(16, 1))
    return parts[0], parts[1]


@pytest.mark.parametrize("name", ["on_fit_start", "on_train_batch_end"])
def test_shards_are_drawn_apart_and_their_replicas_alike(name: str) -> None:  # S-10
    parts = on_ranks(_local_parts, 4, "hybrid", name, process_group=None)
    for _, whole in parts[1:]:
        assert torch.equal(whole, parts[0][1])
    distinct = {tuple(local.flatten().tolist()) for local, _ in parts}
    rows = parts[0][1].tolist()
    assert len({tuple(row) for row in rows}) == len(rows)
    assert len(distinct) < 4


def _resumed(folder: Path, resumes: bool) -> dict[str, torch.Tensor]:
    class Dropping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((nn.functional.dropout(batch[0]), batch[1]), batch_idx)

    module = Dropping()
    callbacks = [
        Reset("on_train_batch_end", "on_train_epoch_start"),
        Checkpoint(folder, every_n_train_steps=3, save_top_k=-1),
    ]
    fit = quiet(strategy="ddp", devices=2, seed=0, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    saved = sorted(path for path in folder.glob("*step=3*"))
    fit.fit(module, loader(20, 2), ckpt_path=saved[0] if resumes else None)
    return {**_whole(module), "drawn": torch.tensor(module.drawn[-2:])}


def test_a_resumed_run_draws_in_hooks_what_the_whole_run_draws(tmp_path: Path) -> None:  # S-10
    whole = on_ranks(_resumed, 2, tmp_path, False, process_group=None)
    resumed = on_ranks(_resumed, 2, tmp_path, True, process_group=None)
    for found, wanted in zip(resumed, whole, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _saved_in_hook(folder: Path, saves: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = Net()

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        again(module)
        if saves and batch_idx == 1:
            trainer.save_checkpoint(folder / "in a hook")

    callback = LambdaCallback(on_train_batch_end=save)
    fit = quiet(strategy="ddp", devices=2, seed=0, max_epochs=1, callbacks=[callback])
    fit.fit(module, loader(16, 2), ckpt_path=None if saves else folder / "in a hook")
    return _whole(module), module.drawn[-2:]


def test_a_checkpoint_that_a_hook_saves_has_the_states_of_steps_and_of_hooks(tmp_path: Path) -> None:  # S-10
    whole = on_ranks(_saved_in_hook, 2, tmp_path, True, process_group=None)
    resumed = on_ranks(_saved_in_hook, 2, tmp_path, False, process_group=None)
    for (found, drawn), (wanted, wanted_drawn) in zip(resumed, whole, strict=True):
        assert drawn == wanted_drawn
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
