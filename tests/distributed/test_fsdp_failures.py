"""The state of a sharded module after a failure, and later runs with it."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Deep, DeepRegression, trained_in_plain_torch
from phased_training import Phased, by_hand, dealt, state, train
from small_runs import TIGHT, failing, loader, quiet, seeded, trained
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


def _raise(*arguments: Any) -> None:
    raise ValueError("on purpose")


class Failing(DeepRegression):
    """Raises in one place, if that is not "nowhere"; its layers may be built in `configure_model`."""

    def __init__(self, where: str, late: bool) -> None:
        super().__init__()
        self.where = where
        self.net: Any = None if late else self.net

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded(Deep)
        self.fail("building")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1:
            self.fail("step")
            if self.where == "backward":
                loss.register_hook(_raise)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.fail("hook")

    def configure_optimizers(self) -> Any:
        self.fail("optimizers")
        return super().configure_optimizers()

    def fail(self, place: str) -> None:
        if place == self.where:
            raise ValueError("on purpose")


def _retry(where: str, late: bool, strategy: str, folder: str) -> Any:
    module = Failing(where, late)
    if not late:
        module.net.stem.weight.mine = "the user's"
    saving = Checkpoint(dirpath=folder, every_n_train_steps=1)
    with failing() as caught:
        quiet(strategy=strategy, enable_checkpointing=True, callbacks=saving).fit(module, loader(32, 4))
    module.where = "nowhere"
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in module.parameters())
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())
    texts = set()
    for stage, other in (("fit", strategy), ("validate", "ddp"), ("predict", "fsdp")):
        with failing() as refused:
            getattr(quiet(strategy=other), stage)(module, loader(32, 4))
        texts.add(f"{refused['type']}: {refused['text']}")
    newest = saving.last_model_path
    if not newest:
        module.load_state_dict(DeepRegression().state_dict(), assign=True)
    found = trained(module, loader(32, 4), None, newest or None, strategy=strategy)
    assert not newest or late or module.net.stem.weight.mine == "the user's"
    return caught["type"], texts, newest, found, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("where", "late", "strategy"),
    [
        ("step", False, "fsdp"),
        ("backward", False, "hsdp"),
        ("optimizers", False, "fsdp"),
        ("building", True, "fsdp"),
        ("hook", True, "fsdp"),
    ],
)
def test_a_failed_run_leaves_no_weights_and_names_the_checkpoint(
    where: str, late: bool, strategy: str, tmp_path: Path
) -> None:
    # I-15, G-07, A-02: in the user's process group, with the same result on every rank
    for error, texts, newest, found, groups in on_ranks(_retry, 2, where, late, strategy, str(tmp_path)):
        assert error == "ValueError"
        (text,) = texts
        assert text.startswith("ConfigurationError: Failing has no weights")
        if where in ("optimizers", "building"):
            assert not newest
            assert "No checkpoint was saved." in text
        else:
            assert newest.endswith("step=1")
            assert f"The newest checkpoint is {newest!r}." in text
            assert f"pass ckpt_path={newest!r}, or call Failing.load_from_checkpoint({newest!r})" in text
        torch.testing.assert_close(found, trained_in_plain_torch(DeepRegression()), **TIGHT)
        assert groups == 1


def _retry_after_setup() -> tuple[str, Tensor]:
    module: Any = DeepRegression()
    with failing() as caught:
        quiet(strategy="fsdp", callbacks=LambdaCallback(setup=_raise)).fit(module, loader(32, 4))
    return caught["type"], trained(module, loader(32, 4), strategy="fsdp")


def test_a_run_that_fails_in_setup_leaves_the_module_as_it_was() -> None:  # I-15
    for error, found in on_ranks(_retry_after_setup, 2):
        assert error == "ValueError"
        torch.testing.assert_close(found, trained_in_plain_torch(DeepRegression()), **TIGHT)


# On four ranks, in groups of two: a failure must also reach the peers of peers.
SPLIT: dict[str, Any] = {"tensor_parallel": 2, "wrap": []}


class OnOneRank(Phased):
    """Raises, or blocks, on rank 1 only: ranks 2 and 3 form a group without it."""

    def __init__(self, where: str) -> None:
        super().__init__({}, split=True)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        end = time.monotonic() + (20 if self.global_rank == 1 and self.where == "stall" else 0)
        while time.monotonic() < end and not self.trainer.strategy.control.all_failures(timedelta(0)):
            time.sleep(0.1)
        loss = self.loss(batch)
        if self.global_rank == 1 and batch_idx == 1:
            if self.where == "backward":
                loss.register_hook(_raise)
            if self.where == "step":
                raise ValueError("on purpose")
        return loss


def _one_of_four(wheres: list[str], **options: Any) -> Any:
    caught = {}
    for where in wheres:
        begun = time.monotonic()
        with failing() as error:
            train(OnOneRank(where), FSDPStrategy(**SPLIT, **options), dealt(SPLIT))
        caught[where] = error, time.monotonic() - begun
    module = Phased({}, split=True)
    train(module, FSDPStrategy(**SPLIT), dealt(SPLIT))
    return caught, state(module)


def test_a_failure_on_one_rank_of_a_mesh_reaches_all() -> None:  # G-01, G-07
    expected = by_hand(Phased({}))
    found = on_ranks(_one_of_four, 4, ["step", "backward"], process_group=None, timeout=60)
    for rank, (caught, after) in enumerate(found):
        for where, (error, seconds) in caught.items():
            assert error["type"] == ("ValueError" if rank == 1 else "RankFailedError"), (where, rank, error)
            assert "on purpose" in error["text"], (where, rank, error)
            assert seconds < 15, (where, rank)
        torch.testing.assert_close(after, expected, **TIGHT)


def test_a_mesh_uses_the_timeout_of_its_strategy() -> None:  # G-04
    stalling = partial(_one_of_four, timeout=timedelta(seconds=2))
    stalls = [caught["stall"] for caught, _ in on_ranks(stalling, 4, ["stall"], process_group=None, timeout=60)]
    assert all(error["text"] and seconds < 15 for error, seconds in stalls), stalls
    # A rank that times out names those it waited for; ranks connected to it may only see the lost connection.
    assert any("waited in a collective, and not all of rank(s)" in error["text"] for error, _ in stalls), stalls


def test_a_torch_that_lacks_what_fsdp_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # O-06
    monkeypatch.delattr(FSDPParamGroup, "post_backward")
    text = r"(?s)cannot run on torch .* needs 'FSDPParamGroup\.post_backward'.*2\.11"
    with pytest.raises(ConfigurationError, match=text):
        FSDPStrategy()
