from __future__ import annotations

import contextlib
import io
import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callback_run import FakeRun, FakeStrategy
from torch import nn

from drivetrain import Fit, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.callbacks import ModelSummary
from drivetrain.callbacks._summary_table import format_bytes, format_count
from drivetrain.callbacks.model_summary import summarize
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.body[0].requires_grad_(False)


def test_tied_parameters_count_once_and_frozen_ones_are_told_apart() -> None:
    # B-07, B-08
    model = _Model()
    summary = summarize(model)
    assert summary.total == sum(parameter.numel() for parameter in model.parameters()) == 40 + 20 + 8
    assert summary.trainable == 48
    # float32 parameters and statistics, and the int64 count of batches.
    assert summary.size == 4 * (68 + 8) + 8
    rows = {row.name: row for row in summary.rows}
    assert list(rows) == ["embedding", "body", "head"]
    assert rows["head"].total == rows["embedding"].total == 40
    assert rows["head"].notes == "tied to embedding.weight"
    assert rows["embedding"].notes == "tied to head.weight"
    assert (rows["body"].total, rows["body"].trainable, rows["body"].notes) == (28, 8, "")


@pytest.mark.parametrize(
    ("depth", "names"),
    [(0, []), (1, ["embedding", "body", "head"]), (2, ["embedding", "body", "body.0", "body.1", "head"])],
)
def test_it_goes_as_deep_as_told(depth: int, names: list[str]) -> None:
    assert [row.name for row in summarize(_Model(), depth).rows] == names
    assert summarize(_Model(), -1) == summarize(_Model(), 9)


def test_meta_and_lazy_parameters_are_counted_for_what_they_will_take() -> None:
    # D-03
    model = nn.Sequential(nn.Linear(1000, 1000, device="meta", dtype=torch.bfloat16), nn.LazyLinear(3))
    summary = summarize(model)
    assert summary.total == 1_001_000
    assert summary.size == 2 * 1_001_000
    assert [row.notes for row in summary.rows] == ["meta", "lazy"]


