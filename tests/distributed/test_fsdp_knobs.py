"""The effects of each argument of FSDPStrategy, while results stay equal: D-06, D-07, D-08, D-09."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import WIDTH, Block, Deep, DeepRegression, Tied
from small_runs import TIGHT, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp._internals import _groups_of
from drivetrain_strategies.fsdp._replicated_parameters import ReplicatedParameters
from worlds import on_ranks

OPERATIONS = torch.ops.aten


def _ignored() -> Any:
    found: list[set[str]] = []
    module = DeepRegression()
    look = LambdaCallback(
        on_train_start=lambda trainer, module: found.append(
            {name for name, value in module.named_parameters() if not isinstance(value, DTensor)}
        )
    )
    quiet(strategy=FSDPStrategy(ignored=["net.head.*", nn.LayerNorm]), callbacks=look).fit(module, loader(16, 4))
    return found[0]


def test_ignored_parameters_stay_whole() -> None:
    # D-08
    norms = {f"net.blocks.{number}.norm.{kind}" for number in range(3) for kind in ("weight", "bias")}
    assert on_ranks(_ignored, 2)[0] == {"net.head.weight", "net.head.bias", *norms}


class Together(DeepRegression):
    """Its optimizer uses foreach updates, as AdamW does by default on a GPU."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_optimizers(self) -> Any:
        how: dict[str, Any] = {self.how: True}
        self.optimizer: Optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5, **how)
        return self.optimizer


def _together(how: str) -> tuple[Tensor, list[Any]]:
    module = Together(how)
    strategy = "single_device" if not dist.is_initialized() else FSDPStrategy(ignored=["net.head.*", nn.LayerNorm])
    quiet(strategy=strategy).fit(module, loader(16, 4 if dist.is_initialized() else 8))
    return weights(module), [group[how] for group in module.optimizer.param_groups]


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_an_optimizer_of_shards_and_whole_parameters_steps_them_one_by_one(how: str) -> None:
    # D-08: torch refuses lists of both; on a GPU AdamW makes such lists by default
    expected, _ = _together(how)
    for found, settings in on_ranks(_together, 2, how):
        torch.testing.assert_close(found, expected, **TIGHT)
        assert settings == [True], "it is the user's again"


class Counted(Optimizer):
    """Steps with lists; its rate falls with the number of steps, which it keeps in its groups, as some optimizers
    do.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "foreach": None, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            moved = [one for one in group["params"] if one.grad is not None]
            rate = -group["lr"] / group["k"]
            if group["foreach"] is False:
                for one in moved:
                    one.add_(one.grad, alpha=rate)
            else:
                torch._foreach_add_(moved, [one.grad for one in moved], alpha=rate)


class Hooked(Together):
    """Its optimizer has hooks, one of which applies weight decay."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.seen: list[int] = []

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        self.optimizer = Counted(parameters) if self.how == "counted" else torch.optim.SGD(parameters, foreach=True)
        self.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self.note())
        self.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.decay())
        return self.optimizer

    def note(self) -> None:
        self.seen += [len(group["params"]) for group in self.optimizer.param_groups]

    @torch.no_grad()
    def decay(self) -> None:
        for group in self.optimizer.param_groups:
            for one in group["params"]:
                one.mul_(0.9)


def _hooked(how: str) -> tuple[Tensor, list[int], list[int]]:
    module = Hooked(how)
    strategy = "single_device" if not dist.is_initialized() else FSDPStrategy(ignored=["net.head.*", nn.LayerNorm])
    quiet(strategy=strategy).fit(module, loader(16, 4 if dist.is_initialized() else 8))
    return weights(module), module.seen, [group.get("k", 0) for group in module.optimizer.param_groups]


@pytest.mark.parametrize("how", ["counted", "hooks"])
def test_a_mixed_step_counts_as_one_step(how: str) -> None:  # D-08
    expected, seen, counts = _hooked(how)
    for found, seen_there, counts_there in on_ranks(_hooked, 2, how):
        torch.testing.assert_close(found, expected, **TIGHT)
        assert (seen_there, counts_there) == (seen, counts)


