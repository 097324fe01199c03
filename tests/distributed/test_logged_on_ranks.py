"""Values, metrics, histograms and profiles of several ranks. Rows I-01, I-16, L-04, L-05, S-06."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from fsdp_nets import Deep
from small_runs import Regression, data, each, failing, loader, quiet, refusal, seeded, weights

from drivetrain import Fit, Logger
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import SimpleProfiler
from drivetrain.testing import requires_package
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from mergeable import MergeablePearson
from oracle.outcome import whole
from worlds import on_emulated_cuda, on_ranks


class ListOfStates(torchmetrics.Metric):
    values: list[torch.Tensor]
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def compute(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in self.values]).mean()


class LogsOddly(Regression):
    """Logs a shard, a list of states that rank 0 alone updates, or a value that is NaN on rank 1."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.scale = torch.nn.Parameter(torch.tensor([0.5]))
        self.states = ListOfStates()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.what == "without targets":
            value, count = (3.0, 2) if self.global_rank == 0 else (float("nan"), 0)
            weight: Any = torch.tensor(count)
            self.log("value", torch.tensor(value), on_step=True, on_epoch=True, sync_dist=True, batch_size=weight)
        return self.loss(batch) * self.scale.square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "shard":
            self.log("scale", self.scale)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.what == "states":
            if self.global_rank == 0:
                self.states.update(batch[0][:, 0])
            self.log("states", self.states)


def _log_oddly() -> tuple[list[str], dict[str, float]]:
    batches, runner = loader(8, 2), quiet(strategy="ddp", log_every_n_steps=1)
    shard = refusal(LogsOddly("shard"), batches, strategy="fsdp")
    states = refusal(LogsOddly("states"), batches, batches, strategy="ddp")
    runner.fit(LogsOddly("without targets"), batches)
    values = {name: float(value) for name, value in runner.callback_metrics.items() if "value" in name}
    return [shard, states], values


def test_values_that_ranks_cannot_combine_are_refused_and_those_without_weight_ignored() -> None:  # I-01, H-03, S-06
    for (shard, states), values in on_ranks(_log_oddly, 2):
        assert shard.startswith("ConfigurationError")
        assert "log('scale') was given a DTensor" in shard
        assert "full_tensor()" in shard
        assert states.startswith("ConfigurationError")
        assert "state 'values' of the ListOfStates 'states'" in states
        assert "2, 0" in states
        assert values == {"value_step": 3.0, "value_epoch": 3.0, "value": 3.0}


SAMPLES = 24


