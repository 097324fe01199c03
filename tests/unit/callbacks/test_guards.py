"""NonFiniteGuard, ReplicaCheck with its checksums, and LossSpikeGuard: what they find, allow and do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import CHECKPOINTS, Regression, checkpoint_names, loader, quiet_fit
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from drivetrain import ConfigurationError, DistributedError, Fit, LossSpikeError, NonFiniteError
from drivetrain._distributed.checksum import checksum, checksums  # private: tensors of every dtype, bit by bit
from drivetrain.callbacks import Checkpoint, LambdaCallback, LossSpikeGuard, NonFiniteGuard, ReplicaCheck
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

INF, NAN = math.inf, math.nan
WINDOW, LONG_WINDOW, TWO = {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 600}, {"every_n_steps": 2}
WEIGHT = "parameter 'norm.weight' is not the same on"
STEPS, BAD = 16, 8
RANKS: dict[str, Any] = {"devices": 2, "batch_size": 2}


class Bad(Regression):
    def __init__(self, bad: dict[int, float]) -> None:
        super().__init__()
        self.bad = bad
        self.trained = 0
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        return self.loss(batch) + self.bad.get(self.trainer.micro_batches, 0.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1


@pytest.mark.parametrize(
    ("bad", "every", "options", "found", "trained"),
    [
        pytest.param({7: NAN, 8: INF}, 5, {}, "nan on rank 0 at batch index 7 of epoch 0, after 7", 10, id="nan"),
        pytest.param({7: INF, 8: NAN}, 5, {}, "inf on rank 0 at batch index 7 of epoch 0, after 7", 10, id="inf"),
        pytest.param({7: -INF}, 5, {}, "-inf on rank 0 at batch index 7 of epoch 0, after 7", 10, id="-inf"),
        pytest.param({1: NAN}, 1, {}, "nan on rank 0 at batch index 1 of epoch 0, after 1", 2, id="after each step"),
        pytest.param({6: INF}, 1, WINDOW, "inf on rank 0 at batch index 6 of epoch 0, after 3", 8, id="in a window"),
        pytest.param({27: NAN}, 4, WINDOW, "nan on rank 0 at batch index 7 of epoch 1, after 13", 28, id="next epoch"),
        pytest.param({19: NAN}, 50, {}, "nan on rank 0 at batch index 19 of epoch 0", 20, id="an epoch's end"),
        pytest.param({3: NAN}, 50, {"max_steps": 5}, "nan on rank 0 at batch index 3", 5, id="the run's end"),
        pytest.param({300: NAN}, 1000, LONG_WINDOW, "nan on rank 0 at batch index 300", 512, id="within a long window"),
    ],
)
def test_the_first_bad_loss_is_named(bad: Any, every: int, options: Any, found: str, trained: int) -> None:  # G-05
    module = Bad(bad)
    data = loader(600, 1) if options is LONG_WINDOW else loader(80)
    with pytest.raises(NonFiniteError, match=f"The loss is {found} ?(optimizer steps)?"):
        quiet_fit(max_epochs=2, callbacks=NonFiniteGuard(every), **options).fit(module, data, loader(4))
    assert module.trained == trained
    assert module.validated == (trained == 28)  # not with the weights after a bad loss


def test_in_manual_optimization_every_backward_is_watched() -> None:  # G-05, B-13
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for bad in (0.0, INF if batch_idx == 4 else 0.0):
                self.manual_backward(self.loss(batch) + 3e38 + bad)  # the sum of both is not finite in float32
            optimizer.step()

    with pytest.raises(NonFiniteError, match=r"loss is inf on rank 0 at batch index 4 .*after 4 optimizer steps"):
        quiet_fit(callbacks=NonFiniteGuard()).fit(Manual(), loader())


def test_a_batch_without_items_may_have_no_loss() -> None:  # B-21
    class Weighed(Regression):
        def batch_weight(self, batch: Any) -> torch.Tensor:
            return (batch[1] > 0).sum()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            items = (y > 0).squeeze(1)
            return (self.net(x) - y)[items].square().mean()  # NaN where there are none

    x, y = torch.ones(16, 4), torch.ones(16, 1)
    y[4:8] = -1
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "callbacks": NonFiniteGuard()}
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    quiet_fit(**options).fit(Weighed(), data)
    x[8] = NAN
    with pytest.raises(NonFiniteError, match="The loss is nan on rank 0 at batch index 2"):
        quiet_fit(**options).fit(Weighed(), data)


def _found_on_ranks(bad_by_rank: dict[int, dict[int, float]]) -> str:
    class BadOnRanks(Bad):
        def on_fit_start(self) -> None:
            self.bad = bad_by_rank.get(self.global_rank, {})

    fit = quiet_fit(strategy="ddp", devices=2, callbacks=NonFiniteGuard(every_n_steps=4))
    try:
        fit.fit(BadOnRanks({}), loader(64))
    except NonFiniteError as error:
        return f"{error.what} [{fit.global_step}]"
    return ""


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({1: {2: NAN}}, "rank 1 at batch index 2 of epoch 0, after 2 optimizer steps (global_step=2) [4]"),
        ({0: {6: NAN}, 1: {5: NAN}}, "rank 1 at batch index 5 of epoch 0, after 5 optimizer steps (global_step=5) [8]"),
        ({0: {1: NAN}, 1: {1: INF}}, "ranks 0, 1 at batch index 1 of epoch 0, after 1 optimizer steps"),
        ({}, ""),
    ],
)
def test_every_rank_stops_at_once_and_names_the_rank(bad: Any, found: str) -> None:  # G-05, G-01: no rank hangs
    first, second = on_ranks(_found_on_ranks, 2, bad, process_group=None)
    assert first == second
    assert found in first
    assert bool(first) is bool(bad)


def _found(strategy: str, change: str, step: int, rank: int, options: dict[str, Any]) -> str:
    """Change a tensor of one rank after a step, and return the error."""

    class Still(Regression):
        """Keeps its weights, and has statistics of each rank's data, which may differ until the next forward."""

        def __init__(self) -> None:
            super().__init__(lr=0.0)
            self.norm = nn.BatchNorm1d(4)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss((self.norm(batch[0]), batch[1]))

    @torch.no_grad()
    def change_one_rank(trainer: Any, module: Any, *arguments: Any) -> None:
        if (trainer.global_step, trainer.global_rank) != (step, rank):
            return
        if change == "extra":
            module.extra = nn.Parameter(torch.zeros(1))
        elif change:
            tensor = module.norm.weight
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            value = local.view(-1)[0]
            local.view(-1)[0] = torch.nextafter(value, torch.tensor(9.0))  # the last bit

    changing = LambdaCallback(on_train_batch_end=change_one_rank, priority=200)  # before the check
    chosen: Any = FSDPStrategy(sharding="hybrid", replicate_size=2) if strategy == "hsdp" else strategy
    ranks, callbacks = torch.distributed.get_world_size(), [changing, ReplicaCheck(**options)]
    try:
        quiet_fit(strategy=chosen, devices=ranks, max_steps=5, callbacks=callbacks).fit(Still(), loader(80))
    except DistributedError as error:
        return error.what
    return ""