class Later(Together):
    """Trains its head, which is ignored, and from the second epoch on also the rest."""

    def configure_optimizers(self) -> Any:
        how: dict[str, Any] = {self.how: True}
        self.optimizer = torch.optim.AdamW(self.net.head.parameters(), lr=self.lr, eps=1e-5, **how)
        return self.optimizer

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizer.add_param_group({"params": list(self.net.blocks.parameters())})


def _later(how: str) -> Tensor:
    module = Later(how)
    strategy = "single_device" if not dist.is_initialized() else FSDPStrategy(ignored=["net.head.*", nn.LayerNorm])
    batch = 4 if dist.is_initialized() else 8
    quiet(strategy=strategy, max_epochs=2).fit(module, loader(16, batch))
    return weights(module)


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_shards_can_be_added_to_an_optimizer_of_whole_parameters(how: str) -> None:  # D-08
    expected = _later(how)
    for found in on_ranks(_later, 2, how):
        torch.testing.assert_close(found, expected, **TIGHT)


# Prefetching


class RecordsPrefetch(Block):
    """Records which units are being gathered while it computes."""

    ask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.ask("forward")
        x = super().forward(x)
        x.register_hook(lambda gradient: self.ask("backward"))
        return x.clone()


def _ahead(options: dict[str, Any]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    net = seeded(lambda: Deep(4))
    net.blocks = nn.ModuleList(RecordsPrefetch() for _ in range(4))
    strategy = FSDPStrategy(wrap=[RecordsPrefetch], **options)

    def ask(direction: str) -> None:
        assert strategy._sharded is not None
        groups = [_groups_of(module._get_fsdp_state())[0] for module in strategy._sharded.modules[1:]]
        coming = [number for number, group in enumerate(groups) if group._all_gather_result is not None]
        found[direction].append(coming)

    for block in net.blocks:
        block.ask = ask
    quiet(strategy=strategy, max_steps=1).fit(DeepRegression(net), loader(16, 4))
    return found


def test_how_far_ahead_units_are_gathered() -> None:
    # D-08: in the order of the module; by default torch gathers one ahead in the backward
    assert on_ranks(_ahead, 2, {})[0]["forward"] == [[], [], [], []]
    found = on_ranks(_ahead, 2, {"forward_prefetch": 2, "backward_prefetch": 2})[0]
    assert found["forward"] == [[1, 2], [2, 3], [3], []]
    assert found["backward"] == [[1, 2], [0, 1], [0], []]


# The dtypes of a policy


class Typed(Block):
    """Records the dtypes that it computes with."""

    def __init__(self, seen: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen["input"], self.seen["weight"] = x.dtype, self.up.weight.dtype
        return super().forward(x)


class InOneDtype(DeepRegression):
    """FSDP casts the whole batch, including targets; torch 2.11 has no backward for a loss of two dtypes."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        found = self.net(x)
        return nn.functional.mse_loss(found, y.to(found.dtype))


ENDS = ("net.stem", "net.head")


def _typed(policy: MixedPrecisionPolicy, precision: str) -> Any:
    seen: dict[str, Any] = {}
    net = seeded(Deep)
    net.blocks = nn.ModuleList(seeded(lambda: Typed(seen)) for _ in range(3))
    look = LambdaCallback(
        on_train_start=lambda *_: net.blocks[0].register_forward_hook(
            lambda module, args, output: seen.update(output=output.dtype)  # after the unit that is sharded
        ),
        on_before_optimizer_step=lambda trainer, module, optimizer: seen.update(
            gradient=module.net.stem.weight.grad.to_local().clone()
        ),
    )
    module = InOneDtype(net)
    # All blocks are units, so each casts the output of the previous one.
    strategy = FSDPStrategy(wrap=lambda name, module: isinstance(module, Typed) or name in ENDS, mixed_precision=policy)
    quiet(strategy=strategy, callbacks=look, max_steps=1, precision=precision).fit(module, loader(16, 4))
    return seen, {parameter.dtype for parameter in module.parameters()}


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtypes", "weight", "output", "rounded"),
    [
        ({}, FULL, FULL, False),
        ({"param_dtype": HALF}, HALF, HALF, None),  # reduced in that dtype; from torch 2.15 on in the parameters' own
        ({"param_dtype": HALF, "reduce_dtype": HALF}, HALF, HALF, True),
        ({"param_dtype": HALF, "reduce_dtype": FULL}, HALF, HALF, False),
        ({"param_dtype": HALF, "reduce_dtype": FULL, "output_dtype": FULL}, HALF, FULL, False),
        ({"reduce_dtype": HALF}, FULL, FULL, True),
    ],
    ids=str,
)
def test_each_dtype_of_a_policy(dtypes: dict[str, Any], weight: Any, output: Any, rounded: bool | None) -> None:
    # D-08: stored in fp32; gathered, reduced and output in the requested dtypes
    for seen, kept in on_ranks(_typed, 2, MixedPrecisionPolicy(**dtypes), "32-true"):
        assert kept == {FULL}
        assert seen["weight"] == weight
        assert seen["input"] == weight  # inputs are cast
        assert seen["output"] == output
        gradient = seen["gradient"]
        assert gradient.dtype == FULL
        # The mean of two is exact except for the dtype of the communication.
        assert rounded is None or torch.equal(gradient, gradient.to(HALF).float()) == rounded


class IgnoresOutput(Deep):
    """Runs its second block without using its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = x if number == 1 and block(x) is not None else block(x)
        return self.head(x)


def _ignored_output(policy: MixedPrecisionPolicy) -> Any:
    net = seeded(IgnoresOutput)
    before = [parameter.detach().clone() for parameter in net.blocks[1].parameters()]
    module = InOneDtype(net)
    quiet(strategy=FSDPStrategy(wrap=[Block], mixed_precision=policy), max_steps=2).fit(module, loader(16, 4))
    return weights(module), all(map(torch.equal, before, net.blocks[1].parameters()))


def test_a_unit_without_gradients_that_computes_in_another_dtype() -> None:
    # D-05, O-06: torch 2.15 keeps its gradients in the dtype of its shards, earlier versions in that of its weights
    (first, left_alone), (second, _) = on_ranks(_ignored_output, 2, MixedPrecisionPolicy(param_dtype=HALF))
    module = InOneDtype(seeded(IgnoresOutput))
    train_by_hand(module, global_batches(16, 8))
    assert left_alone
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(module), atol=2e-2, rtol=0)


def test_inputs_are_not_cast_if_the_policy_says_so() -> None:
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL, cast_forward_inputs=False)
    for seen, _ in on_ranks(_typed, 2, policy, "bf16-mixed"):
        assert (seen["input"], seen["weight"]) == (HALF, HALF)  # by autocast, in the previous layer