class Correlated(Regression):
    """Measures the correlation of the data's first number with the target: the same for any split and order."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.pearson = kind()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pearson.update(batch[0][:, 0], batch[1][:, 0])
        self.log("pearson", self.pearson, on_step=False, on_epoch=True)
        return self.loss(batch)


def _run(kind: Any, folder: Path, start: Path | None, max_steps: int) -> Any:
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": max_steps, "default_root_dir": folder, "seed": 3}
    module, trainer = Correlated(kind), quiet(strategy="ddp", callbacks=saver, **options)
    before = weights(module).clone()
    with failing() as caught:
        trainer.fit(module, loader(SAMPLES, 2, shuffle=True), ckpt_path=start)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return caught, found, torch.equal(before, weights(module))


def test_a_mergeable_metric_resumes_and_another_is_refused_before_anything_changes(tmp_path: Path) -> None:
    # I-16: with three ranks' states on two ranks, one rank gets two states, and the other could resume
    kinds = {"mergeable": MergeablePearson, "plain": torchmetrics.PearsonCorrCoef}
    on_ranks(each, 3, _run, *[(kind, tmp_path / name, None, 2) for name, kind in kinds.items()])
    starts = [(kind, tmp_path / f"{name} 2", tmp_path / name / "epoch=0-step=2", -1) for name, kind in kinds.items()]
    x, y = data(SAMPLES).tensors
    expected = float(torch.corrcoef(torch.stack([x[:, 0], y[:, 0]]))[0, 1])
    for (none, found, _), (caught, _, unchanged) in on_ranks(each, 2, _run, *starts):
        assert none["type"] == "nothing was raised", none
        assert found["pearson"] == pytest.approx(expected, abs=1e-5)
        assert caught["type"] == "CheckpointError"
        assert "PearsonCorrCoef 'pearson'" in caught["text"]
        assert "merge_state" in caught["text"]
        assert unchanged


class Listing(Logger):
    name, version = "listing", "0"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.config: dict[str, int] = {}
        self.histograms: dict[str, tuple[int, list[int], list[float]]] = {}

    @property
    def experiment(self) -> Any:
        return self

    def write(self, text: str) -> None:
        self.calls.append(text)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append("metrics")

    def log_text(self, key: str, value: str, step: int) -> None:
        self.calls.append(value)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        assert key not in self.histograms
        self.histograms[key] = (step, list(value.counts), list(value.edges))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


class LogsInAHook(Regression):
    def on_train_start(self) -> None:
        for one in (self.logger, *self.loggers, *self.trainer.loggers):
            one.log_text("text", f"by {self.global_rank}", 0)
        self.logger.experiment.write(f"to the library by {self.global_rank}")
        assert isinstance(self.logger, Listing)
        assert isinstance(self.trainer.loggers[1], CSVLogger)
        assert self.trainer.loggers[1].log_dir == self.trainer.log_dir
        self.logger.experiment.config["x"] = 1 if self.global_rank else self.logger.experiment.write("")
        self.trainer.log_histogram("w", next(iter(self.parameters())))


def _log_in_a_hook(folder: Path) -> list[str]:
    listing = Listing()
    quiet(strategy="fsdp", devices=2, logger=[listing, CSVLogger(folder)]).fit(LogsInAHook(), loader(8, 4))
    return listing.calls


def test_a_value_logged_by_a_hook_on_every_rank_is_written_once(tmp_path: Path) -> None:  # L-04
    calls, others = on_ranks(_log_in_a_hook, 2, tmp_path)
    assert calls == ["by 0", "by 0", "by 0", "to the library by 0", "", "success"]
    assert others == []
    media = tmp_path / "drivetrain_logs/version_0/media"
    assert [path.name for path in media.rglob("*.txt")] == ["step=0.txt"]
    assert sum(json.loads((media / "w/step=0.json").read_text())["counts"]) == 8 * 4  # of the whole tensor


class LogsHistograms(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Deep)
        self.register_buffer("scale", torch.arange(5.0))
        self.wholes: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1 and not self.trainer.strategy.name.startswith("deepspeed"):
            found = {name: one.grad for name, one in self.named_parameters() if one.grad is not None}
            self.wholes = {f"grads/{name}": whole(one) for name, one in found.items()}
            self.trainer.log_histogram("grads", found, step=2, bins=16)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 2:
            return
        self.wholes |= {f"weights/{name}": whole(one) for name, one in self.trainer.strategy.model_state().items()}
        self.trainer.log_histogram("weights", {**dict(self.named_parameters()), "scale": self.scale}, bins=16)
        own = torch.arange(3.0) + 10 * self.global_rank  # differs between ranks
        self.trainer.log_histogram("own", own, step=7, bins=4)
        self.trainer.log_histogram("one", own if self.global_rank else None, bins=2)
        self.trainer.log_histogram("none", torch.full((3,), float("nan")))
        self.wholes["own"] = torch.tensor([0.0, 1, 2, 10, 11, 12])
        self.wholes["one"] = torch.tensor([10.0, 11, 12])


def _histograms(strategy: str, precision: str) -> Any:
    listing, module = Listing(), LogsHistograms()
    quiet(strategy=strategy, devices=2, logger=listing, precision=precision).fit(module, loader(16, 4))
    return listing.histograms, module.wholes


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "32-true"),
        ("fsdp", "bf16-true"),
        pytest.param("deepspeed_stage_3", "32-true", marks=requires_package("deepspeed")),
        pytest.param("deepspeed_stage_2", "32-true", marks=requires_package("deepspeed")),
    ],
)
def test_histograms_are_of_the_whole_tensors(strategy: str, precision: str) -> None:  # L-04
    (found, wholes), (others, _) = on_ranks(_histograms, 2, strategy, precision)
    assert others == {}
    assert found.keys() == wholes.keys()  # nothing for "none", which has no finite number
    assert len(wholes) > (20 if strategy.startswith("deepspeed") else 40)
    for name, values in wholes.items():
        counts, edges = np.histogram(values.double().numpy(), {"own": 4, "one": 2}.get(name, 16))
        assert found[name] == (7 if name == "own" else 2, counts.tolist(), edges.tolist()), name


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


def fit(root: Path, strategy: str, profiler: Any, **options: Any) -> tuple[Fit, str]:
    """Train and validate; return the Fit and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runner = quiet(default_root_dir=root, strategy=strategy, profiler=profiler, seed=1, **options)
        runner.fit(Validated(), loader(32, 2), loader(32, 2))
    return runner, printed.getvalue()