def test_a_sharded_parameter_counts_whole() -> None:
    # ZeRO 3 parameters are empty and have their size in ds_numel.
    model = nn.Linear(4, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_numel = 16  # type: ignore[attr-defined]
    assert summarize(nn.Sequential(model)).total == 16


def test_the_table_is_printed_once_on_rank_0() -> None:
    # L-08
    model: Any = _Model()
    run: Any = FakeRun()
    ModelSummary().on_fit_start(run, model)
    rule = "-" * 49
    assert run.printed == [
        "Name       Type        Params   Size  Mode\n"
        f"{rule}\n"
        "embedding  Embedding       40  160 B  train\n"
        "body       Sequential      28  152 B  part frozen\n"
        "head       Linear          40  160 B  train\n"
        f"{rule}\n"
        "embedding: tied to head.weight\n"
        "head: tied to embedding.weight\n"
        "68 parameters, 48 trainable, 20 frozen; 312 B with buffers\n"
        "6 modules, all in train mode"
    ]
    control = LocalControl()
    control.rank = 1
    other: Any = FakeRun(strategy=FakeStrategy(control=control))
    ModelSummary().on_fit_start(other, model)
    assert other.printed == []
    model.body.eval()
    other = FakeRun()
    ModelSummary(max_depth=0).on_fit_start(other, model)
    assert other.printed == [
        "68 parameters, 48 trainable, 20 frozen; 312 B with buffers\n6 modules, 3 of them in train mode, 3 in eval mode"
    ]


def test_numbers_have_units() -> None:
    # L-08
    assert [format_count(one) for one in (0, 999, 1000, 1_234, 12_345, 999_600, 1_234_567, 7_000_000_000)] == [
        *("0", "999", "1.00 K", "1.23 K", "12.3 K", "1.00 M", "1.23 M", "7.00 B")
    ]
    assert [format_bytes(one) for one in (12, 1_230, 5_000_000, 80_000_000_000)] == [
        "12 B",
        "1.23 kB",
        "5.00 MB",
        "80.0 GB",
    ]


class _Vision(nn.Module):
    """Has an example input, and a forward that changes everything a forward may change."""

    calls: torch.Tensor

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten())
        self.a_name_that_is_much_longer_than_there_is_room_for_it_in_eighty_columns = nn.Linear(8 * 30 * 30, 10)
        self.unused = nn.Linear(1, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.zeros(1)
        self.kept: list[Any] = []
        self.queue: deque[Any] = deque([torch.zeros(1)])
        self.dice = random.Random(1)
        self.last: Any = None
        self.example_input_array = torch.zeros(4, 3, 32, 32) if example is None else example

    def forward(self, x: torch.Tensor, flip: bool = False) -> Any:
        self.calls += 1
        self.plain.add_(1)
        self.kept.append(x)
        self.queue.append(x)
        self.dice.random()
        self.late = nn.Linear(2, 2)
        self.fresh = x
        self.last = x
        y = self.a_name_that_is_much_longer_than_there_is_room_for_it_in_eighty_columns(self.stem(x + self.plain))
        if flip and y.sum() > 0:
            y = -y
        return {"logits": y, "noise": torch.randn_like(y) * torch.tensor(2.0)}


def test_an_example_gives_shapes_and_flops_and_changes_nothing() -> None:
    # L-08
    model = _Vision()
    model.stem[1].eval()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    modes, parameters, drawn = (
        [one.training for one in model.modules()],
        list(model.parameters()),
        torch.get_rng_state(),
    )
    summary = summarize(model, 2)
    rows = {row.name: row for row in summary.rows}
    assert (rows["stem.0"].inputs, rows["stem.0"].outputs) == (((4, 3, 32, 32),), ((4, 8, 30, 30),))
    convolution, product = 2 * 4 * 30 * 30 * 8 * 3 * 9, 2 * 4 * 8 * 30 * 30 * 10
    assert rows["stem.0"].flops == rows["stem"].flops == convolution
    assert summary.flops == convolution + product
    assert rows["unused"].outputs is None
    text = str(summary)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"^a_\w+\.\.\w+ns  Linear", text, re.MULTILINE)
    assert "4x3x32x32  4x8x30x30" in text
    assert text.endswith("2.13 MFLOPs in a forward pass of example_input_array")

    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert [one.training for one in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (model.kept, model.last, model.plain.item(), len(model.queue)) == ([], None, 0.0, 1)
    assert model.dice.random() == random.Random(1).random()
    assert not hasattr(model, "late")
    assert not hasattr(model, "fresh")
    assert not model._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()


TABLE = torch.ones(1)


class _Global(_Vision):
    def forward(self, x: torch.Tensor, flip: bool = False) -> Any:
        return x + TABLE.add_(1)


class _Talking(_Vision):
    def forward(self, x: torch.Tensor, flip: bool = False) -> Any:
        torch.distributed.all_reduce(x)
        return x


def test_what_cannot_run_on_shapes_alone_is_named_with_the_reason() -> None:
    # L-08
    said = {
        "DataDependentOutputException": _Vision({"x": torch.zeros(4, 3, 32, 32), "flip": True}),
        "got [4, 288] X [7200, 10]": _Vision(torch.zeros(4, 3, 8, 8)),
        "forward uses a tensor that is not an attribute of a module": _Global(),
        "lazy layers have no shape": nn.Sequential(nn.LazyLinear(3)),
        "the module has no forward": nn.ModuleList([nn.Linear(2, 2)]),
    }
    for reason, model in said.items():
        model.example_input_array = getattr(model, "example_input_array", torch.zeros(1))
        text = str(summarize(model))
        assert "No shapes and no FLOPs: " in text
        assert reason in " ".join(text.split())
    assert TABLE.item() == 1.0


class _Logging(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        self.log("mean", y.mean())
        self.log_dict({"largest": y.max()})
        return y


def test_a_forward_that_logs_has_shapes_and_logs_nothing() -> None:
    # L-08
    module = _Logging()
    before = dict(vars(module))
    summary = summarize(module)
    assert (summary.missing_reason, summary.flops) == ("", 2 * 3 * 4 * 2)
    assert vars(module) == before


def _talks() -> str:
    return " ".join(str(summarize(_Talking())).split())


def test_no_rank_waits_for_others_that_summarize_nothing() -> None:
    # L-08
    assert all("forward communicates with other ranks" in text for text in on_ranks(_talks, 2))


def test_recurrent_layers_and_attention_are_counted() -> None:
    # L-08
    lstm = nn.LSTM(4, 8)
    lstm.example_input_array = torch.zeros(5, 2, 4)
    assert summarize(lstm).flops == 2 * 5 * 2 * (4 + 8) * 32
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.example_input_array = (torch.zeros(3, 7, 16),)  # type: ignore[assignment]
    products = 3 * 7 * (16 * 48 + 16 * 16 + 2 * 16 * 32) + 3 * 7 * 7 * 16 * 2
    assert summarize(layer).flops == 2 * products


class Sharded(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


def _printed(strategy: str, summarizes: bool) -> tuple[str, dict[str, torch.Tensor]]:
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    callbacks: list[Any] = [ModelSummary(2)] if summarizes else []
    settings: Any = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "callbacks": callbacks, **off}
    torch.manual_seed(1)
    module = Sharded()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit = Fit(strategy=STRATEGIES[strategy](), precision="bf16-mixed", **settings)
        fit.fit(module, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))  # type: ignore[arg-type]
    return out.getvalue(), {name: one.clone() for name, one in module.state_dict().items()}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_shapes_are_those_of_the_whole_under_a_strategy(strategy: str) -> None:
    # L-08
    (text, trained), _ = on_ranks(_printed, 2, strategy, True, process_group=None, timeout=120)
    table = "\n".join(line for line in text.splitlines() if " " in line)
    assert re.search(r"^net +Sequential +44 +(176|88) B +3x4 +3x2 +216$", table, re.MULTILINE)  # ZeRO's is in bfloat16
    assert re.search(r"^  0 +Linear +30 +(120|60) B +3x4 +3x6 +144$", table, re.MULTILINE)
    assert "216 FLOPs in a forward pass of example_input_array" in table
    (_, without), _ = on_ranks(_printed, 2, strategy, False, process_group=None, timeout=120)
    assert all(torch.equal(one, without[name]) for name, one in trained.items())


def test_a_model_without_memory_has_shapes() -> None:
    # L-08, D-03
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.BatchNorm1d(100_000))
    model.example_input_array = torch.zeros(2, 100_000)
    summary = summarize(model)
    assert (summary.flops, summary.rows[1].outputs) == (4 * 10**10, ((2, 100_000),))
    assert "0, 1: on the meta device" in str(summary)


def test_a_depth_that_makes_no_sense_is_refused() -> None:
    # G-06
    for wrong in (-2, 1.5, "all"):
        with pytest.raises(ConfigurationError, match=f"max_depth={wrong!r}"):
            ModelSummary(max_depth=wrong)  # type: ignore[arg-type]
    assert ModelSummary(1).state_key != ModelSummary(2).state_key
