from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from callback_run import FakeRun, distributed_run
from torch import nn

from drivetrain.callbacks import NonFiniteGuard
from drivetrain.errors import ConfigurationError, NonFiniteError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import resolve_precision
from worlds import on_ranks


class _Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def _train(
    callback: NonFiniteGuard,
    run: FakeRun,
    losses: list[list[float]],
    window: int = 1,
    net: nn.Module | None = None,
    gradients: dict[int, float] | None = None,
    weights: list[float] | None = None,
) -> str:
    """Run one micro-batch for each list of losses; return the exception and the micro-batch at which it was raised."""
    trainer: Any = run
    module: Any = net if net is not None else _Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        callback.on_train_start(trainer, module)
        for index, values in enumerate(losses):
            run.micro_batch_weight = 1.0 if weights is None else weights[index]
            for value in values:
                loss = (torch.ones((), requires_grad=True) * value).to(torch.float32)
                callback.on_before_backward(trainer, module, loss)
            if (index + 1) % window == 0:
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                if gradients and index in gradients:
                    next(module.parameters()).grad.view(-1)[1] = gradients[index]
                callback.on_before_optimizer_step(trainer, module, optimizer)
                run.global_step += 1
            callback.on_train_batch_end(trainer, module, {}, None, index)
        callback.on_train_epoch_end(trainer, module)
        callback.on_train_end(trainer, module)
    except NonFiniteError as error:
        return f"{error.what} [raised at {index}]"
    return ""


@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_the_first_bad_loss_is_named_exactly_though_it_is_looked_for_seldom(value: float, name: str) -> None:
    # G-05
    losses = [[1.0]] * 7 + [[value], [math.nan], [1.0]] + [[2.0]] * 10
    found = _train(NonFiniteGuard(every_n_steps=5), FakeRun(current_epoch=3), losses)
    assert found == (
        f"The loss is {name} on rank 0 at batch index 7 of epoch 3, after 7 optimizer steps (global_step=7) "
        "[raised at 9]"
    )


def test_with_an_interval_of_one_it_stops_right_after_the_step() -> None:
    # G-05
    found = _train(NonFiniteGuard(every_n_steps=1), FakeRun(), [[1.0], [math.nan], [1.0]])
    assert found.endswith("batch index 1 of epoch 0, after 1 optimizer steps (global_step=1) [raised at 1]")


def test_micro_batches_of_a_window_are_told_apart() -> None:
    losses = [[1.0]] * 6 + [[math.inf]] + [[1.0]] * 5
    found = _train(NonFiniteGuard(every_n_steps=1), FakeRun(), losses, window=4)
    assert "batch index 6 of epoch 0, after 1 optimizer steps" in found
    assert found.endswith("[raised at 7]")


def test_what_is_left_at_the_end_of_an_epoch_is_looked_at() -> None:
    assert "batch index 2" in _train(NonFiniteGuard(), FakeRun(), [[1.0], [1.0], [math.nan]])


def test_a_window_longer_than_its_memory_is_looked_at_in_between() -> None:
    losses = [[1.0]] * 300 + [[math.nan]] + [[1.0]] * 400
    found = _train(NonFiniteGuard(every_n_steps=1000), FakeRun(), losses, window=1000)
    assert "batch index 300" in found
    assert found.endswith("[raised at 511]")


def test_several_losses_of_one_batch_count_together_and_none_is_none() -> None:
    # Manual optimization: two backward passes per batch, and a batch whose loss is None.
    assert _train(NonFiniteGuard(every_n_steps=1), FakeRun(), [[1.0, -1.0], [], [3.0]]) == ""
    assert "batch index 2" in _train(NonFiniteGuard(every_n_steps=1), FakeRun(), [[1.0, -1.0], [], [3.0, math.nan]])


def test_finite_losses_of_any_size_pass() -> None:
    assert _train(NonFiniteGuard(every_n_steps=2), FakeRun(), [[3e38, 3e38], [-3e38], [1e-45], [0.0]]) == ""


def test_the_mean_over_no_items_counts_for_nothing() -> None:
    # B-21: a batch with weight zero may have a NaN loss, and so may a joining rank's.
    losses = [[1.0], [math.nan], [1.0], [math.nan]]
    assert _train(NonFiniteGuard(), FakeRun(), losses, weights=[3.0, 0.0, 3.0, 0.0]) == ""
    found = _train(NonFiniteGuard(), FakeRun(), losses, weights=[3.0, 0.0, 3.0, 2.0])
    assert "batch index 3" in found
    assert _train(NonFiniteGuard(), FakeRun(joining=True), losses, weights=[0.0] * 4) == ""


def test_gradients_are_watched_where_asked() -> None:
    losses = [[1.0]] * 6
    assert _train(NonFiniteGuard(), FakeRun(), losses, gradients={3: math.nan}) == ""
    found = _train(NonFiniteGuard(check_gradients=True), FakeRun(), losses, gradients={3: math.inf, 4: math.nan})
    assert found.startswith("A gradient is inf on rank 0 at batch index 3")


def test_parameters_are_watched_where_asked() -> None:
    net = _Net()
    with torch.no_grad():
        net.get_parameter("net.1.bias")[1] = math.nan
    assert _train(NonFiniteGuard(), FakeRun(), [[1.0]], net=net) == ""
    found = _train(NonFiniteGuard(check_parameters=True), FakeRun(), [[1.0]], net=net)
    assert found.startswith("The parameter 'net.1.bias' is not finite on rank 0 at batch index 0")


def test_watching_gradients_under_a_loss_scaler_is_refused() -> None:
    run = FakeRun(precision=resolve_precision("16-mixed", torch.device("cpu")))
    with pytest.raises(ConfigurationError, match="16-mixed"):
        _train(NonFiniteGuard(check_gradients=True), run, [[1.0]])
    assert _train(NonFiniteGuard(), run, [[1.0]]) == ""


def _on_ranks(bad: dict[int, int]) -> str:
    run = distributed_run()
    losses = [[1.0] for _ in range(8)]
    if run.strategy.control.rank in bad:
        losses[bad[run.strategy.control.rank]] = [math.nan]
    return _train(NonFiniteGuard(every_n_steps=4), run, losses)


def test_every_rank_stops_at_once_and_knows_the_rank() -> None:
    # G-05, G-01: no rank hangs
    for results, expected in (
        (on_ranks(_on_ranks, 3, {1: 2}), "rank 1 at batch index 2"),
        (on_ranks(_on_ranks, 3, {0: 6, 2: 5}), "rank 2 at batch index 5"),
        (on_ranks(_on_ranks, 3, {0: 1, 2: 1}), "ranks 0, 2 at batch index 1"),
    ):
        assert len(set(results)) == 1
        assert expected in results[0]
    assert on_ranks(_on_ranks, 2, {}) == ["", ""]


def test_nothing_is_read_off_the_device_between_two_looks() -> None:
    # H-01: the guard's work in a step does not synchronize with the host
    callback, run = NonFiniteGuard(every_n_steps=1000), FakeRun()
    trainer: Any = run
    module: Any = _Net()
    callback.on_train_start(trainer, module)
    with torch.autograd.profiler.profile() as profile:
        for index in range(20):
            callback.on_before_backward(trainer, module, torch.ones(()))
            run.global_step += 1
            callback.on_train_batch_end(trainer, module, {}, None, index)
    names = {event.name for event in profile.function_events}
    assert "aten::add_" in names
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def test_bad_intervals_are_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        NonFiniteGuard(every_n_steps=0)
    assert NonFiniteGuard().state_key != NonFiniteGuard(every_n_steps=2).state_key
