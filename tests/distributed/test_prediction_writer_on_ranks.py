"""Predictions that several ranks write to one folder. Row L-03."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import failing, quiet
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from drivetrain import Callback, DistributedError, TrainModule
from drivetrain.callbacks import BasePredictionWriter, PredictionWriter
from drivetrain.data import read_predictions, split_by_rank
from drivetrain.testing import run_distributed
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

ORDER = [7, 1, 9, 0, 13, 3, 8, 2, 10, 5, 4, 6, 12, 11, 14]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(sharding="hybrid"),
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


class Predicting(TrainModule):
    """Returns the number of each sample and the output of a layer; records its batches."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(2, 3)
        self.given: list[int] = []
        self.kill_at: int | None = None

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (x,) = batch
        out = self.layer(x)
        if batch_idx == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.given += [int(value) for value in x[:, 0]]
        return {"number": x[:, 0].long(), "out": out, "text": [str(int(value)) for value in x[:, 0]]}


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ORDER)

    def __len__(self) -> int:
        return len(ORDER)


class Stream(IterableDataset[Any]):
    """Of 11 samples the first of two ranks gets 6."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(number), 1.0]),) for number in range(self.samples)])


def numbered(samples: int) -> TensorDataset:
    return TensorDataset(torch.stack([torch.arange(float(samples)), torch.ones(samples)], 1))


def own_order() -> DataLoader[Any]:
    return DataLoader(numbered(15), batch_size=2, sampler=Own())


class Failing(Callback):
    """Ends the run at a given batch, on all ranks."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        if batch_idx == self.at:
            raise RuntimeError("the machine is gone")


def predict(path: str, strategy: str, loaders: Any, *callbacks: Callback, module: Any = None, **options: Any) -> Any:
    module = Predicting() if module is None else module
    writer = PredictionWriter(path, part_bytes=1)
    fit = quiet(strategy=STRATEGIES[strategy](), callbacks=[*callbacks, writer], **options)
    fit.predict(module, loaders, return_predictions=False)
    return module.given


def _all_forms(folder: str, strategy: str) -> None:
    for samples in (1, 5, 11, 16):  # fewer samples than ranks, and every possible remainder
        predict(f"{folder}/plain {samples}", strategy, DataLoader(numbered(samples), batch_size=2))
    predict(f"{folder}/shuffled", strategy, DataLoader(numbered(11), batch_size=2, shuffle=True))
    predict(f"{folder}/own", strategy, own_order())
    several = [DataLoader(numbered(7), batch_size=2), own_order()]
    predict(f"{folder}/several", strategy, several)
    stream = DataLoader(split_by_rank(Stream(11)), batch_size=2)
    predict(f"{folder}/stream", strategy, stream)


def _check_all_forms(folder: Path, expected: Callable[[int], torch.Tensor]) -> None:
    for name, samples in {
        "plain 1": 1,
        "plain 5": 5,
        "plain 11": 11,
        "plain 16": 16,
        "shuffled": 11,
        "own": 15,
    }.items():
        read = read_predictions(folder / name)
        assert [int(one["number"]) for one in read] == list(range(samples)), name
        assert [one["text"] for one in read] == [str(number) for number in range(samples)], name
        torch.testing.assert_close(torch.stack([one["out"] for one in read]), expected(samples))
    for index, samples in enumerate((7, 15)):
        read = read_predictions(folder / "several", dataloader_idx=index)
        assert [int(one["number"]) for one in read] == list(range(samples))
    stream = read_predictions(folder / "stream")
    assert sorted(int(one["number"]) for one in stream) == list(range(11))
    assert stream.indices is None


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp"), (2, "zero 3"), (4, "ddp"), (4, "hsdp")])
def test_ranks_write_every_prediction_once(tmp_path: Path, ranks: int, strategy: str) -> None:  # L-03
    on_ranks(_all_forms, ranks, str(tmp_path), strategy, process_group=None, timeout=120)
    layer = Predicting().layer
    with torch.no_grad():
        _check_all_forms(tmp_path, lambda samples: layer(numbered(samples).tensors[0]))


def _begin(path: str, strategy: str, at: int, loaders: Any = None) -> None:
    loaders = DataLoader(numbered(23), batch_size=2) if loaders is None else loaders
    with failing() as caught:
        predict(path, strategy, loaders, Failing(at))
    assert caught["type"] == "RuntimeError", caught


