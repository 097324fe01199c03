"""ModelSummary: counts, the table, and shapes and FLOPs without a real forward pass."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from torch import nn

from drivetrain.callbacks import ModelSummary
from drivetrain.callbacks.model_summary import summarize
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


class Tied(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.body[0].requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.head(self.body(batch[0])).square().mean()


def test_meta_lazy_and_sharded_parameters_count_as_what_they_stand_for() -> None:  # D-03
    sharded = nn.Linear(4, 4, bias=False)
    sharded.weight.data = torch.empty(0)  # as ZeRO 3 leaves it
    sharded.weight.ds_numel = 16  # type: ignore[attr-defined]
    meta = nn.Linear(1000, 1000, device="meta", dtype=torch.bfloat16)
    summary = summarize(nn.Sequential(meta, nn.LazyLinear(3), sharded))
    assert summary.total == 1_001_016
    assert [row.notes for row in summary.rows] == ["meta", "lazy", ""]
    assert summary.rows[0].size == 2 * 1_001_000


def test_the_printed_table_counts_tied_parameters_once_and_frozen_ones_apart(capsys: Any) -> None:  # B-07, B-08, L-08
    model = Tied()
    quiet_fit(callbacks=ModelSummary()).fit(model, loader())
    rule = "-" * 49
    table = (
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
    )
    assert capsys.readouterr().out.count(table) == 1
    assert [row.trainable for row in summarize(model).rows] == [40, 8, 40]
    for depth in (2, -1):
        names = [row.name for row in summarize(model, depth).rows]
        assert names == ["embedding", "body", "body.0", "body.1", "head"]
    model.body.eval()
    assert str(summarize(model, 0)) == (
        "68 parameters, 48 trainable, 20 frozen; 312 B with buffers\n6 modules, 3 of them in train mode, 3 in eval mode"
    )


def test_numbers_have_units() -> None:  # L-08
    shown = {3: "3  12 B", 999: "999  4.00 kB", 12_345: "12.3 K  49.4 kB", 999_600: "1.00 M  4.00 MB"}
    for parameters, text in {**shown, 7_000_000_000: "7.00 B  28.0 GB"}.items():
        model = nn.ModuleList([nn.Linear(parameters, 1, bias=False, device="meta")])
        assert re.search(rf"^0 +Linear +{re.escape(text)}$", str(summarize(model)), re.MULTILINE)


LONG = "a_name_that_is_much_longer_than_there_is_room_for_it_in_eighty_columns"


class Vision(nn.Module):
    """Has an example input, and a forward that changes everything a forward may change."""

    calls: torch.Tensor

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten())
        self.add_module(LONG, nn.Linear(8 * 30 * 30, 10))
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
        y = self.get_submodule(LONG)(self.stem(x + self.plain))
        if flip and y.sum() > 0:
            y = -y
        return {"logits": y, "noise": torch.randn_like(y) * torch.tensor(2.0)}


def test_an_example_gives_shapes_and_flops_and_changes_nothing() -> None:  # L-08
    model = Vision()
    model.stem[1].eval()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    modes, parameters = [one.training for one in model.modules()], list(model.parameters())
    drawn = torch.get_rng_state()
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
    assert not {"late", "fresh"} & set(dir(model))
    assert not model._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()


TABLE = torch.ones(1)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.forward = function
        self.example_input_array = torch.zeros(1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Vision({"x": torch.zeros(4, 3, 32, 32), "flip": True}), "DataDependentOutputException"),
        (lambda: Vision(torch.zeros(4, 3, 8, 8)), "got [4, 288] X [7200, 10]"),
        (lambda: Function(lambda x: x + TABLE.add_(1)), "forward uses a tensor that is not an attribute of a module"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy layers have no shape"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "the module has no forward"),
    ],
)
def test_a_module_that_cannot_run_on_shapes_alone_has_the_reason(make: Callable[[], Any], reason: str) -> None:  # L-08
    model = make()
    model.example_input_array = getattr(model, "example_input_array", torch.zeros(1))
    text = " ".join(str(summarize(model)).split())
    assert "No shapes and no FLOPs: " in text
    assert reason in text
    assert TABLE.item() == 1.0


def _communicating() -> str:
    return " ".join(str(summarize(Function(torch.distributed.all_reduce))).split())


def test_no_rank_waits_for_others_that_summarize_nothing() -> None:  # L-08
    assert all("forward communicates with other ranks" in text for text in on_ranks(_communicating, 2))


class Example(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))  # type: ignore[assignment]
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        self.log("mean", y.mean())
        self.log_dict({"largest": y.max()})
        return y


def test_forwards_that_log_recurrent_layers_attention_and_meta_modules_are_counted() -> None:  # L-08, D-03
    module = Example()
    before = dict(vars(module))
    summary = summarize(module)
    assert (summary.missing_reason, summary.flops) == ("", 2 * 3 * (4 * 6 + 6))
    assert vars(module) == before  # nothing is logged
    lstm = nn.LSTM(4, 8)
    lstm.example_input_array = torch.zeros(5, 2, 4)
    assert summarize(lstm).flops == 2 * 5 * 2 * (4 + 8) * 32
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.example_input_array = (torch.zeros(3, 7, 16),)  # type: ignore[assignment]
    products = 3 * 7 * (16 * 48 + 16 * 16 + 2 * 16 * 32) + 3 * 7 * 7 * 16 * 2
    assert summarize(layer).flops == 2 * products
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.BatchNorm1d(100_000))
    model.example_input_array = torch.zeros(2, 100_000)
    summary = summarize(model)
    assert (summary.flops, summary.rows[1].outputs) == (4 * 10**10, ((2, 100_000),))
    assert "0, 1: on the meta device" in str(summary)


def _printed(strategy: str) -> tuple[str, bool]:
    """Train with and without a summary; return what the former printed, and whether the weights are the same."""
    weights, printed = [], []
    zero = partial(DeepSpeedStrategy, stage=3, stage3_param_persistence_threshold=0)
    make: Any = {"ddp": lambda: "ddp", "fsdp": FSDPStrategy, "zero 3": zero}[strategy]
    for callbacks in ([ModelSummary(2)], []):
        torch.manual_seed(1)
        module = Example()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            options = {"strategy": make(), "devices": 2, "precision": "bf16-mixed"}
            quiet_fit(callbacks=callbacks, **options).fit(module, loader(16))
        weights.append([one.clone() for one in module.state_dict().values()])
        printed.append(out.getvalue())
    return printed[0], all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 3"])
def test_under_a_strategy_shapes_are_those_of_whole_tensors(strategy: str) -> None:  # L-08
    (text, same), (other, _) = on_ranks(_printed, 2, strategy, process_group=None, timeout=120)
    table = "\n".join(line for line in text.splitlines() if " " in line)
    assert re.search(r"^net +Sequential +37 +(148|74) B +3x4 +3x1 +180$", table, re.MULTILINE)  # ZeRO's is in bfloat16
    assert re.search(r"^  0 +Linear +30 +(120|60) B +3x4 +3x6 +144$", table, re.MULTILINE)
    assert "180 FLOPs in a forward pass of example_input_array" in table
    assert "FLOPs" not in other
    assert same
