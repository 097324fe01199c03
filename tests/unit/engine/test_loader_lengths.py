"""A wrong loader length drops no data (I-04); data that changes its size is read at its size of the epoch (S-03)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import FirstOfSeveral, Numbered, Tiny, fit, loader, numbers, stream
from small_modules import calling, tiny
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.data import CombinedLoader
from wrong_lengths import Batches


class Sharded(IterableDataset[torch.Tensor]):
    """Splits its samples over workers, which torch's estimate of its batches ignores."""

    def __init__(self, samples: int, stated: int | None = None) -> None:
        self.samples, self.stated = samples, stated or samples

    def __len__(self) -> int:
        return self.stated

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.tensor([float(index), 1.0]) for index in range(first, self.samples, step))


class Listed(Batches):
    def __iter__(self) -> Any:
        return iter(loader(self.samples))


def sampled(samples: int, length: int) -> DataLoader[Any]:
    return DataLoader(Numbered(samples), batch_sampler=Batches(samples, length))


def warned(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if "proved wrong" in one.getMessage()]


WRONG: dict[str, Any] = {  # how it is built; its samples, stated length and batches
    "a sharded iterable with workers": (lambda: DataLoader(Sharded(20), 4, num_workers=2), 20, 5, 6),
    "a batch sampler of too short a length": (lambda: sampled(20, 6), 20, 6, 10),
    "a batch sampler of too long a length": (lambda: sampled(20, 14), 20, 14, 10),
    "an iterable of too short a length": (lambda: Listed(20, 3), 20, 3, 10),
    "the longer of two": (lambda: CombinedLoader([sampled(20, 6), loader(8)], "max_size_cycle"), 20, 6, 10),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_training_goes_through_all_the_data(tmp_path: Path, caplog: Any, recwarn: Any, wrong: str) -> None:  # I-04
    build, samples, length, batches = WRONG[wrong]
    module, trainer = FirstOfSeveral(), fit(tmp_path, max_epochs=2)
    trainer.fit(module, build())
    assert not [one for one in recwarn if "Length of IterableDataset" in str(one.message)]  # torch's, at each batch
    assert len(list(chain(*module.seen))) == 2 * samples
    assert (trainer.global_step, trainer.current_epoch) == (2 * batches, 2)
    assert trainer.num_training_batches == length
    (line,) = warned(caplog)
    assert f"training loader proved wrong: it is {length} micro-batches per epoch, but {batches} were read" in line


@pytest.mark.parametrize(("stage", "wrong"), [*zip(("validate", "test", "predict"), WRONG, strict=False)])
def test_evaluation_goes_through_all_the_data(tmp_path: Path, caplog: Any, stage: str, wrong: str) -> None:  # I-04
    build, samples, length, batches = WRONG[wrong]
    module = Tiny()
    outputs = getattr(fit(tmp_path), stage)(module, build())
    seen = outputs if stage == "predict" else module.evaluated
    assert len(list(chain(*seen))) == samples
    (line,) = warned(caplog)
    assert f"{length} micro-batches per epoch, but {batches} were read" in line


def test_validation_within_fit_warns_once(tmp_path: Path, caplog: Any) -> None:  # I-04
    module, loaders = Tiny(), [loader(4), sampled(10, 3)]
    fit(tmp_path, max_epochs=3, num_sanity_val_steps=2).fit(module, loader(4), loaders)
    assert sum(map(len, module.evaluated)) == 3 * (4 + 10) + 4 + 4
    (line,) = warned(caplog)
    assert "validation loader 1 proved wrong: it is 3 micro-batches per epoch, but 5 were read" in line
    module = Tiny()
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=3, limit_val_batches=1).fit(module, loader(4), loader(8))
    assert len(module.evaluated) == 1 + 1  # the limit holds for the sanity check too


@pytest.mark.parametrize(
    ("build", "limit", "steps", "is_warned"),
    [
        (lambda: sampled(20, 6), 8, 8, True),  # proven wrong by the seventh
        (lambda: sampled(20, 6), 6, 6, False),
        (lambda: sampled(20, 6), 0.5, 3, False),
        (lambda: sampled(20, 14), 12, 10, True),
        (lambda: sampled(20, 14), 10, 10, False),
        (lambda: sampled(20, 10), 1.0, 10, False),
        (lambda: stream(20), 50, 10, False),
    ],
)
def test_a_limit_ends_an_epoch_but_a_length_does_not(
    tmp_path: Path, caplog: Any, build: Any, limit: Any, steps: int, is_warned: bool
) -> None:  # I-04
    trainer = fit(tmp_path, limit_train_batches=limit)
    trainer.fit(Tiny(), build())
    assert (trainer.global_step, trainer.current_epoch) == (steps, 1)
    assert len(warned(caplog)) == is_warned