@pytest.mark.parametrize(
    ("strategy", "ranks", "change", "step", "rank", "options", "found"),
    [
        pytest.param("ddp", 2, "", 0, 0, TWO, "", id="none"),
        pytest.param("ddp_static_graph", 2, "", 0, 0, TWO, "", id="none, with a static graph"),
        pytest.param("ddp", 4, "weight", 3, 1, TWO, f"step 4: {WEIGHT} ranks 0, 2, 3 and on rank 1", id="the last bit"),
        pytest.param("ddp", 2, "weight", 3, 0, {}, f"step 5: {WEIGHT} rank 0 and on rank 1", id="at the end"),
        pytest.param("ddp", 2, "extra", 4, 1, TWO, "names of the parameters", id="names"),
        pytest.param("hsdp", 4, "", 0, 0, TWO, "", id="none of shards"),
        pytest.param("hsdp", 4, "weight", 3, 3, TWO, f"step 4: {WEIGHT} rank 1 and on rank 3", id="shards"),
    ],
)
def test_replicas_are_compared(
    strategy: str, ranks: int, change: str, step: int, rank: int, options: dict[str, Any], found: str
) -> None:  # C-04, B-20
    results = on_ranks(_found, ranks, strategy, change, step, rank, options)
    assert len(set(results)) == 1  # the same on every rank
    assert found in results[0]
    assert bool(found) is bool(results[0])


DTYPES = "float64 float32 bfloat16 float16 float8_e4m3fn int64 int8 uint8 complex64 complex128"


@pytest.mark.parametrize("name", DTYPES.split())
def test_one_bit_anywhere_changes_the_checksum(name: str) -> None:
    dtype = getattr(torch, name)
    original = torch.randint(-100, 100, (7, 5)).to(torch.float32).to(dtype)
    before = checksum(original)
    assert before.dtype == torch.int64
    assert checksum(original.clone()) == before
    size = dtype.itemsize
    for element in (0, 17, 34):
        for byte, bit in ((0, 1), (size - 1, 0x80)):
            changed = original.clone()
            changed.view(torch.uint8).view(-1)[element * size + byte] ^= bit
            assert checksum(changed) != before


