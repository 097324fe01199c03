"""State under DeepSpeed, by plain names and in float32: rows E-08, E-11, F-01; access to whole parameters within a
run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsdp_nets import DeepRegression, Tied
from small_runs import TIGHT, Saver, about, each, failing, global_batches, loader, quiet, seeded, train_by_hand, weights

from drivetrain import Callback, Strategy
from drivetrain._distributed.shards import ParameterShard, Span, cut
from drivetrain.callbacks import LambdaCallback
from drivetrain.testing import assert_close_states
from drivetrain_strategies import DeepSpeedStrategy
from worlds import on_ranks

ZERO = ("zero 1", "zero 2", "zero 3")
OTHERS = ("ddp", "fsdp")


def _strategy(name: str) -> str | Strategy:
    if name == "zero 3":
        return DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0)  # E-13
    return DeepSpeedStrategy(stage=int(name[-1])) if name in ZERO else name


def _save(folder: str, name: str, batch: int) -> None:
    saver = Saver(f"{folder}/{name}")
    quiet(strategy=_strategy(name), callbacks=saver).fit(DeepRegression(seeded(Tied)), loader(40, batch))


def _resume(folder: str, source: str, target: str, batch: int) -> torch.Tensor:
    module = DeepRegression(seeded(Tied))
    quiet(strategy=_strategy(target), max_epochs=2).fit(module, loader(40, batch), ckpt_path=f"{folder}/{source}")
    return weights(module)


def _exchange(folder: str) -> dict[tuple[str, str], torch.Tensor]:
    for name in (*ZERO, *OTHERS):
        _save(folder, name, 4)
    pairs = [(source, target) for source in ("single_device", *ZERO, *OTHERS) for target in ZERO]
    pairs += [(source, target) for source in ZERO for target in OTHERS]
    return {(source, target): _resume(folder, source, target, 4) for source, target in pairs}


def test_a_run_moves_between_strategies(tmp_path: Path) -> None:
    # E-08, F-01, B-07: weights and optimizer state continue as in the reference, for every pair of writer and reader
    _save(str(tmp_path), "single_device", 8)
    found, _ = on_ranks(_exchange, 2, str(tmp_path), timeout=150)
    for name in ZERO:
        found[name, "single_device"] = _resume(str(tmp_path), name, "single_device", 8)
    module = DeepRegression(seeded(Tied))
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    for _ in range(2):
        train_by_hand(module, global_batches(40, 8))
    for (source, target), actual in found.items():
        torch.testing.assert_close(actual, weights(module), **TIGHT, msg=about((source, target)))


# State that a rank provides and loads


def _shapes(stage: int) -> Any:
    module = DeepRegression(seeded(Tied))
    report: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            # E-11: also before the first step
            report["empty"] = trainer.strategy.optimizer_state()["state"]
            report["before"] = {name: _whole(value) for name, value in trainer.strategy.model_state().items()}

        def on_train_end(self, trainer: Any, module: Any) -> None:
            strategy = trainer.strategy
            state, optimizer = strategy.model_state(), strategy.optimizer_state()
            assert state["net.blocks.0.up.weight"] is state["net.blocks.2.up.weight"]
            regions, moments = strategy.model_regions(), strategy.optimizer_regions()
            assert set(regions) == {name for name, value in state.items() if isinstance(value, ParameterShard)}
            # A scalar's state is requested whole, because it has the shape of step counters.
            assert set(moments) == set(optimizer["state"]) - {"net.temperature"}
            for name, value in state.items():
                if isinstance(value, ParameterShard):
                    assert value.region == regions[name]
                    assert isinstance(value.region, Span)
                    assert torch.equal(cut(value.full_tensor(), value.region), value.local)
            report["held"] = sum(value.local.numel() for value in state.values() if isinstance(value, ParameterShard))
            report["moments"] = sum(values["exp_avg"].local.numel() for values in optimizer["state"].values())
            report["after"] = {name: _whole(value) for name, value in state.items()}
            report["state"] = {
                name: {key: _whole(value) for key, value in values.items()}
                for name, values in optimizer["state"].items()
            }
            # A rank's own regions are loaded without communication, and unchanged.
            strategy.load_model_state(state)
            strategy.load_optimizer_state(optimizer)
            assert_close_states(
                {name: _whole(value) for name, value in strategy.model_state().items()}, report["after"], atol=0, rtol=0
            )
            wrong = {**state, "net.head.bias": torch.zeros(3)}
            for given in (wrong, {key: value for key, value in state.items() if key != "net.head.bias"}):
                with failing() as caught:
                    strategy.load_model_state(given)
                report.setdefault("texts", []).append(f"{caught['type']}: {caught['text']}")

    options: dict[str, Any] = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    quiet(strategy=DeepSpeedStrategy(stage=stage, **options), callbacks=Look()).fit(module, loader(40, 4))
    report["module"] = {name: value.clone() for name, value in module.state_dict().items()}
    return report


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ParameterShard) else value


def test_state_by_plain_names() -> None:
    # E-08, E-11: full float32, each rank its part
    first, second = on_ranks(each, 2, _shapes, (1,), (2,), (3,))
    reference = DeepRegression(seeded(Tied))
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    optimizer = reference.configure_optimizers()
    reference.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    train_by_hand(reference, global_batches(40, 8))
    numel = sum(parameter.numel() for parameter in reference.parameters())
    names = {id(parameter): name for name, parameter in reference.named_parameters()}
    moments = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    for reports in zip(first, second, strict=True):
        for report in reports:
            assert report["empty"] == {}
            assert_close_states(report["before"], before, atol=0, rtol=0)
            assert_close_states(report["after"], dict(reference.state_dict()), **TIGHT)
            assert_close_states(report["state"], moments, **TIGHT)
            assert_close_states(report["module"], report["after"], atol=0, rtol=0)
            assert "CheckpointError" in report["texts"][0]
            assert "net.head.bias ((3,) instead of (1,))" in report["texts"][0]
            assert "missing ['net.head.bias']" in report["texts"][1]
        assert sum(report["moments"] for report in reports) == numel  # no region twice
        assert max(report["moments"] for report in reports) <= 0.6 * numel


# Whole parameters within a run (E-11)


class Average(Callback):
    """An exponential moving average of the weights, swapped in for validation."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        with _gathered(trainer, write=False):
            self.average = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with _gathered(trainer, write=False):
            for name, value in module.named_parameters():
                self.average[name].lerp_(value, 0.5)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with _gathered(trainer):  # training continues from the average
            for name, value in module.named_parameters():
                value.copy_(self.average[name])


