"""Predictions: writing, reading and resuming (L-03)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import BasePredictionWriter, PredictionWriter
from drivetrain.data import CombinedLoader, read_predictions
from faulty_store import FaultyStore

Make = Callable[[torch.Tensor], Any]


class Predicting(TrainModule):
    """Returns ``make(batch)`` and records the samples of each batch."""

    def __init__(self, make: Make = lambda x: x * 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = torch.nn.Linear(2, 2)
        self.make = make
        self.given: list[list[int]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.given.append([int(value) for value in x[:, 0]])
        return self.make(x)


def numbered(samples: int, offset: int = 0) -> TensorDataset:
    """Sample i is (i, 1)."""
    return TensorDataset(torch.stack([torch.arange(float(samples)) + offset, torch.ones(samples)], 1))


def loader(samples: int = 11, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbered(samples), batch_size=batch_size, **options)


def predict(
    path: Any, module: TrainModule | None = None, loaders: Any = None, *others: Callback, **options: Any
) -> Any:
    """Predict with one part per batch, and return the result of predict."""
    writer = PredictionWriter(path, part_bytes=1)
    fit = Fit(
        callbacks=[*others, writer],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        **options,
    )
    module = Predicting() if module is None else module
    return fit.predict(module, loader() if loaders is None else loaders, return_predictions=False)


class Failing(Callback):
    """Ends a run at a given batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        if batch_idx == self.at:
            raise RuntimeError("the machine is gone")


def cut_off(path: Any, at: int, module: TrainModule | None = None, loaders: Any = None, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="the machine is gone"):
        predict(path, module, loaders, Failing(at), **options)


def firsts(predictions: Any) -> list[int]:
    return [int(one[0]) for one in predictions]


