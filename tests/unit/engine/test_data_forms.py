"""Data and batches in every supported form: loaders, collections of loaders, streams, data modules, structures."""

from __future__ import annotations

import dataclasses
import warnings
from array import array
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_case import Bare, Tiny, fit, loader, numbers, stream
from small_modules import calling, tiny
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from drivetrain import ConfigurationError, DataModule, TrainModule
from drivetrain._data.sharding import BatchShare
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._loops.windows import allreduced_windows
from drivetrain._runtime.transfer import cast_floating, move_to
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.data import CombinedLoader


def seen(batch: Any) -> Any:
    """Return the samples in a batch of any structure."""
    return tree_map(lambda one: None if one is None else numbers(one), batch)


class Several(Tiny):
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
    # All samples, in the order of the data set.
    assert trainer.predict(module, loader(7, shuffle=True, drop_last=True)) == [[0, 1], [2, 3], [4, 5], [6]]
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
    asked: list[str] = []
    estimates: list[float] = []

    def give(self: Any, stage: str) -> Any:
        asked.append(stage)
        return loaders[stage]

    def setup(self: Any, stage: str) -> None:
        estimates.append(self.trainer.estimated_stepping_batches)

    module = tiny(setup=setup, **{f"{stage}_dataloader": partialmethod(give, stage) for stage in loaders})
    trainer = fit(tmp_path, num_sanity_val_steps=0)
    trainer.fit(module)
    assert (len(module.seen), len(module.evaluated)) == (2, 2)
    assert (estimates, sorted(asked)) == ([2], ["train", "val"])  # the loader of the estimate is read
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


def test_a_run_with_loaders_is_resumed_with_a_data_module(tmp_path: Path) -> None:
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader(4)

        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("the checkpoint has no state of a data module")

    first, again = fit(tmp_path), fit(tmp_path, max_epochs=2)
    first.fit(Bare(), loader(4))
    first.save_checkpoint(tmp_path / "c")
    again.fit(Bare(), datamodule=Data(), ckpt_path=tmp_path / "c")
    assert again.current_epoch == 2


def test_a_users_sampler_keeps_its_order_and_a_random_one_draws_by_seed_and_epoch(tmp_path: Path) -> None:
    module, given = Tiny(), loader(6, sampler=[5, 3, 1, 0])
    before = (given.sampler, given.batch_sampler)
    fit(tmp_path).fit(module, given)
    assert module.seen == [[5, 3], [1, 0]]
    assert (given.sampler, given.batch_sampler) == before
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


def _train(folder: Path, data: Any, window: int, start: Path | None = None, **options: Any) -> list[Any]:
    module = Several()
    save = calling("on_train_start", lambda run: run.save_checkpoint(folder / "again"))
    callbacks = [save if start else Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)]
    trainer = fit(folder, max_epochs=2, accumulate_grad_batches=window, callbacks=callbacks, **options)
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
            # A checkpoint that is saved before the first batch is read resumes there as well.
            again = tmp_path / str(number) / "again"
            assert _train(tmp_path / f"again-{number}", build(), window, again) == left, folder.name
            resumed += 1
    assert resumed >= 2


@pytest.mark.parametrize("limit", [3, 5])  # 5 is the length, whose end is not read then
def test_an_epoch_after_a_limited_one_starts_a_stateful_loader_anew(limit: int, tmp_path: Path) -> None:  # S-02
    whole = _train(tmp_path / "whole", Stateful(5), 1, limit_train_batches=limit)
    folder = next(each for each in (tmp_path / "whole").iterdir() if f"step={limit}" in each.name)
    assert _train(tmp_path / "resumed", Stateful(5), 1, folder, limit_train_batches=limit) == whole[limit:]


CONVERTED = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
CONVERTED |= {"bf16-mixed": torch.float32, "16-mixed": torch.float32}


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    ids: torch.Tensor
    name: str


class Encoding(UserDict[str, Any]):
    """Like a Hugging Face ``BatchEncoding``: has more than its entries, its own constructor and an in-place ``to``."""

    def __init__(self, *, rows: int) -> None:
        super().__init__(x=torch.ones(rows, 2), ids=torch.arange(rows), name="text")
        self.encodings = ["how it came about"]

    def to(self, device: torch.device) -> Encoding:
        assert isinstance(device, str | torch.device | int)
        self.data = {key: value.to(device) if hasattr(value, "to") else value for key, value in self.data.items()}
        return self


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """Like a Hugging Face ``ModelOutput``: each field is also an entry."""

    x: torch.Tensor
    ids: torch.Tensor

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.x, self.ids)


