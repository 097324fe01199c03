"""FSDPStrategy on ranks: equal results, units, optimizers, unused parameters, refusals; a module after a failure."""

from __future__ import annotations

import copy
import logging
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, Deep, DeepRegression, Experts, Tied, TwiceDeep, one_expert_per_rank, trained_in_plain_torch
from phased_training import Phased, by_hand, data_ranks, state, train
from small_runs import TIGHT, Regression, failing, loader, quiet, refusal, seeded, train_by_hand, trained, weights
from small_runs import trained as trained_with
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from captured_warnings import captured_warnings
from drivetrain import TrainModule
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


class Shared(Deep):
    """One block is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


def second_block(name: str, module: nn.Module) -> bool:
    return name == "net.blocks.1"


def restored(module: Any, options: dict[str, Any], samples: int = 40) -> Tensor:
    """Train, and check that the module is no longer sharded; its parameters, classes and attributes are as before."""
    before, classes = dict(module.named_parameters()), [type(child) for child in module.modules()]
    attributes = [set(child.__dict__) for child in module.modules()]
    quiet(strategy=FSDPStrategy(**options), accumulate_grad_batches=2).fit(module, loader(samples, 4))
    assert all(value is before[key] for key, value in module.named_parameters())
    assert [type(child) for child in module.modules()] == classes
    ours = {"_hyper_parameters", "_last_trainer"}
    assert [set(child.__dict__) - ours for child in module.modules()] == attributes
    children = module.modules()
    assert not any(one._forward_hooks or one._forward_pre_hooks or one._state_dict_pre_hooks for one in children)
    copy.deepcopy(module)
    return weights(module)


@pytest.mark.parametrize(
    ("net", "options"),
    [
        pytest.param(Deep, {}, id="default"),
        pytest.param(Deep, {"sharding": "grad_op"}, id="grad_op"),
        pytest.param(Deep, {"wrap": [Block, nn.Linear]}, id="nested classes"),
        pytest.param(Deep, {"wrap": second_block}, id="callable"),
        pytest.param(Deep, {"reshard_after_forward": False}, id="kept after forward"),
        pytest.param(Deep, {"reshard_after_backward": False}, id="kept within a window"),
        pytest.param(Deep, {"cpu_offload": True}, id="offload"),
        pytest.param(Deep, {"forward_prefetch": 2, "backward_prefetch": 2}, id="prefetch"),
        pytest.param(Deep, {"ignored": ["net.head.*", "*.norm.*"]}, id="ignored"),
        pytest.param(Deep, {"activation_checkpointing": [nn.LayerNorm]}, id="checkpointed within units"),
        pytest.param(Deep, {"find_unused_parameters": False}, id="no search for unused"),
        pytest.param(Deep, {"find_unused_parameters": True}, id="search for unused"),
        pytest.param(Shared, {}, id="a shared block"),
        pytest.param(TwiceDeep, {}, id="blocks that run twice"),
        pytest.param(Tied, {"wrap": [nn.Identity, Block]}, id="a unit without parameters"),
        pytest.param(Tied, {"wrap": []}, id="ties, one unit"),
    ],
)
def test_every_setting_and_structure_equals_plain_torch(net: type[Deep], options: dict[str, Any]) -> None:
    # B-02, D-02, D-07, D-08, D-10: 5 micro-batches in windows of two
    module = DeepRegression(seeded(net))
    first, second = on_ranks(restored, 2, module, options)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, trained_in_plain_torch(module, 40, window=2), **TIGHT)


def test_three_ranks_divide_by_three() -> None:  # D-06: gloo has no premultiplied sum; the factor is no power of two
    found = on_ranks(restored, 3, Regression(), {}, 60)[0]
    torch.testing.assert_close(found, trained_in_plain_torch(Regression(), 60, ranks=3, window=2), **TIGHT)


NORMS = [f"net.blocks.{number}.norm.{kind}" for number in range(3) for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("net", "ignored", "units", "whole"),
    [
        pytest.param(Deep, [], [f"net.blocks.{number}" for number in range(3)], [], id="repeated blocks"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1), nn.LayerNorm(1)),
            *([], ["net.0", "net.2"], []),
            id="layers where no block repeats",
        ),
        # D-11: ranks may use different experts.
        pytest.param(Experts, [], [], [], id="experts are left to the block around them"),
        pytest.param(
            *(Deep, ["net.head.*", "*.norm.*"], [f"net.blocks.{number}" for number in range(3)]),
            [*NORMS, "net.head.weight", "net.head.bias"],
            id="ignored",
        ),
    ],
)
def test_what_is_sharded_together_and_what_stays_whole(net: Any, ignored: Any, units: Any, whole: list[str]) -> None:
    # D-02, D-08
    found: list[list[str]] = []

    def look(trainer: Any, module: Any) -> None:
        found.append([unit.name for unit in trainer.strategy.plan.units])
        found.append([name for name, value in module.named_parameters() if not isinstance(value, DTensor)])

    settings: dict[str, Any] = {"devices": 1, "callbacks": LambdaCallback(on_train_start=look)}
    quiet(strategy=FSDPStrategy(ignored=ignored), **settings).fit(DeepRegression(net()), loader(8, 8))
    assert found == [[*units, ""], whole]


def _printed() -> list[str]:
    with captured_warnings(logging.INFO) as texts:
        quiet(strategy="fsdp").fit(DeepRegression(), loader(16, 4))
    return [line for text in texts for line in text.splitlines() if "FSDP shards" in line or line.startswith("  ")]


def test_the_plan_is_printed_on_rank_0() -> None:  # D-02: the units, with their numbers and sizes
    whole, block = (sum(one.numel() for one in net.parameters()) for net in (Deep(), Block()))
    (*first, rest), second = on_ranks(_printed, 2)
    assert second == []
    assert first == [
        f"FSDP shards {whole:,} parameters over 2 ranks (units: repeated blocks)",
        f"  3 x Block (net.blocks.0 ... net.blocks.2), each {block} parameters of 0.001 MiB",
    ]
    assert rest.startswith(f"  the rest: {whole - 3 * block} parameters of")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding": "ful"}, "did you mean 'full'"),
        ({"sharding": "grad_op", "reshard_after_forward": True}, "together with reshard_after_forward=True"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2"),
        ({"replicate_size": 2}, "replicate_size=2 with sharding='full'"),
        ({"replicate_size": 0}, "is a number of ranks"),
        ({"mixed_precision": torch.bfloat16}, "MixedPrecisionPolicy"),
        ({"timeout": "60"}, "timeout='60'"),
        ({"step_timeout": 0}, "step_timeout=0"),
        ({"activation_policy": "fulll"}, "activation_policy='fulll'"),
    ],
)
def test_arguments_that_contradict_each_other(options: dict[str, Any], text: str) -> None:  # G-06: at construction
    with pytest.raises(ConfigurationError, match="(?i)" + text):
        FSDPStrategy(**options)


def _with_layer(layer: nn.Module) -> DeepRegression:
    module = DeepRegression()
    module.layer = layer
    return module


class ForeignOptimizer(DeepRegression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class KeptOptimizer(DeepRegression):
    """Builds its optimizer in the first run, and returns the same one in later runs."""

    optimizer: Any = None

    def configure_optimizers(self) -> Any:
        self.optimizer = self.optimizer or super().configure_optimizers()
        return self.optimizer


def _mapped() -> DeepRegression:
    module = DeepRegression()
    module.net.head.hf_device_map = {"": 0}
    return module


def _used() -> DeepRegression:
    module = KeptOptimizer()
    quiet(strategy="fsdp").fit(module, loader(16, 4))
    return module


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: _with_layer(nn.Embedding(4, 2, sparse=True)), {}, "'layer' is an Embedding with sparse=True"),
    (lambda: _with_layer(nn.Embedding(4, 2, max_norm=1.0)), {}, "'layer' is an Embedding with max_norm"),
    (DeepRegression, {"sharding": "hybrid", "shard_size": 4}, "cannot arrange 2 ranks as 0 (replicate) x 4 (shard)"),
    (
        DeepRegression,
        {"sharding": "hybrid", "shard_size": 2, "replicate_size": 2},
        "cannot arrange 2 ranks as 2 (replicate) x 2 (shard)",
    ),
    (DeepRegression, {"shard_size": 1}, "cannot arrange 2 ranks as 1 (data)"),
    (DeepRegression, {"tensor_parallel": 3}, "cannot arrange 2 ranks as 0 (data) x 3 (tensor)"),
    (DeepRegression, {"activation_checkpointing": [nn.Conv2d]}, "no module of class Conv2d"),
    (DeepRegression, {"wrap": [nn.Conv2d]}, "no module of class Conv2d is in DeepRegression"),
    (DeepRegression, {"ignored": ["net.hed.*"]}, "ignored='net.hed.*' matches no parameter"),
    (ForeignOptimizer, {}, "holds a parameter of shape (2, 2) that is not the module's"),
    (_used, {}, "holds a parameter of shape (8, 4) that is not the module's"),
    (_mapped, {}, "'net.head' was loaded with a device_map"),
    (lambda: _with_layer(nn.Linear(2, 2).double()), {}, "Unit 'root' has trainable parameters of several dtypes"),
]


def _refusals() -> list[str]:
    texts = [refusal(make(), loader(16, 4), strategy=FSDPStrategy(**options)) for make, options, _ in REFUSED]
    texts.append(refusal(DeepRegression(), loader(16, 4), strategy="fsdp", sync_batchnorm=True))
    quiet(strategy="fsdp").fit(DeepRegression(), loader(16, 4))  # the same processes can train afterwards
    return texts


def test_what_fsdp_does_not_support_is_refused_by_name() -> None:  # B-20, C-06, G-06, G-07
    expected = [*(text for _, _, text in REFUSED), "use strategy='ddp', or normalise with GroupNorm"]
    for texts in on_ranks(_refusals, 2):
        for text, part in zip(texts, expected, strict=True):
            assert text.startswith("ConfigurationError"), text
            assert part in text


def _early() -> Tensor:
    module = KeptOptimizer()
    module.configure_optimizers()
    quiet(strategy="fsdp").fit(module, loader(32, 4))
    held = module.optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    for one in held:
        assert all(value.shape == one.shape for value in module.optimizer.state[one].values() if value.dim())
    return trained_with(module, loader(32, 4), strategy="fsdp")  # continues with the optimizer's state


def test_an_optimizer_built_before_sharding_holds_the_shards() -> None:
    found = on_ranks(_early, 2)[0]
    torch.testing.assert_close(found, trained_in_plain_torch(KeptOptimizer(), epochs=2), **TIGHT)


def _experts(options: dict[str, Any]) -> Tensor:
    module = DeepRegression(seeded(lambda: Experts(unused=True)))
    return trained_with(module, DataLoader(one_expert_per_rank(), batch_size=4), strategy=FSDPStrategy(**options))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"ignored": ["net.experts.*"]}], ids=str)
def test_experts_that_some_ranks_use(options: dict[str, Any]) -> None:
    # D-05, D-11; an expert that no rank uses does not change, not even by weight decay
    first, second = on_ranks(_experts, 2, options)
    module = DeepRegression(seeded(lambda: Experts(unused=True)))
    train_by_hand(module, list(DataLoader(one_expert_per_rank(), batch_size=8)))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(module), **TIGHT)


def _different_units() -> str:
    batches = DataLoader(one_expert_per_rank(), batch_size=4)
    return refusal(DeepRegression(seeded(Experts)), batches, strategy=FSDPStrategy(wrap=[Block]))


def test_units_that_only_some_ranks_run_raise_instead_of_hanging() -> None:  # D-11
    for text in on_ranks(_different_units, 2):
        assert text.startswith("DistributedError")
        assert "the forward of 'net.experts.0'" in text
        assert "the forward of 'net.experts.1'" in text


def test_one_process_equals_plain_torch() -> None:
    module = DeepRegression()
    found = trained_with(module, loader(40, 8), strategy="fsdp", devices=1, accumulate_grad_batches=2)
    torch.testing.assert_close(found, trained_in_plain_torch(DeepRegression(), 40, window=2), **TIGHT)
    assert not dist.is_initialized()
    assert not any(isinstance(child, FSDPModule) for child in module.modules())


class Validated(TrainModule):
    """Has a network, or nothing to shard."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).sum())


@pytest.mark.parametrize("net", [Deep, nn.Identity])
def test_one_process_evaluates(net: Any) -> None:
    # several batches: parameters are gathered again for each
    kinds, module = ("fsdp", "single_device"), Validated(seeded(net))
    scores = [quiet(strategy=kind, devices=1).validate(module, loader(10, 2)) for kind in kinds]
    assert scores[0][0]["val"] == pytest.approx(scores[1][0]["val"], abs=1e-6)


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
) -> None:  # I-15, G-07, A-02: in the user's process group, with the same result on every rank
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
        end, failures = (
            time.monotonic() + 20 * (self.global_rank == 1 and self.where == "stall"),
            self.trainer.strategy.control.failures,
        )
        while failures is not None and time.monotonic() < end and not failures.reports():
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
            train(OnOneRank(where), FSDPStrategy(**SPLIT, **options), data_ranks(SPLIT))
        caught[where] = error, time.monotonic() - begun
    module = Phased({}, split=True)
    train(module, FSDPStrategy(**SPLIT), data_ranks(SPLIT))
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