def _go_on(path: str, strategy: str, loaders: Any = None) -> Any:
    return predict(path, strategy, DataLoader(numbered(23), batch_size=2) if loaders is None else loaders)


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [
        (2, "ddp", "ddp"),
        (2, "fsdp", "fsdp"),
        (2, "ddp", "fsdp"),
        (2, "fsdp", "zero 3"),
        (4, "hsdp", "ddp"),
    ],
)
def test_what_is_missing_is_computed_under_any_strategy(
    tmp_path: Path, ranks: int, before: str, after: str
) -> None:  # L-03
    path = str(tmp_path / "out")
    on_ranks(_begin, ranks, path, before, 2, process_group=None, timeout=120)
    given = on_ranks(_go_on, ranks, path, after, process_group=None, timeout=120)
    assert [int(one["number"]) for one in read_predictions(path)] == list(range(23))
    assert {number for part in given for number in part} == set(range(4 * ranks, 23))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_changed_part_of_one_rank_is_predicted_again(tmp_path: Path, strategy: str) -> None:  # L-03
    path = str(tmp_path / "out")
    on_ranks(_begin, 2, path, strategy, 3, process_group=None)
    part = tmp_path / "out" / "part-0-00001-00000001.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    first, second = on_ranks(_go_on, 2, path, strategy, process_group=None)
    # Under FSDP, the other rank joins the forward of the batch.
    assert [number for number in first if number < 12] == ([4, 5] if strategy == "fsdp" else [])
    assert [number for number in second if number < 12] == [6, 7]
    assert [int(one["number"]) for one in read_predictions(path)] == list(range(23))


def test_another_number_of_ranks_does_not_resume(tmp_path: Path) -> None:  # L-03
    path = str(tmp_path / "out")
    on_ranks(_begin, 2, path, "ddp", 2, process_group=None)
    for ranks, strategy in ((1, "single"), (4, "ddp")):
        for text in on_ranks(_refused, ranks, path, strategy, process_group=None):
            assert f"differ in number of ranks: 2 then, {ranks} now" in text
            assert "write to another path" in text
    given = on_ranks(_go_on, 2, path, "ddp", process_group=None)
    assert sorted(number for part in given for number in part) == list(range(8, 23))


def _refused(path: str, strategy: str) -> str:
    with failing() as caught:
        _go_on(path, strategy)
    return caught["text"]


def _own_and_streams(folder: str, strategy: str, at: int | None) -> Any:
    """Start, and fail at a batch; or resume."""
    given = {}
    for name, make in (("own", own_order), ("stream", _stream)):
        if at is not None:
            _begin(f"{folder}/{name}", strategy, at, make())
        else:
            given[name] = _go_on(f"{folder}/{name}", strategy, make())
    return given


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_own_orders_and_streams_resume_on_ranks(tmp_path: Path, strategy: str) -> None:  # L-03
    on_ranks(_own_and_streams, 2, str(tmp_path), strategy, 2, process_group=None)
    given = on_ranks(_own_and_streams, 2, str(tmp_path), strategy, None, process_group=None)
    assert [int(one["number"]) for one in read_predictions(tmp_path / "own")] == list(range(15))
    assert not {number for part in given for number in part["own"]} & set(ORDER[:8])
    read = read_predictions(tmp_path / "stream")
    assert sorted(int(one["number"]) for one in read) == list(range(13))
    # One rank has three samples left, in two batches, the other two in one; under FSDP it joins with that batch again.
    assert [len(part["stream"]) for part in given] == ([3, 2] if strategy == "ddp" else [3, 4])


def test_a_stream_does_not_resume_with_other_batches(tmp_path: Path) -> None:  # L-03
    assert "differ in data: batch size 2 then, 3 now" in refused(1, _go_on_stream_anew, str(tmp_path / "stream"))


def _stream() -> DataLoader[Any]:
    return DataLoader(split_by_rank(Stream(13)), batch_size=2)


def _go_on_stream_anew(path: str) -> str:
    _begin(path, "single", 1, DataLoader(Stream(11), batch_size=2))
    with failing() as caught:
        predict(path, "single", DataLoader(Stream(11), batch_size=3))
    return caught["text"]


