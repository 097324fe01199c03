"""DDPStrategy on two ranks: rows C-01 to C-07."""

from __future__ import annotations

import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
import torch
from fsdp_nets import trained_in_plain_torch
from small_runs import FEATURES, TIGHTER, Regression, each, failing, loader, quiet, refusal, seeded, trained, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain.callbacks import LambdaCallback, ReplicaCheck
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy
from drivetrain_strategies.ddp.strategy import SyncBatchNormSwap  # its public form needs a GPU
from oracle.check import check
from oracle.program import Data, Program
from worlds import on_ranks

FIND = "ddp_find_unused_parameters_true"
ALWAYS, BOTH = range(100), (0, 1)


class WithSpare(Regression):
    """Has a layer that the loss leaves out in these micro-batches, counted over the run, on these ranks."""

    def __init__(self, left_out: Sequence[int] = ALWAYS, ranks: tuple[int, ...] = BOTH) -> None:
        super().__init__()
        self.spare = seeded(lambda: nn.Linear(FEATURES, 1))
        self.left_out, self.ranks, self.seen = left_out, ranks, -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = self.loss(batch)
        if self.seen in self.left_out and self.global_rank in self.ranks:
            return loss
        return loss + self.spare(batch[0]).square().mean()


LEFT_OUT: dict[str, tuple[Sequence[int], tuple[int, ...], int, int]] = {
    "every step": (ALWAYS, BOTH, 1, 0),
    "every step, accumulated": (ALWAYS, BOTH, 2, 0),
    "every step, on one rank": (ALWAYS, (1,), 1, 0),
    "every step but the first": (range(1, 100), BOTH, 1, 1),
    "the micro-batch that synchronises": ((5,), BOTH, 2, 2),
    "a step between": ((2,), BOTH, 1, 2),
    "the epoch's last step, on one rank": ((3,), (1,), 1, 3),
    "the run's last step, on one rank": ((7,), (0,), 1, 7),
    "the run's last step": ((7,), BOTH, 1, 7),
}
"""The micro-batches of two epochs of four that leave a layer out; on which ranks; the window; the steps before that."""


def _left_out() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, (left_out, ranks, window, before) in LEFT_OUT.items():
        for static in (False, True) if before > 1 else (False,):
            module, began = WithSpare(left_out, ranks), time.monotonic()
            strategy = DDPStrategy(timeout=timedelta(seconds=20), static_graph=static)
            fit = quiet(strategy=strategy, max_epochs=2, accumulate_grad_batches=window)
            with failing() as error:
                fit.fit(module, loader(32, 4))
            found[static, name] = error, fit.global_step, time.monotonic() - began, weights(module)
    found["found"] = trained(WithSpare(ranks=(1,)), loader(32, 4), strategy=FIND)
    return found


def test_a_step_that_omits_a_parameter_is_refused_before_it_is_made() -> None:  # C-01, C-04
    ranks = on_ranks(_left_out, 2, process_group=None, timeout=120)
    first, second = (found.pop("found") for found in ranks)
    assert torch.equal(first, second)
    assert not torch.allclose(first, trained_in_plain_torch(WithSpare(), 32))
    for static, name in ranks[0]:
        _, on, _, before = LEFT_OUT[name]
        for rank, found in enumerate(ranks):
            error, steps, seconds, left = found[static, name]
            # A rank that used the parameter reports the other's error.
            assert error["type"] == ("ConfigurationError" if rank in on else "RankFailedError"), (static, name, error)
            plain = "Trainable parameters got no gradient: 'spare.weight', 'spare.bias'."
            assert ("The graph of training_step changed under static_graph=True" if static else plain) in error["text"]
            assert steps == before, (static, name)
            assert seconds < 10, (static, name)
            assert torch.equal(left, ranks[0][static, name][3]), (static, name)
            # Only the fixes for this kind of run are suggested.
            assert "find_unused_parameters=True" in error["text"]
            for fix in ("use DDPStrategy(static_graph=True)", "requires_grad_(False)"):
                assert (fix in error["text"]) == (not static), (static, error)


def _changed_graph(left_out: Sequence[int]) -> str:
    strategy = DDPStrategy(static_graph=True)
    return refusal(WithSpare(left_out), loader(64, 4), strategy=strategy, callbacks=ReplicaCheck(1))


