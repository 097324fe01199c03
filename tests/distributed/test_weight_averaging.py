"""Weight averaging under every strategy equals torch's AveragedModel in a hand-written loop (L-01)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_near, quiet
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging, WeightAveraging
from drivetrain.checkpoint import load
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(sharding="hybrid"),
    "zero 1": lambda: DeepSpeedStrategy(stage=1),
    "zero 2": lambda: DeepSpeedStrategy(stage=2),
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


class Net(TrainModule):
    """Has a frozen layer, two tied ones, and a buffer that training changes; validation records its weights."""

    running_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.frozen = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)
        self.tied.weight = self.inner.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("running_seen", torch.zeros(()))
        self.validated: list[float] = []
        self.trained: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tied(torch.tanh(self.inner(torch.tanh(self.frozen(x))))))).squeeze(1)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.running_seen += 1
        loss = self.loss(batch)
        self.trained.append(float(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.05)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, generator=generator))


def by_hand(epochs: int, average: Callable[[], Any], starts: int = 0, every: int = 1) -> dict[str, Any]:
    """Train in one process, in plain PyTorch."""
    model = Net()
    optimizer = model.configure_optimizers()
    averaged: Any = AveragedModel(model, multi_avg_fn=average(), use_buffers=True)
    validated, step = [], 0
    for _ in range(epochs):
        for batch in DataLoader(rows(), batch_size=BATCH):
            loss = model.loss(batch)
            model.running_seen += 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= starts and step % every == 0:
                averaged.update_parameters(model)
            step += 1
        shown = averaged.module if averaged.n_averaged else model
        validated.append(float(shown.loss(rows()[:]).detach()))
    state = copy.deepcopy(averaged.module.state_dict())
    return {"average": state, "weights": model.state_dict(), "validated": validated}


def run(
    strategy: str,
    world: int,
    folder: Path,
    callbacks: list[Callback],
    epochs: int = 2,
    precision: str = "32-true",
    **settings: Any,
) -> dict[str, Any]:
    path = settings.pop("ckpt_path", None)
    fit = quiet(
        strategy=STRATEGIES[strategy](),
        devices=world,
        max_epochs=epochs,
        precision=precision,
        seed=1,
        default_root_dir=folder,
        callbacks=callbacks,
        **{"enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks), **settings},
    )
    module = Net()
    fit.fit(
        module, DataLoader(rows(), batch_size=BATCH // world), DataLoader(rows(), batch_size=SAMPLES), ckpt_path=path
    )
    return {
        "average": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "validated": module.validated,
        "trained": module.trained,
    }


def ema(decay: float = 0.8, **options: Any) -> EMAWeightAveraging:
    return EMAWeightAveraging(decay, **options)


CASES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("zero 1", 2), ("zero 2", 2), ("zero 3", 2)]


def _ema(strategy: str, world: int, folder: Path) -> dict[str, Any]:
    return run(strategy, world, folder, [ema()])


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_the_module_holds_the_hand_written_average_after_fit(strategy: str, world: int, tmp_path: Path) -> None:
    # L-01
    wanted = by_hand(2, lambda: get_ema_multi_avg_fn(0.8))
    for found in on_ranks(_ema, world, strategy, world, tmp_path, process_group=None):
        assert_near(found["average"], wanted["average"])
        torch.testing.assert_close(found["validated"], wanted["validated"], atol=1e-6, rtol=1e-6)


# Training's weights are restored


class Recording(Callback):
    """Records the exact weights after every step, and after a validation that fails."""

    def __init__(self) -> None:
        self.weights: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        held = (trainer.strategy.shard_of(one) for one in trainer.strategy.model_state().values())
        self.weights.append(torch.cat([getattr(one, "local", one).double().reshape(-1) for one in held]).tolist())


def _with_and_without(strategy: str, world: int, folder: Path, precision: str) -> list[bool]:
    found = []
    for others in ([], [ema()]):
        recording = Recording()
        settings: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3, "precision": precision}
        run(strategy, world, folder, [recording, *others], **settings)
        found.append(recording.weights)
    return [len(found[0]) == 12, found[0] == found[1]]


@pytest.mark.parametrize(
    ("strategy", "world", "precision"),
    [
        *[(strategy, world, "32-true") for strategy, world in CASES],
        ("ddp", 2, "bf16-true"),
        ("fsdp", 2, "bf16-mixed"),
        ("zero 3", 2, "bf16-mixed"),
    ],
)
def test_validation_on_the_averages_changes_no_bit_of_training(
    strategy: str, world: int, precision: str, tmp_path: Path
) -> None:  # L-01: also within accumulation windows
    for found in on_ranks(_with_and_without, world, strategy, world, tmp_path, precision, process_group=None):
        assert found == [True, True]


class Failing(Net):
    def on_validation_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            raise RuntimeError("disk full")


def test_a_validation_that_fails_leaves_what_was_trained(tmp_path: Path) -> None:  # L-01
    kept: dict[str, Any] = {}

    class Last(Callback):
        priority = -10

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            kept.update({name: value.clone() for name, value in module.state_dict().items()})

    fit = quiet(max_epochs=3, default_root_dir=tmp_path, callbacks=[Last(), ema()])
    with pytest.raises(RuntimeError, match="disk full"):
        fit.fit(Failing(), DataLoader(rows(), batch_size=BATCH), DataLoader(rows(), batch_size=SAMPLES))
    assert_near(kept, by_hand(2, lambda: get_ema_multi_avg_fn(0.8))["weights"])


# In a checkpoint


def _saved(strategy: str, world: int, folder: Path, steps: int) -> None:
    run(strategy, world, folder, [ema(), Checkpoint(folder / "c", every_n_train_steps=4)], max_steps=steps)


class Parts(EMAWeightAveraging):
    """Records in which form the averages are loaded."""

    sharded = 0

    def load_tensors(self, trainer: Any, module: Any, tensors: Any) -> None:
        self.sharded = sum(hasattr(one, "region") for one in tensors.values())
        super().load_tensors(trainer, module, tensors)

    @property
    def state_key(self) -> str:
        return "EMAWeightAveraging"


def _resumed(strategy: str, world: int, folder: Path) -> tuple[dict[str, Any], int, int]:
    averaging = Parts(0.8)
    callbacks = [averaging, Checkpoint(folder / "c", every_n_train_steps=4)]
    return run(strategy, world, folder, callbacks, ckpt_path="last"), averaging.sharded, averaging.updates


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("single", 1), ("zero 2", 2)),
        (("ddp", 2), ("single", 1)),
        (("fsdp", 2), ("fsdp", 2)),
        (("fsdp", 2), ("zero 3", 2)),
        (("hsdp", 4), ("ddp", 2)),
        (("zero 1", 2), ("fsdp", 2)),
        (("zero 3", 2), ("fsdp", 4)),
    ],
    ids=str,
)
def test_averages_resume_under_another_strategy_and_world_size(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:  # L-01
    on_ranks(_saved, first[1], *first, tmp_path, 4, process_group=None)
    wanted = by_hand(2, lambda: get_ema_multi_avg_fn(0.8))
    for found, sharded, updates in on_ranks(_resumed, second[1], *second, tmp_path, process_group=None):
        assert_near(found["average"], wanted["average"])
        assert updates == 12
        assert (sharded > 0) == (second[0] not in ("single", "ddp"))  # each rank reads its own part


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 3"])
def test_the_averages_are_in_the_checkpoint_in_float32(strategy: str, tmp_path: Path) -> None:  # L-01
    on_ranks(_saved, 2, strategy, 2, tmp_path, 12, process_group=None)
    newest = max((tmp_path / "c").glob("epoch=*-step=12"))
    checkpoint = load(newest)
    averages = dict(checkpoint.callback_tensors("EMAWeightAveraging"))
    wanted = by_hand(2, lambda: get_ema_multi_avg_fn(0.8))
    assert averages.keys() == {"inner.weight", "inner.bias", "tied.bias", "head.weight", "head.bias", "running_seen"}
    assert {one.dtype for one in averages.values()} == {torch.float32}
    assert_near(averages, {name: wanted["average"][name] for name in averages})
    weights = {
        name: value for name, value in checkpoint.weights().items() if name != "running_seen"
    }  # this rank's part
    assert_near(weights, {name: wanted["weights"][name] for name in weights})


class AtTheEnd(Callback):
    """Saves a checkpoint while the averages are in the module."""

    priority = -100

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _saved_at_the_end(strategy: str, folder: Path) -> Any:
    run(strategy, 2, folder, [ema(), AtTheEnd(folder / "end")], epochs=1)
    return run(strategy, 2, folder, [ema()], ckpt_path=folder / "end")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 2"])
def test_the_last_checkpoint_holds_both(strategy: str, tmp_path: Path) -> None:  # L-01
    for found in on_ranks(_saved_at_the_end, 2, strategy, tmp_path, process_group=None):
        assert_near(found["average"], by_hand(2, lambda: get_ema_multi_avg_fn(0.8))["average"])
    checkpoint, ended = load(tmp_path / "end"), by_hand(1, lambda: get_ema_multi_avg_fn(0.8))
    for found, wanted in ((checkpoint.weights(), ended["weights"]), (checkpoint.averages(), ended["average"])):
        assert_near(
            {name: value for name, value in found.items() if name != "running_seen"},
            {name: value for name, value in wanted.items() if name != "running_seen"},
        )


# Update intervals


@pytest.mark.parametrize(
    "options", [{"update_every_n_steps": 3}, {"update_starting_at_step": 5}, {"update_starting_at_epoch": 1}]
)
def test_the_start_and_interval_of_updates(options: dict[str, int], tmp_path: Path) -> None:  # L-01
    starts = options.get("update_starting_at_step", 6 * options.get("update_starting_at_epoch", 0))
    wanted = by_hand(2, lambda: get_ema_multi_avg_fn(0.8), starts, options.get("update_every_n_steps", 1))
    found = run("single", 1, tmp_path, [ema(**options)])
    assert_near(found["average"], wanted["average"])
    assert found["validated"] == pytest.approx(wanted["validated"], abs=1e-6)


def test_without_an_update_the_module_keeps_its_trained_weights(tmp_path: Path) -> None:  # L-01
    found = run("single", 1, tmp_path, [ema(update_starting_at_step=100)])
    assert_near(found["average"], by_hand(2, lambda: get_ema_multi_avg_fn(0.8))["weights"])
    assert len(found["validated"]) == 2


def test_the_mean_and_a_user_defined_function(tmp_path: Path) -> None:  # L-01
    mean = by_hand(2, lambda: None)["average"]
    assert_near(run("single", 1, tmp_path, [WeightAveraging()])["average"], mean)
    own = WeightAveraging(lambda average, weight, updates: average + (weight - average) / (updates + 1))
    assert_near(run("single", 1, tmp_path, [own])["average"], mean)


def test_validation_can_use_the_trained_weights(tmp_path: Path) -> None:  # L-01
    wanted, plain = by_hand(2, lambda: get_ema_multi_avg_fn(0.8)), run("single", 1, tmp_path, [])
    found = run("single", 1, tmp_path, [ema(evaluate=False)])
    assert found["validated"] == plain["validated"]
    assert_near(found["average"], wanted["average"])


# Changes of the trainable parameters, and the precision


class Unfreezing(Net):
    """Unfreezes its first layer in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1 and not self.frozen.weight.requires_grad:
            self.frozen.requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.frozen.parameters()), "lr": 0.02})