class Split(Predicting):
    """Its layers are split over two ranks, which read the same batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up: Any = None

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.up is None:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 3)
        parallelize_module(self, self.device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (x,) = batch
        self.given += [int(value) for value in x[:, 0]]
        return {"number": x[:, 0].long(), "out": self.layer(x) + self.down(torch.tanh(self.up(x)))}


def _split(path: str, at: int | None) -> Any:
    module = Split()
    fit = quiet(
        strategy=FSDPStrategy(tensor_parallel=2),
        callbacks=[*([] if at is None else [Failing(at)]), PredictionWriter(path, part_bytes=1)],
    )
    with failing() as caught:
        fit.predict(module, DataLoader(numbered(11), batch_size=4), return_predictions=False)
    assert caught["type"] == ("nothing was raised" if at is None else "RuntimeError"), caught
    return module.given


def test_one_of_the_ranks_with_the_same_data_writes(tmp_path: Path) -> None:  # L-03
    on_ranks(_split, 2, str(tmp_path / "out"), 1, process_group=None)
    given = on_ranks(_split, 2, str(tmp_path / "out"), None, process_group=None)
    assert given == [[4, 5, 6, 7, 8, 9, 10]] * 2
    read = read_predictions(tmp_path / "out")
    assert [int(one["number"]) for one in read] == list(range(11))
    assert {path.name.split("-")[2] for path in (tmp_path / "out").glob("part-*")} == {"00000"}


def refused(ranks: int, function: Any, *arguments: Any) -> str:
    texts = on_ranks(function, ranks, *arguments, process_group=None)
    return str(texts[0])


def _other_weights(path: str, strategy: str) -> tuple[str, str, str]:
    _begin(path, strategy, 2)
    with failing() as weights:
        predict(path, strategy, DataLoader(numbered(23), batch_size=2), module=Predicting(seed=1))
    with failing() as data:
        predict(path, strategy, DataLoader(numbered(24), batch_size=2))
    _go_on(path, strategy)
    with failing() as finished:
        _go_on(path, strategy)
    return weights["text"], data["text"], finished["text"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_refuses_predictions_of_other_weights(tmp_path: Path, strategy: str) -> None:  # L-03
    path = str(tmp_path / "out")
    for weights, data, finished in on_ranks(_other_weights, 2, path, strategy, process_group=None):
        assert "differ in weights" in weights
        assert "differ in data" in data
        assert "complete predictions" in finished


def _unstorable(path: str) -> str:
    class Odd(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {1, 2} if self.global_rank == 1 else batch[0]

    with failing() as caught:
        predict(path, "ddp", DataLoader(numbered(8), batch_size=2), module=Odd())
    return caught["text"]


def test_a_prediction_that_one_rank_cannot_store_ends_the_run(tmp_path: Path) -> None:  # L-03
    texts = on_ranks(_unstorable, 2, str(tmp_path / "out"), process_group=None)
    assert any("a set" in text for text in texts), texts


def _killed(path: str, strategy: str, rank: int, at: int) -> None:
    module = Predicting()
    if int(os.environ["RANK"]) == rank:
        module.kill_at = at
    predict(path, strategy, DataLoader(numbered(23), batch_size=2), module=module)


@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_a_killed_rank(tmp_path: Path, strategy: str, victim: int) -> None:  # L-03
    path = str(tmp_path / "out")
    with pytest.raises(DistributedError):
        run_distributed(_killed, 2, path, strategy, victim, 3, process_group=None, timeout=100)
    with pytest.raises(DistributedError):
        run_distributed(_killed, 2, path, strategy, victim, 4, process_group=None, timeout=100)
    given = on_ranks(_go_on, 2, path, strategy, process_group=None, timeout=100)
    assert [int(one["number"]) for one in read_predictions(path)] == list(range(23))
    # The progress of the other rank is undefined.
    written = {4 * batch + 2 * victim + number for batch in range(4) for number in range(2)}
    assert not written & {number for part in given for number in part}


class Told(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
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
        assert prediction["number"].tolist() == list(batch_indices)
        self.batches.append(list(batch_indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        assert [one["number"].tolist() for one in predictions] == batch_indices[0]
        self.epochs.append(batch_indices)


def _told() -> Any:
    told = []
    for loaders in (DataLoader(numbered(5), batch_size=2), own_order()):
        one = Told()
        quiet(strategy="ddp", callbacks=[one]).predict(Predicting(), loaders, return_predictions=False)
        assert one.epochs == [[one.batches]]
        told.append(one.batches)
    return told


def test_batch_indices_are_those_of_this_rank() -> None:  # L-03
    first, second = on_ranks(_told, 2, process_group=None)
    for number, samples in enumerate((5, 15)):
        indices = [index for rank in (first, second) for batch in rank[number] for index in batch]
        assert sorted(indices) == list(range(samples))
    assert first[1][0] == ORDER[:2]
    assert second[1][0] == ORDER[2:4]