def test_static_graph_notices_a_changed_graph() -> None:  # C-02, C-04; tests/parity accumulates
    for text in chain(*on_ranks(each, 2, _changed_graph, (range(1, 100),), ((0,),), process_group=None)):
        assert "static_graph=True" in text
        assert "changed" in text


def _doubled(factor, bucket):  # torch refuses annotations that are strings
    buffer = bucket.buffer()
    work = torch.distributed.all_reduce(buffer, async_op=True).get_future()
    return work.then(lambda future: future.value()[0] * (factor / 4.0))


CHANGED: dict[str, dict[str, Any]] = {
    "find": {"find_unused_parameters": 1},
    "bucket": {"bucket_cap_bytes": 104},
    "buffers": {"broadcast_buffers": 0},
    "view": {"gradient_as_bucket_view": 1},
    "static True": {"static_graph": True},
}
"""What differs from torch's defaults."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "unset": {},
    "find": {"find_unused_parameters": True},
    "bucket": {"bucket_cap_mb": 0.0001},
    "buffers": {"broadcast_buffers": False},
    "view": {"gradient_as_bucket_view": True},
    "static None": {"static_graph": None},
    "static True": {"static_graph": True},
    "own": {"comm_hook": (2.0, _doubled)},
    **{hook: {"comm_hook": hook} for hook in ("fp16", "bf16", "powersgd")},
}


def _settings(ddp: DistributedDataParallel) -> dict[str, Any]:
    return {**ddp._get_ddp_logging_data(), "static_graph": ddp.static_graph}


def _arguments() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": _settings(DistributedDataParallel(Regression().net))}
    for name, options in ARGUMENTS.items():
        report = found[name] = {"ddp": {}}

        def describe(trainer: Any, module: Any, report: Any = report) -> None:
            report["ddp"] = _settings(trainer.strategy.ddp_module)

        module, callback = Regression(), LambdaCallback(on_train_end=describe)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = refusal(module, loader(64, 4), callbacks=callback, strategy=DDPStrategy(**options))
        report |= {"weights": weights(module), "error": error}
    found["typo"] = refusal(Regression(), loader(64, 4), strategy=DDPStrategy(comm_hook="pf16"))
    return found


def test_every_argument_reaches_torch_or_is_refused() -> None:  # C-03, C-07
    with pytest.raises(ConfigurationError, match="find_unused_parameters=True"):
        DDPStrategy(static_graph=True, find_unused_parameters=True)
    ranks = on_ranks(_arguments, 2)
    reference = trained_in_plain_torch(Regression(), 64)
    # torch accepts bf16 if it was built with NCCL, even on gloo.
    with_bf16 = torch.distributed.is_nccl_available()
    rounded = {"fp16": 2e-3, **({"bf16": 2e-2} if with_bf16 else {})}
    for found in ranks:
        for name in ARGUMENTS:
            if name == "bf16" and not with_bf16:
                assert "BF16 all reduce communication hook" in found[name]["error"]
                continue
            assert found[name]["error"].startswith("nothing was raised"), name
            # PowerSGD starts to compress after 1000 steps; until then it is the plain average.
            torch.testing.assert_close(found[name]["weights"], reference, atol=rounded.get(name, 1e-6), rtol=1e-5)
            assert torch.equal(found[name]["weights"], ranks[0][name]["weights"])
            assert name not in rounded or not torch.equal(found[name]["weights"], reference)
            for key in {key for changes in CHANGED.values() for key in changes}:
                assert found[name]["ddp"][key] == CHANGED.get(name, {}).get(key, found["torch"][key]), (name, key)
        assert "fp16_compress_hook" in found["fp16"]["ddp"]["comm_hook"]
        assert "powerSGD_hook" in found["powersgd"]["ddp"]["comm_hook"]
        assert "Did you mean 'fp16'" in found["typo"]


class ModelOutput(OrderedDict[str, Any]):
    """Like Hugging Face's class."""


