"""Weight averaging under every strategy equals torch's AveragedModel in a hand-written loop (L-01)."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import dealt, state
from small_runs import STRATEGIES, assert_near, global_batches, loader, quiet, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging, WeightAveraging
from drivetrain.checkpoint import load
from oracle import program as plan
from oracle.check import check
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8
EMA: Any = get_ema_multi_avg_fn(0.8)
RANKS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("zero 1", 2), ("zero 2", 2), ("zero 3", 2)]
AVERAGED = {"inner.weight", "inner.bias", "tied.bias", "head.weight", "head.bias", "running_seen"}


class Net(TrainModule):
    """Has a frozen layer, two tied ones, and a buffer that training changes; validation records its loss."""

    running_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.inner, self.tied = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
        self.head = seeded(lambda: nn.Linear(4, 1))
        self.tied.weight = self.inner.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("running_seen", torch.zeros(()))
        self.validated: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tied(torch.tanh(self.inner(torch.tanh(self.frozen(x)))))))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.running_seen += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.05)


def by_hand(average: Any = EMA, starts: int = 0, every: int = 1) -> Any:
    """Return the module's state after the run, the trained weights and the losses of validation.

    Written by hand: torch's AveragedModel defines which tensors are averaged, and how.
    """
    model, step = Net(), 0
    optimizer = model.configure_optimizers()
    averaged: Any = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    validated = []
    for _ in range(2):
        for batch in global_batches(SAMPLES, BATCH):
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
            if step >= starts and step % every == 0:
                averaged.update_parameters(model)
            step += 1
        shown = averaged.module if averaged.n_averaged else model
        validated.append(float(shown.loss(global_batches(SAMPLES, SAMPLES)[0]).detach()))
    return copy.deepcopy(shown.state_dict()), model.state_dict(), validated


def ema(decay: float = 0.8, **options: Any) -> EMAWeightAveraging:
    return EMAWeightAveraging(decay, **options)


def run(module: Any, *callbacks: Callback, strategy: str = "single", path: Any = None, **settings: Any) -> Fit:
    saves = any(isinstance(one, Checkpoint) for one in callbacks)
    options = {"max_epochs": 2, "seed": 1, "callbacks": list(callbacks), "enable_checkpointing": saves, **settings}
    fit = quiet(strategy=STRATEGIES[strategy](), **options)
    fit.fit(module, loader(SAMPLES, BATCH // dealt({})), loader(SAMPLES, SAMPLES), ckpt_path=path)
    return fit


@pytest.mark.parametrize(("strategy", "ranks"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("evaluates", [True, False])
def test_unfrozen_parameters_are_averaged_from_then_on(strategy: str, ranks: int, evaluates: bool) -> None:  # L-01
    program = plan.Program(strategy, ranks, net=plan.Net(frozen="body"), changes=(plan.Change(part="body"),), epochs=2)
    logs = (plan.Log("validation_step", on_step=False, on_epoch=True),)
    average = plan.Average(0.8, evaluates=evaluates)
    assert not check(replace(program, average=average, validation=plan.Validation(), logs=logs))


class Recording(Callback):
    """Records what this rank holds of the state after every step, and at the start of every batch of validation."""

    priority = -10

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def held(self, trainer: Any) -> dict[str, Tensor]:
        shards = {name: trainer.strategy.shard_of(one) for name, one in trainer.strategy.model_state().items()}
        return {name: getattr(shard, "local", shard).detach().clone() for name, shard in shards.items()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(self.held(trainer))

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: int) -> None:
        self.validated.append(self.held(trainer))


def _with_and_without(strategy: str, precision: str) -> list[list[dict[str, Tensor]]]:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3, "precision": precision}
    recordings = Recording(), Recording()
    run(Net(), recordings[0], strategy=strategy, **settings)
    run(Net(), recordings[1], ema(), strategy=strategy, **settings)
    return [recording.after for recording in recordings]


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        *[(strategy, ranks, "32-true") for strategy, ranks in RANKS],
        *[("ddp", 2, "bf16-true"), ("fsdp", 2, "bf16-mixed"), ("zero 3", 2, "bf16-mixed")],
    ],
)
def test_validation_on_the_averages_changes_no_bit_of_training(
    strategy: str, ranks: int, precision: str
) -> None:  # L-01: also within accumulation windows
    for plain, averaged in on_ranks(_with_and_without, ranks, strategy, precision, process_group=None):
        assert len(plain) == 12
        for one, other in zip(plain, averaged, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_validation_that_fails_leaves_what_was_trained() -> None:  # L-01
    kept: dict[str, Any] = {}

    class Failing(Net):
        def on_validation_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                raise RuntimeError("disk full")

    class Last(Callback):
        priority = -10

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            kept.update(state(module))

    with pytest.raises(RuntimeError, match="disk full"):
        run(Failing(), Last(), ema())
    assert_near(kept, by_hand()[1])


class Parts(EMAWeightAveraging):
    """Records in which form the averages are loaded."""

    sharded = 0

    def load_tensors(self, trainer: Any, module: Any, tensors: Any) -> None:
        self.sharded = sum(hasattr(one, "region") for one in tensors.values())
        super().load_tensors(trainer, module, tensors)

    @property
    def state_key(self) -> str:
        return "EMAWeightAveraging"


def _saved(strategy: str, folder: Path) -> None:
    run(Net(), ema(), Checkpoint(folder / "c", every_n_train_steps=4), strategy=strategy, max_steps=4)


def _resumed(strategy: str, folder: Path) -> tuple[dict[str, Any], list[float], int, int]:
    module, averaging = Net(), Parts(0.8)
    run(module, averaging, Checkpoint(folder / "c", every_n_train_steps=4), strategy=strategy, path="last")
    return state(module), module.validated, averaging.sharded, averaging.updates


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("single", 1), ("zero 2", 2)),
        (("zero 2", 2), ("single", 1)),
        (("ddp", 2), ("hsdp", 4)),
        (("hsdp", 4), ("ddp", 2)),
        (("fsdp", 2), ("zero 3", 2)),
        (("zero 3", 2), ("zero 1", 2)),
        (("zero 1", 2), ("fsdp", 4)),
    ],
    ids=str,
)
def test_averages_resume_under_another_strategy_and_are_in_the_module_after_fit(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:  # L-01
    on_ranks(_saved, first[1], first[0], tmp_path, process_group=None)
    wanted, trained, losses = by_hand()
    for found, validated, sharded, updates in on_ranks(_resumed, second[1], second[0], tmp_path, process_group=None):
        assert_near(found, wanted)
        torch.testing.assert_close(validated, losses, atol=1e-6, rtol=1e-6)
        assert updates == 12
        assert (sharded > 0) == (second[0] not in ("single", "ddp"))  # each rank reads its own part
    checkpoint = load(max((tmp_path / "c").glob("epoch=*-step=12")))
    averages = dict(checkpoint.callback_tensors("EMAWeightAveraging"))
    assert {one.dtype for one in averages.values()} == {torch.float32}
    assert_near(averages, {name: wanted[name] for name in AVERAGED})
    weights = {name: value for name, value in checkpoint.weights().items() if name != "running_seen"}  # the rank's own
    assert_near(weights, {name: trained[name] for name in weights})


def test_unused_averages_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # L-01
    _saved("single", tmp_path)
    run(Net(), Checkpoint(tmp_path / "c", every_n_train_steps=4), path="last")
    assert "has tensors of callbacks that this run does not have: 'EMAWeightAveraging'." in caplog.text


def running_mean(average: Any, weight: Any, updates: Any) -> Any:
    return average + (weight - average) / (updates + 1)


@pytest.mark.parametrize(
    ("averaging", "average", "starts", "every"),
    [
        pytest.param(ema(update_every_n_steps=3), EMA, 0, 3, id="every third step"),
        pytest.param(ema(update_starting_at_step=5), EMA, 5, 1, id="from a step on"),
        pytest.param(ema(update_starting_at_epoch=1), EMA, 6, 1, id="from an epoch on"),
        pytest.param(ema(update_starting_at_step=100), EMA, 100, 1, id="never: the trained weights stay"),
        pytest.param(WeightAveraging(), None, 0, 1, id="the mean"),
        pytest.param(WeightAveraging(running_mean), None, 0, 1, id="a function of the user's"),
    ],
)
def test_the_average_is_of_the_chosen_steps(averaging: Any, average: Any, starts: int, every: int) -> None:  # L-01
    module = Net()
    run(module, averaging)
    wanted, _, losses = by_hand(average, starts, every)
    assert_near(state(module), wanted)
    assert module.validated == pytest.approx(losses, abs=1e-6)


def test_the_average_changes_in_half_precision(tmp_path: Path) -> None:
    # L-01: in bfloat16 an average with decay 0.999 never changes
    recording, saver = Recording(), Checkpoint(tmp_path / "c", every_n_train_steps=12)
    run(Net(), recording, ema(0.999), saver, precision="bf16-true")
    averages = load(max((tmp_path / "c").glob("epoch=*-step=12"))).callback_tensors("EMAWeightAveraging")
    for name in ("inner.weight", "head.bias"):
        wanted = first = recording.after[0][name].float()
        for one in recording.after[1:]:
            wanted = wanted.lerp(one[name].float(), 1 - 0.999)
        assert averages[name].dtype == torch.float32
        assert torch.equal(averages[name], wanted)
        assert not torch.equal(averages[name], first)


class Normed(Net):
    """Has batch normalization, whose statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def _normed(strategy: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    recording = Recording()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Normed(), recording, ema(), strategy=strategy)
    after, validated = ([one["norm.running_mean"] for one in held] for held in (recording.after, recording.validated))
    return after, validated, [str(one.message) for one in caught]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 1", "zero 3"])
