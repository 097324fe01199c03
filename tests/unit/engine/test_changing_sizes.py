"""A data set that grows or shrinks between epochs is read at its size of the epoch: S-03."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import FirstOfSeveral, Numbered, Tiny, fit, loader, numbers
from small_modules import calling
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.data import CombinedLoader


class Resizes(Callback):
    """Gives a data set the size of the epoch in a hook, and records the samples and the length of each epoch."""

    def __init__(self, data: Numbered, hook: str, sizes: tuple[int, ...]) -> None:
        self.data, self.sizes = data, sizes
        self.seen: dict[int, list[int]] = {}
        self.lengths: list[int | float] = []
        self.next = int(hook == "on_train_epoch_end")  # the size is the next epoch's
        setattr(self, hook, self.resize)

    def resize(self, trainer: Any, module: Any) -> None:
        if (epoch := trainer.current_epoch + self.next) < len(self.sizes):
            self.data.samples = self.sizes[epoch]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.lengths.append(trainer.num_training_batches)
        self.seen.setdefault(trainer.current_epoch, []).extend(numbers(batch[0] if isinstance(batch, list) else batch))


GROWS, SHRINKS = ("on_train_epoch_start", (4, 8, 11)), ("on_train_epoch_end", (11, 8, 4))


@pytest.mark.parametrize(
    ("build", "change"),
    [
        pytest.param(lambda data: {"shuffle": True}, GROWS, id="shuffled"),
        pytest.param(lambda data: {"shuffle": True}, SHRINKS, id="shuffled, shrinks"),
        pytest.param(lambda data: {"shuffle": True}, ("on_fit_start", (12,)), id="grows in on_fit_start"),
        pytest.param(lambda data: {"shuffle": True}, ("on_train_start", (12,)), id="grows in on_train_start"),
        pytest.param(lambda data: {}, GROWS, id="in order"),
        pytest.param(lambda data: {"shuffle": True, "num_workers": 1, "persistent_workers": True}, GROWS, id="workers"),
        pytest.param(lambda data: {"sampler": SequentialSampler(data)}, SHRINKS, id="sampler"),
        pytest.param(lambda data: {"sampler": DistributedSampler(data, 1, 0)}, GROWS, id="distributed sampler"),
    ],
)
def test_an_epoch_reads_the_data_set_at_its_size_of_that_epoch(build: Any, change: Any, tmp_path: Path) -> None:  # S-03
    hook, sizes = change
    data = Numbered(11 if change is SHRINKS else 4)
    resizes = Resizes(data, hook, sizes)
    trainer = fit(tmp_path, max_epochs=len(sizes), callbacks=resizes)
    trainer.fit(Tiny(), DataLoader(data, 2, **build(data)))
    assert {epoch: sorted(seen) for epoch, seen in resizes.seen.items()} == {
        epoch: list(range(size)) for epoch, size in enumerate(sizes)
    }
    assert resizes.lengths == [-(-size // 2) for size in sizes]
    assert trainer.global_step == sum(resizes.lengths)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "sequential"])
def test_a_combination_reads_each_loader_at_its_size(mode: str, tmp_path: Path) -> None:  # S-03
    data = Numbered(4)
    resizes = Resizes(data, "on_train_epoch_start", (4, 8))
    combined = CombinedLoader([DataLoader(data, 2, shuffle=True), loader(12, 2)], mode)
    fit(tmp_path, max_epochs=2, callbacks=resizes).fit(FirstOfSeveral(), combined)
    found = [sorted(set(resizes.seen[epoch])) for epoch in range(2)]
    assert found == ([list(range(12))] * 2 if mode == "sequential" else [list(range(4)), list(range(8))])
    assert resizes.lengths == {"min_size": [2, 4], "max_size_cycle": [6, 6], "sequential": [8, 10]}[mode]


def test_a_list_of_batches_that_grows_is_read_in_full(tmp_path: Path) -> None:  # S-03
    batches = [torch.tensor([[float(index), 1.0]]) for index in range(2)]
    grows = calling("on_train_epoch_start", lambda trainer: batches.append(torch.ones(1, 2)))
    trainer = fit(tmp_path, max_epochs=2, callbacks=grows)
    trainer.fit(Tiny(), batches)
    assert (trainer.global_step, trainer.num_training_batches) == (3 + 4, 4)


def test_limits_intervals_and_estimates_follow_the_size(tmp_path: Path) -> None:  # S-03
    data, estimates, validated = Numbered(8), [], []
    options: dict[str, Any] = {"limit_train_batches": 0.5, "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    callbacks = [
        Resizes(data, "on_train_epoch_start", (8, 16, 32)),
        calling("on_train_batch_start", lambda trainer: estimates.append(trainer.estimated_stepping_batches)),
        calling("on_validation_start", lambda trainer: validated.append((trainer.current_epoch, trainer.batch_idx))),
    ]
    trainer = fit(tmp_path, max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(Tiny(), DataLoader(data, 2, shuffle=True), loader(2))
    assert trainer.global_step == 2 + 4 + 8
    assert list(dict.fromkeys(estimates)) == [2 * 3, 2 + 4 * 2, 2 + 4 + 8]
    assert validated == [(0, 1), (0, 2), (1, 2), (1, 4), (2, 4), (2, 8)]


@pytest.mark.parametrize(("stage", "name"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_reads_what_hooks_have_added(stage: str, name: str, tmp_path: Path) -> None:  # S-03
    data, lengths, module = Numbered(4), [], Tiny()

    def end(trainer: Any, module: Any) -> None:
        lengths.append(getattr(trainer, f"num_{stage.removesuffix('idate')}_batches"))

    hooks: dict[str, Any] = {f"on_{name}_epoch_start": lambda *_: setattr(data, "samples", 12), f"on_{name}_end": end}
    grows = LambdaCallback(**hooks)
    outputs = getattr(fit(tmp_path, callbacks=grows), stage)(module, DataLoader(data, 3))
    assert list(chain(*(outputs if stage == "predict" else module.evaluated))) == list(range(12))
    assert lengths == [[4]]


def test_a_resume_within_an_epoch_needs_the_size_of_that_epoch(tmp_path: Path) -> None:  # S-03, J-07
    def run(folder: str, size: int, hook: str = "on_train_epoch_start", start: Any = None) -> Any:
        data = Numbered(size)
        resizes = Resizes(data, hook, (4, 8, 12) if hook == "on_train_epoch_start" else (8, 8))
        saver = Checkpoint(tmp_path / folder, every_n_train_steps=1, save_top_k=-1)
        at_ends = Checkpoint(tmp_path / folder / "ends", save_top_k=-1)
        fit(tmp_path, max_epochs=3, callbacks=[resizes, saver, at_ends]).fit(
            Tiny(), DataLoader(data, 2, shuffle=True), ckpt_path=start
        )
        return resizes.seen

    whole = run("whole", 4)
    within, at_end = tmp_path / "whole" / "epoch=1-step=4", tmp_path / "whole" / "ends" / "epoch=1-step=6"
    with pytest.raises(ConfigurationError, match="began with 8 training samples, and now has 4"):
        run("a", 4, start=within)
    resumed = run("c", 8, start=within)
    assert resumed[1] == whole[1][4:]
    assert sorted(resumed[2]) == list(range(12))
    assert run("d", 4, "on_fit_start", within)[1] == whole[1][4:]
    assert run("e", 4, start=at_end)[2] == whole[2]


@pytest.mark.parametrize(
    ("sizes", "options", "named"),
    [
        ((4, 0), {}, "its size went from 4 to 0 samples"),
        ((4, 8), {"num_samples": 4}, r"RandomSampler\(num_samples=4\) of a data set that now has 8"),
    ],
)
def test_an_unusable_size_is_refused(sizes: Any, options: dict[str, Any], named: str, tmp_path: Path) -> None:  # S-03
    data = Numbered(4)
    resizes = Resizes(data, "on_train_epoch_start", sizes)
    with pytest.raises(ConfigurationError, match=named):
        fit(tmp_path, max_epochs=2, callbacks=resizes).fit(
            Tiny(), DataLoader(data, 2, sampler=RandomSampler(data, **options))
        )
