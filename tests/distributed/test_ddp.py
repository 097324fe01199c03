"""DDPStrategy on two ranks: rows C-01 to C-07."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    FEATURES,
    Regression,
    Saver,
    about,
    failing,
    global_batches,
    loader,
    quiet,
    seeded,
    train_by_hand,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain import Callback
from drivetrain.callbacks import ReplicaCheck
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy
from drivetrain_strategies.ddp import strategy as ddp_module
from drivetrain_strategies.ddp._sync_batchnorm import SyncBatchNormSwap
from worlds import on_ranks

TIGHT: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}


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


def _unused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}}.items():
        fit = quiet(strategy="ddp", **settings)
        with failing() as found[name]:
            fit.fit(WithSpare(), loader(32, 4))
        found[name]["steps"] = str(fit.global_step)
    for uses in ("at first", "on rank 0", "but for the last"):
        with failing() as found[uses]:
            quiet(strategy="ddp").fit(WithSpare(uses), loader(32, 4))
    # Used in the first micro-batch of the window, but not in the one that synchronises.
    with failing() as found["at first, accumulated"]:
        quiet(strategy="ddp", accumulate_grad_batches=2).fit(WithSpare("at first"), loader(32, 4))
    for name, strategy in {
        "static": DDPStrategy(static_graph=True),
        "find": DDPStrategy(find_unused_parameters=True),
        "alias": "ddp_find_unused_parameters_true",
        "static alias": "ddp_static_graph",
    }.items():
        module = WithSpare()
        quiet(strategy=strategy).fit(module, loader(32, 4))
        found[name] = weights(module)
    module = WithSpare()
    module.spare.requires_grad_(False)
    quiet(strategy="ddp").fit(module, loader(32, 4))
    found["frozen"] = weights(module)
    module = WithSpare("on rank 0")
    quiet(strategy=DDPStrategy(find_unused_parameters=True)).fit(module, loader(32, 4))
    found["found on one rank"] = weights(module)
    return found


def test_unused_parameters_are_named_on_step_1() -> None:  # C-01
    ranks = on_ranks(_unused, 2, process_group=None, timeout=120)
    reference = weights(train_by_hand(WithSpare(), global_batches(32, 8)))
    for found in ranks:
        for name in ("plain", "accumulated"):
            assert found[name]["type"] == "ConfigurationError", found[name]
            text = found[name]["text"]
            assert "2 trainable parameter(s) got no gradient: 'spare.weight', 'spare.bias'." in text
            for cure in ("static_graph=True", "find_unused_parameters=True", "requires_grad_(False)"):
                assert cure in text
            assert found[name]["steps"] == "0"
        for name in ("at first", "at first, accumulated", "but for the last"):
            assert found[name]["type"] == "ConfigurationError", found[name]
            assert "2 trainable parameter(s) got no gradient: 'spare.weight', 'spare.bias'." in found[name]["text"]
        for name in ("static", "find", "alias", "static alias", "frozen"):
            torch.testing.assert_close(found[name], reference, **TIGHT)
    # A parameter that is unused on one rank: that rank names it, and the other one reports that rank's error.
    assert ranks[1]["on rank 0"]["type"] == "ConfigurationError"
    assert ranks[0]["on rank 0"]["type"] == "RankFailedError"
    for found in ranks:
        assert "'spare.weight', 'spare.bias'" in found["on rank 0"]["text"]
    torch.testing.assert_close(ranks[0]["found on one rank"], ranks[1]["found on one rank"], rtol=0, atol=0)
    assert not torch.allclose(ranks[0]["found on one rank"], reference)


# C-02, C-04: static graphs


class Recorder(Callback):
    """Records the optimizer steps by the micro-batch that they followed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.steps.append(trainer.micro_batches + 1)


def _static() -> dict[str, Any]:
    found: dict[str, Any] = {}
    views: dict[str, dict[str, Any]] = {"static": {}, "view": {"gradient_as_bucket_view": True}}
    for name, options in views.items():
        module, recorder = WithSpare(), Recorder()
        strategy = DDPStrategy(static_graph=True, **options)
        quiet(strategy=strategy, accumulate_grad_batches=4, callbacks=recorder).fit(module, loader(80, 4))
        found[name] = (weights(module), recorder.steps)
    for uses in ("at first", "later"):
        with failing() as found[f"changed: {uses}"]:
            quiet(strategy=DDPStrategy(static_graph=True), callbacks=ReplicaCheck(1)).fit(
                WithSpare(uses), loader(64, 4)
            )
    return found


