"""Data in every supported form: loaders, collections of loaders, streams, modules, data modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, numbers, stream
from small_modules import tiny
from torch.utils.data import DataLoader, WeightedRandomSampler

from drivetrain import ConfigurationError, DataModule, TrainModule
from drivetrain.data import CombinedLoader


def _seen(batch: Any) -> Any:
    if batch is None:
        return None
    if isinstance(batch, dict):
        return {key: _seen(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_seen(value) for value in batch]
    return numbers(batch)


class Several(TrainModule):
    """Accepts batches of any structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[Any] = []
        self.evaluated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(_seen(batch))
        return self.layer(torch.ones(1, 2)).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, batch_idx, _seen(batch)))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return (dataloader_idx, batch_idx, _seen(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


_SHORT, _LONG = [[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]]


_PAIRS = list(zip(_SHORT, _LONG, strict=False))


class TestSeveralTrainingLoaders:
    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("min_size", _PAIRS),
            ("max_size_cycle", [*_PAIRS, (_SHORT[0], _LONG[2])]),
            ("max_size", [*_PAIRS, (None, _LONG[2])]),
            (None, [*_PAIRS, (_SHORT[0], _LONG[2])]),  # as in Lightning: max_size_cycle
        ],
    )
    @pytest.mark.parametrize("keyed", [True, False])
    def test_combination_modes(self, tmp_path: Path, mode: str | None, expected: Any, keyed: bool) -> None:
        loaders: Any = {"a": loader(4), "b": loader(6)} if keyed else [loader(4), loader(6)]
        module, runner = Several(), fit(tmp_path, max_epochs=2)
        runner.fit(module, loaders if mode is None else CombinedLoader(loaders, mode))
        assert module.seen == [{"a": a, "b": b} if keyed else [a, b] for a, b in expected] * 2
        assert runner.num_training_batches == len(expected)

    @pytest.mark.parametrize(
        ("loaders", "expected"),
        [
            (CombinedLoader({"a": loader(4), "b": loader(6)}, "sequential"), _SHORT + _LONG),
            ({"a": loader(2), "b": [loader(2), loader(2)]}, [{"a": [0, 1], "b": [[0, 1], [0, 1]]}]),
            (CombinedLoader([stream(4), loader(6)], "min_size"), [list(pair) for pair in _PAIRS]),
        ],
        ids=["in sequence", "nested", "one without a length"],
    )
    def test_other_combinations(self, tmp_path: Path, loaders: Any, expected: Any) -> None:
        module = Several()
        fit(tmp_path).fit(module, loaders)
        assert module.seen == expected


class TestSeveralEvaluationLoaders:
    @pytest.mark.parametrize(
        "several",
        [
            lambda: [loader(4), loader(2)],
            lambda: {"a": loader(4), "b": loader(2)},
            lambda: CombinedLoader([loader(4), loader(2)], "sequential"),
        ],
    )
    def test_sequential_loaders(self, tmp_path: Path, several: Any) -> None:
        expected = [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0, 1])]
        module, runner = Several(), fit(tmp_path, num_sanity_val_steps=0)
        runner.fit(module, loader(2), several())
        assert runner.num_val_batches == [2, 1]
        runner.validate(module, several(), verbose=False)
        runner.test(module, several(), verbose=False)
        assert module.evaluated == expected * 3
        assert runner.predict(module, several()) == [expected[:2], expected[2:]]

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("min_size", [[[0, 1], [0, 1]]]),
            ("max_size", [[[0, 1], [0, 1]], [[2, 3], None]]),
            ("max_size_cycle", [[[0, 1], [0, 1]], [[2, 3], [0, 1]]]),
        ],
    )
    def test_simultaneous_loaders(self, tmp_path: Path, mode: str, expected: Any) -> None:
        module, runner = Several(), fit(tmp_path)
        runner.validate(module, CombinedLoader([loader(4), loader(2)], mode), verbose=False)
        rows = [(0, index, row) for index, row in enumerate(expected)]
        assert module.evaluated == rows
        assert runner.predict(module, CombinedLoader([loader(4), loader(2)], mode)) == rows

    def test_the_default_predict_step_supports_several_loaders(self, tmp_path: Path) -> None:
        class Plain(TrainModule):
            def forward(self, batch: Any) -> Any:
                return numbers(batch)

        assert fit(tmp_path).predict(Plain(), [loader(2), loader(2)]) == [[[0, 1]], [[0, 1]]]