def _gathered(trainer: Any, write: bool = True) -> Any:
    strategy = trainer.strategy
    return strategy.gathered(write=write) if isinstance(strategy, DeepSpeedStrategy) else torch.no_grad()


def _averaged() -> dict[str, torch.Tensor]:
    found = {}
    for name in ("ddp", *ZERO):
        module = DeepRegression()
        quiet(strategy=_strategy(name), max_epochs=3, callbacks=Average()).fit(module, loader(40, 4))
        found[name] = weights(module)
    return found


def test_writes_to_gathered_parameters_persist() -> None:
    # E-11: raw DeepSpeed loses it at the next step, which uses the unchanged masters
    first, second = on_ranks(_averaged, 2)
    for name in ZERO:
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], first["ddp"], **TIGHT)


def _still(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def _written_in_full() -> dict[str, torch.Tensor]:
    @torch.no_grad()
    def write(trainer: Any, module: Any) -> None:
        with _gathered(trainer):
            for parameter in module.parameters():
                parameter.add_(2.0**-20)  # a change too small for bf16

    found = {}
    for name in ZERO:
        module = DeepRegression()
        module.configure_optimizers = partial(_still, module)  # type: ignore[method-assign]
        write_first = LambdaCallback(on_train_start=write)
        quiet(strategy=_strategy(name), precision="bf16-mixed", callbacks=write_first).fit(module, loader(8, 4))
        found[name] = weights(module)
    return found


def test_masters_keep_values_beyond_half_precision() -> None:
    # E-11: as they were built, and as they were written, bit for bit
    expected = weights(DeepRegression()) + 2.0**-20
    for found in on_ranks(_written_in_full, 2):
        for name in ZERO:
            assert torch.equal(found[name], expected), name


def _one_gathered() -> Any:
    seen: list[Any] = []

    def look(trainer: Any, module: Any) -> None:
        head = module.net.head.weight
        seen.append(head.numel())
        with trainer.strategy.gathered(head):
            seen.append(tuple(head.shape))
            with torch.no_grad():
                head.fill_(1.0 + trainer.global_rank)  # rank 0's value is used
        with trainer.strategy.gathered([head], write=False):
            seen.append(head.mean().item())
            with torch.no_grad():
                head.fill_(7.0)
        seen.append(head.numel())

    strategy = DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0)
    module = DeepRegression()
    module.lr = 0.0
    quiet(strategy=strategy, callbacks=LambdaCallback(on_train_start=look)).fit(module, loader(8, 4))
    return seen, module.net.head.weight.detach().clone()


def test_one_parameter_gathered() -> None:
    for seen, head in on_ranks(_one_gathered, 2):
        assert seen == [8, (1, 8), 1.0, 8]
        assert torch.equal(head, torch.ones(1, 8))


# An optimizer that the module keeps


class Keeping(DeepRegression):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _kept(stage: int) -> list[str]:
    texts = []
    module = Keeping()
    for _ in range(2):
        with failing() as caught:
            quiet(strategy=DeepSpeedStrategy(stage=stage)).fit(module, loader(40, 4))
        texts.append(caught["text"])
    stepped = Keeping()
    stepped.loss(next(iter(loader(8, 8)))).backward()
    stepped.optimizer.step()
    with failing() as caught:
        quiet(strategy=DeepSpeedStrategy(stage=stage)).fit(stepped, loader(40, 4))
    return [*texts, caught["text"]]


def test_an_optimizer_that_was_stepped_before_is_refused() -> None:
    for _, again, stepped in on_ranks(each, 2, _kept, (2,), (3,))[0]:
        assert "build a new one in configure_optimizers" in again
        assert "AdamW has state" in stepped