class Checkpointed(Regression):
    """Calls its layers instead of `forward`, recomputes one in the backward, and has outputs in the given form."""

    def __init__(self, reentrant: bool, times: int = 1, form: type | None = None) -> None:
        super().__init__()
        self.inner = seeded(lambda: nn.Linear(8, 8))
        self.reentrant = reentrant
        self.times = times
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = torch.tanh(self.net[0](x))
        for _ in range(self.times):
            hidden = hidden + torch.tanh(checkpoint(self.inner, hidden, use_reentrant=self.reentrant))
        loss = nn.functional.mse_loss(self.net[2](hidden), y)
        return loss if self.form is None else self.form(loss=loss, hidden=hidden)


CHECKPOINTED = [
    # the strategy, whether it is re-entrant, how often the layer is used, the outputs, and a part of the error
    ("ddp_static_graph", True, 2, ModelOutput, ""),
    ("ddp", True, 1, dict, ""),
    ("ddp", False, 2, ModelOutput, ""),
    (FIND, False, 2, ModelOutput, ""),
    (FIND, True, 1, None, "use_reentrant=False"),
    ("ddp", True, 2, None, "use_reentrant"),
]


def _checkpointed(strategy: str, reentrant: bool, times: int, form: type | None, _: str) -> tuple[str, torch.Tensor]:
    module = Checkpointed(reentrant, times, form)
    error = refusal(module, loader(64, 4), strategy=strategy, callbacks=ReplicaCheck(every_n_steps=1))
    return error, weights(module)


def test_layers_used_twice_or_recomputed_and_outputs_of_every_form() -> None:  # C-03, C-04, C-05
    references = {times: trained_in_plain_torch(Checkpointed(False, times), 64) for times in (1, 2)}
    for found in on_ranks(each, 2, _checkpointed, *CHECKPOINTED, process_group=None):
        for (strategy, _, times, _, part), (error, after) in zip(CHECKPOINTED, found, strict=True):
            if part:
                assert error.startswith(("ConfigurationError", "DistributedError")), (strategy, error)
                assert part in error
            else:
                assert error.startswith("nothing was raised"), (strategy, error)
                torch.testing.assert_close(after, references[times], **TIGHTER)


class Drifting(Regression):
    """Changes a weight on one rank, as code that forgot the other ranks does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 2:
            with torch.no_grad():
                self.net[0].bias[0] += 1e-3


def _refused() -> list[str]:
    mapped, normalised = Regression(), Regression()
    mapped.net.hf_device_map = {"0": "cpu", "2": "disk"}
    normalised.table = nn.Embedding(10, FEATURES, max_norm=1.0)
    modules = (mapped, normalised, Drifting())
    return [refusal(module, loader(64, 4), strategy="ddp", callbacks=ReplicaCheck(1)) for module in modules]


def test_modules_that_ddp_cannot_train_are_refused_by_name() -> None:  # C-04, C-06, B-20; tests/parity has sparse ones
    for mapped, normalised, drifted in on_ranks(_refused, 2, process_group=None):
        assert re.match("ConfigurationError: .*'net' was loaded with a device_map", mapped)
        assert re.match("ConfigurationError: .*'table' is an Embedding with max_norm=1.0(?s:.*)renormaliz", normalised)
        assert re.match("DistributedError: .*after step 4: parameter 'net.0.bias'", drifted)


def test_a_batch_norm_used_twice_is_converted_and_restored() -> None:  # C-05, C-07
    norm = nn.BatchNorm1d(3)
    module: Any = nn.ModuleDict({"first": norm, "second": norm, "other": nn.Sequential(nn.BatchNorm2d(2))})
    before = dict(module.named_modules(remove_duplicate=False))
    parameters = list(module.parameters())
    swap = SyncBatchNormSwap(module)
    assert isinstance(module.first, nn.SyncBatchNorm)
    assert module.second is module.first
    assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
    module.first.running_mean.fill_(3.0)
    module.eval()
    swap.undo()
    assert dict(module.named_modules(remove_duplicate=False)) == before
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [3.0] * 3
    assert not module.first.training


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_a_loss_on_one_process_that_looks_for_unused_parameters(accumulate: int) -> None:
    # C-01: on a single rank a step may return None, in all of a window or in its last micro-batch
    assert not check(Program(FIND, 1, missing_loss="odd", accumulate=accumulate, data=Data(samples=16)))