def test_static_graph_accumulates_from_the_first_step_and_notices_a_changed_graph() -> None:  # C-02, C-04, B-02
    ranks = on_ranks(_static, 2, process_group=None)
    reference = weights(train_by_hand(WithSpare(), global_batches(80, 8), window=4))
    for found in ranks:
        for name in ("static", "view"):
            torch.testing.assert_close(found[name][0], reference, **TIGHT)
            assert found[name][1] == [4, 8, 10]
        for uses in ("at first", "later"):
            error = found[f"changed: {uses}"]
            assert "static_graph=True" in error["text"], (uses, error)
            assert "changed" in error["text"], (uses, error)


class CountsForwards(Regression):
    """The forward counts itself in a buffer, differently on each rank, and the loss depends on the count."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("count", torch.zeros(()))

    def loss(self, batch: Any) -> torch.Tensor:
        self.count += 1 + self.global_rank
        return super().loss((self.norm(batch[0]) * (1 + self.count / 10), batch[1]))


def _windows_of_a_static_graph(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy, start in (
        ("plain", "ddp", None),
        ("static", "ddp_static_graph", None),
        ("resumed", "ddp_static_graph", folder / "static"),
    ):
        module = CountsForwards()
        fit = quiet(
            strategy=strategy, accumulate_grad_batches=3, max_epochs=2, seed=1, callbacks=Saver(str(folder / name))
        )
        fit.fit(module, loader(56, 4), ckpt_path=start)
        found[name] = module.state_dict()
    return found


def test_the_first_window_of_a_static_graph_synchronises_once(tmp_path: Path) -> None:  # C-02, F-02
    # It was reduced, and buffers were broadcast, after every micro-batch; in a resumed run once more.
    for found in on_ranks(_windows_of_a_static_graph, 2, tmp_path, process_group=None):
        for name in ("static", "resumed"):
            for key, value in found["plain"].items():
                assert torch.equal(found[name][key], value), (name, key)


# C-03, C-07: what reaches DistributedDataParallel


class _RecordingDDP(DistributedDataParallel):
    given: dict[str, Any]

    def __init__(self, module: nn.Module, **options: Any) -> None:
        type(self).given = options
        super().__init__(module, **options)


class _Description(Callback):
    """Reads DDP's own description after the last step."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        ddp = trainer.strategy.ddp_module
        self.data = {**ddp._get_ddp_logging_data(), "static_graph": ddp.static_graph}


def _arguments() -> dict[str, Any]:
    ddp_module.DistributedDataParallel = _RecordingDDP  # type: ignore[assignment, attr-defined]
    found: dict[str, Any] = {}
    knobs: dict[str, dict[str, Any]] = {
        "unset": {},
        "static None": {"static_graph": None},
        "static True": {"static_graph": True},
        "find": {"find_unused_parameters": True},
        "bucket": {"bucket_cap_mb": 0.0001},
        "buffers": {"broadcast_buffers": False},
        "view": {"gradient_as_bucket_view": True},
        "fp16": {"comm_hook": "fp16"},
        "bf16": {"comm_hook": "bf16"},
        "powersgd": {"comm_hook": "powersgd"},
        "own": {"comm_hook": (2.0, _doubled)},
    }
    for name, options in knobs.items():
        look, module = _Description(), Regression()
        with failing() as error, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet(strategy=DDPStrategy(**options), callbacks=look, precision="32-true").fit(module, loader(64, 4))
        found[name] = {"given": _RecordingDDP.given, "ddp": look.data, "weights": weights(module), "error": error}
    with failing() as found["typo"]:
        quiet(strategy=DDPStrategy(comm_hook="pf16")).fit(Regression(), loader(64, 4))
    found["sync_batchnorm"] = {}
    with failing() as found["sync_batchnorm"]:
        quiet(strategy=DDPStrategy(sync_batchnorm=True)).fit(Regression(), loader(64, 4))
    return found


