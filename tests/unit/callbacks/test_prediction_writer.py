"""Predictions: writing, reading and resuming (L-03)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import quiet_fit
from safetensors.torch import load_file
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from drivetrain import Callback, CheckpointError, ConfigurationError, TrainModule
from drivetrain.callbacks import BasePredictionWriter, LambdaCallback, PredictionWriter
from drivetrain.data import CombinedLoader, read_predictions
from faulty_store import FaultyStore
from worlds import on_ranks

Make = Callable[[torch.Tensor], Any]
DOUBLED = list(range(0, 22, 2))
ORDER: Any = [7, 1, 9, 0, 3, 8, 2, 10, 5, 4, 6]  # a sampler's


class Predicting(TrainModule):
    def __init__(self, make: Make = lambda x: x * 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = torch.nn.Linear(2, 2)
        self.make = make
        self.given: list[list[int]] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (x,) = batch
        self.given.append([int(value) for value in x[:, 0]])
        return self.make(x + 100 * dataloader_idx)


def numbered(samples: int = 11) -> TensorDataset:
    """Sample i is (i, 1)."""
    return TensorDataset(torch.stack([torch.arange(float(samples)), torch.ones(samples)], 1))


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(numbered(self.samples))


def loader(samples: int = 11, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbered(samples), batch_size=batch_size, **options)


def predict(path: Any, module: Any = None, loaders: Any = None, *others: Callback, **options: Any) -> None:
    """Predict with one part per batch."""
    fit = quiet_fit(callbacks=[*others, PredictionWriter(path, part_bytes=1)], **options)
    data = loader() if loaders is None else loaders
    fit.predict(Predicting() if module is None else module, data, return_predictions=False)


def cut_off(path: Any, at: int, module: Any = None, loaders: Any = None, **options: Any) -> None:
    def fail(trainer: Any, module: Any, batch: Any, batch_idx: int, *loader: int) -> None:
        if batch_idx == at:
            raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="the machine is gone"):
        predict(path, module, loaders, LambdaCallback(on_predict_batch_start=fail), **options)


def first_values(predictions: Any) -> list[int]:
    return [int(one[0]) for one in predictions]


def test_a_tree_comes_back_in_its_structure_and_in_order(tmp_path: Path) -> None:  # L-03
    def make(x: torch.Tensor) -> Any:
        first = x[:, 0]
        return {
            "tensor": x,
            "tuple": (first.long(), first > 3),
            "list": [first.bfloat16(), {"deep": x[:, None]}],
            "text": [f"sample {int(value)}" for value in first],
            "numbers": [float("inf") if value == 2 else int(value) for value in first],
        }

    predict(tmp_path / "out", Predicting(make))
    read = read_predictions(tmp_path / "out")
    assert len(read) == 11
    for number, one in enumerate(read):
        assert one["tensor"].tolist() == [number, 1]
        assert one["tuple"][0].dtype == torch.int64
        assert [part.item() for part in one["tuple"]] == [number, number > 3]
        assert one["list"][0].dtype == torch.bfloat16
        assert one["list"][1]["deep"].shape == (1, 2)
        assert one["text"] == f"sample {number}"
        assert one["numbers"] == (float("inf") if number == 2 else number)
    assert [one["text"] for one in read[-2:]] == ["sample 9", "sample 10"]
    with pytest.raises(IndexError):
        read[11]
    assert default_collate(list(read))["list"][1]["deep"].shape == (11, 1, 2)
    # The last batch has three samples, and both lists have three entries.
    predict(tmp_path / "each", Predicting(lambda x: [torch.full((int(n) % 3 + 1, 4), n) for n in x[:, 0]]))
    for number, one in enumerate(read_predictions(tmp_path / "each")):
        assert one.tolist() == [[number] * 4] * (number % 3 + 1)
    predict(tmp_path / "several", Predicting(lambda x: [x, x + 1, x + 2]))
    for number, one in enumerate(read_predictions(tmp_path / "several")):
        assert first_values(one) == [number, number + 1, number + 2]


@pytest.mark.parametrize("at", [0, 2], ids=["new", "resumed"])
def test_batches_are_what_predict_returns(at: int, tmp_path: Path) -> None:  # L-03
    module = Predicting(lambda x: {"mean": x.mean(), "rows": x, "note": "a batch"})
    cut_off(tmp_path / "out", at=at, module=module)
    returned: Any = quiet_fit(callbacks=PredictionWriter(tmp_path / "out")).predict(module, loader())
    read = read_predictions(tmp_path / "out")
    assert len(returned) == 3
    for one, other in zip(read.batches(), returned, strict=True):
        assert one.pop("note") == other.pop("note")
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="cannot be split by sample"):
        read[0]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        pytest.param({"batch_size": 4, "shuffle": True}, range(11), id="shuffled"),
        pytest.param({"batch_sampler": BatchSampler(ORDER, 3, drop_last=False)}, range(11), id="batches"),
        pytest.param({"batch_size": 4, "sampler": ORDER, "num_workers": 2}, range(11), id="a sampler and workers"),
        pytest.param({"batch_size": 1, "sampler": ORDER}, range(11), id="batches of one"),
        pytest.param({"batch_size": 2, "sampler": [8, 2, 5]}, [2, 5, 8], id="some samples"),
        pytest.param({"batch_size": 2, "sampler": [8, 2, 8]}, [2, 8, 8], id="one sample twice"),
    ],
)
def test_predictions_come_back_in_the_order_of_the_data(options: Any, samples: Any, tmp_path: Path) -> None:  # L-03
    make = lambda x: {"text": [f"sample {int(n)}" for n in x[:, 0]], "number": x[:, 0]}  # noqa: E731
    predict(tmp_path / "out", Predicting(make), DataLoader(numbered(), **options))
    read = read_predictions(tmp_path / "out")
    assert [one["text"] for one in read] == [f"sample {number}" for number in samples]
    assert default_collate(list(read))["number"].tolist() == read.indices == list(samples)


def test_several_loaders_and_streams(tmp_path: Path) -> None:  # L-03
    writer = Recording("epoch")
    loaders = [loader(5), loader(3), DataLoader(Stream(7), batch_size=4)]
    predict(tmp_path / "several", Predicting(lambda x: x), loaders, writer)
    with pytest.raises(ConfigurationError, match="dataloader_idx"):
        read_predictions(tmp_path / "several")
    with pytest.raises(ConfigurationError, match="from 0 to 2"):
        read_predictions(tmp_path / "several", dataloader_idx=3)
    for index, samples in enumerate((5, 3, 7)):
        read = read_predictions(tmp_path / "several", dataloader_idx=index)
        assert first_values(read) == [100 * index + number for number in range(samples)]
    assert read.indices is None
    ((predictions, indices),) = writer.epochs
    values = [[first_values(one) for one in part] for part in predictions]
    assert values == [[[0, 1, 2, 3], [4]], [[100, 101, 102]], [[200, 201, 202, 203], [204, 205, 206]]]
    assert indices == [[[0, 1, 2, 3], [4]], [[0, 1, 2]], [None, None]]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda x: {"boxes": [x.numpy()]}, "batch 0: .*'0/boxes/0', a ndarray"),
        (lambda x: slice(0), "batch 0: .*'0', a slice"),
        (lambda x: (x, {1, 2}), "batch 0: .*'0/1', a set"),
        (lambda x: x.to(torch.complex128), "a tensor of dtype torch.complex128"),
        (lambda x: x.to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_stored_is_refused_in_the_first_batch(tmp_path: Path, made: Make, named: str) -> None:  # L-03
    module = Predicting(made)
    with pytest.raises(CheckpointError, match=named) as caught:
        predict(tmp_path / "out", module)
    assert "torch.from_numpy" in caught.value.fix
    assert len(module.given) == 1


def flipped(content: bytes, at: int = -1) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("part-0-00000-00000001.safetensors", flipped),
        ("part-0-00000-00000000.safetensors", lambda content: content.replace(b"samples", b"simples", 1)),
        ("predictions.json", lambda content: content.replace(b"4", b"3", 1)),
        ("predictions.json", lambda content: content[:-3]),
    ],
)
def test_a_damaged_or_absent_file_is_named(name: str, change: Callable[[bytes], bytes], tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "out", Predicting(lambda x: {"x": x, "text": [str(row) for row in x]}))
    path = tmp_path / "out" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=path.name) as caught:
        list(read_predictions(tmp_path / "out"))
    assert "checkpoint" not in str(caught.value)
    assert "is damaged" in caught.value.what
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        list(read_predictions(tmp_path / "out"))


def test_a_resumed_run_reads_predicts_and_writes_what_is_missing(tmp_path: Path) -> None:  # L-03
    read: list[int] = []

    def collate(samples: list[Any]) -> Any:
        read.extend(int(x[0]) for (x,) in samples)
        return default_collate(samples)

    cut_off(tmp_path / "out", at=2)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert sorted(path.name for path in written) == [f"part-0-00000-0000000{batch}.safetensors" for batch in (0, 1)]
    module = Predicting()
    predict(tmp_path / "out", module, loader(collate_fn=collate))
    assert (module.given, read) == ([[8, 9, 10]], [8, 9, 10])
    assert first_values(read_predictions(tmp_path / "out")) == DOUBLED
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    assert not list((tmp_path / "out").glob("writing.lock"))

    cut_off(tmp_path / "limited", at=1, loaders=loader(20), limit_predict_batches=3)
    module = Predicting()
    predict(tmp_path / "limited", module, loader(20), limit_predict_batches=3)
    assert module.given == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(read_predictions(tmp_path / "limited")) == 12


class ReadsA(Predicting):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch["a"], batch_idx)


def combined(batch_size: int = 4) -> CombinedLoader:
    return CombinedLoader({"a": loader(batch_size=batch_size), "b": loader(shuffle=True)}, "min_size")


WHOLE: Any = [(torch.full((index + 1, 2), float(index)),) for index in range(3)]  # batches of 1, 2 and 3 samples


@pytest.mark.parametrize(
    ("make", "missing", "predictions"),
    [
        pytest.param(lambda: loader(sampler=ORDER), ORDER[8:], DOUBLED, id="a sampler"),
        pytest.param(lambda: DataLoader(Stream(11), batch_size=4), [8, 9, 10], DOUBLED, id="a stream"),
        pytest.param(lambda: DataLoader(WHOLE, batch_size=None), [2, 2, 2], [0, 2, 2, 4, 4, 4], id="whole batches"),
        pytest.param(combined, [8, 9, 10], DOUBLED, id="a combined loader"),
    ],
)
def test_other_loaders_resume(make: Any, missing: list[int], predictions: list[int], tmp_path: Path) -> None:  # L-03
    kind = ReadsA if make is combined else Predicting
    cut_off(tmp_path / "out", at=2, module=kind(), loaders=make())
    module = kind()
    predict(tmp_path / "out", module, make())
    assert module.given == [missing]
    assert first_values(read_predictions(tmp_path / "out")) == predictions


def test_a_resume_with_what_does_not_fit_the_written_part_is_refused(tmp_path: Path) -> None:  # L-03
    cut_off(tmp_path / "stream", at=2, loaders=DataLoader(Stream(11), batch_size=4))
    with pytest.raises(CheckpointError, match="more batches of rank 0 than its data") as caught:
        predict(tmp_path / "stream", loaders=DataLoader(Stream(4), batch_size=4))
    assert "delete the folder" in caught.value.fix
    cut_off(tmp_path / "combined", at=1, module=ReadsA(), loaders=combined())
    with pytest.raises(CheckpointError, match="'batch size': 3"):
        predict(tmp_path / "combined", ReadsA(), combined(3))
    cut_off(tmp_path / "out", at=2)
    manifest = tmp_path / "out" / "predictions.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"The predictions .* cannot be read: .*predictions\.json"):
        predict(tmp_path / "out")
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"but not predictions\.json, which identifies the weights and data"):
        predict(tmp_path / "out")


def test_another_prediction_is_refused_with_the_difference(tmp_path: Path) -> None:  # L-03
    cut_off(tmp_path / "out", at=2)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    in_threes = BatchSampler(loader().sampler, 3, False)
    for difference, arguments, options in (
        ("weights", (Predicting(seed=1),), {}),
        ("module", (type("Another", (Predicting,), {})(),), {}),
        ("precision", (), {"precision": "bf16-mixed"}),
        ("data: .*'samples': 11.* then, .*'samples': 12", (None, loader(12)), {}),
        ("data", (None, loader(sampler=list(range(11)))), {}),
        ("data", (None, DataLoader(Subset(numbered(12), range(11)), batch_size=4)), {}),
        ("data: .*'drawn samples': 11.* then, .*'drawn samples': 7", (None, loader(sampler=loader(7).sampler)), {}),
        ("use_distributed_sampler: True then, False now", (), {"use_distributed_sampler": False}),
        ("limit", (), {"limit_predict_batches": 3}),
        ("data: .*'batch size': 4.* then, .*'batch size': 3", (None, loader(batch_size=3)), {}),
        ("data: .*'batch size': 3.* now", (None, DataLoader(numbered(), batch_sampler=in_threes)), {}),
    ):
        with pytest.raises(CheckpointError, match=f"differ in {difference}") as caught:
            predict(tmp_path / "out", *arguments, **options)
        assert "write to another path" in caught.value.fix
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    predict(tmp_path / "out")
    with pytest.raises(CheckpointError, match="complete predictions"):
        predict(tmp_path / "out")


def test_a_sampler_has_to_draw_in_the_same_order(tmp_path: Path) -> None:  # L-03
    def drawing(*order: int) -> DataLoader[Any]:
        return loader(batch_size=2, sampler=list(order))

    cut_off(tmp_path / "out", at=2, loaders=drawing(1, 2, 3, 4, 1, 5))
    for returned in (False, True):
        fit = quiet_fit(callbacks=PredictionWriter(tmp_path / "out"))
        with pytest.raises(CheckpointError, match=r"other samples in batch 1 of rank 0: \[3, 4\] then, \[4, 3\] now"):
            fit.predict(Predicting(), drawing(1, 2, 4, 3, 1, 5), return_predictions=returned)
    module = Predicting()
    predict(tmp_path / "out", module, drawing(1, 2, 3, 4, 1, 5))
    assert module.given == [[1, 5]]
    assert first_values(read_predictions(tmp_path / "out")) == [2, 2, 4, 6, 8, 10]


def test_other_files_are_neither_read_nor_changed(tmp_path: Path) -> None:  # L-03
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    predict(tmp_path / "out")
    assert first_values(read_predictions(tmp_path / "out")) == DOUBLED
    for name in ("nowhere", "empty", "out/thesis.tex"):
        with pytest.raises(CheckpointError, match=r"There is no checkpoint at|is not a checkpoint|there are none"):
            read_predictions(tmp_path / name)
    with pytest.raises(CheckpointError, match="File exists"):
        predict(tmp_path / "out/thesis.tex")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def _refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="Another run is writing predictions"):
        predict(path)
    with pytest.raises(CheckpointError, match="are incomplete"):
        read_predictions(path)


def test_while_a_run_writes_no_other_writes_to_its_place_or_reads_it(tmp_path: Path) -> None:  # L-03
    def in_another_process(*arguments: Any) -> None:
        on_ranks(_refused, 1, str(tmp_path / "out"), process_group=None)

    predict(tmp_path / "out", None, None, LambdaCallback(on_predict_batch_end=in_another_process))
    assert first_values(read_predictions(tmp_path / "out")) == DOUBLED


def test_a_store_that_fails_loses_no_prediction(store: FaultyStore) -> None:  # L-03
    path = f"{store.url}/out"
    # Temporary failures and lost responses: the upload is repeated.
    store.fail("put", "*00000001.safetensors", times=2)
    store.fail("put", "*predictions.json", lost=True)
    predict(path)
    assert first_values(read_predictions(path)) == DOUBLED
    # Permanent failure: the run fails, the parts remain, and a later run resumes.
    store.fail("put", "other/part-0-00000-00000001*", times=None)
    with pytest.raises(OSError, match="503"):
        predict(f"{store.url}/other")
    with pytest.raises(CheckpointError, match="are incomplete"):
        read_predictions(f"{store.url}/other")
    store.heal()
    module = Predicting()
    predict(f"{store.url}/other", module)
    assert module.given[0] == [4, 5, 6, 7]
    assert first_values(read_predictions(f"{store.url}/other")) == DOUBLED
    store.fail("list", "third*", times=None)
    with pytest.raises(CheckpointError, match="503"):  # it does not count as an empty folder
        predict(f"{store.url}/third")
    store.fail("get", "out/predictions.json", times=None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_predictions(path)
    store.heal()


@pytest.mark.parametrize("at", [None, 0, 100, -40, -1])
def test_a_changed_part_is_predicted_again(at: int | None, tmp_path: Path, caplog: Any) -> None:  # L-03
    cut_off(tmp_path / "out", at=2)
    changed = tmp_path / "out/part-0-00000-00000000.safetensors"
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] if at is None else flipped(content, at))
    (tmp_path / f"out/.{changed.name}-01234567").touch()  # a file that a killed run was writing
    module = Predicting()
    predict(tmp_path / "out", module)
    assert module.given == [[0, 1, 2, 3], [8, 9, 10]]
    assert caplog.text.count(f"{changed.name} of the predictions '{tmp_path}/out' has changed") == 1
    assert first_values(read_predictions(tmp_path / "out")) == DOUBLED
    parts = [f"part-0-00000-0000000{batch}.safetensors" for batch in range(3)]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [*parts, "predictions.json"]


def test_files_open_without_drivetrain(tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "out", Predicting(lambda x: {"x": x, "text": ["a"] * len(x)}))
    json.loads((tmp_path / "out/predictions.json").read_bytes())
    tensors = load_file(tmp_path / "out" / "part-0-00000-00000001.safetensors")
    assert tensors["0/x"].tolist() == [[number, 1] for number in range(4, 8)]
    assert tensors["indices"].tolist() == [4, 5, 6, 7]
    assert tensors["samples"].tolist() == [4]
    assert json.loads(tensors["outputs"].numpy().tobytes()) == [{"x": {"$tensor": "0/x"}, "text": ["a"] * 4}]


def test_a_part_is_written_once_its_bytes_are_reached(tmp_path: Path) -> None:  # L-03
    parts: list[int] = []

    def count(*arguments: Any) -> None:
        parts.append(len(list((tmp_path / "out").glob("*.safetensors"))))

    writer = PredictionWriter(tmp_path / "out", part_bytes=3 * 4 * 1000 * 4)  # three batches
    fit = quiet_fit(callbacks=[writer, LambdaCallback(on_predict_batch_start=count)])
    fit.predict(Predicting(lambda x: torch.ones(len(x), 1000)), loader(32), return_predictions=False)
    assert parts == [0, 0, 0, 1, 1, 1, 2, 2]
    assert default_collate(list(read_predictions(tmp_path / "out"))).shape == (32, 1000)


class Recording(BasePredictionWriter):
    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *batch: Any) -> None:
        data, *numbers = batch
        self.batches.append((prediction.tolist(), list(batch_indices), len(data[0]), *numbers))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_lightnings_interface(interval: str) -> None:  # L-03
    writer, module = Recording(interval), Predicting(lambda x: x[:, 0])
    fit = quiet_fit(callbacks=writer)
    assert fit.predict(module, loader(5, 2, sampler=[4, 2, 0, 1, 3]), return_predictions=False) is None
    batches = [([4, 2], [4, 2], 2, 0, 0), ([0, 1], [0, 1], 2, 1, 0), ([3], [3], 1, 2, 0)]
    assert writer.batches == (batches if interval != "epoch" else [])
    assert fit.batch_indices is None
    assert len(writer.epochs) == (interval != "batch")
    for predictions, indices in writer.epochs:
        assert [one.tolist() for one in predictions] == [[4, 2], [0, 1], [3]]
        assert indices == [[[4, 2], [0, 1], [3]]]  # one list per loader, even for one loader
