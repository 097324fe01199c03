"""ModelSummary, what LearningRateMonitor, ThroughputMonitor and DeviceStatsMonitor log, and norms of gradients."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, failing, loader, logged_rows, quiet_fit
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from drivetrain import callbacks, grad_norm
from drivetrain.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ThroughputMonitor
from drivetrain.callbacks.model_summary import summarize
from drivetrain.callbacks.throughput_monitor import peak_of, tf32_is_on
from drivetrain.loggers import CSVLogger
from drivetrain.testing import run_distributed
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from emulated_cuda import requires_emulated_cuda
from worlds import DEEPSPEED, on_emulated_cuda, on_ranks, preload

preload(*DEEPSPEED)


def test_meta_lazy_and_sharded_parameters_count_as_what_they_stand_for_and_numbers_have_units() -> None:  # D-03, L-08
    sharded = nn.Linear(4, 4, bias=False)
    sharded.weight.data = torch.empty(0)  # as ZeRO 3 leaves it
    sharded.weight.ds_numel = 16  # type: ignore[attr-defined]
    meta = nn.Linear(1000, 1000, device="meta", dtype=torch.bfloat16)
    summary = summarize(nn.Sequential(meta, nn.LazyLinear(3), sharded))
    assert summary.whole.total == 1_001_016
    assert summary.rows[0].size == 2 * 1_001_000
    texts = {3: "3  12 B", 999: "999  4.00 kB", 12_345: "12.3 K  49.4 kB", 999_600: "1.00 M  4.00 MB"}
    for parameters, text in {**texts, 7_000_000_000: "7.00 B  28.0 GB"}.items():
        model = nn.ModuleList([nn.Linear(parameters, 1, bias=False, device="meta")])
        assert re.search(rf"^0 +Linear +{re.escape(text)}  train$", str(summarize(model)), re.MULTILINE)


def test_the_printed_table_counts_tied_parameters_once_and_frozen_ones_apart(capsys: Any) -> None:  # B-07, B-08, L-08
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
        "68 parameters, 48 trainable, 20 frozen; 312 B with buffers\n"
        "6 modules, 6 in train mode, 0 in eval mode"
    )
    assert capsys.readouterr().out.count(table) == 1
    assert [row.trainable for row in summarize(model).rows] == [40, 8, 40]
    for depth in (2, -1):
        names = [row.name for row in summarize(model, depth).rows]
        assert names == ["embedding", "body", "body.0", "body.1", "head"]
    model.body.eval()
    assert str(summarize(model, 0)) == (
        "68 parameters, 48 trainable, 20 frozen; 312 B with buffers\n6 modules, 3 in train mode, 3 in eval mode"
    )


class Vision(nn.Module):
    """Has an example input, and a forward that changes everything a forward may change."""

    calls: torch.Tensor

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten())
        self.head = nn.Linear(8 * 30 * 30, 10)
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
        y = self.head(self.stem(x + self.plain))
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
    assert summary.whole.flops == convolution + product
    assert rows["unused"].outputs is None
    text = str(summary)
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
        (lambda: nn.Sequential(nn.LazyLinear(3)), "uninitialized parameter"),
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
        return self.net(x)


def test_recurrent_layers_attention_and_meta_modules_are_counted() -> None:  # L-08, D-03
    module = Example()
    before = dict(vars(module))
    summary = summarize(module)
    assert (summary.missing_reason, summary.whole.flops) == ("", 2 * 3 * (4 * 6 + 6))
    assert vars(module) == before
    lstm = nn.LSTM(4, 8)
    lstm.example_input_array = torch.zeros(5, 2, 4)
    assert summarize(lstm).whole.flops == 2 * 5 * 2 * (4 + 8) * 32
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.example_input_array = (torch.zeros(3, 7, 16),)  # type: ignore[assignment]
    products = 3 * 7 * (16 * 48 + 16 * 16 + 2 * 16 * 32) + 3 * 7 * 7 * 16 * 2
    assert summarize(layer).whole.flops == 2 * products
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.BatchNorm1d(100_000))
    model.example_input_array = torch.zeros(2, 100_000)
    summary = summarize(model)
    assert (summary.whole.flops, summary.rows[1].outputs) == (4 * 10**10, ((2, 100_000),))


@pytest.mark.parametrize("given", [(), (ModelSummary(2),)])
def test_a_run_prints_one_summary_unless_it_is_turned_off(given: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quiet_fit(enable_model_summary=True, callbacks=given).fit(Regression(), loader())
    assert capsys.readouterr().out.count("Name ") == 1
    quiet_fit().fit(Regression(), loader())
    assert "Name " not in capsys.readouterr().out


def _printed(strategy: str) -> tuple[str, bool]:
    """Train with and without a summary; return what the former printed, and whether the weights are the same."""
    weights, printed = [], []
    zero = partial(DeepSpeedStrategy, stage=3, stage3_param_persistence_threshold=0)
    make: Any = {"ddp": lambda: "ddp", "fsdp": FSDPStrategy, "zero 3": zero}[strategy]
    for summaries in ([ModelSummary(2)], []):
        torch.manual_seed(1)
        module = Example()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            options = {"strategy": make(), "devices": 2, "precision": "bf16-mixed"}
            quiet_fit(callbacks=summaries, **options).fit(module, loader(16))
        weights.append([one.clone() for one in module.state_dict().values()])
        printed.append(out.getvalue())
    return printed[0], all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 3"])
def test_under_a_strategy_shapes_are_those_of_whole_tensors(strategy: str) -> None:  # L-08
    (text, same), (other, _) = on_ranks(_printed, 2, strategy, process_group=None, timeout=120)
    table = "\n".join(line for line in text.splitlines() if " " in line)
    assert re.search(
        r"^net +Sequential +37 +(148|74) B +3x4 +3x1 +180  train$", table, re.MULTILINE
    )  # ZeRO's is in bfloat16
    assert re.search(r"^  0 +Linear +30 +(120|60) B +3x4 +3x6 +144  train$", table, re.MULTILINE)
    assert "180 FLOPs in a forward pass of example_input_array" in table
    assert "FLOPs" not in other
    assert same


FLOPS = 2 * 2 * 4 * 4  # Linear(4, 1) on 4 rows, forward and the weight's gradient


def test_every_group_of_every_optimizer_has_a_key(tmp_path: Path) -> None:
    class Several(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            pass

        def configure_optimizers(self) -> Any:
            self.more = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(4))
            first, second, third, fourth = self.more
            groups = [{"params": [second], "lr": 0.2}, {"params": [third], "lr": 0.3, "name": "head"}]
            return [
                AdamW([first], lr=0.1),
                AdamW(groups),
                SGD([fourth], lr=torch.tensor(0.5), momentum=0.9, weight_decay=0.01),
            ]

    rates = {"lr-AdamW": 0.1, "lr-AdamW-1/pg1": 0.2, "lr-AdamW-1/head": 0.3, "lr-SGD": 0.5}
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    fit = quiet_fit(logger=CSVLogger(tmp_path), callbacks=monitor)
    fit.fit(Several(), loader(4))
    more = {"lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01, "lr-AdamW-momentum": 0.9}
    assert {name: float(fit.callback_metrics[name]) for name in more} == pytest.approx(more)
    assert len(fit.callback_metrics) == 12
    assert monitor.lrs == {name: [value] for name, value in rates.items()}
    assert type(monitor.lrs["lr-SGD"][0]) is float  # and not the optimizer's tensor, which a scheduler changes


class Scheduled(Regression):
    """The step after n others has the rate 1 / (n + 1)."""

    def __init__(self, interval: str | None, name: str | None = None) -> None:
        super().__init__()
        self.settings = {"interval": interval, "name": name}

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        if self.settings["interval"] is None:
            return optimizer
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.settings}}


@pytest.mark.parametrize(
    ("interval", "module", "rates"),
    [
        pytest.param(None, Scheduled("step"), {n: 1 / n for n in (2, 4, 6, 8, 10)}, id="as the scheduler, by steps"),
        pytest.param(None, Scheduled("epoch", "warmup"), {0: 1.0, 5: 0.5}, id="as the scheduler, by epochs, named"),
        pytest.param(None, Scheduled(None), {0: 1.0, 5: 1.0}, id="no scheduler"),
        pytest.param("step", Scheduled(None), dict.fromkeys((2, 4, 6, 8, 10), 1.0), id="steps, as asked"),
        pytest.param("epoch", Scheduled("step"), {0: 1.0, 5: 1 / 6}, id="epochs, as asked"),
    ],
)
def test_rates_are_in_the_rows_of_their_steps(interval: Any, module: Any, rates: Any, tmp_path: Path) -> None:  # B-09
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor(interval)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=2, callbacks=monitor)
    fit.fit(module, loader())
    name = module.settings["name"] or "lr-SGD"
    rows = [row for row in logged_rows(logger) if row[name]]
    assert {int(row["step"]): float(row[name]) for row in rows} == pytest.approx(rates)
    assert {key: len(values) for key, values in monitor.lrs.items()} == {name: len(rates)}
    assert all(row["train_loss"] for row in rows if 2 in rates)  # in the same row


class Tokens(Timed):
    def batch_weight(self, batch: Any) -> torch.Tensor:
        return batch[1].new_tensor(10 * len(batch[0]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "drivetrain.callbacks.throughput_monitor.time")


@pytest.mark.parametrize(
    ("options", "module", "more"),
    [
        pytest.param({}, Timed, {}, id="rates"),
        pytest.param({}, Tokens, {"tokens_per_sec": 40}, id="tokens"),
        pytest.param({"peak_flops": 1e3}, Timed, {"tflops": FLOPS / 1e12, "mfu": FLOPS / 1e3}, id="counted FLOPs"),
        pytest.param({"peak_flops": 1e9, "flops": 1e6}, Timed, {"tflops": 1e-6, "mfu": 1e-3}, id="given FLOPs"),
    ],
)
def test_rates_are_logged(options: Any, module: Any, more: dict[str, float], clock: Clock, tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), ThroughputMonitor(**options)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=5, callbacks=monitor)
    fit.fit(module(clock), loader(80), loader(8))  # the time of the validation does not count
    rows = [row for row in logged_rows(logger) if row["throughput/steps_per_sec"]]
    assert [row["step"] for row in rows] == ["5", "10", "15", "20"]
    expected = {"samples_per_sec": 4.0, "steps_per_sec": 0.5, "micro_batches_per_sec": 1.0, **more}
    assert monitor.latest == pytest.approx({f"throughput/{name}": value for name, value in expected.items()})
    assert {name: float(rows[-1][name]) for name in monitor.latest} == pytest.approx(monitor.latest)


def test_the_window_slides(clock: Clock, tmp_path: Path) -> None:
    class Faster(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.clock.now += 9 if batch_idx < 12 else 0
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    monitor = ThroughputMonitor(window=4)
    quiet_fit(logger=logger, log_every_n_steps=2, callbacks=monitor).fit(Faster(clock), loader(24, 1))
    rates = [float(row["throughput/steps_per_sec"]) for row in logged_rows(logger) if row["throughput/steps_per_sec"]]
    slow, mixed, fast = 4 / 40, 4 / 22, 4 / 4
    assert rates[4:] == pytest.approx([slow, slow, mixed, *[fast] * 5])


def _uneven() -> tuple[int, float]:
    class Joining(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.joining else loss

    monitor = ThroughputMonitor()
    watching = [monitor, callbacks.NonFiniteGuard(every_n_steps=1), callbacks.ReplicaCheck()]
    fit = quiet_fit(strategy="ddp", devices=2, max_epochs=3, log_every_n_steps=1, callbacks=watching)
    fit.fit(Joining(Clock()), loader(17, batch_size=2))
    return fit.samples_seen, monitor.latest["throughput/tokens_per_sec"] / monitor.latest["throughput/samples_per_sec"]


def test_a_joining_rank_is_neither_counted_nor_suspected() -> None:
    # B-04: 17 samples as 4 + 4 + 4 + 4 + 1; rank 1 joins the last step with a NaN loss of weight zero.
    assert on_ranks(_uneven, 2, process_group=None) == [(51, pytest.approx(10))] * 2


def test_flops_are_counted_during_a_run_alone() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        quiet_fit(callbacks=[ThroughputMonitor(peak_flops=1e9), failing(1)]).fit(Regression(), loader())
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, False, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A10", torch.bfloat16, False, 125e12),
        ("NVIDIA L40S", torch.bfloat16, False, 362e12),
        ("NVIDIA L4", torch.bfloat16, False, 121e12),
        ("NVIDIA A1000 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA H200", torch.float64, False, None),
    ],
)
def test_peaks_are_found_by_whole_names(name: str, dtype: torch.dtype, tf32: bool, peak: float | None) -> None:
    assert peak_of(name, dtype, tf32) == peak


def _tf32() -> list[bool]:
    found = [tf32_is_on()]
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        found.append(tf32_is_on())
    for precision in ("tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = precision
        found.append(tf32_is_on())
    return found


def test_tf32_is_known_whichever_interface_has_set_it() -> None:
    # The older interface raises if the newer one was used.
    assert run_distributed(_tf32, 1, process_group=None) == [[False, True, False, True, False]]


def logged(folder: Path, callback: DeviceStatsMonitor, **options: Any) -> list[dict[str, str]]:
    """Return the logged rows of a run with six steps of two micro-batches and log_every_n_steps=3."""
    logger = CSVLogger(folder)
    settings: dict[str, Any] = {"log_every_n_steps": 3, "accumulate_grad_batches": 2, **options}
    quiet_fit(logger=logger, callbacks=callback, **settings).fit(Regression(), loader(12, 1))
    return logged_rows(logger)


def by_moment(rows: list[dict[str, str]], name: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return the values at the start and at the end of steps, by step."""
    keys = [f"DeviceStatsMonitor.on_train_batch_{moment}/{name}" for moment in ("start", "end")]
    values = [[(int(row["step"]), float(row[key])) for row in rows if row.get(key)] for key in keys]
    assert [[step for step, _ in each] for each in values] == [[3, 6], [3, 6]]
    start, end = map(dict, values)
    return start, end