def _doubled(factor, bucket):  # torch refuses annotations that are strings
    buffer = bucket.buffer()
    work = torch.distributed.all_reduce(buffer, async_op=True).get_future()
    return work.then(lambda future: future.value()[0] * (factor / 4.0))


def test_every_argument_reaches_torch() -> None:  # C-03, C-07
    ranks = on_ranks(_arguments, 2, process_group=None)
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for found in ranks:
        plain = {"find_unused_parameters": False, "gradient_as_bucket_view": False}
        assert found["unset"]["given"] == found["static None"]["given"] == plain
        assert found["find"]["given"] == {**plain, "find_unused_parameters": True}
        assert found["bucket"]["given"] == {**plain, "bucket_cap_mb": 0.0001}
        assert found["buffers"]["given"] == {**plain, "broadcast_buffers": False}
        assert found["view"]["given"] == {**plain, "gradient_as_bucket_view": True}
        for name in ("unset", "static None", "static True", "find", "bucket", "buffers", "view", "own"):
            # DDP is configured at the first forward whose backward synchronises.
            assert found[name]["ddp"]["static_graph"] is (name == "static True")
            assert found[name]["error"]["text"] == "", name
            torch.testing.assert_close(found[name]["weights"], reference, **TIGHT)
        assert found["bucket"]["ddp"]["bucket_cap_bytes"] == 104
        assert "fp16_compress_hook" in found["fp16"]["ddp"]["comm_hook"]
        assert "powerSGD_hook" in found["powersgd"]["ddp"]["comm_hook"]
        torch.testing.assert_close(found["fp16"]["weights"], reference, atol=2e-3, rtol=0)
        assert not torch.equal(found["fp16"]["weights"], reference)
        # PowerSGD starts to compress after 1000 steps; until then it is the plain average.
        torch.testing.assert_close(found["powersgd"]["weights"], reference, **TIGHT)
        assert "Did you mean 'fp16'" in found["typo"]["text"]
        assert "GroupNorm" in found["sync_batchnorm"]["text"]
        # torch accepts bf16 if it was built with NCCL, even on gloo.
        if torch.distributed.is_nccl_available():
            torch.testing.assert_close(found["bf16"]["weights"], reference, atol=2e-2, rtol=0)
            assert not torch.equal(found["bf16"]["weights"], reference)
        else:
            assert found["bf16"]["error"]["type"] == "ConfigurationError"
            assert "comm_hook='bf16' on the backend 'gloo'" in found["bf16"]["error"]["text"]
    for name in ("fp16", "powersgd"):
        assert torch.equal(ranks[0][name]["weights"], ranks[1][name]["weights"])


def _powersgd_at_once() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    module = Regression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet(
            strategy=DDPStrategy(comm_hook=(state, powerSGD_hook.powerSGD_hook)),
            callbacks=ReplicaCheck(every_n_steps=1),
            max_epochs=5,
        ).fit(module, loader(64, 4))
    batches = global_batches(64, 8)
    with torch.no_grad():
        return weights(module), float(sum(module.loss(batch) for batch in batches)) / len(batches)


def test_powersgd_compresses_and_still_trains() -> None:  # C-07
    before = sum(Regression().loss(batch).item() for batch in global_batches(64, 8)) / 8
    exact = weights(train_by_hand(Regression(), global_batches(64, 8) * 5))
    (first, loss), (second, _) = on_ranks(_powersgd_at_once, 2, process_group=None)
    assert torch.equal(first, second)
    assert not torch.allclose(first, exact, atol=1e-6)
    assert loss < before


def test_contradicting_arguments_are_refused_at_once() -> None:  # C-03
    with pytest.raises(ConfigurationError, match="find_unused_parameters=True"):
        DDPStrategy(static_graph=True, find_unused_parameters=True)


# C-03: re-entrant checkpointing


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


def _checkpointed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy, reentrant, times in (
        ("static, re-entrant", DDPStrategy(static_graph=True), True, 1),
        ("static, re-entrant twice", DDPStrategy(static_graph=True), True, 2),
        ("plain, re-entrant once", DDPStrategy(), True, 1),
        ("plain, not re-entrant twice", DDPStrategy(), False, 2),
        ("find, not re-entrant twice", DDPStrategy(find_unused_parameters=True), False, 2),
        ("find, re-entrant", DDPStrategy(find_unused_parameters=True), True, 1),
        ("plain, re-entrant twice", DDPStrategy(), True, 2),
    ):
        module = Checkpointed(reentrant, times)
        with failing() as error:
            quiet(strategy=strategy, callbacks=ReplicaCheck(every_n_steps=1)).fit(module, loader(64, 4))
        found[name] = (error, weights(module))
    return found


