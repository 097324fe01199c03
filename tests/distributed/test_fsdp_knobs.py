"""The effects of each argument of FSDPStrategy, while results stay equal: also on the bytes that a rank holds."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import WIDTH, Block, Deep, DeepRegression, TwiceDeep, trained_in_plain_torch, trained_on_shards
from small_runs import TIGHT, Regression, each, loader, quiet, seeded, trained, weights
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import FSDPStrategy

# Which units are being gathered at a moment has no public name.
from drivetrain_strategies.fsdp._internals import _groups_of
from worlds import on_ranks

IGNORED = ["net.head.*", "*.norm.*"]


class Decaying(DeepRegression):
    """A hook of its optimizer applies weight decay."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.groups_seen: list[tuple[Any, ...]] = []

    def configure_optimizers(self) -> Any:
        options: dict[str, Any] = {self.kind: True}
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5, **options)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.decay(optimizer.param_groups))
        return optimizer

    @torch.no_grad()
    def decay(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            self.groups_seen.append((len(group["params"]), group["foreach"], group["fused"]))
            for one in group["params"]:
                one.mul_(0.9)


def _decayed(kind: str) -> tuple[Tensor, list[tuple[Any, ...]]]:
    module, distributed = Decaying(kind), dist.is_initialized()
    strategy = FSDPStrategy(ignored=IGNORED) if distributed else "single_device"
    return trained(module, loader(16, 4 if distributed else 8), strategy=strategy), module.groups_seen


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_of_shards_and_whole_parameters_is_one_step(kind: str) -> None:
    # D-08: torch refuses lists of both; on a GPU AdamW makes such lists by default
    expected, seen = _decayed(kind)
    for found, seen_there in on_ranks(_decayed, 2, kind):
        torch.testing.assert_close(found, expected, **TIGHT)
        assert seen_there == seen


def _ahead(options: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Return which units are gathered while each of four computes."""
    found: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    module = DeepRegression(seeded(lambda: Deep(4)))
    blocks = module.net.blocks

    def look(direction: str, *_: Any) -> None:
        groups = [_groups_of(block._get_fsdp_state())[0] for block in blocks]
        found[direction].append([number for number, one in enumerate(groups) if one._all_gather_result is not None])

    for block in blocks:
        block.norm.register_forward_pre_hook(partial(look, "forward"))
        block.down.register_full_backward_pre_hook(partial(look, "backward"))
    trained_on_shards(module, options, 8)
    return found


def test_how_far_ahead_units_are_gathered() -> None:
    # D-08: in the order of the module; by default torch gathers one ahead in the backward
    plain, ahead = on_ranks(each, 2, _ahead, ({},), ({"forward_prefetch": 2, "backward_prefetch": 2},))[0]
    assert plain["forward"] == [[], [], [], []]
    assert ahead == {"forward": [[1, 2], [2, 3], [3], []], "backward": [[1, 2], [0, 1], [0], []]}


class InOneDtype(DeepRegression):
    """FSDP casts the whole batch, including targets; torch 2.11 has no backward for a loss of two dtypes."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        found = self.net(x)
        return nn.functional.mse_loss(found, y.to(found.dtype))


def _typed(policy: MixedPrecisionPolicy, precision: str) -> Any:
    seen: dict[str, Any] = {}
    module = InOneDtype()
    block = module.net.blocks[0]

    def note_input(norm: nn.Module, args: Any) -> None:
        seen["input"], seen["weight"] = args[0].dtype, norm.weight.dtype

    def note_output(*_: Any) -> None:
        # Registered after sharding, so that the hook sees the output of the unit.
        block.register_forward_hook(lambda module, args, output: seen.update(output=output.dtype))

    def note_gradient(trainer: Any, module: Any, optimizer: Any) -> None:
        seen["gradient"] = module.net.stem.weight.grad.to_local().clone()

    block.norm.register_forward_pre_hook(note_input)
    # All layers are units, so each casts the output of the previous one.
    ends = ("net.stem", "net.head")
    strategy = FSDPStrategy(wrap=lambda name, module: isinstance(module, Block) or name in ends, mixed_precision=policy)
    look = LambdaCallback(on_train_start=note_output, on_before_optimizer_step=note_gradient)
    quiet(strategy=strategy, callbacks=look, precision=precision).fit(module, loader(8, 4))
    return seen, {parameter.dtype for parameter in module.parameters()}


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtypes", "precision", "weight", "output", "rounded"),
    [
        ({}, "32-true", FULL, FULL, False),
        ({"param_dtype": HALF, "reduce_dtype": HALF}, "32-true", HALF, HALF, True),
        ({"param_dtype": HALF, "reduce_dtype": FULL, "output_dtype": FULL}, "32-true", HALF, FULL, False),
        ({"reduce_dtype": HALF}, "32-true", FULL, FULL, True),
        # Its input is the output of the previous layer, which autocast computes.
        ({"param_dtype": HALF, "reduce_dtype": FULL, "cast_forward_inputs": False}, "bf16-mixed", HALF, HALF, False),
    ],
    ids=str,
)
def test_each_dtype_of_a_policy(dtypes: Any, precision: str, weight: Any, output: Any, rounded: bool) -> None:
    # D-08: stored in fp32; gathered, reduced and output in the requested dtypes
    for seen, kept in on_ranks(_typed, 2, MixedPrecisionPolicy(**dtypes), precision):
        assert kept == {FULL}
        assert seen["weight"] == seen["input"] == weight
        assert seen["output"] == output
        gradient = seen["gradient"]
        assert gradient.dtype == FULL
        # The mean of two is exact except for the dtype of the communication.
        assert torch.equal(gradient, gradient.to(HALF).float()) == rounded


class IgnoresOutput(Deep):
    """Runs its second block without using its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = x if number == 1 and block(x) is not None else block(x)
        return self.head(x)


def _ignored_output(policy: MixedPrecisionPolicy) -> tuple[Tensor, Tensor]:
    module = InOneDtype(seeded(IgnoresOutput))
    found = trained_on_shards(module, {"wrap": [Block], "mixed_precision": policy}, 16)
    return found, weights(module.net.blocks[1])


def test_a_unit_without_gradients_that_computes_in_another_dtype() -> None:
    # D-05, O-06: torch 2.15 keeps its gradients in the dtype of its shards, earlier versions in that of its weights
    net = seeded(IgnoresOutput)
    (first, unused), (second, _) = on_ranks(_ignored_output, 2, MixedPrecisionPolicy(param_dtype=HALF))
    assert torch.equal(unused, weights(net.blocks[1]))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, trained_in_plain_torch(InOneDtype(net), 16), atol=2e-2, rtol=0)


class Attending(Block):
    """With attention within each sample."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 1, WIDTH // 2)
        return super().forward(x + scaled_dot_product_attention(heads, heads, heads).reshape(x.shape))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local shards
        self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _operations(options: dict[str, Any]) -> tuple[list[int], Tensor]:
    """Return how many products, attentions and tanh a step computes, and the weights after it."""
    net = seeded(Deep)
    net.blocks = seeded(lambda: nn.ModuleList(Attending() for _ in range(3)))
    with Operations() as operations:
        found = trained_on_shards(DeepRegression(net), options, 4, devices=1)
    kinds = ("addmm", "_scaled_dot_product_flash_attention_for_cpu", "tanh")
    return [operations.counts[kind] for kind in kinds], found


def test_recomputed_operations() -> None:
    # D-07, D-08. Three blocks with two products each, plus the stem and the head; the second product of a block is not
    # needed again.
    counts, expected = _operations({})
    assert counts == [8, 3, 3]
    policies = {"full": [11, 6, 6], "save_matmuls": [8, 3, 6], "save_attention": [11, 3, 6]}
    for policy, wanted in policies.items():
        counts, found = _operations({"activation_checkpointing": [Attending], "activation_policy": policy})
        assert counts == wanted, policy
        assert torch.equal(found, expected), policy


def test_a_cached_cast_is_repeated_in_recomputation() -> None:
    # D-07: a policy that identifies operations by their number must see the same ones both times
    settings: dict[str, Any] = {"devices": 1, "precision": "bf16-mixed"}
    torch.set_autocast_cache_enabled(False)  # a weight is cast at every use instead of once per step
    plain = trained_on_shards(DeepRegression(seeded(TwiceDeep)), {}, 16, **settings)
    torch.set_autocast_cache_enabled(True)
    options = {"activation_checkpointing": [Block], "activation_policy": "save_matmuls"}
    assert torch.equal(trained_on_shards(DeepRegression(seeded(TwiceDeep)), options, 16, **settings), plain)


def _compiled() -> tuple[list[str], Tensor]:
    graphs: list[str] = []

    def keep_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    module = DeepRegression()
    options = {"activation_checkpointing": [Block], "compile": {"backend": keep_graph}}
    found = trained_on_shards(module, options, 16)
    assert not any("forward" in child.__dict__ for child in module.modules())
    return graphs, found


def test_compilation_is_around_checkpointing_and_within_sharding() -> None:
    # D-09: a block's graph includes the checkpointed part, and no gather
    graphs, found = on_ranks(_compiled, 2, timeout=120)[0]
    assert graphs
    assert all("checkpoint" in code and "all_gather" not in code for code in graphs)
    torch.testing.assert_close(found, trained_in_plain_torch(DeepRegression(), 16), **TIGHT)


WIDE, DEPTH = 128, 4
UNIT = 2 * WIDE * WIDE * 4
WHOLE = DEPTH * UNIT
SHARD = UNIT // 2  # what one of two ranks holds of a block
SMALL = UNIT // 4  # the rest: norms, activations of a small batch, states of generators
GATHERED = SHARD + UNIT + UNIT // 2  # a shard, and the gathered block with its casts to half precision


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation created or received within the context, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0  # the largest number of live bytes after any operation, since it was set to 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        """Return the live bytes; resized storages, as in FSDP's gathered parameters, count with their current size."""
        alive = {key: storage for key, one in self._storages.items() if (storage := one()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local shards
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten((args, kwargs, result))[0]:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)  # the number of a freed one may be used again
        self.peak = max(self.peak, self.now())
        return result


class Matrices(nn.Module):
    """Two matrices around a residual, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tall(Regression):
    """Layers that `configure_model` builds, and initialises in a loop; matrices may be frozen, in a dtype or later."""

    def __init__(self, depth: int = DEPTH, frozen: Any = None) -> None:
        super().__init__()
        self.net = None
        self.depth, self.frozen = depth, frozen

    def configure_model(self) -> None:
        self.net = nn.Sequential(*(Matrices() for _ in range(self.depth)))
        for name, parameter in self.net.named_parameters():
            nn.init.normal_(parameter, std=0.01)
            if isinstance(self.frozen, torch.dtype) and "norm" not in name:
                parameter.requires_grad_(False).data = parameter.data.to(self.frozen)

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            if self.frozen == "later" and "norm" not in name:
                parameter.requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0].repeat(1, WIDE // 4)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


WATCHED = {
    "on_train_start": "built",
    "on_before_backward": "forward",
    "on_after_backward": "backward",
    "on_train_batch_end": "end",
    "on_validation_start": "evaluation's start",
    "on_validation_batch_end": "evaluation",
}


def _watched(options: dict[str, Any], module: Any = None, **settings: Any) -> dict[str, int]:
    """Return the live bytes when each point was first reached, and the peaks (``peak ...``) before the points."""
    found: dict[str, int] = {}

    def note(point: str, *_: Any) -> None:
        gc.collect()  # garbage that merely awaits collection does not count
        found.setdefault(point, live.now())
        found[f"peak {point}"] = max(live.peak, found.get(f"peak {point}", 0))
        live.peak = 0

    with LiveBytes() as live:
        hooks: dict[str, Any] = {hook: partial(note, point) for hook, point in WATCHED.items()}
        strategy = FSDPStrategy(wrap=[Matrices], gather_limit=0, **options)
        fit = quiet(
            **{"strategy": strategy, "callbacks": LambdaCallback(**hooks), "limit_train_batches": 1, **settings}
        )
        module = Tall() if module is None else module
        fit.fit(module, loader(16, 4), loader(8, 4))
    assert not any("forward" in child.__dict__ for child in module.modules())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_needs_more_than_its_shards_and_a_few_units(ranks: int) -> None:
    # D-01, D-03: during construction, one whole unit and the shard that is cut from it
    part = WHOLE // ranks
    for found in on_ranks(_watched, ranks, {}):
        assert found["built"] <= part + SMALL
        assert found["peak built"] <= part + UNIT + UNIT // ranks + SMALL
        # A unit's shards, as received and as laid out; the previous unit is freed when this one exists.
        assert found["peak forward"] <= part + 3.5 * UNIT
        assert found["peak backward"] <= 2 * part + 4 * UNIT
        # Parameters, gradients, and AdamW's two moments; AdamW needs space for another parameter or two.
        assert found["peak end"] <= 4 * part + 2.5 * UNIT
        assert found["end"] <= 4 * part + UNIT


def test_with_storage_every_rank_builds_the_whole() -> None:
    # Shows that the test above measures a real effect.
    for found in on_ranks(_watched, 2, {"meta": False}):
        assert found["peak built"] > WHOLE
        assert found["built"] <= WHOLE // 2 + SMALL


@pytest.mark.parametrize(
    ("ranks", "options", "kept"),
    [
        (4, {}, 1 / 4),
        (4, {"reshard_after_forward": False}, 1 / 4 + 1),
        (4, {"sharding": "grad_op"}, 1 / 4 + 1),
        (4, {"sharding": "hybrid", "shard_size": 2}, 1 / 2),
        # within a window: shards, whole gradients that were not exchanged yet, and, if kept, whole parameters
        (2, {"reshard_after_backward": True}, 1.5),
        (2, {"reshard_after_backward": False}, 2.5),
    ],
    ids=str,
)
def test_memory_after_a_forward_or_a_backward(ranks: int, options: dict[str, Any], kept: float) -> None:
    # D-08: shards, and none or all of every unit; the last unit stays for the backward that follows
    point, parts = ("backward", 2) if "reshard_after_backward" in options else ("forward", 1)
    watched = partial(_watched, accumulate_grad_batches=parts, limit_train_batches=parts)
    for found in on_ranks(watched, ranks, options):
        assert kept * WHOLE <= found[point] <= kept * WHOLE + 2.5 * UNIT


def _by_depth(precision: str, options: dict[str, Any], frozen: Any = None) -> dict[str, float]:
    """Return what each further block adds to the live bytes at each point."""
    shallow, deep = (_watched(options, Tall(depth, frozen), precision=precision) for depth in (2, 4))
    return {point: (deep[point] - shallow[point]) / 2 for point in shallow}


@pytest.mark.parametrize(
    ("precision", "options", "frozen", "kept"),
    [
        ("bf16-mixed", {}, None, SHARD),
        ("16-mixed", {"activation_checkpointing": [Matrices]}, None, SHARD),
        ("bf16-mixed", {"sharding": "grad_op"}, None, GATHERED),
        ("bf16-mixed", {"sharding": "grad_op"}, torch.float32, GATHERED),
        ("bf16-mixed", {}, torch.float32, SHARD),
        ("bf16-mixed", {}, "later", SHARD),
        ("bf16-mixed", {}, HALF, SHARD // 2),
    ],
    ids=str,
)
def test_a_further_block_costs_shards_and_activations(precision: str, options: Any, frozen: Any, kept: int) -> None:
    # D-01, D-07, I-03: without casts of its weights, UNIT / 2, which autocast's cache would keep until the end of the
    # forward, and products until their backward; gathered weights keep their casts. Autocast caches no casts of weights
    # frozen in float32, so each product saves its own, which is freed like those of trainable weights.
    for more in on_ranks(_by_depth, 2, precision, options, frozen):
        assert kept <= more["forward"] <= kept + SMALL
        if frozen is None and kept == SHARD:
            assert more["peak forward"] <= SHARD + SMALL
            # On a busy machine a finished reduction is freed late, once in a run: another half of SMALL for each block.
            assert more["peak backward"] <= 2 * SHARD + SMALL + SMALL // 2
            assert more["peak evaluation"] <= 4 * SHARD + SMALL  # gradients stay until the next step, and moments
