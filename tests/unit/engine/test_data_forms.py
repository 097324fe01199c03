"""Data in every supported form: loaders, collections of loaders (resumed too), streams, modules, data modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, Tiny, fit, loader, numbers, stream
from small_modules import tiny
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from drivetrain import ConfigurationError, DataModule, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.data import CombinedLoader


def seen(batch: Any) -> Any:
    """Return the samples in a batch of any structure."""
    return tree_map(lambda one: None if one is None else numbers(one), batch)


class Several(Tiny):
    """Accepts batches of any structure."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(seen(batch))
        return self.layer(torch.ones(1, 2)).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append(self.predict_step(batch, batch_idx, dataloader_idx))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return (dataloader_idx, batch_idx, seen(batch))


SHORT, LONG = [[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]]
PAIRS = [list(pair) for pair in zip(SHORT, LONG, strict=False)]
CYCLED = [*PAIRS, [SHORT[0], LONG[2]]]


@pytest.mark.parametrize(
    ("loaders", "expected"),
    [
        pytest.param(CombinedLoader([loader(4), loader(6)], "min_size"), PAIRS, id="min_size"),
        pytest.param(CombinedLoader([loader(4), loader(6)], "max_size_cycle"), CYCLED, id="max_size_cycle"),
        pytest.param(CombinedLoader([loader(4), loader(6)], "max_size"), [*PAIRS, [None, LONG[2]]], id="max_size"),
        pytest.param([loader(4), loader(6)], CYCLED, id="as in Lightning max_size_cycle"),
        pytest.param({"a": loader(4), "b": loader(6)}, [{"a": a, "b": b} for a, b in CYCLED], id="keyed"),
        pytest.param(CombinedLoader({"a": loader(4), "b": loader(6)}, "sequential"), SHORT + LONG, id="in sequence"),
        pytest.param({"a": loader(2), "b": [loader(2)]}, [{"a": [0, 1], "b": [[0, 1]]}], id="nested"),
        pytest.param(CombinedLoader([stream(4), loader(6)], "min_size"), PAIRS, id="one without a length"),
    ],
)
def test_several_training_loaders(tmp_path: Path, loaders: Any, expected: Any) -> None:
    module, trainer = Several(), fit(tmp_path, max_epochs=2)
    trainer.fit(module, loaders)
    assert module.seen == expected * 2
    assert trainer.num_training_batches in (len(expected), float("inf"))


@pytest.mark.parametrize(
    "several",
    [
        lambda: [loader(4), loader(2)],
        lambda: {"a": loader(4), "b": loader(2)},
        lambda: CombinedLoader([loader(4), loader(2)], "sequential"),
    ],
)
def test_several_evaluation_loaders_in_sequence(tmp_path: Path, several: Any) -> None:
    expected = [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0, 1])]
    module, trainer = Several(), fit(tmp_path, num_sanity_val_steps=0)
    trainer.fit(module, loader(2), several())
    assert trainer.num_val_batches == [2, 1]
    trainer.validate(module, several(), verbose=False)
    trainer.test(module, several(), verbose=False)
    assert module.evaluated == expected * 3
    assert trainer.predict(module, several()) == [expected[:2], expected[2:]]


def test_several_evaluation_loaders_at_once(tmp_path: Path) -> None:
    module, trainer = Several(), fit(tmp_path)
    trainer.validate(module, CombinedLoader([loader(4), loader(2)], "max_size"), verbose=False)
    assert module.evaluated == [(0, 0, [[0, 1], [0, 1]]), (0, 1, [[2, 3], None])]
    assert trainer.predict(module, CombinedLoader([loader(4), loader(2)], "max_size")) == module.evaluated