def test_reentrant_checkpointing() -> None:  # C-03, C-04
    ranks = on_ranks(_checkpointed, 2, process_group=None)
    references = {times: weights(train_by_hand(Checkpointed(False, times), global_batches(64, 8))) for times in (1, 2)}
    for found in ranks:
        for name in (
            "static, re-entrant",
            "static, re-entrant twice",
            "plain, re-entrant once",
            "plain, not re-entrant twice",
            "find, not re-entrant twice",
        ):
            error, trained = found[name]
            assert error["text"] == "", (name, error)
            torch.testing.assert_close(trained, references[2 if "twice" in name else 1], **TIGHT)
        error, _ = found["find, re-entrant"]
        assert error["type"] == "ConfigurationError", error
        assert "use_reentrant=False" in error["text"]
        error, _ = found["plain, re-entrant twice"]
        assert error["type"] in ("DistributedError", "ConfigurationError"), error
        assert "use_reentrant" in error["text"]


# C-05: ways to call the module


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
    found = {}
    for form in ("dataclass", "ModelOutput", "dict", "whole ModelOutput"):
        for name, strategy in (("plain", "ddp"), ("static", "ddp_static_graph"), ("find", FIND)):
            module = Forms(form)
            quiet(strategy=strategy).fit(module, loader(48, 4))
            found[f"{form}, {name}"] = weights(module)
    return found


FIND = "ddp_find_unused_parameters_true"


def test_every_way_to_call_the_module_synchronises() -> None:  # C-05
    ranks = on_ranks(_forms, 2, process_group=None)
    reference = weights(
        # the hand-written loop gives the correct result without DDP
        train_by_hand(Forms("dataclass"), global_batches(48, 8))
    )
    for found in ranks:
        for name, trained in found.items():
            torch.testing.assert_close(trained, reference, msg=about(name), **TIGHT)


# C-06, B-20: refused before it is wrapped


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
    with failing() as found["device_map"]:
        quiet(strategy="ddp").fit(mapped, loader(64, 4))
    found["unwrapped"] = quiet(strategy="ddp").strategy.module is None
    with failing() as found["max_norm"]:
        quiet(strategy="ddp").fit(Embedded(max_norm=1.0), loader(64, 4))
    module = Embedded(sparse=True)
    quiet(strategy="ddp", callbacks=ReplicaCheck(1), accumulate_grad_batches=3).fit(module, loader(68, 4))
    found["sparse"] = weights(module)
    with failing() as found["drift"]:
        quiet(strategy="ddp", callbacks=ReplicaCheck(1)).fit(Drifting(), loader(64, 4))
    return found


def test_modules_that_ddp_cannot_train_are_refused_by_name() -> None:  # C-04, C-06, B-20
    ranks = on_ranks(_refused, 2, process_group=None)
    reference = weights(train_by_hand(Embedded(), global_batches(68, 8), window=3))
    for found in ranks:
        assert found["device_map"]["type"] == found["max_norm"]["type"] == "ConfigurationError"
        assert "'net' was loaded with a device_map" in found["device_map"]["text"]
        assert "'table' is an Embedding with max_norm=1.0" in found["max_norm"]["text"]
        assert "renormaliz" in found["max_norm"]["text"]
        torch.testing.assert_close(found["sparse"], reference, **TIGHT)
        assert found["drift"]["type"] == "DistributedError"
        assert "after step 4: parameter 'net.0.bias'" in found["drift"]["text"]


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


def test_a_timeout_is_accepted() -> None:
    assert DDPStrategy(timeout=timedelta(seconds=5))._group.timeout == timedelta(seconds=5)


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
        run = quiet(strategy=strategy, devices=1, accumulate_grad_batches=2)
        run.fit(module, loader(16, 4))
        found.append(weights(module))
    assert torch.equal(*found)