def test_the_order_and_signs_matter_and_the_layout_does_not() -> None:
    value = torch.arange(12.0).reshape(3, 4)
    assert checksum(value.flip(0)) != checksum(value)
    assert checksum(torch.tensor([-1.0, 1.0])) != checksum(torch.tensor([1.0, -1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(value.t()) == checksum(value.t().contiguous())
    assert checksum(value[:, ::2]) == checksum(value[:, ::2].contiguous())
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3))
    assert checksum(torch.zeros(0)) == checksum(torch.ones(3, device="meta")) == 0
    assert checksum(torch.tensor(True)) != checksum(torch.tensor(False))
    large = torch.arange((1 << 22) + 5)
    before = checksum(large)
    assert checksums([value, large]).tolist() == [int(checksum(value)), int(before)]
    large[-1] += 1
    assert checksum(large) != before


class Line(Regression):
    """Has an optimizer that changes weights even with zero gradients, by weight decay and momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.net.weight, 0.1)
        torch.nn.init.zeros_(self.net.bias)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> TensorDataset:
    """Return samples for batches of 4; the last two of batch `BAD` have wrong targets."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS * 4, 4, generator=generator), torch.randn(STEPS * 4, 1, generator=generator)
    y[BAD * 4 + 2 : BAD * 4 + 4] = 1e4
    return TensorDataset(x, y)


def train(path: Path, *callbacks: Any, module: Any = None, dataset: Any = None, **options: Any) -> tuple[Fit, Line]:
    module, ckpt_path = module or Line(), options.pop("ckpt_path", None)
    batches = DataLoader(dataset or data(), options.pop("batch_size", 4), options.pop("shuffle", False))
    settings = {"enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks), **options}
    fit = quiet_fit(default_root_dir=path, callbacks=list(callbacks), **settings)
    fit.fit(module, batches, ckpt_path=ckpt_path)
    return fit, module


def expected(path: Path) -> torch.Tensor:
    """Return the weight after training without the bad batch."""
    good = [sample for sample in range(STEPS * 4) if sample // 4 != BAD]
    return train(path, dataset=Subset(data(), good))[1].net.weight.detach()


def guard(action: str, **options: Any) -> LossSpikeGuard:
    return LossSpikeGuard(action, window=8, warmup=4, **{"every_n_steps": 4, **options})


def test_a_spike_is_far_above_the_median_of_the_last_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Scripted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * 0 + losses[batch_idx]

    # A high loss is no spike in the warm-up, and none after half a window of such losses.
    losses = [math.nan, 5.0, 4.0, 100.0, 4.5, 4.2, 4.8, 4.4, 5.5, *[8.0] * 8]
    spike = LossSpikeGuard(threshold=5, window=10, warmup=4, every_n_steps=1)
    quiet_fit(callbacks=spike).fit(Scripted(), loader(len(losses), 1))
    assert re.findall(r"global_step=(\d+) \(median ([\w.]+)", caplog.text) == [("0", "nan"), ("9", "4.65")]


@pytest.mark.parametrize("every", [pytest.param(4, id="within the epoch"), pytest.param(1000, id="at its end")])
def test_a_run_that_rolls_back_ends_as_if_the_step_had_not_been(every: int, tmp_path: Path, caplog: Any) -> None:
    watching, saving = guard("rollback", every_n_steps=every), Checkpoint(every_n_train_steps=4, save_top_k=3)
    fit, module = train(tmp_path, saving, watching)
    assert torch.equal(module.net.weight, expected(tmp_path))
    assert (watching.rollbacks, watching.skipped_steps, fit.global_step) == (1, {BAD}, STEPS)
    detected, path = 12 if every == 4 else STEPS, tmp_path / CHECKPOINTS / "epoch=0-step=8"
    assert caplog.text.count(f"in the step after global_step={BAD} (median ") == 1
    assert f"Rolling back from global_step={detected} to 8, {path} (rollback 1 of 3)" in caplog.text
    assert checkpoint_names(tmp_path) == [f"epoch=0-step={step}" for step in (12, 16, 8)]


def test_a_rollback_that_a_save_requests_is_made_once(tmp_path: Path) -> None:
    requested: list[int] = []

    def request(trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == 8 and not requested:
            requested.append(8)
            trainer.roll_back(str(tmp_path / CHECKPOINTS / "epoch=0-step=4"))

    saving = Checkpoint(every_n_train_steps=4, save_top_k=-1)
    fit, module = train(tmp_path, saving, LambdaCallback(on_save_checkpoint=request))
    assert (fit.global_step, requested) == (STEPS, [8])
    assert torch.equal(module.net.weight, train(tmp_path / "plain")[1].net.weight)


def test_checkpoints_later_than_the_spike_are_removed(tmp_path: Path) -> None:  # F-05
    # Detected at step 12; checkpoints 9 and 10 contain the spike, and "auto" would resume from the newest.
    def fail(trainer: Any, *arguments: Any) -> None:
        if trainer.callbacks[0].rollbacks and trainer.global_step == BAD + 1:
            raise InterruptedError

    def callbacks() -> list[Any]:
        best = Checkpoint(every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
        return [guard("rollback"), Checkpoint(every_n_train_steps=2, keep_last=2), best]

    with pytest.raises(InterruptedError):
        train(tmp_path, *callbacks(), LambdaCallback(on_train_batch_end=fail))
    names = {name.partition("-v")[0] for name in checkpoint_names(tmp_path)}
    assert names == {f"epoch=0-step={step}" for step in (3, 6, 8)}
    assert (tmp_path / CHECKPOINTS / "latest").read_text().strip() == f"epoch=0-step={BAD}"
    _, module = train(tmp_path, *callbacks(), ckpt_path="auto")
    assert torch.equal(module.net.weight, expected(tmp_path))


def test_a_spike_after_the_last_rollback_or_without_a_checkpoint_raises(tmp_path: Path) -> None:  # G-06
    with pytest.raises(ConfigurationError, match="no Checkpoint callback"):
        train(tmp_path, guard("rollback"))
    with pytest.raises(LossSpikeError, match=rf"(?s)after global_step={BAD} .*has rolled back 0 time\(s\)"):
        train(tmp_path, Checkpoint(every_n_train_steps=4), guard("rollback", max_rollbacks=0))
    with pytest.raises(LossSpikeError, match="no complete checkpoint from before the spike"):
        train(tmp_path, Checkpoint(every_n_train_steps=10), guard("rollback"))


def _stop_after_a_rollback(folder: str) -> int:
    def stop(trainer: Any, *arguments: Any) -> None:
        if watching.rollbacks and trainer.global_step == 9 and trainer.global_rank == 1:
            trainer.should_stop = True

    watching = guard("rollback", every_n_steps=STEPS)
    callbacks = [watching, Checkpoint(every_n_train_steps=8, save_top_k=-1), LambdaCallback(on_train_batch_end=stop)]
    return train(Path(folder), *callbacks, strategy="ddp", **RANKS)[0].global_step


def test_a_request_to_stop_after_a_rollback_is_heard_soon(tmp_path: Path) -> None:  # G-03
    # Ranks poll for requests every few steps, and do not wait for the step that was planned before the rollback.
    stopped = on_ranks(_stop_after_a_rollback, 2, str(tmp_path), process_group=None)
    assert stopped in ([9, 9], [10, 10])  # the other rank may have polled just before


def _weight_on_a_rank(folder: str, action: str) -> torch.Tensor:
    callbacks = [guard(action), Checkpoint(every_n_train_steps=4, save_top_k=2, save_async=True)]
    return train(Path(folder), *callbacks, strategy="ddp", gradient_clip_val=100.0, **RANKS)[1].net.weight.detach()


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_ranks_act_together(action: str, tmp_path: Path) -> None:
    for weight in on_ranks(_weight_on_a_rank, 2, str(tmp_path), action, process_group=None):
        assert torch.allclose(weight, expected(tmp_path), atol=1e-6)


def _roll_back_on_a_rank(folder: str) -> list[tuple[int, torch.Tensor, float]]:
    """Train with spikes that are detected, and with the same spikes known from the start."""

    class Drawing(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss((nn.functional.dropout(batch[0], 0.3), batch[1]))
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    ends, skipped_steps = [], set[int]()
    for name in ("detected", "known"):
        watching = guard("rollback", max_rollbacks=9)
        watching.skipped_steps |= skipped_steps
        saving = Checkpoint(Path(folder, name), every_n_train_steps=4, save_top_k=-1)
        options: dict[str, Any] = {"strategy": "fsdp", "max_epochs": 2, "shuffle": True, "seed": 5, **RANKS}
        fit, module = train(Path(folder), saving, watching, module=Drawing(), **options)
        skipped_steps = watching.skipped_steps
        ends.append((watching.rollbacks, module.net.weight.detach(), float(fit.callback_metrics["loss_epoch"])))
    return ends


def test_random_states_schedules_and_logged_values_go_back_too(tmp_path: Path) -> None:
    for detected, known in on_ranks(_roll_back_on_a_rank, 2, str(tmp_path), process_group=None):
        assert detected[0] > 1
        assert known[0] == 0
        assert torch.equal(detected[1], known[1])
        assert detected[2] == known[2]
