"""FSDPStrategy on two ranks: rows D-01, D-02, D-05 to D-08, D-10, D-11, and B-13, B-16, B-17, B-20."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, Deep, DeepRegression, Experts, Tied
from small_runs import (
    TIGHT,
    Saver,
    counting_collectives,
    data,
    failing,
    global_batches,
    loader,
    quiet,
    same_on_two_ranks,
    seeded,
    train_by_hand,
    weights,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback
from drivetrain.callbacks import LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp._plan import make_plan
from worlds import on_ranks

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "grad_op": {"sharding": "grad_op"},
    "classes": {"wrap": [Block]},
    "nested classes": {"wrap": [Block, nn.Linear]},
    "callable": {"wrap": lambda name, module: name in ("blocks.1", "net.blocks.1")},
    "root only": {"wrap": lambda name, module: False},
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "kept within a window": {"reshard_after_backward": False},
    "ignored": {"ignored": ["net.head.*", nn.LayerNorm]},
    "checkpointed": {"activation_checkpointing": [Block]},
    "checkpointed selectively": {"activation_checkpointing": [Block], "activation_policy": "save_matmuls"},
    "checkpointed within units": {"activation_checkpointing": [nn.LayerNorm]},
    "no search for unused": {"find_unused_parameters": False},
    "search for unused": {"find_unused_parameters": True},
}
SETTINGS = {"accumulate_grad_batches": 2, "max_epochs": 2}


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        module = DeepRegression()
        before, classes = dict(module.named_parameters()), [type(child) for child in module.modules()]
        attributes = [set(child.__dict__) for child in module.modules()]
        quiet(strategy=FSDPStrategy(**options), **SETTINGS).fit(module, loader(40, 4))
        found[name] = weights(module)
        assert all(value is before[key] for key, value in module.named_parameters()), name
        assert [type(child) for child in module.modules()] == classes, name
        assert [
            set(child.__dict__) - {"_hyper_parameters", "_last_trainer"} for child in module.modules()
        ] == attributes, name
        assert not any(
            child._forward_hooks or child._forward_pre_hooks or child._state_dict_pre_hooks
            for child in module.modules()
        )
        copy.deepcopy(module)  # no longer sharded
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    return same_on_two_ranks(_runs)


def _two_epochs_by_hand(module: Any) -> torch.Tensor:
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer
    for _ in range(2):
        train_by_hand(module, global_batches(40, 8), window=2)
    return weights(module)


@pytest.fixture(scope="module")
def by_hand() -> torch.Tensor:
    return _two_epochs_by_hand(DeepRegression())


@pytest.mark.parametrize("name", CASES)
def test_every_setting_gives_the_same_results(
    name: str, trained: dict[str, torch.Tensor], by_hand: torch.Tensor
) -> None:
    # B-02, D-02, D-07, D-08: 5 micro-batches in windows of two; afterwards the module is no longer sharded
    torch.testing.assert_close(trained[name], by_hand, **TIGHT)


# D-10: ties, lists, single numbers


def _ties() -> Any:
    seen: list[bool] = []
    module = DeepRegression(seeded(Tied))
    look = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append(
            module.net.blocks[0].up.weight is module.net.blocks[2].up.weight
            and isinstance(module.net.blocks[0].up.weight, DTensor)
        )
    )
    strategy = FSDPStrategy()
    state: dict[str, Any] = {}
    keep = LambdaCallback(on_train_end=lambda trainer, module: state.update(trainer.strategy.model_state()))
    quiet(strategy=strategy, callbacks=[look, keep], **SETTINGS).fit(module, loader(40, 4))
    assert state["net.blocks.0.up.weight"] is state["net.blocks.2.up.weight"]
    assert set(state) == set(module.state_dict())
    assert module.net.blocks[0].up.weight is module.net.blocks[2].up.weight
    return weights(module), seen


def test_ties_across_units_lists_and_single_numbers() -> None:
    # D-10
    (found, seen), (other, _) = on_ranks(_ties, 2)
    assert seen == [True]
    assert torch.equal(found, other)
    torch.testing.assert_close(found, _two_epochs_by_hand(DeepRegression(seeded(Tied))), **TIGHT)


# D-01: what a rank holds


def _local(tensors: Any) -> int:
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


class Bytes(Callback):
    """Counts what this rank holds when it steps."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = list(module.parameters())
        self.found["parameters"] = _local(parameters)
        self.found["gradients"] = _local(one.grad for one in parameters)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = trainer.optimizers[0].state
        self.found["state"] = _local(value for values in state.values() for value in values.values() if value.dim())
        self.found["originals"] = sum(one.parameter.untyped_storage().nbytes() for one in trainer.strategy._originals)