def test_on_the_cpu_it_logs_psutils_values(tmp_path: Path) -> None:  # L-08
    psutil = pytest.importorskip("psutil")
    rows = logged(tmp_path, DeviceStatsMonitor())
    for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
        assert all(0 <= value <= 100 for values in by_moment(rows, name) for value in values.values())
    assert by_moment(rows, "cpu_vm_percent")[1][6] == pytest.approx(psutil.virtual_memory().percent, abs=25)


def _on_a_gpu(gpu: Any, folder: Path) -> list[dict[str, str]]:
    return logged(folder, DeviceStatsMonitor(), accelerator="cuda", devices=1)


@requires_emulated_cuda()
def test_on_cuda_it_logs_the_allocators_values(tmp_path: Path) -> None:  # L-08
    rows = on_emulated_cuda(_on_a_gpu, tmp_path).returned
    start, end = by_moment(rows, "allocated_bytes.all.current")
    assert start[3] >= 5 * 4
    assert end[6] >= 2 * 5 * 4  # with gradients
    assert by_moment(rows, "num_alloc_retries")[1] == {3: 0.0, 6: 0.0}
    assert not any("cpu_percent" in name for name in rows[0])


def test_the_norms_of_gradients_have_lightnings_keys_and_are_computed_in_float32_or_float64() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False))
    assert grad_norm(net, 2) == {}
    net(torch.randn(4, 3)).sum().backward()
    for order in (1, 2, 3.0, "inf"):
        name = f"grad_{float(order)}_norm"
        norms = grad_norm(net, order, group_separator=".")
        assert list(norms) == [f"{name}.0.weight", f"{name}.0.bias", f"{name}_total"]
        gradients = [p.grad.flatten() for p in net[0].parameters() if p.grad is not None]
        torch.testing.assert_close(norms[f"{name}_total"], torch.cat(gradients).norm(float(order)))
        torch.testing.assert_close(norms[f"{name}.0.weight"], gradients[0].norm(float(order)))
    for dtype, value in ((torch.float16, 2000.0), (torch.bfloat16, 0.01), (torch.float64, 1e200)):
        layer = nn.Linear(64, 64, bias=False, dtype=dtype)
        layer.weight.grad = torch.full_like(layer.weight, value)
        total = grad_norm(layer, 2)["grad_2.0_norm_total"]
        torch.testing.assert_close(total.double(), layer.weight.grad.double().norm())
