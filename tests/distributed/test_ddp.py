"""DDPStrategy on two ranks: rows C-01 to C-07."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from small_runs import (
    FEATURES,
    TIGHTER,
    Regression,
    about,
    each,
    failing,
    global_batches,
    loader,
    quiet,
    refusal,
    seeded,
    train_by_hand,
    trained,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain.callbacks import LambdaCallback, ReplicaCheck
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy
from drivetrain_strategies.ddp import strategy as ddp_module
from drivetrain_strategies.ddp._sync_batchnorm import SyncBatchNormSwap  # its public form needs a GPU
from worlds import on_ranks

# C-01: parameters without a gradient


class WithSpare(Regression):
    """Has a layer that the loss uses only if `uses_spare` returns True."""

    def __init__(self, uses: str = "never") -> None:
        super().__init__()
        self.spare = seeded(lambda: nn.Linear(FEATURES, 1))
        self.uses = uses

    def uses_spare(self, batch_idx: int) -> bool:
        return {
            "never": False,
            "at first": batch_idx == 0,
            "later": batch_idx > 0,
            "on rank 0": self.global_rank == 0,
            "but for the last": batch_idx < 3,
        }[self.uses]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss + self.spare(batch[0]).square().mean() if self.uses_spare(batch_idx) else loss


FIND = "ddp_find_unused_parameters_true"


def _unused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, uses, settings in (
        ("plain", "never", {}),
        ("accumulated", "never", {"accumulate_grad_batches": 2}),
        ("at first", "at first", {}),
        # Used in the first micro-batch of the window, but not in the one that synchronises.
        ("at first, accumulated", "at first", {"accumulate_grad_batches": 2}),
        ("but for the last", "but for the last", {}),
        ("on rank 0", "on rank 0", {}),
    ):
        fit = quiet(strategy="ddp", **settings)
        with failing() as found[name]:
            fit.fit(WithSpare(uses), loader(32, 4))
        found[name]["steps"] = str(fit.global_step)
    found["found on one rank"] = trained(WithSpare("on rank 0"), loader(32, 4), strategy=FIND)
    return found


def test_unused_parameters_are_named_on_step_1() -> None:  # C-01; tests/parity trains with unused parameters
    ranks = on_ranks(_unused, 2, process_group=None, timeout=120)
    unused = "2 trainable parameter(s) got no gradient: 'spare.weight', 'spare.bias'."
    for found in ranks:
        for name in ("plain", "accumulated", "at first", "at first, accumulated", "but for the last"):
            assert found[name]["type"] == "ConfigurationError", found[name]
            assert unused in found[name]["text"]
        for name in ("plain", "accumulated"):
            for cure in ("static_graph=True", "find_unused_parameters=True", "requires_grad_(False)"):
                assert cure in found[name]["text"]
            assert found[name]["steps"] == "0"
        assert "'spare.weight', 'spare.bias'" in found["on rank 0"]["text"]
    # A parameter that is unused on one rank: that rank names it, and the other one reports that rank's error.
    assert [found["on rank 0"]["type"] for found in ranks] == ["RankFailedError", "ConfigurationError"]
    first, second = (found["found on one rank"] for found in ranks)
    assert torch.equal(first, second)
    assert not torch.allclose(first, weights(train_by_hand(WithSpare(), global_batches(32, 8))))


def _changed_graph(uses: str) -> str:
    strategy = DDPStrategy(static_graph=True)
    return refusal(WithSpare(uses), loader(64, 4), strategy=strategy, callbacks=ReplicaCheck(1))


def test_static_graph_notices_a_changed_graph() -> None:  # C-02, C-04; tests/parity accumulates
    for text in chain(*on_ranks(each, 2, _changed_graph, ("at first",), ("later",), process_group=None)):
        assert "static_graph=True" in text
        assert "changed" in text


class _RecordingDDP(DistributedDataParallel):
    given: dict[str, Any]

    def __init__(self, module: nn.Module, **options: Any) -> None:
        type(self).given = options
        super().__init__(module, **options)


def _doubled(factor, bucket):  # torch refuses annotations that are strings
    buffer = bucket.buffer()
    work = torch.distributed.all_reduce(buffer, async_op=True).get_future()
    return work.then(lambda future: future.value()[0] * (factor / 4.0))


PLAIN: dict[str, Any] = {"find_unused_parameters": False, "gradient_as_bucket_view": False}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unset": ({}, PLAIN),
    "static None": ({"static_graph": None}, PLAIN),
    "static True": ({"static_graph": True}, PLAIN),
    "find": ({"find_unused_parameters": True}, {**PLAIN, "find_unused_parameters": True}),
    "bucket": ({"bucket_cap_mb": 0.0001}, {**PLAIN, "bucket_cap_mb": 0.0001}),
    "buffers": ({"broadcast_buffers": False}, {**PLAIN, "broadcast_buffers": False}),
    "view": ({"gradient_as_bucket_view": True}, {**PLAIN, "gradient_as_bucket_view": True}),
    "own": ({"comm_hook": (2.0, _doubled)}, PLAIN),
    "fp16": ({"comm_hook": "fp16"}, PLAIN),
    "bf16": ({"comm_hook": "bf16"}, PLAIN),
    "powersgd": ({"comm_hook": "powersgd"}, PLAIN),
}
"""By name, what the strategy is given, and what DDP gets."""


def _arguments() -> dict[str, Any]:
    ddp_module.DistributedDataParallel = _RecordingDDP  # type: ignore[assignment, attr-defined]
    found: dict[str, Any] = {}
    for name, (options, _) in ARGUMENTS.items():
        description: dict[str, Any] = {}

        def describe(trainer: Any, module: Any, description: Any = description) -> None:
            ddp = trainer.strategy.ddp_module
            description.update(ddp._get_ddp_logging_data(), static_graph=ddp.static_graph)

        module = Regression()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings: dict[str, Any] = {"strategy": DDPStrategy(**options), "precision": "32-true"}
            error = refusal(module, loader(64, 4), callbacks=LambdaCallback(on_train_end=describe), **settings)
        found[name] = {"given": _RecordingDDP.given, "ddp": description, "weights": weights(module), "error": error}
    wrong: dict[str, dict[str, Any]] = {"typo": {"comm_hook": "pf16"}, "sync_batchnorm": {"sync_batchnorm": True}}
    for name, options in wrong.items():
        found[name] = refusal(Regression(), loader(64, 4), strategy=DDPStrategy(**options))
    return found


def test_every_argument_reaches_torch() -> None:  # C-03, C-07
    ranks = on_ranks(_arguments, 2, process_group=None)
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    # torch accepts bf16 if it was built with NCCL, even on gloo.
    with_bf16 = torch.distributed.is_nccl_available()
    rounded = {"fp16": 2e-3, **({"bf16": 2e-2} if with_bf16 else {})}
    for found in ranks:
        for name, (_, given) in ARGUMENTS.items():
            assert found[name]["given"] == given, name
            if name == "bf16" and not with_bf16:
                assert "ConfigurationError" in found[name]["error"]
                assert "comm_hook='bf16' on the backend 'gloo'" in found[name]["error"]
                continue
            assert found[name]["error"].startswith("nothing was raised"), name
            # PowerSGD starts to compress after 1000 steps; until then it is the plain average.
            torch.testing.assert_close(found[name]["weights"], reference, atol=rounded.get(name, 1e-6), rtol=1e-5)
            assert torch.equal(found[name]["weights"], ranks[0][name]["weights"])
            assert found[name]["ddp"]["static_graph"] is (name == "static True")
        for name in rounded:
            assert not torch.equal(found[name]["weights"], reference)
        assert found["bucket"]["ddp"]["bucket_cap_bytes"] == 104
        assert "fp16_compress_hook" in found["fp16"]["ddp"]["comm_hook"]
        assert "powerSGD_hook" in found["powersgd"]["ddp"]["comm_hook"]
        assert "Did you mean 'fp16'" in found["typo"]
        assert "GroupNorm" in found["sync_batchnorm"]


def test_contradicting_arguments_are_refused_at_once() -> None:  # C-03
    with pytest.raises(ConfigurationError, match="find_unused_parameters=True"):
        DDPStrategy(static_graph=True, find_unused_parameters=True)


class Checkpointed(Regression):
    """Recomputes its inner layer in the backward."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.inner = seeded(lambda: nn.Linear(8, 8))
        self.reentrant = reentrant
        self.times = times

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = torch.tanh(self.net[0](x))
        for _ in range(self.times):
            hidden = hidden + torch.tanh(checkpoint(self.inner, hidden, use_reentrant=self.reentrant))
        return nn.functional.mse_loss(self.net[2](hidden), y)


