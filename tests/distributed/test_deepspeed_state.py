"""State under DeepSpeed, by plain names and in float32: rows E-08 and E-11; access to whole parameters within a
run.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
from fsdp_nets import DeepRegression, Tied
from small_runs import (
    SHARD_EVERYTHING,
    STRATEGIES,
    TIGHT,
    each,
    failing,
    global_batches,
    loader,
    refusal,
    seeded,
    train_by_hand,
    trained,
    weights,
)

from drivetrain import Callback
from drivetrain._distributed.shards import (  # the form of a strategy's state has no public name
    ParameterShard,
    Span,
    cut,
)
from drivetrain.callbacks import LambdaCallback
from drivetrain.testing import assert_close_states
from drivetrain_strategies import DeepSpeedStrategy
from worlds import on_ranks

ZERO = ("zero 1", "zero 2", "zero 3")


def _tied() -> DeepRegression:
    return DeepRegression(seeded(Tied))


def _shapes(stage: int) -> Any:
    module = _tied()
    report: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            # E-11: also before the first step
            report["empty"] = trainer.strategy.optimizer_state()["state"]
            report["before"] = _wholes(trainer.strategy.model_state())

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
            report["moments"] = sum(values["exp_avg"].local.numel() for values in optimizer["state"].values())
            report["after"] = _wholes(state)
            report["state"] = {name: _wholes(values) for name, values in optimizer["state"].items()}
            # A rank's own regions are loaded without communication, and unchanged.
            strategy.load_model_state(state)
            strategy.load_optimizer_state(optimizer)
            assert_close_states(_wholes(strategy.model_state()), report["after"], atol=0, rtol=0)
            wrong = {**state, "net.head.bias": torch.zeros(3)}
            for given in (wrong, {key: value for key, value in state.items() if key != "net.head.bias"}):
                with failing() as caught:
                    strategy.load_model_state(given)
                report.setdefault("texts", []).append(f"{caught['type']}: {caught['text']}")

    trained(module, loader(40, 4), strategy=STRATEGIES[f"zero {stage}"](), callbacks=Look())
    report["module"] = {name: value.clone() for name, value in module.state_dict().items()}
    return report


def _wholes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, ParameterShard) else value for name, value in state.items()}


def test_state_by_plain_names() -> None:
    # E-08, E-11: full float32, each rank its part
    first, second = on_ranks(each, 2, _shapes, (1,), (2,), (3,))
    reference = _tied()
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


def _still(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def _written_in_full(precision: str) -> dict[str, torch.Tensor]:
    @torch.no_grad()
    def write(trainer: Any, module: Any) -> None:
        with trainer.strategy.gathered():
            for parameter in module.parameters():
                parameter.add_(2.0**-20)  # a change too small for bf16

    found = {}
    for name in ZERO:
        module = DeepRegression()
        module.configure_optimizers = partial(_still, module)  # type: ignore[method-assign]
        write_first = LambdaCallback(on_train_start=write)
        settings: dict[str, Any] = {"precision": precision, "callbacks": write_first}
        found[name] = trained(module, loader(8, 4), strategy=STRATEGIES[name](), **settings)
    return found


def test_masters_keep_what_is_written_to_gathered_parameters() -> None:
    # E-11: bit for bit; raw DeepSpeed loses it at the next step, which uses the unchanged masters
    expected = weights(DeepRegression()) + 2.0**-20
    for found in chain.from_iterable(on_ranks(each, 2, _written_in_full, ("32-true",), ("bf16-mixed",))):
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

    module = DeepRegression(lr=0.0)
    strategy = DeepSpeedStrategy(**SHARD_EVERYTHING)
    trained(module, loader(8, 4), strategy=strategy, callbacks=LambdaCallback(on_train_start=look))
    return seen, module.net.head.weight.detach().clone()


def test_one_parameter_gathered() -> None:
    for seen, head in on_ranks(_one_gathered, 2):
        assert seen == [8, (1, 8), 1.0, 8]
        assert torch.equal(head, torch.ones(1, 8))


class Keeping(DeepRegression):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _train_again(stage: int) -> list[str]:
    module, stepped = Keeping(), Keeping()
    stepped.loss(next(iter(loader(8, 8)))).backward()
    stepped.optimizer.step()
    return [refusal(one, loader(40, 4), strategy=DeepSpeedStrategy(stage=stage)) for one in (module, module, stepped)]


def test_an_optimizer_that_was_stepped_before_is_refused() -> None:
    for _, again, stepped in on_ranks(each, 2, _train_again, (2,), (3,))[0]:
        assert "build a new one in configure_optimizers" in again
        assert "AdamW has state" in stepped