# Activation checkpointing: recomputed operations


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


def _save_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chosen = operation == OPERATIONS.tanh.default
    return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": [Attending]},
    "save_matmuls": {"activation_checkpointing": [Attending], "activation_policy": "save_matmuls"},
    "save_attention": {"activation_checkpointing": [Attending], "activation_policy": "save_attention"},
    "own": {"activation_checkpointing": [Attending], "activation_policy": _save_tanh},
}


def _operations(name: str) -> Any:
    net = seeded(Deep)
    net.blocks = seeded(lambda: nn.ModuleList(Attending() for _ in range(3)))
    module = DeepRegression(net)
    with Operations() as operations:
        quiet(strategy=FSDPStrategy(**POLICIES[name]), max_steps=1).fit(module, loader(16, 4))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    return [operations.counts[kind] for kind in ("addmm", attention, "tanh")], weights(module)


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    return {name: on_ranks(_operations, 2, name)[0] for name in POLICIES}


@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        # Three blocks with two products each, plus the stem and the head; the second product is not needed again.
        ("none", [8, 3, 3]),
        ("full", [11, 6, 6]),
        ("save_matmuls", [8, 3, 6]),
        ("save_attention", [11, 3, 6]),
        ("own", [11, 6, 3]),
    ],
)
def test_recomputed_operations(policy: str, counts: list[int], operations: dict[str, Any]) -> None:
    # D-07, D-08: full, by a named policy, or by a user-defined one
    assert operations[policy][0] == counts
    assert torch.equal(operations[policy][1], operations["none"][1])