class Own(Sampler[int]):
    """A custom sampler with all or some samples."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(number), 1.0]),) for number in range(self.samples)])


# Writing and reading


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
    assert read.indices == list(range(11))
    for number, one in enumerate(read):
        assert one["tensor"].tolist() == [number, 1]
        assert one["tuple"][0].dtype == torch.int64
        assert one["tuple"][0].item() == number
        assert one["tuple"][1].item() == (number > 3)
        assert one["list"][0].dtype == torch.bfloat16
        assert one["list"][1]["deep"].shape == (1, 2)
        assert one["text"] == f"sample {number}"
        assert one["numbers"] == (float("inf") if number == 2 else number)
    assert [one["text"] for one in read[-2:]] == ["sample 9", "sample 10"]
    with pytest.raises(IndexError):
        read[11]
    whole = default_collate(list(read))
    assert whole["tensor"][:, 0].tolist() == list(range(11))
    assert whole["list"][1]["deep"].shape == (11, 1, 2)
    assert whole["text"][10] == "sample 10"


def test_batches_are_what_predict_returns(tmp_path: Path) -> None:  # L-03
    module = Predicting(lambda x: {"mean": x.mean(), "rows": x, "note": "a batch"})
    writer = PredictionWriter(tmp_path / "out")
    returned = Fit(callbacks=[writer], accelerator="cpu", logger=False).predict(module, loader())
    read = read_predictions(tmp_path / "out")
    for one, other in zip(read.batches(), returned, strict=True):
        assert one["note"] == other["note"]
        assert torch.equal(one["mean"], other["mean"])
        assert torch.equal(one["rows"], other["rows"])
    with pytest.raises(CheckpointError, match="cannot be split by sample"):
        read[0]


def test_lists_of_an_entry_for_each_sample_are_told_from_several_outputs(tmp_path: Path) -> None:  # L-03
    # The last batch has three samples, and both lists have three entries.
    predict(tmp_path / "each", Predicting(lambda x: [torch.full((int(n) % 3 + 1, 4), n) for n in x[:, 0]]))
    for number, one in enumerate(read_predictions(tmp_path / "each")):
        assert one.tolist() == [[number] * 4] * (number % 3 + 1)
    predict(tmp_path / "several", Predicting(lambda x: [x, x + 1, x + 2]))
    for number, one in enumerate(read_predictions(tmp_path / "several")):
        assert [int(part[0]) for part in one] == [number, number + 1, number + 2]


def test_shuffled_and_own_orders_come_back_in_that_of_the_data(tmp_path: Path) -> None:  # L-03
    order = [7, 1, 9, 0, 3, 8, 2, 10, 5, 4, 6]
    orders: dict[str, dict[str, Any]] = {
        "shuffled": {"batch_size": 4, "shuffle": True},
        "own": {"batch_size": 4, "sampler": Own(order)},
        "batches": {"batch_sampler": BatchSampler(Own(order), 3, drop_last=False)},
        "workers": {"batch_size": 4, "sampler": Own(order), "num_workers": 2},
    }
    for name, options in orders.items():
        predict(tmp_path / name, loaders=DataLoader(numbered(11), **options))
        read = read_predictions(tmp_path / name)
        assert firsts(read) == [2 * number for number in range(11)], name
        assert firsts(default_collate(list(read))) == [2 * number for number in range(11)], name
    predict(tmp_path / "some", loaders=DataLoader(numbered(11), batch_size=2, sampler=Own([8, 2, 5])))
    read = read_predictions(tmp_path / "some")
    assert (read.indices, firsts(read)) == ([2, 5, 8], [4, 10, 16])
    predict(tmp_path / "twice", loaders=DataLoader(numbered(11), batch_size=2, sampler=Own([8, 2, 8])))
    assert firsts(read_predictions(tmp_path / "twice")) == [4, 16, 16]


def test_several_loaders_and_streams(tmp_path: Path) -> None:  # L-03
    class Several(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch[0] + 100 * dataloader_idx

    predict(tmp_path / "several", Several(), [loader(5), loader(3), DataLoader(Stream(7), batch_size=2)])
    with pytest.raises(ConfigurationError, match="dataloader_idx"):
        read_predictions(tmp_path / "several")
    with pytest.raises(ConfigurationError, match="from 0 to 2"):
        read_predictions(tmp_path / "several", dataloader_idx=3)
    for index, samples in enumerate((5, 3, 7)):
        read = read_predictions(tmp_path / "several", dataloader_idx=index)
        assert firsts(read) == [100 * index + number for number in range(samples)]
    assert read.indices is None


def test_combined_loaders_and_loaders_of_whole_batches(tmp_path: Path) -> None:  # L-03
    class First(Predicting):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["a"][0] * 2

    for _ in range(2):  # the second run resumes
        loaders = CombinedLoader({"a": loader(), "b": loader(11, shuffle=True)}, "min_size")
        if not (tmp_path / "combined").exists():
            cut_off(tmp_path / "combined", at=1, module=First(), loaders=loaders)
        else:
            other = CombinedLoader({"a": loader(batch_size=3), "b": loader()}, "min_size")
            with pytest.raises(CheckpointError, match="'batch size': 3"):
                predict(tmp_path / "combined", First(), other)
            predict(tmp_path / "combined", First(), loaders)
    assert firsts(read_predictions(tmp_path / "combined")) == [2 * number for number in range(11)]

    class Whole(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return (torch.full((index + 1, 2), float(index)),)

    cut_off(tmp_path / "whole", at=2, loaders=DataLoader(Whole(), batch_size=None))
    module = Predicting()
    predict(tmp_path / "whole", module, DataLoader(Whole(), batch_size=None))
    assert module.given == [[2, 2, 2]]
    assert firsts(read_predictions(tmp_path / "whole")) == [0, 2, 2, 4, 4, 4]


def test_one_prediction_for_each_batch_of_one(tmp_path: Path) -> None:  # L-03
    make = lambda x: {"text": f"sample {int(x[0, 0])}", "number": x[0, 0]}  # noqa: E731
    predict(tmp_path / "out", Predicting(make), DataLoader(numbered(4), batch_size=1, sampler=Own([2, 0, 3, 1])))
    read = read_predictions(tmp_path / "out")
    assert [one["text"] for one in read] == [f"sample {number}" for number in range(4)]
    assert [int(one["number"]) for one in read] == list(range(4))


def test_only_a_part_of_the_data(tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "limited", limit_predict_batches=2)
    assert len(read_predictions(tmp_path / "limited")) == 8
    cut_off(tmp_path / "more", at=1, loaders=loader(20), limit_predict_batches=3)
    module = Predicting()
    predict(tmp_path / "more", module, loader(20), limit_predict_batches=3)
    assert module.given == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(read_predictions(tmp_path / "more")) == 12
    predict(tmp_path / "subset", loaders=DataLoader(Subset(numbered(11), [9, 3]), batch_size=1))
    assert firsts(read_predictions(tmp_path / "subset")) == [18, 6]


# Outputs that cannot be stored


class Found:
    pass


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda x: {"boxes": [x.numpy()]}, "batch 0: .*'0/boxes/0', a ndarray"),
        (lambda x: Found(), "batch 0: .*'0', a Found"),
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


def test_unknown_words_are_refused_with_the_known_ones() -> None:  # L-03
    with pytest.raises(ConfigurationError, match="Did you mean 'safetensors'"):
        PredictionWriter("out", format="safetensor")
    with pytest.raises(ConfigurationError, match="Did you mean 'batch'"):
        BasePredictionWriter("batches")
    with pytest.raises(ConfigurationError, match="bytes"):
        PredictionWriter("out", part_bytes=0)


# Incomplete or damaged predictions


def test_a_reader_sees_nothing_before_all_is_there(tmp_path: Path) -> None:  # L-03
    seen: list[str] = []

    class Reading(Callback):
        def on_predict_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            with pytest.raises(CheckpointError) as caught:
                read_predictions(tmp_path / "out")
            seen.append(caught.value.what)

    predict(tmp_path / "out", None, None, Reading())
    assert len(seen) == 3
    assert "are incomplete" in seen[0]
    assert len(read_predictions(tmp_path / "out")) == 11
    with pytest.raises(CheckpointError, match="There are no predictions at"):
        read_predictions(tmp_path / "nowhere")
    (tmp_path / "else").mkdir()
    with pytest.raises(CheckpointError, match="There are no predictions at"):
        read_predictions(tmp_path / "else")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="contains no predictions"):
        read_predictions(tmp_path / "file")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "out", Predicting(lambda x: {"x": x, "text": [str(row) for row in x]}))
    for name, change in {
        "part-0-00000-00000001.safetensors": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        "part-0-00000-00000000.safetensors": lambda content: content.replace(b"samples", b"simples", 1),
        "predictions.json": lambda content: content.replace(b"4", b"3", 1),
    }.items():
        path = tmp_path / "out" / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        with pytest.raises(CheckpointError, match=path.name) as caught:
            list(read_predictions(tmp_path / "out"))
        assert "checkpoint" not in str(caught.value)
        assert "are damaged" in caught.value.what
        path.unlink()
        with pytest.raises(CheckpointError, match=path.name):
            list(read_predictions(tmp_path / "out"))
        path.write_bytes(before)
    assert len(list(read_predictions(tmp_path / "out"))) == 11


# Resuming


def test_what_is_missing_is_computed_and_nothing_else(tmp_path: Path) -> None:  # L-03
    cut_off(tmp_path / "out", at=2, loaders=loader(22))
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert sorted(path.name for path in written) == [
        "part-0-00000-00000000.safetensors",
        "part-0-00000-00000001.safetensors",
    ]
    module = Predicting()
    predict(tmp_path / "out", module, loader(22))
    assert module.given[0] == [8, 9, 10, 11]
    assert sum(map(len, module.given)) == 14
    assert firsts(read_predictions(tmp_path / "out")) == [2 * number for number in range(22)]
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    assert not list((tmp_path / "out").glob("writing.lock"))


def test_what_was_read_already_is_not_read_again(tmp_path: Path) -> None:  # L-03
    read: list[int] = []

    class Watched(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return (torch.tensor([float(index), 1.0]),)

    cut_off(tmp_path / "out", at=2, loaders=DataLoader(Watched(), batch_size=4))
    read.clear()
    predict(tmp_path / "out", loaders=DataLoader(Watched(), batch_size=4))
    assert read == [8, 9, 10, 11]


def test_own_orders_and_streams_go_on_too(tmp_path: Path) -> None:  # L-03
    order = [7, 1, 9, 0, 3, 8, 2, 10, 5, 4, 6]

    def own() -> DataLoader[Any]:
        return DataLoader(numbered(11), batch_size=4, sampler=Own(order))

    def stream(batch_size: int = 4) -> DataLoader[Any]:
        return DataLoader(Stream(11), batch_size=batch_size)

    for name, make, rest in (("own", own, order[8:]), ("stream", stream, [8, 9, 10])):
        cut_off(tmp_path / name, at=2, loaders=make())
        module = Predicting()
        predict(tmp_path / name, module, make())
        assert module.given == [rest], name
        assert firsts(read_predictions(tmp_path / name)) == [2 * number for number in range(11)], name
    cut_off(tmp_path / "other", at=2, loaders=stream())
    with pytest.raises(CheckpointError, match="differ in data: batch size 4 then, 3 now"):
        predict(tmp_path / "other", loaders=stream(3))
    with pytest.raises(CheckpointError, match="more batches of rank 0 than its data") as caught:
        predict(tmp_path / "other", loaders=DataLoader(Stream(4), batch_size=4))
    assert "delete the folder" in caught.value.fix


def test_outputs_that_are_returned_are_computed_and_not_written_twice(tmp_path: Path) -> None:  # L-03
    cut_off(tmp_path / "out", at=2)
    fit = Fit(callbacks=[PredictionWriter(tmp_path / "out")], accelerator="cpu", logger=False)
    assert len(torch.cat(fit.predict(Predicting(), loader()))) == 11
    assert firsts(read_predictions(tmp_path / "out")) == [2 * number for number in range(11)]
    assert len(list(read_predictions(tmp_path / "out").batches())) == 3


def test_others_are_refused_by_name(tmp_path: Path) -> None:  # L-03
    class Another(Predicting):
        pass

    cut_off(tmp_path / "out", at=2)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for named, arguments, options in (
        ("differ in weights", (Predicting(seed=1),), {}),
        ("differ in module", (Another(),), {}),
        ("differ in precision", (), {"precision": "bf16-mixed"}),
        ("differ in data", (None, loader(12)), {}),
        ("differ in data", (None, DataLoader(numbered(11, offset=1), batch_size=4)), {}),
        ("differ in data", (None, DataLoader(numbered(11), batch_size=4, sampler=Own(list(range(11))))), {}),
        ("differ in data", (None, DataLoader(Subset(numbered(12), range(11)), batch_size=4)), {}),
        ("drawn samples 11 then, 7 now", (None, loader(11, sampler=SequentialSampler(range(7)))), {}),
        ("differ in use_distributed_sampler: True then, False now", (), {"use_distributed_sampler": False}),
        ("differ in limit", (), {"limit_predict_batches": 3}),
        ("differ in data: batch size 4 then, 3 now", (None, loader(11, batch_size=3)), {}),
        (
            "differ in data: batch size 4 then, 3 now",
            (None, DataLoader(numbered(11), batch_sampler=BatchSampler(SequentialSampler(range(11)), 3, False))),
            {},
        ),
    ):
        with pytest.raises(CheckpointError, match=named) as caught:
            predict(tmp_path / "out", *arguments, **options)
        assert "write to another path" in caught.value.fix
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    predict(tmp_path / "out")
    with pytest.raises(CheckpointError, match="complete predictions"):
        predict(tmp_path / "out")


def test_a_sampler_has_to_draw_in_the_same_order(tmp_path: Path) -> None:  # L-03
    def own(*order: int) -> DataLoader[Any]:
        return DataLoader(numbered(11), batch_size=2, sampler=Own(list(order)))

    cut_off(tmp_path / "out", at=2, loaders=own(1, 2, 3, 4, 1, 5))
    for returned in (False, True):
        writer = PredictionWriter(tmp_path / "out")
        fit = Fit(callbacks=[writer], accelerator="cpu", logger=False, enable_progress_bar=False)
        with pytest.raises(CheckpointError, match=r"other samples in batch 1 of rank 0: \[3, 4\] then, \[4, 3\] now"):
            fit.predict(Predicting(), own(1, 2, 4, 3, 1, 5), return_predictions=returned)
    with pytest.raises(CheckpointError, match="are incomplete"):
        read_predictions(tmp_path / "out")
    module = Predicting()
    predict(tmp_path / "out", module, own(1, 2, 3, 4, 1, 5))
    assert module.given == [[1, 5]]
    assert firsts(read_predictions(tmp_path / "out")) == [2, 2, 4, 6, 8, 10]


def test_what_is_no_prediction_is_left_alone(tmp_path: Path) -> None:  # L-03
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        predict(tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a file"):
        predict(tmp_path / "out" / "thesis.tex")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


SCRIPT = """
    import sys
    sys.path[:0] = sys.argv[2:]
    from test_prediction_writer import Predicting, loader, predict

    def when_told(x):
        print(int(x[0, 0]), flush=True)
        sys.stdin.readline()
        return x * 2

    predict(sys.argv[1], Predicting(when_told), loader(40, 1))