def test_buffers_of_each_rank_are_averaged_on_their_rank(strategy: str) -> None:  # L-01
    ranks = on_ranks(_normed, 2, strategy, process_group=None)
    wanted = ranks[0][0][0]
    for number, one in enumerate(ranks[0][0][1:], 2):
        wanted = wanted.lerp(one, 0.2)
        if number % 6 == 0:
            for _, validated, _ in ranks:  # with rank 0's buffers, as in any validation
                torch.testing.assert_close(validated[number // 6 - 1], wanted)
    assert not torch.equal(ranks[0][0][-1], ranks[1][0][-1])
    for *_, warned in ranks:  # tensors that are not averaged are not missing
        assert not [text for text in warned if "do not fit" in text]


class Assigning(Net):
    """Assigns its buffer and its head's bias in each step, and has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(seeded(lambda: torch.randn((), dtype=torch.complex64)))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.wave.abs()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.running_seen = self.running_seen * 0.5 + float(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data = self.head.bias.data.clamp(-0.05, 0.05)


@pytest.mark.parametrize("settings", [{"limit_val_batches": 0}, {}], ids=["", "validated"])
def test_reassigned_and_complex_tensors_are_averaged(settings: dict[str, Any]) -> None:  # L-01
    module, recording = Assigning(), Recording()
    run(module, recording, ema(), **settings)
    for name in ("running_seen", "head.bias", "wave"):
        wanted, *later = [one[name] for one in recording.after]
        for one in later:
            wanted = wanted + (one - wanted) * 0.2
        torch.testing.assert_close(module.state_dict()[name], wanted, msg=name)


class Growing(Net):
    """Has a buffer that changes its shape at a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3:
            self.running_seen = torch.ones(2)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_grows_is_averaged_from_then_on() -> None:  # L-01
    module = Growing()
    run(module, ema(), max_epochs=1)
    # It is 2 after the step that creates it, where its average starts, and increases by one in each step.
    torch.testing.assert_close(module.running_seen, torch.full((2,), 2 + 0.2 + 0.2 * (2 - 0.2)))