class Twice(Tied):
    """Runs its blocks twice, and two of them share a weight."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Uncached(DeepRegression):
    """Under autocast a weight is cast at every use instead of once per step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.set_autocast_cache_enabled(False)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            torch.set_autocast_cache_enabled(True)


def _again(options: dict[str, Any], kind: type[DeepRegression]) -> Tensor:
    module = kind(seeded(Twice))
    quiet(strategy=FSDPStrategy(**options), precision="bf16-mixed").fit(module, loader(32, 4))
    return weights(module)


def test_a_cached_cast_is_repeated_in_recomputation() -> None:
    # D-07: a policy that identifies operations by their number must see the same ones both times
    plain = on_ranks(_again, 2, {}, Uncached)[0]
    options = {"activation_checkpointing": [Block], "activation_policy": "save_matmuls"}
    assert torch.equal(on_ranks(_again, 2, options, DeepRegression)[0], plain)


# Compilation


_graphs: list[str] = []


def _keep_graph(graph: Any, inputs: Any) -> Any:
    _graphs.append(graph.code)
    return graph.forward


def _compiled() -> Any:
    module = DeepRegression()
    strategy = FSDPStrategy(activation_checkpointing=[Block], compile={"backend": _keep_graph})
    quiet(strategy=strategy).fit(module, loader(32, 4))
    return _graphs, weights(module)


def test_compilation_is_around_checkpointing_and_within_sharding() -> None:
    # D-09: a block's graph includes the checkpointed part, and no gather
    graphs, found = on_ranks(_compiled, 2, timeout=120)[0]
    assert graphs
    for code in graphs:
        assert "checkpoint" in code
        assert "all_gather" not in code
    torch.testing.assert_close(found, weights(train_by_hand(DeepRegression(), global_batches(32, 8))), **TIGHT)


# A backend without division


def _divided(reduce_dtype: torch.dtype) -> Any:
    refused = ""
    try:
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
    except RuntimeError as error:
        refused = str(error)
    module = DeepRegression()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    quiet(strategy=FSDPStrategy(mixed_precision=policy)).fit(module, loader(36, 4))
    return refused, weights(module)


@pytest.mark.parametrize(("reduce_dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=str)
def test_gloo_divides_without_a_premultiplied_sum(reduce_dtype: torch.dtype, atol: float) -> None:
    # D-06: by a factor that is no power of two
    expected = weights(train_by_hand(DeepRegression(), global_batches(36, 12)))
    for refused, found in on_ranks(_divided, 3, reduce_dtype):
        assert refused
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)


class _Reads(TorchDispatchMode):
    """Counts copies from host values and reads of device values, which wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (OPERATIONS._local_scalar_dense, OPERATIONS.lift_fresh)
        return func(*args, **(kwargs or {}))


def _averaged(unused: bool) -> tuple[int, int, list[float | None]]:
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(3)]
    for number, parameter in enumerate(parameters):
        if not unused or number != 1 or rank == 1:
            parameter.grad = torch.tensor(float(rank + number))
    if unused:
        parameters[2].grad = None
    lists = 0
    original = Tensor.tolist

    def counted(self: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return original(self)

    Tensor.tolist = counted  # type: ignore[method-assign, assignment]
    try:
        with _Reads() as reads:
            ReplicatedParameters(parameters, dist.group.WORLD).average()
    finally:
        Tensor.tolist = original  # type: ignore[method-assign]
    return reads.count, lists, [None if one.grad is None else float(one.grad) for one in parameters]


def test_single_numbers_are_averaged_without_waiting_for_the_device() -> None:  # O-04
    assert on_ranks(_averaged, 2, False) == [(0, 0, [0.5, 1.5, 2.5])] * 2
    # What this rank has not used is read: a gradient is dropped only if no rank has used the parameter.
    assert [(lists, found) for _, lists, found in on_ranks(_averaged, 2, True)] == [(1, [0.5, 1.0, None])] * 2