def calls(profiler: SimpleProfiler) -> dict[str, int]:
    return {" > ".join(row.path): row.calls for row in profiler.rows()}


def _profiled(root: Path, strategy: str) -> Any:
    simple = SimpleProfiler()
    runner, printed = fit(root, strategy, simple)
    adds_up = sum(row.self_ns for row in simple.rows()) == simple.total_ns > 0
    traced = fit(root, strategy, "pytorch")[0]
    (path,) = Path(str(traced.log_dir), "profile").glob(f"fit-pytorch-rank-{traced.global_rank}.trace.json")
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    return printed, str(runner.log_dir), simple.summary(), calls(simple), adds_up, names


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed", marks=requires_package("deepspeed"))])
def test_each_rank_has_a_table_and_a_trace(tmp_path: Path, strategy: str) -> None:  # L-05
    first, second = on_ranks(_profiled, 2, tmp_path, strategy)
    printed, folder, summary, rows, _, _ = first
    assert rows["training > forward"] == rows["training > backward"] == rows["training > optimizer"] == 8
    assert rows["training > windows > data"] == 8
    assert rows["training > validation > forward"] == 8
    assert summary in printed
    assert "rank 0 of 2" in summary
    assert "Profile of" not in second[0]  # rank 0 logs for all ranks
    assert "rank 1 of 2" in second[2]
    files = {path.name: path.read_text() for path in Path(folder, "profile").iterdir()}
    assert files == {"fit-simple-rank-0.txt": summary, "fit-simple-rank-1.txt": second[2]}
    for *_, adds_up, names in (first, second):
        assert adds_up
        assert names.count("forward") == 3
        assert {"backward", "optimizer", "ProfilerStep#2"} <= {*names}


def _on_one_rank(root: Path) -> list[str]:
    first, told = torch.distributed.get_rank() == 0, []
    for profiler, checkpoints, callbacks in (
        ("simple" if first else None, True, []),
        ("simple" if first else None, False, []),
        (None, False, [] if first else [Checkpoint()]),
    ):
        with failing() as caught:
            fit(root, "ddp", profiler, enable_checkpointing=checkpoints, callbacks=callbacks)
        told.append(f"{caught['type']}: {caught['text']}")
    return told


def test_what_one_rank_alone_has_is_refused_by_name(tmp_path: Path) -> None:  # L-05
    # Ranks without loggers or checkpoints do not take part in choosing the run's folder.
    alone = "what needs a folder for the run"
    wanted = (
        ["profiler", "SimpleProfiler"],
        [alone, '"SimpleProfiler" on rank(s) [0]', '"nothing" on rank(s) [1]'],
        [alone, '"Checkpoint" on rank(s) [1]', '"nothing" on rank(s) [0]'],
    )
    for texts in on_ranks(_on_one_rank, 2, tmp_path):
        for text, parts in zip(texts, wanted, strict=True):
            assert text.startswith("DistributedError")
            assert all(part in text for part in parts), text


def _on_a_device(gpu: EmulatedCuda, root: Path) -> tuple[dict[str, int], list[int]]:
    profiler, waits = SimpleProfiler(), []
    for one in (None, profiler):
        gpu.forget()
        fit(root, "single_device", one, accelerator="gpu", devices=1)
        waits.append(len(gpu.host_syncs))
    return calls(profiler), waits


@requires_emulated_cuda()
def test_on_a_device_no_phase_waits_for_it(tmp_path: Path) -> None:  # L-05
    seen = on_emulated_cuda(_on_a_device, tmp_path)
    found, (without, with_profiler) = seen.returned
    assert without == with_profiler
    assert found["training > transfer"] >= 16
    assert not seen.races, seen.report