class Batches:
    """An iterable of batches that is no data loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(self.count, 2, 2)


class TestStreams:
    def test_train_validate_and_predict(self, tmp_path: Path) -> None:
        module = Tiny()
        runner = fit(tmp_path, max_epochs=2, num_sanity_val_steps=1, accumulate_grad_batches=2)
        runner.fit(module, stream(5), stream(3))
        assert module.seen == [[0, 1], [2, 3], [4]] * 2
        assert module.evaluated == [[0, 1]] + [[0, 1], [2]] * 2
        assert runner.num_training_batches == float("inf")
        assert (runner.samples_seen, runner.global_step) == (10, 4)
        assert runner.predict(module, stream(5)) == [[0, 1], [2, 3], [4]]

    def test_limits(self, tmp_path: Path) -> None:
        runner, module = fit(tmp_path, limit_train_batches=2, limit_val_batches=1), Tiny()
        runner.fit(module, stream(20), stream(20))
        assert module.seen == [[0, 1], [2, 3]]
        assert runner.num_val_batches == [1]

    def test_any_iterable_of_batches(self, tmp_path: Path) -> None:
        for loaders in (Batches(3), list(torch.ones(3, 2, 2))):
            runner = fit(tmp_path, max_epochs=2)
            runner.fit(Tiny(), loaders)
            assert (runner.global_step, runner.samples_seen) == (6, 12)
        module, several = Tiny(), Several()
        fit(tmp_path).validate(module, [Batches(2), Batches(1)], verbose=False)
        assert module.evaluated == [[1, 1]] * 3
        fit(tmp_path).fit(several, {"a": Batches(2), "b": Batches(1)})
        assert several.seen == [{"a": [1, 1], "b": [1, 1]}] * 2


class TestWhereLoadersComeFrom:
    def test_the_modules_methods(self, tmp_path: Path) -> None:
        module = tiny(
            train_dataloader=lambda self: loader(4),
            val_dataloader=lambda self: [loader(2), loader(2)],
            test_dataloader=lambda self: loader(6),
            predict_dataloader=lambda self: loader(8),
        )
        runner = fit(tmp_path, num_sanity_val_steps=0)
        runner.fit(module)
        assert (len(module.seen), len(module.evaluated)) == (2, 2)
        runner.validate(module, verbose=False)
        runner.test(module, verbose=False)
        assert len(module.evaluated) == 7
        assert len(runner.predict(module)) == 4
        runner.fit(module, loader(2))  # arguments take precedence
        assert len(module.seen) == 3

    def test_a_data_module(self, tmp_path: Path) -> None:
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

        module, runner, data = Tiny(), fit(tmp_path, num_sanity_val_steps=0), Data(2)
        runner.fit(module, datamodule=data)
        runner.fit(module, data)
        runner.validate(module, data, verbose=False)
        runner.test(module, datamodule=data, verbose=False)
        assert (module.seen, module.evaluated) == ([[100, 101]] * 2, [[100, 101]] * 4)
        assert runner.predict(module, data) == [[100, 101]]
        assert stages == ["fit", "fit", "validate", "test", "predict"]
        assert data.trainer is runner  # L-10
        with pytest.raises(ConfigurationError, match="is not in a run"):
            _ = Data(4).trainer


class TestPrediction:
    def test_in_data_set_order_whatever_the_loader_shuffles(self, tmp_path: Path) -> None:
        """B-04: no sample is dropped or used twice."""
        outputs = fit(tmp_path).predict(Tiny(), loader(7, shuffle=True, drop_last=True))
        assert outputs == [[0, 1], [2, 3], [4, 5], [6]]

    def test_in_eval_mode_and_inference_mode(self, tmp_path: Path) -> None:
        def modes(self: Any, batch: Any, batch_idx: int) -> Any:
            return (self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())

        module = tiny(predict_step=modes)
        for inference in (True, False):
            outputs = fit(tmp_path, inference_mode=inference).predict(module, loader(2))
            assert outputs == [(False, False, inference)]
        assert module.training


class TestSamplersAndWorkers:
    def test_a_users_sampler_keeps_its_order_and_the_loader_is_unchanged(self, tmp_path: Path) -> None:
        module, given = Tiny(), loader(6, sampler=[5, 3, 1, 0])
        sampler, batch_sampler = given.sampler, given.batch_sampler
        fit(tmp_path).fit(module, given)
        assert module.seen == [[5, 3], [1, 0]]
        assert given.sampler is sampler
        assert given.batch_sampler is batch_sampler

    def test_a_random_sampler_draws_by_seed_and_epoch(self, tmp_path: Path) -> None:
        runs = [Tiny(), Tiny()]
        for module in runs:
            fit(tmp_path, max_epochs=2).fit(module, loader(20, sampler=WeightedRandomSampler([1.0] * 20, 8)))
        assert runs[0].seen == runs[1].seen
        assert runs[0].seen[:4] != runs[0].seen[4:]

    def test_samplers_are_kept_on_request(self, tmp_path: Path) -> None:
        """use_distributed_sampler=False: the loader's own shuffling, from torch's generator."""
        orders = []
        for seed in (1, 1, 2):
            module = Tiny()
            torch.manual_seed(seed)
            fit(tmp_path, seed=None, use_distributed_sampler=False).fit(module, loader(20, shuffle=True))
            orders.append(module.seen)
        assert orders[0] == orders[1] != orders[2]

    def test_a_data_set_of_whole_batches(self, tmp_path: Path) -> None:
        module = Tiny()
        runner = fit(tmp_path)
        runner.fit(module, DataLoader(torch.ones(3, 5, 2), batch_size=None))  # type: ignore[arg-type]
        assert runner.samples_seen == 15
