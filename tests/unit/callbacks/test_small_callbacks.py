"""Arguments of all callbacks, small callbacks, averages, and several callbacks together."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, failing, loader, quiet_fit, train
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain import Callback, ConfigurationError, callbacks
from drivetrain.callbacks import Checkpoint, GarbageCollection, GradientAccumulationScheduler, LambdaCallback, Timer
from drivetrain.loggers import CSVLogger
from worlds import on_ranks

INVALID = "is not a valid name"
SCHEDULES: list[Any] = [{}, {-1: 2}, {0: 0}, {0: 1.5}, {"0": 1}, {True: 2}]
NAMES = ["", "a/b", ".hidden", "a\0b", "a\nb", "x" * 300, "é" * 255, "{val_loss:0300.2f}", "{" + "v" * 250 + "}"]
FILES = ["latest", "Latest", "manifest.json", "state.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BasePredictionWriter", {"write_interval": "batches"}, "Did you mean 'batch'"),
        ("Checkpoint", {"mode": "mn"}, "mode='mn'.*min"),
        ("Checkpoint", {"save_top_k": -2}, "save_top_k=-2"),
        ("Checkpoint", {"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ("Checkpoint", {"keep_last": True}, "keep_last=True"),
        ("Checkpoint", {"train_time_interval": 30}, "train_time_interval=30"),
        *(("Checkpoint", {"filename": name}, INVALID) for name in (*NAMES, *FILES)),
        ("Checkpoint", {"filename": "{val_loss:.>9}", "auto_insert_metric_name": False}, INVALID),
        *(("EarlyStopping", {"monitor": "a", "patience": patience}, f"patience={patience}") for patience in (-1, True)),
        ("EarlyStopping", {"monitor": "a", "mode": "mni"}, "mode='mni'"),
        *(("EMAWeightAveraging", {"decay": decay}, "decay=") for decay in (1.5, -0.1, float("nan"))),
        *(("EMAWeightAveraging", {"update_every_n_steps": steps}, "update_every_n_steps=") for steps in (0, 1.5)),
        ("EMAWeightAveraging", {"update_starting_at_step": -1}, "update_starting_at_step="),
        ("EMAWeightAveraging", {"update_starting_at_epoch": "2"}, "update_starting_at_epoch="),
        ("GarbageCollection", {"every_n_steps": 0}, "every_n_steps=0"),
        *(("GradientAccumulationScheduler", {"scheduling": each}, "Scheduler") for each in SCHEDULES),
        ("LambdaCallback", {"on_train_epoch_ends": print}, "Did you mean 'on_train_epoch_end'"),
        ("LearningRateMonitor", {"logging_interval": "steps"}, "Did you mean 'step'"),
        ("LossSpikeGuard", {"action": "rolback"}, r"action='rolback'\)\. Did you mean 'rollback'"),
        ("LossSpikeGuard", {"every_n_steps": 0}, "every_n_steps=0"),
        ("LossSpikeGuard", {"threshold": 0}, "threshold=0"),
        ("LossSpikeGuard", {"window": 4, "warmup": 5}, "warmup=5"),
        *(("ModelSummary", {"max_depth": depth}, f"max_depth={depth!r}") for depth in (-2, 1.5, "all")),
        ("NonFiniteGuard", {"every_n_steps": 0}, "every_n_steps=0"),
        ("PredictionWriter", {"path": "out", "format": "safetensor"}, "Did you mean 'safetensors'"),
        ("PredictionWriter", {"path": "out", "part_bytes": 0}, "bytes"),
        *(("ProgressBar", {"refresh_rate": rate}, "refresh_rate") for rate in (0, -1, 11)),
        ("ReplicaCheck", {"every_n_steps": 0}, "every_n_steps=0"),
        ("ThroughputMonitor", {"window": 0}, "window"),
        *(("Timer", {"duration": given}, "duration=") for given in ("12:00", "a:b:c:d", {"hour": 1}, timedelta(-1))),
        ("Timer", {"interval": "steps"}, "interval='steps'"),
        ("WeightAveraging", {"avg_fn": 0.9}, r"WeightAveraging\(avg_fn=0.9\)"),
        ("Checkpoint", {"dirpath": 3}, r"dirpath=3(?s:.*)dirpath takes str \| os.* and a int"),
        ("EarlyStopping", {"monitor": "a", "min_delta": "x"}, "min_delta='x'"),
        ("EMAWeightAveraging", {"decay": "x"}, "decay='x'"),
        ("GradientAccumulationScheduler", {"scheduling": 4}, "scheduling=4"),
        ("LearningRateFinder", {"min_lr": "x"}, "min_lr='x'"),
        ("ProgressBar", {"refresh_rate": "x"}, "refresh_rate='x'"),
        ("ThroughputMonitor", {"flops": "x"}, "flops='x'"),
    ],
)
def test_bad_arguments_are_refused(name: str, options: dict[str, Any], message: str) -> None:  # G-06, L-01, L-03
    with pytest.raises(ConfigurationError, match=message):
        getattr(callbacks, name)(**options)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("EarlyStopping", [("a",), ("b",), ("a", 0.1), ("a", 0.0, 4), ("a", 0.0, 3, False, "max")]),
        ("GradientAccumulationScheduler", [({0: 2},), ({0: 3},)]),
        ("LearningRateMonitor", [("step",), ("epoch",)]),
        ("ModelSummary", [(1,), (2,)]),
        ("NonFiniteGuard", [(), (2,)]),
        ("ReplicaCheck", [(), (50,)]),
        ("Timer", [(), ("00:01:00:00",), (None, "epoch")]),
    ],
)
def test_different_arguments_have_different_state_keys(name: str, arguments: list[tuple[Any, ...]]) -> None:  # F-12
    keys, again = ([getattr(callbacks, name)(*each).state_key for each in arguments] for _ in range(2))
    assert len(set(keys)) == len(arguments)
    assert keys == again


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "drivetrain.callbacks.timer.time")


@pytest.mark.parametrize(
    ("duration", "interval", "steps"),
    [(timedelta(seconds=15), "step", 13), ("0:0:0:15", "epoch", 20), ({"seconds": 15}, "epoch", 20)],
)
def test_the_timer_ends_the_run(duration: Any, interval: str, steps: int, clock: Clock, capsys: Any) -> None:
    assert Timer("1:2:3:4").duration == timedelta(seconds=93784)
    timer = Timer(duration, interval=interval, verbose=interval == "step")
    fit = quiet_fit(max_epochs=-1, callbacks=timer)
    fit.fit(Timed(clock), loader(), loader(4))  # 10 steps of one second and a validation of two in each epoch
    assert fit.global_step == steps
    spent = steps + 4.0
    assert (timer.time_elapsed(), timer.time_elapsed("validate"), timer.time_remaining()) == (spent, 4.0, 15 - spent)
    assert (timer.start_time(), timer.end_time()) == (1000.0, 1000.0 + spent)
    assert ("time of 0:00:15 is up after 0:00:15" in capsys.readouterr().out) is (steps == 13)


def test_a_resumed_runs_time_counts(clock: Clock, tmp_path: Path) -> None:  # F-12
    for ckpt_path, steps in ((None, 10), ("last", 11)):  # the resumed run has no time left
        timer = Timer({"seconds": 8}, interval="epoch")
        fit = train(tmp_path, [timer, Checkpoint()], Timed(clock), loader(), max_epochs=9, ckpt_path=ckpt_path)
        assert (fit.global_step, timer.time_elapsed()) == (steps, float(steps))


def test_stages_are_measured_apart_and_a_failure_stops_the_clock(clock: Clock) -> None:
    timer = Timer()
    fit = quiet_fit(callbacks=[timer, failing(5)], num_sanity_val_steps=1)
    fit.test(Timed(clock), loader(12))
    assert (timer.time_elapsed("test"), timer.time_elapsed(), timer.time_remaining()) == (6.0, 0.0, None)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit.fit(Timed(clock), loader(), loader(4))
    clock.now += 100
    assert timer.time_elapsed() == 5.0
    assert timer.start_time("validate") is None  # the sanity check does not count


def test_the_functions_of_a_lambda_callback_are_its_only_hooks() -> None:  # H-01
    seen: list[str] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(f"batch {index}"),
        on_train_end=lambda trainer, module: seen.append(f"end {trainer.global_step}"),
        priority=-5,
    )
    quiet_fit(limit_train_batches=2, callbacks=callback).fit(Regression(), loader())
    assert seen == ["fit", "batch 0", "batch 1", "end 2"]
    assert callback.priority == -5
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    overridden = [name for name in hooks if getattr(callback, name) != getattr(Callback, name).__get__(callback)]
    assert overridden == ["on_train_batch_end", "on_train_end"]


def test_windows_follow_the_schedule() -> None:
    # B-02: 10 micro-batches an epoch; windows of 1, then 4 (4, 4 and the short 2), then 10.
    steps: list[int] = []
    counting = LambdaCallback(on_train_epoch_end=lambda trainer, module: steps.append(trainer.global_step))
    fit = quiet_fit(max_epochs=4, callbacks=[GradientAccumulationScheduler({3: 16, 1: 4}), counting])
    for _ in range(2):  # a second fit starts from the beginning
        fit.fit(Regression(), loader())
        assert steps[-4:] == [10, 13, 16, 17]
        assert fit.accumulate_grad_batches == 1


def test_a_run_resumed_within_an_epoch_has_the_epochs_window(tmp_path: Path) -> None:
    def with_checkpoints(*others: Any) -> list[Any]:
        return [GradientAccumulationScheduler({1: 4}), Checkpoint(every_n_train_steps=1), *others]

    with pytest.raises(RuntimeError, match="out of luck"):  # after 10 steps and 6 micro-batches
        train(tmp_path, with_checkpoints(failing(16)), Regression(), loader(), max_epochs=2)
    fit = train(tmp_path, with_checkpoints(), Regression(), loader(), max_epochs=2, ckpt_path="last")
    assert fit.global_step == 13


@pytest.mark.parametrize(("window", "message"), [(4, "accumulate_grad_batches=4"), (1, "manual optimization")])
def test_contradictory_windows_are_refused(window: int, message: str) -> None:  # G-06
    module = Regression()
    module.automatic_optimization = window > 1
    with pytest.raises(ConfigurationError, match=message):
        quiet_fit(callbacks=GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=window).fit(module, loader())


def _collections(*callbacks: Callback) -> list[tuple[int, int]]:
    """Return (step, generation) of each collection during training: 10 steps of two micro-batches."""

    class Littering(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for _ in range(2000):  # cycles, enough to trigger automatic collections
                ring: list[Any] = []
                ring.append(ring)
            return self.loss(batch)

    trainer = quiet_fit(callbacks=list(callbacks), accumulate_grad_batches=2)
    ran: list[tuple[int, int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and trainer.state == "fitting" and trainer.micro_batches:
            ran.append((trainer.global_step, info["generation"]))

    gc.callbacks.append(note)
    try:
        trainer.fit(Littering(), loader(20, 1))
    finally:
        gc.callbacks.remove(note)
    return ran


def test_garbage_is_collected_at_some_steps_and_the_collector_is_left_as_it_was() -> None:
    assert len(_collections()) > 20  # automatic collection every 700 objects
    collections = _collections(GarbageCollection(every_n_steps=4))
    assert collections[:3] == [(4, 1), (8, 1), (10, 2)]  # all objects at the end of the epoch
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="out of luck"):
        _collections(GarbageCollection(), failing(1))
    assert gc.isenabled()
    gc.disable()
    try:
        _collections(GarbageCollection())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_callbacks_that_watch_leave_the_numbers_alone(tmp_path: Path) -> None:  # B-01
    def weights(watching: list[Callback]) -> torch.Tensor:
        torch.manual_seed(0)
        module = Regression()
        fit = quiet_fit(max_epochs=3, logger=CSVLogger(tmp_path), log_every_n_steps=3, callbacks=watching)
        fit.fit(module, loader(42), loader(10))
        return module.net.weight.detach()

    everything: list[Callback] = [
        callbacks.EarlyStopping("val_loss", patience=100),
        callbacks.LearningRateMonitor("step"),
        Timer("01:00:00:00"),
        GradientAccumulationScheduler({0: 1}),
        callbacks.ReplicaCheck(every_n_steps=1),
        callbacks.NonFiniteGuard(every_n_steps=1),
        callbacks.ThroughputMonitor(peak_flops=1e12),
        LambdaCallback(on_fit_start=lambda *_: None),
    ]
    assert len({callback.state_key for callback in everything}) == len(everything)
    assert torch.equal(weights(everything), weights([]))


def test_a_batchs_weight_is_asked_once_and_of_the_loaders_batch() -> None:  # O-04
    given: list[bool] = []

    class Weighing(Regression):
        def batch_weight(self, batch: Any) -> Any:
            given.append(isinstance(batch, list))
            return len(batch[0])

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return tuple(one.clone() for one in batch)  # like a copy to a device

    guards = [callbacks.NonFiniteGuard(), callbacks.LossSpikeGuard(action="warn")]
    quiet_fit(callbacks=[callbacks.ThroughputMonitor(), *guards], accumulate_grad_batches=2).fit(Weighing(), loader())
    assert given == [True] * 10


def _printed_lines(root: str) -> int:
    output = io.StringIO()
    bar = callbacks.ProgressBar(stream=output)
    fit = quiet_fit(strategy="ddp", devices=2, max_epochs=2, logger=CSVLogger(root), callbacks=bar)
    fit.fit(Regression(), loader(32), loader(8))
    return len(output.getvalue().splitlines())


def test_rank_0_alone_prints_and_writes(tmp_path: Path) -> None:
    assert on_ranks(_printed_lines, 2, str(tmp_path), process_group=None) == [2, 0]
    assert [path.name for path in (tmp_path / "drivetrain_logs").iterdir()] == ["version_0"]


def averaged(*averaging: Callback) -> Regression:
    """Train two epochs of two steps."""
    module = Regression()
    quiet_fit(max_epochs=2, callbacks=list(averaging)).fit(module, loader(8))
    return module


def test_one_average_can_be_used_copied_and_pickled_after_a_run_and_two_in_one_are_refused() -> None:  # L-01
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging and WeightAveraging in one run"):
        averaged(callbacks.EMAWeightAveraging(), callbacks.WeightAveraging())
    averaging = callbacks.EMAWeightAveraging(0.5)
    for _ in range(2):
        averaged(averaging)
        assert averaging.updates == 4  # of the last run
    copy.deepcopy(averaging)
    assert pickle.loads(pickle.dumps(averaging)).updates == 4


def test_a_subclass_decides_when_to_update() -> None:  # L-01
    asked: list[tuple[int | None, int | None]] = []
    after: list[torch.Tensor] = []

    class AtEnds(callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            asked.append((step_idx, epoch_idx))
            return epoch_idx is not None

    keep = LambdaCallback(on_train_epoch_end=lambda trainer, module: after.append(module.net.weight.detach().clone()))
    module = averaged(AtEnds(), keep)
    assert asked == [(0, None), (1, None), (None, 0), (2, None), (3, None), (None, 1)]
    torch.testing.assert_close(module.net.weight.detach(), (after[0] + after[1]) / 2)


class Normed(Regression):
    """A spectrally normalized layer, a BatchNorm and a mask; keeps the buffers of each step and of the validation."""

    mask: torch.Tensor

    def __init__(self, normalize: Any = parametrizations.spectral_norm) -> None:
        super().__init__(lr=0.3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(normalize(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 1))  # type: ignore[assignment]
        self.register_buffer("mask", torch.ones(4))
        self.trained: list[dict[str, torch.Tensor]] = []
        self.validated: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss((batch[0] * self.mask, batch[1]))
        self.mask = 1 - self.mask
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append({name: buffer.clone() for name, buffer in self.named_buffers()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated = {name: buffer.clone() for name, buffer in self.named_buffers()}


def average(root: Path, module: Normed, **options: Any) -> None:
    averaging = [callbacks.EMAWeightAveraging(0.8), Checkpoint(root / "saved", save_last=True)]
    train(root, averaging, module, loader(24), loader(24), **{"max_epochs": 2, **options})


@pytest.mark.parametrize("normalize", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_only_running_statistics_are_averaged(normalize: Any, tmp_path: Path) -> None:  # S-14
    module = Normed(normalize)
    average(tmp_path, module)
    last = module.trained[-1]
    mean, *later = [buffers["net.1.running_mean"] for buffers in module.trained]
    for value in later:
        mean = mean.lerp(value, 0.2)
    for found in (module.validated, dict(module.named_buffers())):
        torch.testing.assert_close(found["net.1.running_mean"], mean)
        for name in last.keys() - {"net.1.running_mean", "net.1.running_var"}:
            assert torch.equal(found[name], last[name]), name
    vectors = [value for name, value in module.validated.items() if name.endswith(("_u", "_v"))]
    assert [float(vector.norm()) for vector in vectors] == pytest.approx([1.0, 1.0])


def test_a_resumed_run_has_the_averages_and_buffers_of_the_whole_run(tmp_path: Path) -> None:  # S-14
    whole, resumed = Normed(), Normed()
    average(tmp_path / "whole", whole)
    average(tmp_path / "parts", Normed(), max_epochs=1)
    average(tmp_path / "parts", resumed, ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