def test_the_default_predict_step_is_the_forward_in_eval_and_inference_mode(tmp_path: Path) -> None:
    class Plain(TrainModule):
        def forward(self, batch: Any) -> Any:
            return (numbers(batch), self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    module = Plain()
    for inference in (True, False):
        outputs = fit(tmp_path, inference_mode=inference).predict(module, [loader(2), loader(2)])
        assert outputs == [[([0, 1], False, False, inference)]] * 2
    assert module.training


class Batches:
    """An iterable of batches that is no data loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(self.count, 2, 2)


def test_streams_train_validate_and_predict(tmp_path: Path) -> None:
    module = Tiny()
    trainer = fit(tmp_path, max_epochs=2, num_sanity_val_steps=1, accumulate_grad_batches=2)
    trainer.fit(module, stream(5), stream(3))
    assert module.seen == [[0, 1], [2, 3], [4]] * 2
    assert module.evaluated == [[0, 1]] + [[0, 1], [2]] * 2
    assert trainer.num_training_batches == float("inf")
    assert (trainer.samples_seen, trainer.global_step) == (10, 4)
    assert trainer.predict(module, stream(5)) == [[0, 1], [2, 3], [4]]
    limited = fit(tmp_path, limit_train_batches=2, limit_val_batches=1)
    limited.fit(module, stream(20), stream(20))
    assert module.seen[6:] == [[0, 1], [2, 3]]
    assert limited.num_val_batches == [1]


def test_any_iterable_of_batches(tmp_path: Path) -> None:
    batches: Any = torch.ones(3, 2, 2)
    for loaders in (Batches(3), list(batches), DataLoader(batches, batch_size=None)):
        trainer = fit(tmp_path, max_epochs=2)
        trainer.fit(Tiny(), loaders)
        assert (trainer.global_step, trainer.samples_seen) == (6, 12)
    module, several = Tiny(), Several()
    fit(tmp_path).validate(module, [Batches(2), Batches(1)], verbose=False)
    assert module.evaluated == [[1, 1]] * 3
    fit(tmp_path).fit(several, {"a": Batches(2), "b": Batches(1)})
    assert several.seen == [{"a": [1, 1], "b": [1, 1]}] * 2


def test_a_long_list_of_batches_is_not_iterated(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    trainer = fit(tmp_path, max_steps=1)
    trainer.fit(Bare(), [Counted([torch.ones(4, 2)]) for _ in range(100)])
    assert trainer.global_step == 1
    assert len(reads) < 100


def test_the_modules_methods_give_loaders(tmp_path: Path) -> None:
    loaders = {"train": loader(4), "val": [loader(2), loader(2)], "test": loader(6), "predict": loader(8)}
    module = tiny(**{f"{stage}_dataloader": lambda self, stage=stage: loaders[stage] for stage in loaders})
    trainer = fit(tmp_path, num_sanity_val_steps=0)
    trainer.fit(module)
    assert (len(module.seen), len(module.evaluated)) == (2, 2)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    assert len(module.evaluated) == 7
    assert len(trainer.predict(module)) == 4
    trainer.fit(module, loader(2))  # arguments take precedence
    assert len(module.seen) == 3


def test_a_data_module_gives_loaders(tmp_path: Path) -> None:
    stages: list[str] = []

    class Data(DataModule):
        def __init__(self, size: int) -> None:
            self.save_hyperparameters()

        def setup(self, stage: str) -> None:
            stages.append(stage)

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 100

    module, trainer, data = Tiny(), fit(tmp_path, num_sanity_val_steps=0), Data(2)
    trainer.fit(module, datamodule=data)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    assert (module.seen, module.evaluated) == ([[100, 101]] * 2, [[100, 101]] * 4)
    assert trainer.predict(module, data) == [[100, 101]]
    assert stages == ["fit", "fit", "validate", "test", "predict"]
    assert data.trainer is trainer  # L-10
    with pytest.raises(ConfigurationError, match="is not in a run"):
        _ = Data(4).trainer


def test_a_users_sampler_keeps_its_order_and_the_loader_is_unchanged(tmp_path: Path) -> None:
    module, given = Tiny(), loader(6, sampler=[5, 3, 1, 0])
    before = (given.sampler, given.batch_sampler)
    fit(tmp_path).fit(module, given)
    assert module.seen == [[5, 3], [1, 0]]
    assert (given.sampler, given.batch_sampler) == before


def test_a_random_sampler_draws_by_seed_and_epoch(tmp_path: Path) -> None:
    runs = [Tiny(), Tiny()]
    for module in runs:
        fit(tmp_path, max_epochs=2).fit(module, loader(20, sampler=WeightedRandomSampler([1.0] * 20, 8)))
    assert runs[0].seen == runs[1].seen
    assert runs[0].seen[:4] != runs[0].seen[4:]


class Stateful(IterableDataset[Any]):
    """Batches 100, 101, ... that go on from the position that is loaded."""

    def __init__(self, batches: int) -> None:
        self.batches, self.start, self.done = batches, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done, self.start = self.start, 0
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([[99.0 + self.done, 1.0]])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class Sized(Stateful):
    def __len__(self) -> int:
        return self.batches


def both_stateful(mode: str) -> Any:
    return lambda: CombinedLoader([Stateful(5), DataLoader(Stateful(3), batch_size=None)], mode)


def _train(folder: Path, data: Any, window: int, start: Path | None = None) -> list[Any]:
    module = Several()
    callbacks = [] if start else [Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)]
    trainer = fit(folder, max_epochs=2, accumulate_grad_batches=window, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=start)
    return module.seen


@pytest.mark.parametrize(
    ("build", "window"),
    [
        pytest.param(lambda: CombinedLoader([Stateful(5), loader(8, shuffle=True)], "sequential"), 1, id="sequential"),
        pytest.param(lambda: CombinedLoader([Sized(5), stream(6)], "max_size"), 2, id="max_size"),
        pytest.param(both_stateful("min_size"), 1, id="min_size"),
        pytest.param(both_stateful("max_size_cycle"), 3, id="max_size_cycle, windows that do not divide an epoch"),
        pytest.param(lambda: {"a": Sized(4), "b": loader(8, shuffle=True, num_workers=1)}, 1, id="dict with workers"),
    ],
)
def test_a_combination_with_a_stateful_loader_resumes_once(build: Any, window: int, tmp_path: Path) -> None:  # S-02
    whole = _train(tmp_path / "whole", build(), window)
    saved = [folder for folder in (tmp_path / "whole").iterdir() if (folder / "manifest.json").exists()]
    resumed = 0
    for number, folder in enumerate(sorted(saved)[::3]):
        progress = load(folder).progress
        if progress["epoch"] < 2:
            left = whole[progress["micro_batches"] :]
            assert _train(tmp_path / str(number), build(), window, folder) == left, folder.name
            resumed += 1
    assert resumed >= 2
