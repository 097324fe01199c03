"""The state of a sharded module after a failure, and later runs with it: A-02, G-01, G-04, G-07, I-15."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Deep, DeepRegression
from phased_training import Phased, by_hand, dealt, state, train
from small_runs import TIGHT, failing, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
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


def _checkpoint(folder: str) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": Checkpoint(dirpath=folder, every_n_train_steps=1)}


def _newest(trainer: Fit) -> str:
    assert trainer.checkpoint_callback is not None
    return trainer.checkpoint_callback.last_model_path


def _refused(module: Any) -> set[str]:
    """Return the errors of each use of the module through `Fit`."""
    texts = set()
    for strategy in ("fsdp", "ddp"):
        for stage in ("fit", "validate", "predict"):
            with failing() as caught:
                getattr(quiet(strategy=strategy), stage)(module, loader(32, 4))
            assert caught["type"] == "ConfigurationError", caught
            texts.add(caught["text"])
    return texts


def _fail(where: str, strategy: str, folder: str) -> Any:
    module = Failing(where)
    drawn = []
    module.net.stem.weight.mine = "the user's"
    module.net.stem.weight.register_hook(lambda gradient: drawn.append(1))
    trainer = quiet(strategy=strategy, max_epochs=1, **_checkpoint(folder))
    with failing() as caught:
        trainer.fit(module, loader(32, 4))
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in module.parameters())
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())
    texts = _refused(module)
    with failing() as saved:
        trainer.save_checkpoint(f"{folder}/after", weights_only=True)
    assert saved["type"] in ("ConfigurationError", "nothing was raised"), saved  # nothing: warned that it is not saved
    module.where = "nowhere"
    newest = _newest(trainer)
    if newest:
        drawn.clear()
        quiet(strategy=strategy, max_epochs=1).fit(module, loader(32, 4), ckpt_path=newest)
        assert drawn
        assert module.net.stem.weight.mine == "the user's"
    else:
        with failing() as nothing:
            quiet(strategy=strategy).fit(module, loader(32, 4), ckpt_path="auto")
        texts.add(nothing["text"])
        module.load_state_dict(DeepRegression().state_dict(), assign=True)
        quiet(strategy=strategy, max_epochs=1).fit(module, loader(32, 4))
    return caught, texts, newest, weights(module), len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.parametrize(("where", "step"), [("step", 1), ("backward", 1), ("hook", 1), ("optimizers", 0)])
def test_a_failed_run_leaves_no_weights_and_names_the_checkpoint(
    where: str, step: int, strategy: str, tmp_path: Any
) -> None:  # I-15, G-07, A-02: in the user's process group, with the same result on every rank
    expected = weights(train_by_hand(DeepRegression(), global_batches(32, 8)))
    for caught, texts, newest, found, groups in on_ranks(_fail, 2, where, strategy, str(tmp_path)):
        assert caught["type"] == "ValueError"
        (text,) = texts
        assert "Failing has no weights" in text
        if step:
            assert newest.endswith(f"step={step}")
            assert f"The newest checkpoint is {newest!r}." in text
            assert f"pass ckpt_path={newest!r}, or call Failing.load_from_checkpoint({newest!r})" in text
        else:
            assert not newest
            assert "No checkpoint was saved." in text
        torch.testing.assert_close(found, expected, **TIGHT)
        assert groups == 1


class BuiltLate(Failing):
    """Builds its layers in `configure_model`."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded(Deep)
        if self.where == "building":
            raise ValueError("while building")

    def setup(self, stage: str) -> None:
        if self.where == "set-up":
            raise ValueError("in setup")


def _late(folder: str) -> Any:
    found = []
    for where in ("set-up", "building", "step"):
        module = BuiltLate(where)
        with failing():
            quiet(strategy="fsdp", max_epochs=1, **_checkpoint(folder)).fit(module, loader(32, 4))
        module.where = "nowhere"
        with failing() as caught:
            quiet(strategy="fsdp", max_epochs=1).fit(module, loader(32, 4))
        found.append((caught["text"], None if caught["text"] else weights(module)))
        if where == "step":
            quiet(strategy="fsdp", max_epochs=1).fit(module, loader(32, 4), ckpt_path=f"{folder}/epoch=0-step=1")
            found.append(("", weights(module)))
    return found


def test_layers_of_configure_model_after_a_failure(tmp_path: Any) -> None:  # I-15
    expected = weights(train_by_hand(DeepRegression(), global_batches(32, 8)))
    for untouched, building, step, resumed in on_ranks(_late, 2, str(tmp_path)):
        assert "No checkpoint was saved." in building[0]
        assert "epoch=0-step=1" in step[0]
        for text, found in (untouched, resumed):
            assert text == ""
            torch.testing.assert_close(found, expected, **TIGHT)