def _held() -> dict[str, int]:
    counter = Bytes()
    quiet(strategy="fsdp", callbacks=counter).fit(DeepRegression(), loader(16, 4))
    return counter.found


def test_a_rank_holds_its_part() -> None:
    # D-01: at most half, plus a row of padding for each parameter
    parameters = list(DeepRegression().parameters())
    whole = sum(one.nbytes for one in parameters)
    padding = sum(one[0].nbytes for one in parameters)
    for found in on_ranks(_held, 2):
        assert found["parameters"] <= whole / 2 + padding
        assert found["gradients"] == found["parameters"]
        assert found["state"] == 2 * found["parameters"]
        assert found["originals"] == 0


# D-02: the plan


def test_the_default_plan() -> None:
    # D-02
    module = DeepRegression()
    plan = make_plan(module, None, [])
    assert [unit.name for unit in plan.units] == ["net.blocks.0", "net.blocks.1", "net.blocks.2", ""]
    table = plan.table(2)
    assert "3 x Block (net.blocks.0 ... net.blocks.2), each" in table
    assert "the rest" in table
    assert str(sum(parameter.numel() for parameter in module.parameters())) in table.replace(",", "")


def test_layers_are_units_where_no_block_repeats() -> None:
    plan = make_plan(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.LayerNorm(4)), None, [])
    assert [unit.name for unit in plan.units] == ["0", "2", ""]


def test_experts_are_left_to_the_block_around_them() -> None:
    # D-11: because not every rank runs every expert
    assert [unit.name for unit in make_plan(Experts(), None, []).units] == [""]


def test_inner_units_come_first() -> None:
    names = [unit.name for unit in make_plan(Deep(2), [Block, nn.Linear], []).units]
    assert names.index("blocks.0.up") < names.index("blocks.0")
    assert names[-1] == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wrap": [nn.Conv2d]}, "no module of class Conv2d is in DeepRegression"),
        ({"wrap": lambda name, module: isinstance(module, nn.ModuleList)}, "wrap chose 'net.blocks', a ModuleList"),
        ({"ignored": ["net.hed.*"]}, "ignored='net.hed.*' matches no parameter"),
    ],
)
def test_an_impossible_plan_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text.replace("*", "\\*")) as error:
        make_plan(DeepRegression(), options.get("wrap"), options.get("ignored", []))
    if "Conv2d" in text:
        assert "Block" in str(error.value)  # the classes that exist


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding": "ful"}, "did you mean 'full'"),
        ({"sharding": "grad_op", "reshard_after_forward": True}, "keeps parameters gathered"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision=torch.bfloat16"),
        ({"replicate_size": 2}, "replicate_size=2 with sharding='full'"),
        ({"activation_policy": "fulll"}, "activation_policy='fulll'"),
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
    ],
)
def test_arguments_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    # G-06: at construction
    with pytest.raises(ConfigurationError, match="(?i)" + text):
        FSDPStrategy(**options)


# Refused before a step


class Sparse(DeepRegression):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, **options)


def _refusals() -> list[str]:
    texts = []
    for strategy, module in (
        (FSDPStrategy(), Sparse(sparse=True)),
        (FSDPStrategy(), Sparse(max_norm=1.0)),
        (FSDPStrategy(sharding="hybrid", shard_size=4), DeepRegression()),
        (FSDPStrategy(sharding="hybrid", shard_size=2, replicate_size=2), DeepRegression()),
        (FSDPStrategy(shard_size=1), DeepRegression()),
        (FSDPStrategy(tensor_parallel=3), DeepRegression()),
        (FSDPStrategy(tensor_parallel=2), DeepRegression()),
        (FSDPStrategy(activation_checkpointing=[nn.Conv2d]), DeepRegression()),
        (FSDPStrategy(), _ForeignOptimizer()),
    ):
        with failing() as caught:
            quiet(strategy=strategy).fit(module, loader(16, 4))
        texts.append(f"{caught['type']}: {caught['text']}")
    quiet(strategy="fsdp").fit(DeepRegression(), loader(16, 4))
    return texts


