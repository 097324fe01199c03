"""Weight averaging under every strategy equals torch's AveragedModel, SWALR and update_bn in a loop (L-01)."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import data_ranks, state
from small_runs import STRATEGIES, assert_near, data, global_batches, loader, quiet, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from drivetrain.checkpoint import load
from drivetrain.errors import ConfigurationError
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


def by_hand(average: Any = EMA, starts: int = 0, every: int = 1, model: Net | None = None) -> Any:
    """Return the state after the run, the trained one, and the losses. Written by hand: the average is torch's."""
    model, step = model or Net(), 0
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
    fit.fit(module, loader(SAMPLES, BATCH // data_ranks({})), loader(SAMPLES, SAMPLES), ckpt_path=path)
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
def test_validation_on_the_averages_changes_no_bit_of_training(strategy: str, ranks: int, precision: str) -> None:
    # L-01: also within accumulation windows
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


def _leg(strategy: str, folder: Path, steps: int) -> tuple[dict[str, Any], list[float], int, int]:
    """Resume the run in the folder, if there is one, up to a step."""
    module, averaging = Net(), Parts(0.8)
    saver, path = Checkpoint(folder, every_n_train_steps=1), "last" if folder.exists() else None
    run(module, averaging, saver, strategy=strategy, path=path, max_steps=steps)
    return state(module), module.validated, averaging.sharded, averaging.updates


def test_averages_resume_under_other_strategies_and_are_in_the_module_after_fit(tmp_path: Path) -> None:  # L-01
    folder, losses = tmp_path / "c", []
    legs = ["single", "zero 2", "single", "ddp", "hsdp", "ddp", "fsdp", "zero 3", "zero 1", "fsdp", "hsdp"]
    # None ends at step 6 with the epoch: its validation would belong to two legs.
    for steps, strategy in zip((1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12), legs, strict=True):
        ranks = on_ranks(_leg, dict(RANKS)[strategy], strategy, folder, steps, process_group=None)
        losses += ranks[0][1]
        for *_, sharded, updates in ranks:
            assert updates == steps
            if steps > 1:  # each rank reads its own part
                assert (sharded > 0) == (strategy not in ("single", "ddp")), strategy
    wanted, trained, expected = by_hand()
    assert_near(ranks[0][0], wanted)
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-6)
    checkpoint = load(max(folder.glob("epoch=*-step=12")))
    averages = dict(checkpoint.callback_tensors("EMAWeightAveraging"))
    assert {one.dtype for one in averages.values()} == {torch.float32}
    assert_near(averages, {name: wanted[name] for name in AVERAGED})
    weights = {name: value for name, value in checkpoint.weights().items() if name != "running_seen"}  # the rank's own
    assert_near(weights, {name: trained[name] for name in weights})


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


EPOCHS, FIRST = 6, 3  # of stochastic averaging, and the first epoch whose weights are averaged


class Stochastic(TrainModule):
    """Has two groups of parameters, a schedule, and batch normalization if ``normed``; records the epochs' rates."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(4, momentum=0.3) if normed else nn.Identity()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
        self.rates: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.rates.append([float(group["lr"]) for group in self.trainer.optimizers[0].param_groups])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        optimizer = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.05}], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def stochastic_by_hand(annealing: int = 2, shape: Any = "cos", normed: bool = False) -> tuple[Any, list[Any]]:
    """Return the averages, and the rates of each epoch. Written by hand: the classes of torch define them."""
    model, rates = Stochastic(normed), []
    (optimizer,), (scheduler,) = model.configure_optimizers()
    averaged: Any = AveragedModel(model)
    for epoch in range(EPOCHS):
        if epoch == FIRST:
            scheduler = SWALR(optimizer, [0.02, 0.04], annealing, shape)  # type: ignore[arg-type]  # one for each group
        rates.append([group["lr"] for group in optimizer.param_groups])
        for batch in global_batches(SAMPLES, BATCH):
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        if epoch >= FIRST:
            averaged.update_parameters(model)
        scheduler.step()
    if normed:
        update_bn(loader(SAMPLES, BATCH), averaged)
    return averaged.module.state_dict(), rates


def _stochastic(
    strategy: str, folder: Path, annealing: int = 2, shape: str = "cos", normed: bool = False, resume: int = 0
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train, or resume from the checkpoint of a step; return the weights and the learning rates."""
    module = Stochastic(normed)
    averaging = StochasticWeightAveraging([0.02, 0.04], FIRST + 1, annealing, shape)
    checkpoints = Checkpoint(folder / "c", every_n_train_steps=9, save_top_k=-1)
    path = next((folder / "c").glob(f"epoch=*-step={resume}")) if resume else None
    run(module, averaging, checkpoints, strategy=strategy, path=path, max_epochs=EPOCHS, default_root_dir=folder)
    return state(module), module.rates


@pytest.mark.parametrize(
    ("strategy", "ranks", "annealing", "shape"),
    [
        *[("single", 1, 4, "linear"), ("single", 1, 0, "cos"), ("single", 1, 1, "linear")],
        ("single, normed", 1, 2, "cos"),
        *[(strategy, 2, 2, "cos") for strategy in ("ddp", "fsdp", "zero 1", "zero 3")],
    ],
)
def test_stochastic_averages_and_learning_rates_equal_the_hand_written_loop(
    strategy: str, ranks: int, annealing: int, shape: str, tmp_path: Path
) -> None:  # L-01
    normed = strategy == "single, normed"  # the statistics of batch normalization are the averages'
    wanted, rates = stochastic_by_hand(annealing, shape, normed)
    case = (strategy.split(",")[0], tmp_path, annealing, shape, normed)
    for found, seen in on_ranks(_stochastic, ranks, *case, process_group=None):
        assert_near(found, wanted)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(rates))