def test_an_endless_loader_is_warned_about(tmp_path: Path, caplog: Any) -> None:  # I-04
    fit(tmp_path, max_steps=20).fit(Tiny(), DataLoader(Sharded(10**9, stated=10), 2))
    (line,) = warned(caplog)
    assert "5 micro-batches per epoch, but at least 20 were read" in line


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        # The fraction of the stated length is run, and the rest when the data ends.
        (lambda: sampled(12, 40), {"val_check_interval": 0.5}, [(0, 6), (1, 12)]),
        (lambda: sampled(12, 8), {"val_check_interval": 0.5}, [(0, 4), (0, 6), (1, 10), (1, 12)]),
        (lambda: sampled(12, 4), {"val_check_interval": 0.5}, [(0, 2), (0, 4), (0, 6), (1, 8), (1, 10), (1, 12)]),
        (lambda: sampled(12, 40), {"val_check_interval": 8}, [(0, 6), (1, 12)]),
        (lambda: sampled(12, 40), {"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, [(1, 12)]),
        (lambda: sampled(12, 40), {"val_check_interval": 8, "check_val_every_n_epoch": None}, [(1, 8)]),
        (lambda: stream(12), {"val_check_interval": 0.5, "limit_train_batches": 20}, [(0, 6), (1, 12)]),
        # A stream does not state its length in advance.
        (lambda: stream(12), {"val_check_interval": 7}, []),
        (lambda: stream(12), {"val_check_interval": 6}, [(0, 6), (1, 12)]),
        (lambda: stream(12), {"val_check_interval": 4}, [(0, 4), (1, 10)]),
        (lambda: stream(12), {"val_check_interval": 7, "check_val_every_n_epoch": None}, [(1, 7)]),
        (lambda: stream(12), {"val_check_interval": 7, "max_steps": 5}, []),  # the data did not end
    ],
)
def test_validations_of_an_epoch_that_ends_before_their_interval(
    tmp_path: Path, build: Any, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:  # I-04
    validated: list[tuple[int, int]] = []
    note = calling("on_validation_end", lambda run: validated.append((run.current_epoch, run.global_step)))
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": note}
    fit(tmp_path, **settings, **options).fit(Tiny(), build(), loader(4))
    assert validated == expected


SCHEDULES: dict[str, Any] = {
    "one cycle": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=int(steps)),
    "linear": lambda optimizer, steps: LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)),
    # warms up for a fraction of the steps, and stays constant afterwards
    "warm-up": lambda optimizer, steps: LambdaLR(optimizer, lambda step: min(1.0, step / (steps / 2))),
}


@pytest.mark.parametrize(
    ("kind", "length", "fails"),
    [("one cycle", 6, True), ("linear", 6, True), ("warm-up", 6, False), ("linear", 10, False)],
)
def test_a_schedule_that_runs_out_names_the_length(tmp_path: Path, kind: str, length: int, fails: bool) -> None:  # I-04
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = SCHEDULES[kind](optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = fit(tmp_path)
    error = pytest.raises(ConfigurationError, match=r"ran out after 6 steps(.|\n)*length of 6")
    with error if fails else nullcontext():
        trainer.fit(tiny(configure_optimizers=configure_optimizers), sampled(20, length))
    assert trainer.global_step == (7 if fails else 10)


def test_max_steps_at_a_wrong_epoch_end_leaves_the_rest_to_a_resumed_run(tmp_path: Path) -> None:
    # I-04: the epoch ends with its data, not at the stated length.
    for data, epochs in ((sampled(20, 6), 0), (sampled(12, 6), 1), (Listed(20, 6), 0)):
        run = fit(tmp_path, max_epochs=-1, max_steps=6)
        run.fit(Tiny(), data)
        assert (run.global_step, run.current_epoch) == (6, 1)  # L-10: an epoch that was cut short counts
        assert run.run_state.progress.epoch == epochs
        run.save_checkpoint(str(tmp_path / f"{epochs}"))
    module, run = Tiny(), fit(tmp_path)
    run.fit(module, Listed(20, 6), ckpt_path=str(tmp_path / "0"))
    assert list(chain(*module.seen)) == list(range(12, 20))
    assert (run.global_step, run.current_epoch) == (10, 1)


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
    outputs = getattr(fit(tmp_path, callbacks=LambdaCallback(**hooks)), stage)(module, DataLoader(data, 3))
    assert list(chain(*(outputs if stage == "predict" else module.evaluated))) == list(range(12))
    assert lengths == [[4]]


def test_a_resume_within_an_epoch_needs_the_size_of_that_epoch(tmp_path: Path) -> None:  # S-03, J-07
    def run(folder: str, size: int, hook: str = "on_train_epoch_start", start: Any = None) -> Any:
        data = Numbered(size)
        resizes = Resizes(data, hook, (4, 8, 12) if hook == "on_train_epoch_start" else (8, 8))
        saver = Checkpoint(tmp_path / folder, every_n_train_steps=4, save_top_k=-1)
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