def _above_the_limit(folder: str) -> Any:
    module = DeepRegression()
    trainer = quiet(strategy=FSDPStrategy(gather_limit=0), max_epochs=1, **_checkpoint(folder))
    trainer.fit(module, loader(32, 4))
    assert all(parameter.is_meta for parameter in module.parameters())
    texts = _refused(module)
    with failing() as saved:
        trainer.save_checkpoint(f"{folder}/after", weights_only=True)
    quiet(strategy="fsdp", max_epochs=2).fit(module, loader(32, 4), ckpt_path=_newest(trainer))
    return {*texts, saved["text"]}, weights(module)


def test_above_the_limit_the_weights_are_in_the_checkpoint(tmp_path: Any) -> None:  # I-15
    module = train_by_hand(DeepRegression(), 2 * global_batches(32, 8))
    for (text,), found in on_ranks(_above_the_limit, 2, str(tmp_path)):
        assert f"The newest checkpoint is '{tmp_path}/epoch=0-step=4'." in text
        torch.testing.assert_close(found, weights(module), **TIGHT)


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
    # G-01, G-07: in a group of our own, the other ranks' collective fails
    first, second = on_ranks(_one_rank, 2, process_group=None, timeout=60)
    assert second["type"] == "ValueError"
    assert "only here" in first["text"]


# On four ranks, in groups of two: a failure must also reach the peers of peers

MESHES: dict[str, dict[str, Any]] = {
    "hybrid": {"sharding": "hybrid", "replicate_size": 2, "shard_size": 2, "wrap": []},
    "tensor parallel": {"tensor_parallel": 2, "wrap": []},
}


class OnOneRank(Phased):
    """Raises, or blocks, on rank 1 only: ranks 2 and 3 form a group without it."""

    def __init__(self, where: str, split: bool) -> None:
        super().__init__({}, split=split)
        self.where = where

    def turns_up(self, where: str) -> bool:
        return self.where == where and self.global_rank == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.turns_up("stall"):
            end = time.monotonic() + 20
            while time.monotonic() < end and not self.trainer.strategy.control.all_failures(timedelta(0)):
                time.sleep(0.1)
        if self.turns_up("step") and batch_idx == 1:
            raise ValueError("only here")
        loss = self.loss(batch)
        if self.turns_up("backward") and batch_idx == 1:
            loss.register_hook(self._raise)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.turns_up("hook") and batch_idx == 1:
            raise ValueError("only here")

    def _raise(self, gradient: torch.Tensor) -> None:
        raise ValueError("only here")


def _one_of_four(wheres: list[str], options: dict[str, Any], **more: Any) -> Any:
    caught, split = {}, "tensor_parallel" in options
    for where in wheres:
        begun = time.monotonic()
        with failing() as error:
            train(OnOneRank(where, split), FSDPStrategy(**options, **more), dealt(options))
        caught[where] = error, time.monotonic() - begun
    module = Phased({}, split=split)
    train(module, FSDPStrategy(**options), dealt(options))
    return caught, state(module)


@pytest.mark.parametrize("kind", MESHES)
def test_a_failure_on_one_rank_of_a_mesh_reaches_all(kind: str) -> None:  # G-01, G-07
    """With tensor parallelism the failed rank kept a group, and rank 3, its peer there, waited for it forever."""
    expected = by_hand(Phased({}))
    found = on_ranks(_one_of_four, 4, ["step", "backward", "hook"], MESHES[kind], process_group=None, timeout=60)
    for rank, (caught, after) in enumerate(found):
        for where, (error, seconds) in caught.items():
            assert error["type"] == ("ValueError" if rank == 1 else "RankFailedError"), (where, rank, error)
            assert "only here" in error["text"], (where, rank, error)
            assert seconds < 15, (where, rank)
        torch.testing.assert_close(after, expected, **TIGHT)


@pytest.mark.parametrize("kind", MESHES)
def test_a_mesh_uses_the_timeout_of_its_strategy(kind: str) -> None:  # G-04
    """Previously its groups had half an hour until the first step was made, or ten minutes on NCCL, whatever
    ``timeout`` was.
    """
    found = on_ranks(_stalled, 4, MESHES[kind], process_group=None, timeout=60)
    expected = by_hand(Phased({}))
    stalls = [caught["stall"] for caught, _ in found]
    assert all(error["text"] and seconds < 15 for error, seconds in stalls), stalls
    # A rank that times out names those it waited for; ranks connected to it may only see the lost connection.
    assert any("waited in a collective, and not all of rank(s)" in error["text"] for error, _ in stalls), stalls
    for _, after in found:
        torch.testing.assert_close(after, expected, **TIGHT)


def _stalled(options: dict[str, Any]) -> Any:
    return _one_of_four(["stall"], options, timeout=timedelta(seconds=2))


def test_a_torch_that_lacks_what_fsdp_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # O-06
    monkeypatch.delattr(FSDPParamGroup, "post_backward")
    with pytest.raises(
        ConfigurationError, match=r"(?s)cannot run on torch .* needs 'FSDPParamGroup\.post_backward'.*2\.11"
    ):
        FSDPStrategy()
