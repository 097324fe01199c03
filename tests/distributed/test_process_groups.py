"""A process group of the user or of the run, environment and processes: rows A-02, A-03, A-06, on two ranks."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from small_runs import Regression, failing, global_batches, loader, quiet, train_by_hand, weights

from drivetrain_strategies import DDPStrategy
from worlds import on_ranks


class Raising(Regression):
    """Fails in its third step on every rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def _group() -> tuple[Any, ...]:
    return (
        dist.group.WORLD,
        dist.get_backend(),
        dist.get_world_size(),
        dist.get_rank(),
        tuple(dist.distributed_c10d._world.pg_map),
        dist.distributed_c10d._get_default_store(),
    )


def _works() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def _users_group() -> dict[str, Any]:
    own = dist.new_group([0, 1])
    before = _group()
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        module = Regression()
        quiet(strategy="ddp").fit(module, loader(64, 4))
        found[name] = weights(module)
        assert _group() == before, name
    with failing() as found["raises"]:
        quiet(strategy="ddp").fit(Raising(), loader(64, 4))
    assert _group() == before
    with failing() as found["refused"]:
        quiet(strategy="ddp", devices=3).fit(Regression(), loader(64, 4))
    with failing() as found["alone"]:
        quiet(strategy="ddp", devices=1).fit(Regression(), loader(64, 4))
    with failing() as found["backend"]:
        quiet(strategy=DDPStrategy(process_group_backend="nccl")).fit(Regression(), loader(64, 4))
    assert _group() == before
    module = Regression()
    trainer = quiet()  # "auto" is DDP with several ranks
    trainer.fit(module, loader(64, 4))
    found["after"] = weights(module)
    found["strategy"] = trainer.strategy.name
    found["metrics"] = quiet(strategy="ddp").validate(Raising(), loader(64, 4), verbose=False)
    assert _group() == before
    value = torch.ones(())
    dist.all_reduce(value, group=own)
    found["sums"] = (_works(), value.item())
    return found


def test_a_users_process_group_is_used_and_kept() -> None:  # G-07
    ranks = on_ranks(_users_group, 2)
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for found in ranks:
        for name in ("first", "second", "after"):
            torch.testing.assert_close(found[name], reference)
        assert found["raises"] == {"type": "ValueError", "text": "on purpose"}
        for name in ("refused", "alone", "backend"):
            assert found[name]["type"] == "ConfigurationError", found[name]
        assert "3" in found["refused"]["text"]
        assert "2 processes" in found["refused"]["text"]
        assert "'nccl'" in found["backend"]["text"]
        assert found["strategy"] == "ddp"
        assert found["sums"] == (3.0, 2.0)


class ChangesState(Regression):
    """Changes process-wide state, as library code may do."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.net[1].eval()
        self.fails = fails

    def on_train_start(self) -> None:
        os.environ["SOMETHING_NEW"] = "1"
        torch.set_default_dtype(torch.float64)
        sys.excepthook = print
        random.seed(3)
        torch.rand(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 1:
            raise KeyError("missing")
        return super().training_step(batch, batch_idx)


def _state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "excepthook": sys.excepthook,
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "group": dist.is_initialized(),
    }


def _own_group() -> dict[str, Any]:
    found: dict[str, Any] = {}
    before, random_state, torch_state = _state(), random.getstate(), torch.get_rng_state()
    for name, fails in (("returns", False), ("raises", True), ("again", False)):
        module = ChangesState(fails)
        flags = [child.training for child in module.modules()]
        with failing() as found[name]:
            quiet(strategy="ddp", seed=5, deterministic=True).fit(module, loader(64, 4, shuffle=True))
        after = _state()
        found[name]["changed"] = str({key for key in before if before[key] != after[key]})
        assert [child.training for child in module.modules()] == flags
        # With a seed, the generators are restored too.
        assert random.getstate() == random_state
        assert torch.equal(torch.get_rng_state(), torch_state)
    with failing() as found["three"]:
        quiet(strategy="ddp", devices=3).fit(Regression(), loader(64, 4))
    with failing() as found["single"]:
        quiet(strategy="single_device", devices=2).fit(Regression(), loader(64, 4))
    return found


def test_the_runs_own_process_group_ends_and_all_state_is_restored() -> None:
    for found in on_ranks(_own_group, 2, process_group=None):
        assert found["returns"]["text"] == found["again"]["text"] == ""
        assert found["raises"]["type"] == "KeyError"
        for name in ("returns", "raises", "again"):
            assert found[name]["changed"] == "set()", name
        assert found["three"]["type"] == found["single"]["type"] == "ConfigurationError"
        assert "3" in found["three"]["text"]
        assert "2 processes" in found["three"]["text"]