@pytest.mark.parametrize(("first", "second", "ranks"), [("fsdp", "single", 1), ("ddp", "zero 3", 2)])
def test_stochastic_averaging_resumes_mid_schedule(first: str, second: str, ranks: int, tmp_path: Path) -> None:  # L-01
    on_ranks(_stochastic, 2, first, tmp_path, process_group=None)
    wanted, _ = stochastic_by_hand()
    for step in (9, 27):  # before the first epoch of the averages, and within
        case = (second, tmp_path, 2, "cos", False, step)
        for found, _ in on_ranks(_stochastic, ranks, *case, process_group=None):
            assert_near(found, wanted)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_of_stochastic_averages_are_over_all_micro_batches(strategy: str, tmp_path: Path) -> None:  # L-01
    x = data(SAMPLES).tensors[0].split(BATCH // 2)
    mean, variance = torch.stack([one.mean(0) for one in x]).mean(0), torch.stack([one.var(0) for one in x]).mean(0)
    for found, _ in on_ranks(_stochastic, 2, strategy, tmp_path, 2, "cos", True, process_group=None):
        torch.testing.assert_close(found["norm.running_mean"], mean)
        torch.testing.assert_close(found["norm.running_var"], variance)
        assert found["norm.num_batches_tracked"] == len(x)


class PartlyFrozen(Stochastic):
    """Has four batch normalizations: one in eval mode, one that is not called, one frozen and one trained."""

    def __init__(self) -> None:
        super().__init__(normed=True)
        layers: Any = [nn.BatchNorm1d(4) for _ in range(3)]
        self.kept, self.idle, self.frozen = layers
        self.frozen.track_running_stats = False  # as left by finetuning with train_bn=False
        for layer in layers:
            layer.running_mean.fill_(0.5)

    def on_train_epoch_start(self) -> None:
        self.kept.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kept(x) + self.frozen(x))


def test_statistics_of_inactive_layers_stay() -> None:  # L-01
    module = PartlyFrozen()
    quiet(max_epochs=5, callbacks=[StochasticWeightAveraging(0.05)]).fit(module, loader(SAMPLES, BATCH))
    for layer in (module.kept, module.idle, module.frozen):
        assert layer.running_mean.tolist() == [0.5] * 4
        assert layer.running_var.tolist() == [1.0] * 4
    assert int(module.norm.num_batches_tracked) == SAMPLES // BATCH
    assert torch.isfinite(module.norm.running_mean).all()


class Manual(Stochastic):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_stochastic_averaging_in_manual_optimization_and_from_a_fraction_of_the_epochs() -> None:  # L-01
    averaging = StochasticWeightAveraging([0.05, 0.05])
    quiet(max_epochs=5, callbacks=[averaging]).fit(Manual(), loader(SAMPLES, BATCH))
    assert averaging.updates == 2
    averaging = StochasticWeightAveraging(0.1)
    quiet(max_epochs=10, callbacks=[averaging]).fit(Stochastic(), loader(SAMPLES, 24))
    assert averaging.updates == 3  # from the eighth epoch on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("swa_lrs", 0.0), ("swa_lrs", []), ("swa_lrs", [0.1, -1.0])],
        *[("swa_epoch_start", 0), ("swa_epoch_start", 1.5)],
        *[("annealing_epochs", -1), ("annealing_epochs", 2.0), ("annealing_strategy", "cosine")],
    ],
)
def test_a_wrong_argument_of_stochastic_averaging_is_refused_by_name(name: str, value: Any) -> None:  # L-01
    with pytest.raises(ConfigurationError, match=rf"StochasticWeightAveraging\(.*{name}="):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, name: value})


@pytest.mark.parametrize(
    ("module", "arguments", "settings", "words"),
    [
        (Stochastic(), (0.1,), {"max_epochs": None, "max_steps": 3}, "a fraction of max_epochs"),
        (Stochastic(), ([0.1], 1), {"max_epochs": 1}, "the optimizers have 2 parameter groups"),
        (Manual(normed=True), ([0.1, 0.1],), {"max_epochs": 5}, "batch normalization and uses manual optimization"),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused(module: Any, arguments: Any, settings: Any, words: str) -> None:
    # L-01
    averaging = StochasticWeightAveraging(*arguments)
    fit = quiet(callbacks=[averaging], **settings)
    with pytest.raises(ConfigurationError, match=words):
        fit.fit(module, loader(SAMPLES, BATCH))
    assert (fit.global_step, averaging.updates) == (0, 0)