def _unfreezing_by_hand() -> dict[str, Tensor]:
    model = Net()
    optimizer = model.configure_optimizers()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for epoch in range(2):
        if epoch == 1:
            model.frozen.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.02})
        for batch in DataLoader(rows(), batch_size=BATCH):
            optimizer.zero_grad()
            model.loss(batch).backward()
            model.running_seen += 1
            optimizer.step()
            averaged.update_parameters(model)
    return averaged.module.state_dict()


def _unfreezing(strategy: str, world: int, folder: Path) -> dict[str, Tensor]:
    fit = quiet(
        strategy=STRATEGIES[strategy](), devices=world, max_epochs=2, default_root_dir=folder, callbacks=[ema()]
    )
    module = Unfreezing()
    fit.fit(module, DataLoader(rows(), batch_size=BATCH // world))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_unfrozen_parameters_are_averaged_from_then_on(strategy: str, world: int, tmp_path: Path) -> None:  # L-01
    for found in on_ranks(_unfreezing, world, strategy, world, tmp_path, process_group=None):
        assert_near(found, _unfreezing_by_hand())


class Weights(Callback):
    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append({name: value.detach().clone() for name, value in module.named_parameters()})


def test_the_average_changes_in_half_precision(tmp_path: Path) -> None:
    # L-01: in bfloat16 an average with decay 0.999 never changes
    weights = Weights()
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=12)
    run("single", 1, tmp_path, [weights, ema(0.999), saver], precision="bf16-true")
    averages = load(max((tmp_path / "c").glob("epoch=*-step=12"))).callback_tensors("EMAWeightAveraging")
    for name in ("inner.weight", "head.bias"):
        wanted = weights.after[0][name].float()
        for one in weights.after[1:]:
            wanted = wanted.lerp(one[name].float(), 1 - 0.999)
        assert averages[name].dtype == torch.float32
        assert torch.equal(averages[name], wanted)
        assert not torch.equal(averages[name], weights.after[0][name].float())


class Normed(Net):
    """Has batch normalization, whose statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Statistics(Callback):
    priority = -10

    def __init__(self) -> None:
        self.after: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(module.norm.running_mean.clone())

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: int) -> None:
        self.validated.append(module.norm.running_mean.clone())


def _normed(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    statistics = Statistics()
    fit = quiet(strategy="ddp", devices=2, max_epochs=2, default_root_dir=folder, callbacks=[statistics, ema()])
    fit.fit(Normed(), DataLoader(rows(), batch_size=4), DataLoader(rows(), batch_size=24))
    return statistics.after, statistics.validated


def test_per_rank_buffers_are_averaged_on_their_rank(tmp_path: Path) -> None:  # L-01
    ranks = on_ranks(_normed, 2, tmp_path, process_group=None)
    wanted = ranks[0][0][0]
    for number, one in enumerate(ranks[0][0][1:], 2):
        wanted = wanted.lerp(one, 0.2)
        if number % 6 == 0:
            for _, validated in ranks:  # with rank 0's buffers, as in any validation
                torch.testing.assert_close(validated[number // 6 - 1], wanted)
    assert not torch.equal(ranks[0][0][-1], ranks[1][0][-1])


class Assigning(Net):
    """Assigns its buffer and its head's bias in each step, and has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wave = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.after: list[dict[str, Tensor]] = []

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.wave.abs()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.running_seen = self.running_seen * 0.5 + float(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data = self.head.bias.data.clamp(-0.05, 0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append({name: self.state_dict()[name].clone() for name in ("running_seen", "head.bias", "wave")})


@pytest.mark.parametrize("validated", [False, True])
def test_reassigned_and_complex_tensors_are_averaged(validated: bool) -> None:  # L-01
    module = Assigning()
    loader = DataLoader(rows(), batch_size=BATCH)
    quiet(max_epochs=2, callbacks=[ema()]).fit(module, loader, loader if validated else None)
    wanted = module.after[0]
    for later in module.after[1:]:
        wanted = {name: one + (later[name] - one) * 0.2 for name, one in wanted.items()}
    for name, value in wanted.items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


class Again(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_with_averages_is_replaced_by_the_next_at_its_path(tmp_path: Path) -> None:  # L-01
    loader = DataLoader(rows(), batch_size=BATCH)
    quiet(max_epochs=2, callbacks=[ema(), Again(tmp_path / "c")]).fit(Net(), loader)
    assert load(tmp_path / "c").progress["global_step"] == 12
    assert load(tmp_path / "c").callback_tensors("EMAWeightAveraging")


def _warned(strategy: str, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = quiet(
            strategy=STRATEGIES[strategy](), devices=2, max_epochs=1, default_root_dir=folder, callbacks=[ema()]
        )
        fit.fit(Normed(), DataLoader(rows(), batch_size=4), DataLoader(rows(), batch_size=24))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero 1", "zero 3"])
def test_tensors_that_are_not_averaged_are_not_reported_as_missing(strategy: str, tmp_path: Path) -> None:  # L-01
    for said in on_ranks(_warned, 2, strategy, tmp_path, process_group=None):
        assert not [one for one in said if "do not fit" in one]


class Growing(Net):
    """Has a buffer that changes its shape at a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3:
            self.running_seen = torch.ones(2)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_grows_is_averaged_from_then_on() -> None:  # L-01
    module = Growing()
    loader = DataLoader(rows(), batch_size=BATCH)
    quiet(max_epochs=1, callbacks=[ema()]).fit(module, loader, loader)
    # It is 2 after the step that creates it, where its average starts, and increases by one in each step.
    torch.testing.assert_close(module.running_seen, torch.full((2,), 2 + 0.2 + 0.2 * (2 - 0.2)))


def test_unused_averages_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # L-01
    _saved("single", 1, tmp_path, 4)
    run("single", 1, tmp_path, [Checkpoint(tmp_path / "c", every_n_train_steps=4)], ckpt_path="last")
    assert "has tensors of callbacks that this run does not have: 'EMAWeightAveraging'." in caplog.text