"""


def started(folder: Path) -> subprocess.Popen[str]:
    """Start a process that predicts samples one by one, printing each index and waiting for a line of input."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    paths = [Path(__file__).parent, Path(__file__).parents[2]]
    command = [sys.executable, str(script), str(folder / "out"), *map(str, paths)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:  # L-03
    begun = 0
    for batches in (3, 5):  # killed twice
        with started(tmp_path) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for number in range(begun, begun + batches):
                assert int(process.stdout.readline()) == number
                if number < begun + batches - 1:
                    process.stdin.write("\n")
                    process.stdin.flush()
            with pytest.raises(CheckpointError, match="are incomplete"):
                read_predictions(tmp_path / "out")
            os.kill(process.pid, signal.SIGKILL)
        begun += batches - 1  # the last one was not finished
    module = Predicting()
    predict(tmp_path / "out", module, loader(40, 1))
    assert module.given == [[number] for number in range(begun, 40)]
    assert firsts(read_predictions(tmp_path / "out")) == [2 * number for number in range(40)]


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:  # L-03
    with started(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError, match="Another run is writing predictions"):
            predict(tmp_path / "out", loaders=loader(40, 1))
        process.kill()


# Object stores


def test_an_object_store_in_memory(tmp_path: Path) -> None:  # L-03
    fsspec.filesystem("memory").store.clear()
    cut_off("memory://bucket/out", at=2)
    with pytest.raises(CheckpointError, match="are incomplete"):
        read_predictions("memory://bucket/out")
    module = Predicting()
    predict("memory://bucket/out", module)
    assert module.given == [[8, 9, 10]]
    assert firsts(read_predictions("memory://bucket/out")) == [2 * number for number in range(11)]
    with pytest.raises(CheckpointError, match="complete predictions"):
        predict("memory://bucket/out")


def test_a_store_that_fails(tmp_path: Path) -> None:  # L-03
    store = FaultyStore(tmp_path / "store").mount()
    path = f"{store.url}/out"
    # Temporary failures and lost responses: the upload is repeated.
    store.fail("put", "*00000001.safetensors", times=2)
    store.fail("put", "*predictions.json", lost=True)
    predict(path)
    assert firsts(read_predictions(path)) == [2 * number for number in range(11)]
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
    assert firsts(read_predictions(f"{store.url}/other")) == [2 * number for number in range(11)]
    # A listing that fails does not count as an empty folder.
    store.fail("list", "third*", times=None)
    with pytest.raises(CheckpointError, match="503"):
        predict(f"{store.url}/third")
    store.heal()
    store.fail("get", "out/predictions.json", times=None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_predictions(path)
    store.heal()


def test_a_torn_manifest_is_said(tmp_path: Path) -> None:  # L-03
    cut_off(tmp_path / "out", at=2)
    manifest = tmp_path / "out" / "predictions.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    for function in (predict, read_predictions):
        with pytest.raises(CheckpointError, match=r"The predictions .* are damaged: the checksum of predictions\.json"):
            function(tmp_path / "out")
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"but not predictions\.json, which identifies the weights and data"):
        predict(tmp_path / "out")


def test_a_part_that_has_changed_is_found_and_its_batches_are_predicted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # L-03
    changes: list[Callable[[bytes], bytes]] = [
        lambda content: content[:-1],
        lambda content: b"",
        *(
            lambda content, at=at: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            for at in (0, 100, -40, -1)
        ),
    ]
    for number, change in enumerate(changes):
        path = tmp_path / str(number)
        cut_off(path, at=2)
        changed = path / "part-0-00000-00000000.safetensors"
        changed.write_bytes(change(changed.read_bytes()))
        (path / f".{changed.name}-01234567").touch()  # a file that a killed run was writing
        module = Predicting()
        caplog.clear()
        predict(path, module)
        assert module.given == [[0, 1, 2, 3], [8, 9, 10]]
        assert caplog.text.count(f"{changed.name} of the predictions {str(path)!r} has changed") == 1
        assert firsts(read_predictions(path)) == [2 * number for number in range(11)]
        assert sorted(file.name for file in path.iterdir()) == [
            *(f"part-0-00000-0000000{batch}.safetensors" for batch in range(3)),
            "predictions.json",
        ]


def test_a_part_opens_without_drivetrain(tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "out", Predicting(lambda x: {"x": x, "text": ["a"] * len(x)}))
    tensors = load_file(tmp_path / "out" / "part-0-00000-00000001.safetensors")
    assert tensors["0/x"].tolist() == [[number, 1] for number in range(4, 8)]
    assert tensors["indices"].tolist() == [4, 5, 6, 7]
    assert tensors["samples"].tolist() == [4]
    assert json.loads(tensors["outputs"].numpy().tobytes()) == [{"x": {"$tensor": "0/x"}, "text": ["a"] * 4}]


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:  # L-03
    held: list[int] = []

    class Watching(Callback):
        def on_predict_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            held.append(writer._run._buffered_bytes if writer._run is not None else 0)

    writer = PredictionWriter(tmp_path / "out", part_bytes=3 * 4 * 1000 * 4)
    fit = Fit(callbacks=[writer, Watching()], accelerator="cpu", logger=False)
    module = Predicting(lambda x: torch.ones(len(x), 1000))
    fit.predict(module, loader(80), return_predictions=False)
    assert max(held) < 3 * 4 * 1000 * 4
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 7  # 20 batches, three in each
    assert default_collate(list(read_predictions(tmp_path / "out"))).shape == (80, 1000)


# Lightning's interface


class Told(BasePredictionWriter):
    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.batches.append((prediction.tolist(), list(batch_indices), len(batch[0]), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def test_lightning_s_interface() -> None:  # L-03
    order = [4, 2, 0, 1, 3]
    for interval in ("batch", "epoch", "batch_and_epoch"):
        told = Told(interval)
        fit = Fit(callbacks=[told], accelerator="cpu", logger=False)
        data = DataLoader(numbered(5), batch_size=2, sampler=Own(order))
        module = Predicting(lambda x: x[:, 0])
        assert fit.predict(module, data, return_predictions=False) is None
        batches = [([4, 2], [4, 2], 2, 0, 0), ([0, 1], [0, 1], 2, 1, 0), ([3], [3], 1, 2, 0)]
        assert told.batches == (batches if interval != "epoch" else [])
        if interval == "batch":
            assert told.epochs == []
            continue
        ((predictions, indices),) = told.epochs
        assert [one.tolist() for one in predictions] == [[4, 2], [0, 1], [3]]
        assert indices == [[[4, 2], [0, 1], [3]]]  # one list per loader, even for one loader
        assert fit.batch_indices is None


def test_several_loaders_by_lightning_s_interface() -> None:  # L-03
    class Several(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch[0][:, 0]

    told = Told("epoch")
    stream = DataLoader(Stream(3), batch_size=2)
    Fit(callbacks=[told], accelerator="cpu", logger=False).predict(Several(), [loader(3), stream])
    ((predictions, indices),) = told.epochs
    assert [[one.tolist() for one in part] for part in predictions] == [[[0, 1, 2]], [[0, 1], [2]]]
    assert indices == [[[0, 1, 2]], [None, None]]


def test_no_file_holds_code(tmp_path: Path) -> None:  # L-03
    predict(tmp_path / "out", Predicting(lambda x: {"x": x, "text": ["a"] * len(x)}))
    for path in (tmp_path / "out").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_bytes())


NOTHING_WRITTEN = """
    import sys
    import torch
    from drivetrain import Fit, TrainModule

    class Net(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()
        def predict_step(self, batch, batch_idx):
            return self.layer(batch)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit = Fit(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    fit.fit(Net(), [torch.ones(2, 2)])
    fit.predict(Net(), [torch.ones(2, 2)])
    print([name for name in sys.modules if name.startswith("drivetrain") and "predict" in name])
"""


def test_who_writes_none_imports_none_of_it(tmp_path: Path) -> None:  # L-03
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(NOTHING_WRITTEN))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "['drivetrain._loops.predict']"
