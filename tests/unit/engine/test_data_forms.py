"""Data in every supported form: loaders, collections of loaders, streams, modules, data modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, numbers, stream
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


class TestSeveralTrainingLoaders:
    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("min_size", [(_SHORT[0], _LONG[0]), (_SHORT[1], _LONG[1])]),
            ("max_size_cycle", [(_SHORT[0], _LONG[0]), (_SHORT[1], _LONG[1]), (_SHORT[0], _LONG[2])]),
            ("max_size", [(_SHORT[0], _LONG[0]), (_SHORT[1], _LONG[1]), (None, _LONG[2])]),
        ],
    )
    @pytest.mark.parametrize("keyed", [True, False])
    def test_combination_modes(self, tmp_path: Path, mode: str, expected: Any, keyed: bool) -> None:
        loaders: Any = {"a": loader(4), "b": loader(6)} if keyed else [loader(4), loader(6)]
        module = Several()
        runner = fit(tmp_path, max_epochs=2)
        runner.fit(module, CombinedLoader(loaders, mode))
        rows = [{"a": a, "b": b} if keyed else [a, b] for a, b in expected]
        assert module.seen == rows * 2
        assert runner.num_training_batches == len(expected)

    def test_in_sequence(self, tmp_path: Path) -> None:
        module = Several()
        fit(tmp_path).fit(module, CombinedLoader({"a": loader(4), "b": loader(6)}, "sequential"))
        assert module.seen == _SHORT + _LONG

    @pytest.mark.parametrize("several", [lambda: {"a": loader(4), "b": loader(6)}, lambda: [loader(4), loader(6)]])
    def test_a_bare_collection_ends_with_the_longest(self, tmp_path: Path, several: Any) -> None:
        """As in Lightning: max_size_cycle."""
        module = Several()
        fit(tmp_path).fit(module, several())
        assert [list(row.values()) if isinstance(row, dict) else row for row in module.seen] == [
            [_SHORT[0], _LONG[0]],
            [_SHORT[1], _LONG[1]],
            [_SHORT[0], _LONG[2]],
        ]

    def test_nested(self, tmp_path: Path) -> None:
        module = Several()
        fit(tmp_path, limit_train_batches=1).fit(module, {"a": loader(4), "b": [loader(6), loader(2)]})
        assert module.seen == [{"a": [0, 1], "b": [[0, 1], [0, 1]]}]

    def test_with_one_that_has_no_length(self, tmp_path: Path) -> None:
        module = Several()
        fit(tmp_path).fit(module, CombinedLoader([stream(4), loader(6)], "min_size"))
        assert module.seen == [[_SHORT[0], _LONG[0]], [_SHORT[1], _LONG[1]]]


class TestSeveralEvaluationLoaders:
    @pytest.mark.parametrize(
        "several",
        [
            lambda: [loader(4), loader(2)],
            lambda: (loader(4), loader(2)),
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


class TestStreams:
    def test_train_validate_and_predict(self, tmp_path: Path) -> None:
        module = Tiny()
        runner = fit(tmp_path, max_epochs=2, num_sanity_val_steps=1)
        runner.fit(module, stream(5), stream(3))
        assert module.seen == [[0, 1], [2, 3], [4]] * 2
        assert module.evaluated == [[0, 1]] + [[0, 1], [2]] * 2
        assert runner.num_training_batches == float("inf")
        assert runner.samples_seen == 10
        assert runner.predict(module, stream(5)) == [[0, 1], [2, 3], [4]]

    def test_windows_of_an_uneven_length(self, tmp_path: Path) -> None:
        runner = fit(tmp_path, accumulate_grad_batches=4)
        runner.fit(Tiny(), stream(20))
        assert runner.global_step == 3

    def test_limits(self, tmp_path: Path) -> None:
        runner = fit(tmp_path, limit_train_batches=2, limit_val_batches=1)
        module = Tiny()
        runner.fit(module, stream(20), stream(20))
        assert module.seen == [[0, 1], [2, 3]]
        assert runner.num_val_batches == [1]

    def test_any_iterable_of_batches(self, tmp_path: Path) -> None:
        class Batches:
            def __iter__(self) -> Iterator[torch.Tensor]:
                yield from torch.ones(3, 2, 2)

        for loaders in (Batches(), list(torch.ones(3, 2, 2))):
            runner = fit(tmp_path, max_epochs=2)
            runner.fit(Tiny(), loaders)
            assert (runner.global_step, runner.samples_seen) == (6, 12)

    def test_several_iterables_that_are_no_data_loaders(self, tmp_path: Path) -> None:
        class Batches:
            def __init__(self, count: int) -> None:
                self._count = count

            def __iter__(self) -> Iterator[torch.Tensor]:
                yield from torch.ones(self._count, 2, 2)

        module = Tiny()
        fit(tmp_path).validate(module, [Batches(2), Batches(1)], verbose=False)
        assert module.evaluated == [[1, 1]] * 3
        several = Several()
        fit(tmp_path).fit(several, {"a": Batches(2), "b": Batches(1)})
        assert several.seen == [{"a": [1, 1], "b": [1, 1]}] * 2


class TestWhereLoadersComeFrom:
    def test_the_module_s_methods(self, tmp_path: Path) -> None:
        class Own(Tiny):
            def train_dataloader(self) -> Any:
                return loader(4)

            def val_dataloader(self) -> Any:
                return [loader(2), loader(2)]

            def test_dataloader(self) -> Any:
                return loader(6)

            def predict_dataloader(self) -> Any:
                return loader(8)

        module, runner = Own(), fit(tmp_path, num_sanity_val_steps=0)
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

            def val_dataloader(self) -> Any:
                return loader(2)

            def test_dataloader(self) -> Any:
                return loader(2)

            def predict_dataloader(self) -> Any:
                return loader(2)

            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                return batch + 100

        module, runner, data = Tiny(), fit(tmp_path, num_sanity_val_steps=0), Data(4)
        runner.fit(module, datamodule=data)
        runner.fit(module, data)
        assert module.seen == [[100, 101], [102, 103]] * 2
        runner.validate(module, data, verbose=False)
        runner.test(module, datamodule=data, verbose=False)
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
        class Watching(Tiny):
            def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return (self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())

        module = Watching()
        assert fit(tmp_path).predict(module, loader(2)) == [(False, False, True)]
        assert fit(tmp_path, inference_mode=False).predict(module, loader(2)) == [(False, False, False)]
        assert module.training


class TestSamplersAndWorkers:
    def test_a_user_s_sampler_keeps_its_order(self, tmp_path: Path) -> None:
        module = Tiny()
        fit(tmp_path).fit(module, loader(6, sampler=[5, 3, 1, 0]))
        assert module.seen == [[5, 3], [1, 0]]

    def test_a_random_sampler_draws_by_seed_and_epoch(self, tmp_path: Path) -> None:
        runs = []
        for _ in range(2):
            module = Tiny()
            sampler = WeightedRandomSampler([1.0] * 20, 8)
            fit(tmp_path, max_epochs=2).fit(module, loader(20, sampler=sampler))
            runs.append(module.seen)
        assert runs[0] == runs[1]
        assert runs[0][:4] != runs[0][4:]

    def test_samplers_are_kept_on_request(self, tmp_path: Path) -> None:
        """use_distributed_sampler=False: the loader's own shuffling, from torch's generator."""
        orders = []
        for seed in (1, 1, 2):
            module = Tiny()
            torch.manual_seed(seed)
            fit(tmp_path, seed=None, use_distributed_sampler=False).fit(module, loader(20, shuffle=True))
            orders.append(module.seen)
        assert orders[0] == orders[1] != orders[2]

    def test_the_loader_is_unchanged_after_the_run(self, tmp_path: Path) -> None:
        given = loader(6, shuffle=True)
        sampler, batch_sampler = given.sampler, given.batch_sampler
        fit(tmp_path).fit(Tiny(), given)
        assert given.sampler is sampler
        assert given.batch_sampler is batch_sampler

    def test_workers(self, tmp_path: Path) -> None:
        module = Tiny()
        fit(tmp_path, max_epochs=2).fit(module, loader(6, num_workers=1, persistent_workers=True))
        assert module.seen == [[0, 1], [2, 3], [4, 5]] * 2

    def test_a_data_set_of_whole_batches(self, tmp_path: Path) -> None:
        module = Tiny()
        runner = fit(tmp_path)
        runner.fit(module, DataLoader(torch.ones(3, 5, 2), batch_size=None))  # type: ignore[arg-type]
        assert runner.samples_seen == 15
