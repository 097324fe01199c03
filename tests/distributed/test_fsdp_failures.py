"""What a failure leaves of a sharded module, and what comes after it: A-02, G-01, G-07."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import DeepRegression
from small_runs import TIGHT, failing, global_batches, loader, quiet, train_by_hand, weights
from torch.distributed.fsdp import FSDPModule

from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


class Failing(DeepRegression):
    """Raises in one place, once."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1:
            if self.where == "step":
                raise ValueError("in the step")
            if self.where == "backward":
                loss.register_hook(self._raise)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.where == "hook":
            raise ValueError("in a hook")

    def configure_optimizers(self) -> Any:
        if self.where == "optimizers":
            raise ValueError("in configure_optimizers")
        return super().configure_optimizers()

    def _raise(self, gradient: torch.Tensor) -> None:
        raise ValueError("in backward")


def _again(where: str, strategy: str) -> Any:
    module = Failing(where)
    before = dict(module.named_parameters())
    with failing() as caught:
        quiet(strategy=strategy, max_epochs=1).fit(module, loader(32, 4))
    assert all(value is before[name] for name, value in module.named_parameters())
    assert all(bool(parameter.isnan().all()) for parameter in module.parameters())
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())
    with failing() as refused:
        quiet(strategy="ddp").fit(module, loader(32, 4))
    module.where = "nowhere"
    quiet(strategy=strategy, max_epochs=1).fit(module, loader(32, 4))
    return caught, refused, weights(module), len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.parametrize(("where", "steps"), [("step", 1), ("backward", 1), ("hook", 2), ("optimizers", 0)])
def test_another_run_goes_on_from_the_shards(where: str, steps: int, strategy: str) -> None:
    # G-07, A-02: in a process group of the user's, alike on every rank
    module = train_by_hand(DeepRegression(), global_batches(32, 8)[:steps])
    train_by_hand(module, global_batches(32, 8))
    for caught, refused, found, groups in on_ranks(_again, 2, where, strategy):
        assert caught["type"] == "ValueError"
        assert refused["type"] == "ConfigurationError"
        assert "left as shards over" in refused["text"]
        torch.testing.assert_close(found, weights(module), **TIGHT)
        assert groups == 1


def _loaded() -> Any:
    module = Failing("hook")
    with failing():
        quiet(strategy="fsdp").fit(module, loader(32, 4))
    module.where = "nowhere"
    module.load_state_dict(DeepRegression().state_dict())
    quiet(strategy="ddp").fit(module, loader(32, 4))
    return weights(module)


def test_weights_that_are_loaded_take_the_shards_place() -> None:
    expected = weights(train_by_hand(DeepRegression(), global_batches(32, 8)))
    torch.testing.assert_close(on_ranks(_loaded, 2)[0], expected, **TIGHT)


def _above_the_limit() -> Any:
    module = DeepRegression()
    quiet(strategy=FSDPStrategy(gather_limit=0), max_epochs=1).fit(module, loader(32, 4))
    assert all(bool(parameter.isnan().all()) for parameter in module.parameters())
    assert sum(parameter.untyped_storage().nbytes() for parameter in module.parameters()) < 200
    quiet(strategy="fsdp", max_epochs=1).fit(module, loader(32, 4))
    return weights(module)


def test_above_the_limit_the_module_stays_sharded() -> None:
    module = DeepRegression()
    for _ in range(2):
        train_by_hand(module, global_batches(32, 8))
    torch.testing.assert_close(on_ranks(_above_the_limit, 2)[0], weights(module), **TIGHT)


def _one_rank() -> Any:
    class OnOne(DeepRegression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.global_rank == 1:
                raise ValueError("only here")
            return self.loss(batch)

    with failing() as caught:
        quiet(strategy="fsdp").fit(OnOne(), loader(32, 4))
    quiet(strategy="fsdp").fit(DeepRegression(), loader(32, 4))
    return caught


def test_a_failure_on_one_rank_reaches_all(tmp_path: Any) -> None:
    # G-01, G-07: in a group of our own, the others fall out of their collective
    first, second = on_ranks(_one_rank, 2, process_group=None, timeout=60)
    assert second["type"] == "ValueError"
    assert "only here" in first["text"]


def test_a_torch_that_lacks_what_fsdp_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.11 does, the oldest that the package admits."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ConfigurationError, match=r"(?s)cannot run on torch .*Fix: install torch 2\.13"):
        FSDPStrategy()