CHECKPOINTED = [
    # the strategy, whether it is re-entrant, how often the layer is used, and a part of the error
    ("ddp_static_graph", True, 2, ""),
    ("ddp", True, 1, ""),
    (FIND, False, 2, ""),
    (FIND, True, 1, "use_reentrant=False"),
    ("ddp", True, 2, "use_reentrant"),
]


def _checkpointed() -> list[Any]:
    found = []
    for strategy, reentrant, times, _ in CHECKPOINTED:
        module = Checkpointed(reentrant, times)
        error = refusal(module, loader(64, 4), strategy=strategy, callbacks=ReplicaCheck(every_n_steps=1))
        found.append((error, weights(module)))
    return found


def test_reentrant_checkpointing() -> None:  # C-03, C-04
    references = {times: weights(train_by_hand(Checkpointed(False, times), global_batches(64, 8))) for times in (1, 2)}
    for found in on_ranks(_checkpointed, 2, process_group=None):
        for (strategy, _, times, part), (error, after) in zip(CHECKPOINTED, found, strict=True):
            if part:
                assert error.startswith(("ConfigurationError", "DistributedError")), (strategy, error)
                assert part in error
            else:
                assert error.startswith("nothing was raised"), (strategy, error)
                torch.testing.assert_close(after, references[times], **TIGHTER)


@dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor


class ModelOutput(OrderedDict[str, Any]):
    """Like Hugging Face's class: a dict whose keys are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Forms(Regression):
    """Uses a layer twice, calls submodules instead of `forward`, and returns outputs in the given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.shared = seeded(lambda: nn.Linear(8, 8))
        self.form = form

    def model(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(torch.tanh(self.net[0](x))))))
        loss = nn.functional.mse_loss(self.net[2](hidden), y)
        if self.form == "dataclass":
            return Output(loss, hidden)
        return ModelOutput(loss=loss, hidden=hidden, nothing=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(*batch)
        return output if self.form in ("dict", "whole ModelOutput") else output.loss


def _forms() -> dict[str, Any]:
    found = {form: trained(Forms(form), loader(48, 4), strategy="ddp") for form in FORMS}
    for strategy in ("ddp_static_graph", FIND):
        found[strategy] = trained(Forms("whole ModelOutput"), loader(48, 4), strategy=strategy)
    return found


FORMS = ("dataclass", "ModelOutput", "dict", "whole ModelOutput")


def test_every_way_to_call_the_module_synchronises() -> None:  # C-05
    reference = weights(train_by_hand(Forms("dataclass"), global_batches(48, 8)))
    for found in on_ranks(_forms, 2, process_group=None):
        for name, actual in found.items():
            torch.testing.assert_close(actual, reference, msg=about(name), **TIGHTER)


class Embedded(Regression):
    """Looks up rows of a table."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = seeded(lambda: nn.Embedding(10, FEATURES, **options))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        index = (x[:, 0].abs() * 7).long() % 10
        return nn.functional.mse_loss(self.net(x + self.table(index)), y)


class Drifting(Regression):
    """Changes a weight on one rank, as code that forgot the other ranks does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 2:
            with torch.no_grad():
                self.net[0].bias[0] += 1e-3


def _refused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    mapped = Regression()
    mapped.net.hf_device_map = {"0": "cpu", "2": "disk"}
    checked: dict[str, Any] = {"strategy": "ddp", "callbacks": ReplicaCheck(1)}
    found["device_map"] = refusal(mapped, loader(64, 4), strategy="ddp")
    found["max_norm"] = refusal(Embedded(max_norm=1.0), loader(64, 4), strategy="ddp")
    found["drift"] = refusal(Drifting(), loader(64, 4), **checked)
    found["sparse"] = trained(Embedded(sparse=True), loader(68, 4), accumulate_grad_batches=3, **checked)
    return found


def test_modules_that_ddp_cannot_train_are_refused_by_name() -> None:  # C-04, C-06, B-20
    reference = weights(train_by_hand(Embedded(), global_batches(68, 8), window=3))
    for found in on_ranks(_refused, 2, process_group=None):
        assert found["device_map"].startswith("ConfigurationError: ")
        assert "'net' was loaded with a device_map" in found["device_map"]
        assert found["max_norm"].startswith("ConfigurationError: ")
        assert "'table' is an Embedding with max_norm=1.0" in found["max_norm"]
        assert "renormaliz" in found["max_norm"]
        assert found["drift"].startswith("DistributedError: ")
        assert "after step 4: parameter 'net.0.bias'" in found["drift"]
        torch.testing.assert_close(found["sparse"], reference, **TIGHTER)


def test_a_batch_norm_used_twice_is_converted_and_restored() -> None:  # C-05, C-07
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(3)
            self.second = self.first
            self.other = nn.Sequential(nn.BatchNorm2d(2))

    module = Twice()
    before = dict(module.named_modules(remove_duplicate=False))
    parameters = list(module.parameters())
    swap = SyncBatchNormSwap(module)
    assert isinstance(module.first, nn.SyncBatchNorm)
    assert isinstance(module.second, nn.SyncBatchNorm)
    assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
    module.first.running_mean.fill_(3.0)  # type: ignore[union-attr]
    module.eval()
    swap.undo()
    assert dict(module.named_modules(remove_duplicate=False)) == before
    assert module.second.running_mean is not None
    assert module.second.running_mean.tolist() == [3.0] * 3
    assert not module.first.training


class NoneNow(Regression):
    """A step without a loss in the micro-batches for which `none_at` returns True."""

    none_at: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.none_at else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("none_at", [(1,), (0, 1), (3,)])
def test_a_step_without_a_loss_on_one_process_that_looks_for_unused_parameters(none_at: tuple[int, ...]) -> None:
    # C-01: on a single rank a step may return None.
    found = []
    for strategy in (DDPStrategy(find_unused_parameters=True), "single_device"):
        module = NoneNow()
        module.none_at = none_at
        found.append(trained(module, loader(16, 4), strategy=strategy, devices=1, accumulate_grad_batches=2))
    assert torch.equal(*found)