class _ForeignOptimizer(DeepRegression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_unsupported_training_is_refused_by_name() -> None:
    # B-20, C-06, G-07: and the same processes can train afterwards
    expected = [
        "'table' is an Embedding with sparse=True",
        "'table' is an Embedding with max_norm",
        "shard_size=4, but there are only 2 ranks",
        "replicate_size=2 x shard_size=2 = 4, but there are 2 ranks",
        "shard_size=1 with sharding='full' on 2 ranks",
        "tensor_parallel=3 on 2 ranks",
        "tensor_parallel=2, but no layer of DeepRegression is split",
        "no module of class Conv2d",
        "holds a parameter of shape (2, 2) that is not the module's",
    ]
    for texts in on_ranks(_refusals, 2):
        for text, part in zip(texts, expected, strict=True):
            assert text.startswith("ConfigurationError"), text
            assert part in text


# Optimizers built before sharding


class EarlyOptimizer(DeepRegression):
    """Builds its optimizer in __init__."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _early() -> Any:
    module = EarlyOptimizer()
    fit = quiet(strategy="fsdp", max_epochs=1)
    fit.fit(module, loader(32, 4))
    held = module.optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    assert all(
        value.shape == one.shape for one in held for value in module.optimizer.state[one].values() if value.dim()
    )
    quiet(strategy="fsdp", max_epochs=1).fit(module, loader(32, 4))  # continues with its state
    return weights(module)


def test_an_optimizer_built_before_sharding_holds_the_shards() -> None:
    found = on_ranks(_early, 2)[0]
    module = EarlyOptimizer()
    for _ in range(2):
        train_by_hand(module, global_batches(32, 8))
    torch.testing.assert_close(found, weights(module), **TIGHT)


# D-05, D-11


def _one_expert_per_rank() -> TensorDataset:
    """Return samples in an order in which rank 0's batches go to one expert and rank 1's to the other."""
    x, y = data(32).tensors
    order = x[:, 0].argsort()
    half = torch.stack([order[:16].view(4, 4), order[16:].view(4, 4)], 1).flatten()
    return TensorDataset(x[half], y[half])


def _experts(unused: bool, options: dict[str, Any]) -> Any:
    module = DeepRegression(seeded(lambda: Experts(unused)))
    quiet(strategy=FSDPStrategy(**options)).fit(module, DataLoader(_one_expert_per_rank(), batch_size=4))
    return weights(module)


@pytest.mark.parametrize(("unused", "options"), [(False, {}), (True, {}), (True, {"find_unused_parameters": True})])
def test_experts_that_some_ranks_use(unused: bool, options: dict[str, Any]) -> None:
    # D-05, D-11; an unused expert does not change, not even by weight decay
    first, second = on_ranks(_experts, 2, unused, options)
    module = DeepRegression(seeded(lambda: Experts(unused)))
    train_by_hand(module, list(DataLoader(_one_expert_per_rank(), batch_size=8)))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(module), **TIGHT)


def _different_units() -> Any:
    module = DeepRegression(seeded(Experts))
    with failing() as caught:
        quiet(strategy=FSDPStrategy(wrap=[Block])).fit(module, DataLoader(_one_expert_per_rank(), batch_size=4))
    return caught


def test_units_that_only_some_ranks_run_raise_instead_of_hanging() -> None:
    # D-11
    for caught in on_ranks(_different_units, 2):
        assert caught["type"] == "DistributedError"
        assert "the forward of 'net.experts.0'" in caught["text"]
        assert "the forward of 'net.experts.1'" in caught["text"]


# No gradient communication within a window


def _counted() -> list[dict[str, int]]:
    counts = []
    for windows in (1, 4):
        module = DeepRegression()
        with counting_collectives() as found:
            quiet(strategy="fsdp", accumulate_grad_batches=4, max_epochs=1).fit(module, loader(32 * windows, 4))
        counts.append(dict(found))
    return counts


def test_gradients_are_exchanged_once_a_window() -> None:
    # B-02: four units, one reduce-scatter each for every window of four micro-batches
    for one, four in on_ranks(_counted, 2):
        reductions = [count for name, count in four.items() if "reduce_scatter" in name]
        before = [count for name, count in one.items() if "reduce_scatter" in name]
        assert sum(reductions) - sum(before) == 3 * 4
        assert sum(count for name, count in four.items() if "allreduce" in name) == sum(
            count for name, count in one.items() if "allreduce" in name
        )


# State, and saving


def _saved(folder: str, strategy: str) -> Any:
    module = DeepRegression(seeded(Tied))
    quiet(strategy=strategy, max_epochs=2, callbacks=Saver(f"{folder}/half")).fit(module, loader(40, 4, shuffle=False))
    again = DeepRegression(seeded(Tied))
    quiet(strategy=strategy, max_epochs=2).fit(again, loader(40, 4), ckpt_path=f"{folder}/half")
    return weights(module), weights(again)


def _resumed(folder: str, strategy: str) -> Any:
    again = DeepRegression(seeded(Tied))
    quiet(strategy=strategy, max_epochs=2).fit(again, loader(40, 4), ckpt_path=f"{folder}/half")
    return weights(again)


def test_a_plain_checkpoint_written_and_read(tmp_path: Path) -> None:
    # D-07: plain names; B-07: one copy of tied weights; and DDP can resume from it
    whole, resumed = on_ranks(_saved, 2, str(tmp_path), "fsdp")[0]
    assert torch.equal(whole, resumed)
    by_ddp = on_ranks(_resumed, 2, str(tmp_path), "ddp")[0]
    torch.testing.assert_close(by_ddp, whole, **TIGHT)
    from safetensors.torch import load_file

    names = set(load_file(tmp_path / "half" / "model.safetensors"))
    assert names == set(dict(DeepRegression(Tied()).named_parameters()))


def _round_trip() -> Any:
    texts = []

    class Look(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            strategy = trainer.strategy
            state = strategy.model_state()
            assert all(isinstance(state[name], DTensor) for name, _ in module.named_parameters())
            optimizer = strategy.optimizer_state()
            assert set(optimizer["state"]) == {name for name, _ in module.named_parameters()}
            doubled = {name: value.full_tensor() * 2 for name, value in state.items()}
            strategy.load_model_state(doubled)
            for name, value in strategy.model_state().items():
                assert torch.equal(value.full_tensor(), doubled[name])
            strategy.load_model_state({name: value * 1 for name, value in strategy.model_state().items()})
            strategy.load_optimizer_state(optimizer)
            try:
                strategy.load_model_state({**doubled, "net.head.bias": torch.zeros(3), "odd": torch.zeros(1)})
            except Exception as error:
                texts.append(str(error))

    quiet(strategy="fsdp", callbacks=Look()).fit(DeepRegression(), loader(16, 4))
    return texts


def test_state_by_plain_names() -> None:
    for texts in on_ranks(_round_trip, 2):
        assert "odd" in texts[0]
        assert "net.head.bias ((3,) instead of (1,))" in texts[0]


# Hooks see shards, and an average of weights is kept from them


class Average(Callback):
    """An exponential moving average, swapped in for validation."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in module.named_parameters():
            self.average[name].lerp_(value, 0.5)

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        for name, value in module.named_parameters():
            self.kept[name] = value.clone()
            value.copy_(self.average[name])

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for name, value in module.named_parameters():
            value.copy_(self.kept[name])


class Validated(DeepRegression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def _averaged(strategy: str) -> Any:
    module = Validated()
    fit = quiet(strategy=strategy, max_epochs=2, callbacks=Average())
    fit.fit(module, loader(40, 4), loader(19, 4))
    return weights(module), float(fit.callback_metrics["val"])


def test_an_average_of_weights_by_callback() -> None:
    found, ddp = on_ranks(_averaged, 2, "fsdp")[0], on_ranks(_averaged, 2, "ddp")[0]
    torch.testing.assert_close(found[0], ddp[0], **TIGHT)
    assert math.isclose(found[1], ddp[1], rel_tol=1e-5)


# Frozen base models with adapters; modules above the gather limit; failures


class Adapted(DeepRegression):
    """Blocks are frozen but for their norms."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_("norm" in name or "head" in name)


def _adapted() -> Any:
    module = Adapted()
    quiet(strategy="fsdp").fit(module, loader(32, 4))
    return weights(module), [parameter.requires_grad for parameter in module.parameters()]


def test_adapters_within_frozen_units() -> None:
    # B-08
    found, flags = on_ranks(_adapted, 2)[0]
    module = train_by_hand(Adapted(), global_batches(32, 8))
    assert flags == [parameter.requires_grad for parameter in module.parameters()]
    torch.testing.assert_close(found, weights(module), **TIGHT)


def _offloaded() -> Any:
    kinds: list[Any] = []
    look = LambdaCallback(
        on_train_start=lambda trainer, module: kinds.extend(
            type(group.offload_policy).__name__ for group in trainer.strategy._sharded._groups
        )
    )
    quiet(strategy=FSDPStrategy(cpu_offload=True), callbacks=look).fit(DeepRegression(), loader(16, 4))
    return kinds


def test_offload_reaches_torch() -> None:
    # D-08; on the CPU there is no other device to move to
    assert set(on_ranks(_offloaded, 2)[0]) == {"CPUOffloadPolicy"}


def _one_process() -> Any:
    module = DeepRegression()
    quiet(strategy="fsdp", devices=1, accumulate_grad_batches=2).fit(module, loader(40, 8))
    return weights(module)


def test_one_process() -> None:
    torch.testing.assert_close(
        _one_process(), weights(train_by_hand(DeepRegression(), global_batches(40, 8), window=2)), **TIGHT
    )
    assert not dist.is_initialized()
    assert not any(isinstance(child, FSDPModule) for child in DeepRegression().modules())


def test_one_process_evaluates() -> None:
    # several batches: parameters are gathered again for each
    module, plain = Validated(), Validated()
    (scores,) = quiet(strategy="fsdp", devices=1).validate(module, loader(10, 2), verbose=False)
    (expected,) = quiet(strategy="single_device").validate(plain, loader(10, 2), verbose=False)
    assert scores["val"] == pytest.approx(expected["val"], abs=1e-6)
