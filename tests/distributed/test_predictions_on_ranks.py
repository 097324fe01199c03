"""Predictions that several ranks write to one folder, or return. Rows L-03, I-14."""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import STRATEGIES, each, failing, quiet, seeded
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import DistributedError, TrainModule
from drivetrain._loops.outputs import _HostPickler
from drivetrain.callbacks import BasePredictionWriter, PredictionWriter
from drivetrain.data import read_predictions, split_by_rank
from drivetrain.testing import run_distributed
from drivetrain_strategies import FSDPStrategy
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import DEEPSPEED, on_emulated_cuda, on_ranks, preload

preload(*DEEPSPEED)

ORDER = [7, 1, 9, 0, 13, 3, 8, 2, 10, 5, 4, 6, 12, 11, 14]


class Predicting(TrainModule):
    """Returns the number of each sample and the output of a layer; records its samples."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = seeded(lambda: nn.Linear(2, 3))
        self.layer.weight.data *= scale
        self.given: list[int] = []
        self.kill_at = self.fail_at = -1

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = self.samples_of(batch, batch_idx)
        out = self.layer(x)
        if batch_idx == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.given += [int(value) for value in x[:, 0]]
        return {"number": x[:, 0].long(), "out": out, "text": [str(int(value)) for value in x[:, 0]]}

    def samples_of(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("the machine is gone")
        samples: torch.Tensor = batch[0]
        return samples


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(number), 1.0]),) for number in range(self.samples)])


def numbered(samples: int) -> TensorDataset:
    return TensorDataset(torch.stack([torch.arange(float(samples)), torch.ones(samples)], 1))


def plain(samples: int = 23) -> DataLoader[Any]:
    return DataLoader(numbered(samples), batch_size=2)


def own_order() -> DataLoader[Any]:
    return DataLoader(numbered(15), batch_size=2, sampler=ORDER)


def stream(samples: int = 13) -> DataLoader[Any]:
    return DataLoader(split_by_rank(Stream(samples)), batch_size=2)


def predict(path: str, strategy: str, loaders: Any = None, fail_at: int = -1, module: Any = None) -> Any:
    """Predict on all ranks, or until a batch; return the samples that this rank predicted, or the error."""
    module = module or Predicting()
    module.fail_at = fail_at
    chosen = FSDPStrategy(tensor_parallel=2) if strategy == "tensor parallel" else STRATEGIES[strategy]()
    fit = quiet(strategy=chosen, callbacks=PredictionWriter(path, part_bytes=1))
    with failing() as caught:
        fit.predict(module, plain() if loaders is None else loaders, return_predictions=False)
    return caught["text"] or module.given


def numbers(path: Any, **options: Any) -> list[int]:
    return [int(one["number"]) for one in read_predictions(path, **options)]


FORMS = {"plain 1": 1, "plain 5": 5, "plain 11": 11, "plain 16": 16, "shuffled": 11, "own": 15}


class KeepsIndices(BasePredictionWriter):
    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        (self.indices,) = batch_indices
        assert [one["number"].tolist() for one in predictions] == self.indices


def _all_forms(folder: str, strategy: str) -> Any:
    for name, samples in FORMS.items():
        loaders = DataLoader(numbered(samples), batch_size=2, shuffle=name == "shuffled")
        predict(f"{folder}/{name}", strategy, own_order() if name == "own" else loaders)
    predict(f"{folder}/several", strategy, [plain(7), own_order()])
    predict(f"{folder}/stream", strategy, stream(11))
    writer = KeepsIndices("epoch")
    fit = quiet(strategy=STRATEGIES[strategy](), callbacks=[writer])
    fit.predict(Predicting(), own_order(), return_predictions=False)
    return writer.indices


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp"), (2, "zero 3"), (4, "hsdp")])
def test_ranks_write_every_prediction_once(tmp_path: Path, ranks: int, strategy: str) -> None:  # L-03
    indices = on_ranks(_all_forms, ranks, str(tmp_path), strategy, process_group=None, timeout=120)
    assert [index for one in indices for index in one[0]] == ORDER[: 2 * ranks]
    assert {index for one in indices for batch in one for index in batch} == set(range(15))
    for name, samples in FORMS.items():
        read = read_predictions(tmp_path / name)
        assert [int(one["number"]) for one in read] == list(range(samples)), name
        assert [one["text"] for one in read] == [str(number) for number in range(samples)], name
        with torch.no_grad():
            expected = Predicting().layer(numbered(samples).tensors[0])
        torch.testing.assert_close(torch.stack([one["out"] for one in read]), expected)
    for index, samples in enumerate((7, 15)):
        assert numbers(tmp_path / "several", dataloader_idx=index) == list(range(samples))
    assert sorted(numbers(tmp_path / "stream")) == list(range(11))
    assert read_predictions(tmp_path / "stream").indices is None


@pytest.mark.parametrize(("ranks", "before", "after"), [(2, "ddp", "fsdp"), (2, "fsdp", "zero 3"), (4, "hsdp", "ddp")])
def test_what_is_missing_is_computed_under_any_strategy_and_other_predictions_are_refused(
    tmp_path: Path, ranks: int, before: str, after: str
) -> None:  # L-03
    path = str(tmp_path / "out")
    assert on_ranks(predict, ranks, path, before, None, 2, process_group=None) == ["the machine is gone"] * ranks
    others = 6 - ranks
    for told, number, *case in (
        (f"differ in number of ranks: {ranks} then, {others} now", others, "ddp"),
        ("differ in weights", ranks, after, None, -1, Predicting(scale=2)),
        ("differ in data", ranks, after, plain(24)),
    ):
        for text in on_ranks(predict, number, path, *case, process_group=None, timeout=120):
            assert told in text
            assert "write to another path" in text
    given = on_ranks(predict, ranks, path, after, process_group=None, timeout=120)
    assert numbers(path) == list(range(23))
    assert {number for part in given for number in part} == set(range(4 * ranks, 23))
    for text in on_ranks(predict, ranks, path, after, process_group=None, timeout=120):
        assert "complete predictions" in text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_own_orders_and_streams_resume_on_ranks(tmp_path: Path, strategy: str) -> None:  # L-03
    given: list[Any] = []
    for fail_at in (2, -1):
        cases = [(str(tmp_path / "own"), strategy, own_order(), fail_at)]
        cases += [(str(tmp_path / "stream"), strategy, stream(), fail_at)]
        given = on_ranks(each, 2, predict, *cases, process_group=None)
    own, streamed = zip(*given, strict=True)
    assert numbers(tmp_path / "own") == list(range(15))
    assert not {number for part in own for number in part} & set(ORDER[:8])
    assert sorted(numbers(tmp_path / "stream")) == list(range(13))
    # One rank has three samples left, in two batches, the other two in one; under FSDP it joins with that batch again.
    assert [len(part) for part in streamed] == ([3, 2] if strategy == "ddp" else [3, 4])


class Split(Predicting):
    """Its layers are split over two ranks, which read the same batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = seeded(lambda: nn.ModuleList([nn.Linear(2, 4), nn.Linear(4, 3)]))

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(self, self.device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = self.samples_of(batch, batch_idx)
        self.given += [int(value) for value in x[:, 0]]
        return {"number": x[:, 0].long(), "out": self.layer(x) + self.down(torch.tanh(self.up(x)))}


def _split(path: str, fail_at: int) -> Any:
    return predict(path, "tensor parallel", DataLoader(numbered(11), batch_size=4), fail_at, Split())


def test_one_of_the_ranks_with_the_same_data_writes(tmp_path: Path) -> None:  # L-03
    on_ranks(_split, 2, str(tmp_path / "out"), 1, process_group=None)
    assert on_ranks(_split, 2, str(tmp_path / "out"), -1, process_group=None) == [[4, 5, 6, 7, 8, 9, 10]] * 2
    assert numbers(tmp_path / "out") == list(range(11))
    assert {path.name.split("-")[2] for path in (tmp_path / "out").glob("part-*")} == {"00000"}


def _killed(path: str, strategy: str, rank: int) -> None:
    module = Predicting()
    module.kill_at = 3 if int(os.environ["RANK"]) == rank else -1
    predict(path, strategy, module=module)


@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("fsdp", 1)])
def test_a_killed_rank_loses_nothing_that_was_written(tmp_path: Path, strategy: str, victim: int) -> None:  # L-03
    path = str(tmp_path / "out")
    with pytest.raises(DistributedError):
        run_distributed(_killed, 2, path, strategy, victim, process_group=None, timeout=100)
    given = on_ranks(predict, 2, path, strategy, process_group=None, timeout=100)
    assert numbers(path) == list(range(23))
    # The progress of the other rank is undefined.
    written = {4 * batch + 2 * victim + number for batch in range(3) for number in range(2)}
    assert not written & {number for part in given for number in part}


class Found:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class PredictsObjects(Predicting):
    def __init__(self, local: bool) -> None:
        super().__init__()
        self.local = local

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return (lambda: batch) if self.local else Found(batch[0][:, 0])


def _objects() -> Any:
    own = [one.x for one in quiet(strategy="ddp").predict(PredictsObjects(False), plain())]
    none = quiet(strategy="ddp").predict(PredictsObjects(True), plain(), return_predictions=False)
    return torch.cat(own).tolist(), none


def test_predictions_are_gathered_or_stay_on_their_ranks() -> None:  # I-14
    assert on_ranks(_objects, 2, process_group=None) == [(list(range(23)), None)] * 2


def _pickled(gpu: EmulatedCuda) -> Any:
    stream = io.BytesIO()
    _HostPickler(stream).dump([Found(torch.arange(3, device="cuda"))])
    (found,) = pickle.loads(stream.getvalue())
    return found.x.device.type, found.x.tolist()


@requires_emulated_cuda()
def test_tensors_in_a_users_object_are_sent_from_the_cpu() -> None:  # I-14
    assert on_emulated_cuda(_pickled).returned == ("cpu", [0, 1, 2])