FORMS: dict[str, Callable[[], Any]] = {
    "frozen dataclass": lambda: Frozen(torch.ones(3, 2), torch.arange(3), "text"),
    "encoding": lambda: Encoding(rows=3),
    "model output": lambda: Output(torch.ones(3, 2), torch.arange(3)),
    "packed sequence": lambda: pack_sequence([torch.ones(length, 2) for length in (4, 2, 1)]),
    "among what is no tensor": lambda: [None, "text", Path("a/b"), {"x": torch.ones(3, 2), "ids": torch.arange(3)}],
}


def part(batch: Any, name: str) -> Any:
    if isinstance(batch, list):
        return batch[-1][name]
    return getattr(batch, name) if isinstance(batch, Frozen) else batch[name]


class Taking(Tiny):
    """Computes on ``x`` and records its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return self.layer(batch.data if isinstance(batch, PackedSequence) else part(batch, "x")).mean()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


@pytest.mark.parametrize(
    ("form", "precision"),
    [*((form, "16-true") for form in FORMS), *(("frozen dataclass", precision) for precision in CONVERTED)],
)
def test_a_batch_keeps_its_structure_and_gets_the_runs_dtype(tmp_path: Path, form: str, precision: str) -> None:  # I-11
    given, module = FORMS[form](), Taking()
    trainer = fit(tmp_path, precision=precision)
    trainer.fit(module, [given])
    assert trainer.samples_seen == 3  # sequences of a packed sequence are counted, rather than time steps
    (came,) = module.seen
    assert type(came) is type(given)
    if isinstance(came, PackedSequence):
        assert came.data.dtype == CONVERTED[precision]
        assert torch.equal(came.batch_sizes, given.batch_sizes)
        return
    assert part(came, "x").dtype == CONVERTED[precision]
    assert part(came, "ids").dtype == torch.int64
    assert part(given, "x").dtype == torch.float32  # the user's own batch is unchanged
    if isinstance(came, Encoding):
        assert came.encodings == given.encodings
        assert came["name"] == "text"
    if isinstance(came, Output):
        assert came.x is came["x"]
    if isinstance(came, list):
        assert came[:3] == [None, "text", Path("a/b")]


@pytest.mark.parametrize("batch", [None, ["text", None, Path("a/b")]])
def test_a_batch_without_tensors_passes(tmp_path: Path, batch: Any) -> None:  # I-11
    class Blind(Taking):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch)
            return self.layer(torch.ones(1, 2)).mean()

        def batch_weight(self, batch: Any) -> int:
            return 1

    module = Blind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it counts as one sample, with a warning
        fit(tmp_path, precision="16-true", accumulate_grad_batches=2).fit(module, [batch] * 3)
        assert fit(tmp_path, precision="16-true").predict(module, [batch]) == [batch]
    assert module.seen == [batch] * 3


def test_none_is_a_batch_on_several_ranks_too() -> None:  # I-11
    shard = BatchShare(1, None, False, 0)
    strategy: Any = SimpleNamespace(control=LocalControl(), data_world_size=1, is_data_leader=True)
    micro_batches = allreduced_windows(iter([(None, shard)] * 3), 2, strategy, None, None, None, True, lambda: None)
    assert [(micro.batch, micro.samples) for micro in micro_batches] == [(None, 1)] * 3


def test_what_is_no_batch_is_neither_cast_nor_moved_and_an_output_moves_as_a_whole() -> None:  # I-11
    layer, complex_number = torch.nn.Linear(2, 1), torch.tensor([1j])
    cast = cast_floating([layer, complex_number, torch.float32], torch.float16)
    assert cast[0] is layer
    assert layer.weight.dtype == torch.float32
    assert cast[1:] == [complex_number, torch.float32]
    moved = move_to(Output(torch.ones(3, 2), torch.arange(3)), torch.device("meta"))
    assert {one.device.type for one in (moved.x, moved.ids, moved["x"], moved["ids"])} == {"meta"}
    numbers, view = array("d", [1.0]), memoryview(b"ab")
    moved = move_to({"numbers": numbers, "views": [view]}, torch.device("cpu"))
    assert moved["numbers"] is numbers
    assert moved["views"][0] is view
