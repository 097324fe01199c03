"""Weights that are not split but act on split heads, under tensor parallelism: P-07."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Experts
from small_runs import TIGHT, Regression, each, failing, global_batches, loader, quiet, train_by_hand, weights
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import TrainModule
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp._unsplit_gradients import WINDOWS, UnsplitGradients
from worlds import on_ranks

WIDTH, HEAD = 8, 4
BLOCK = "blocks.*"
SPLIT: dict[str, Any] = {
    f"{BLOCK}.query": ColwiseParallel(),
    f"{BLOCK}.key": ColwiseParallel(),
    f"{BLOCK}.value": ColwiseParallel(),
    f"{BLOCK}.out": RowwiseParallel(),
}
HEADS = SequenceParallel(sequence_dim=2, use_local_output=True)  # (samples, tokens, heads, head)
SUMMED = {**SPLIT, f"{BLOCK}.query_norm": HEADS, f"{BLOCK}.key_norm": HEADS}
GATHERED = {
    **dict.fromkeys(list(SPLIT)[:3], ColwiseParallel(output_layouts=Replicate())),
    f"{BLOCK}.out": RowwiseParallel(input_layouts=Replicate()),
}
TOKENS = {
    "blocks": [
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
        PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    ],
    **dict.fromkeys(list(SPLIT)[:3], ColwiseParallel(input_layouts=Shard(1))),
    f"{BLOCK}.out": RowwiseParallel(output_layouts=Shard(1)),
    f"{BLOCK}.query_norm": HEADS,
    f"{BLOCK}.key_norm": HEADS,
}
"""Also splits the tokens between the layers, but for the blocks' first norm."""
SEQUENCE = {**TOKENS, f"{BLOCK}.norm": SequenceParallel()}
NORMS = [f"net.blocks.{block}.{norm}.weight" for block in range(2) for norm in ("query_norm", "key_norm")]


class Attention(nn.Module):
    """Normalizes queries and keys by head, as Qwen3 does: (samples, tokens, width) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, HEAD)) for layer in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in (self.query_norm(q), self.key_norm(k), v))
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attending(Regression):
    """Blocks of attention, split by ``plan`` if it is not None."""

    def __init__(self, plan: dict[str, Any] | None = None) -> None:
        super().__init__(lr=0.01)
        self.plan = plan
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.net = nn.ModuleDict(
                    {
                        "stem": nn.Linear(1, WIDTH),
                        "blocks": nn.Sequential(Attention(), Attention()),
                        "head": nn.Linear(WIDTH, 1),
                    }
                )
        if self.plan is not None:
            for name, styles in self.plan.items():
                for style in styles if isinstance(styles, list) else [styles]:
                    parallelize_module(self.net, self.device_mesh["tensor"], {name: style})

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = self.net["blocks"](self.net["stem"](x.unsqueeze(-1)))
        return nn.functional.mse_loss(self.net["head"](hidden).mean(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5)


class Poisoned(Attending):
    """Has an infinite loss in the first micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (float("inf") if batch_idx == 0 else 1.0)


class Manual(Attending):
    """Steps the optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self._each_optimizer():
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    def _each_optimizer(self) -> list[Any]:
        found = self.optimizers()
        return found if isinstance(found, list) else [found]


class Alternating(Manual):
    """Steps an optimizer of the weights around the blocks first, and then one of the blocks."""

    def configure_optimizers(self) -> Any:
        parts = (self.net["stem"], self.net["head"]), (self.net["blocks"],)
        return [torch.optim.SGD([p for one in part for p in one.parameters()], lr=0.01) for part in parts]


class Opening(Attending):
    """The output of attention is zero before the first step, and stays so if ``closed``."""

    closed = False

    def configure_model(self) -> None:
        new = self.net is None
        super().configure_model()
        for block in self.net["blocks"] if new else ():
            nn.init.zeros_(block.out.weight)
            block.out.weight.requires_grad_(not self.closed)


class Closed(Opening):
    closed = True


class Unfreezing(Attending):
    """Trains the norms of queries and keys from the second epoch."""

    def configure_model(self) -> None:
        super().configure_model()
        self._train_norms(False)

    def on_train_epoch_start(self) -> None:
        self._train_norms(self.trainer.current_epoch > 0)

    def _train_norms(self, train: bool) -> None:
        for name, parameter in self.named_parameters():
            if name in NORMS:
                parameter.requires_grad_(train)


class Scaled(Attending):
    """Scales the queries by a weight that is replicated over the group; its gradient is summed."""

    def configure_model(self) -> None:
        new = self.net is None
        super().configure_model()
        for block in self.net["blocks"]:
            if new:
                block.query_scale = nn.Parameter(torch.linspace(0.5, 1.5, HEAD))
                block.query_norm = _Scale(block)
            if self.plan is not None:
                mesh = self.device_mesh["tensor"]
                block.query_scale = nn.Parameter(distribute_tensor(block.query_scale.detach(), mesh, [Replicate()]))


class _Scale(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._owner = [owner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self._owner[0].query_scale
        return x * (scale.to_local(grad_placements=[Partial()]) if isinstance(scale, DTensor) else scale)


def _refused(kind: type[Attending], options: dict[str, Any], settings: dict[str, Any]) -> Any:
    plan = options.pop("plan", SPLIT)
    fit = quiet(strategy=FSDPStrategy(**{"tensor_parallel": 2, **options}), **settings)
    with failing() as error:
        fit.fit(kind(plan), loader(48, 4))
    return error, fit.global_step


def _names(error: dict[str, str]) -> list[str]:
    assert error["type"] == "ConfigurationError", error
    listed = error["text"].partition("the gradients of ")[2].partition(" differ between")[0]
    return [name.strip("'") for name in listed.split(", ")]


ON_TWO: list[tuple[Any, ...]] = [
    (Attending, {}, {}),
    (Attending, {"wrap": []}, {"precision": "bf16-mixed"}),
    (Attending, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    (Attending, {"ignored": ["*query_norm*"]}, {}),
    (Manual, {}, {}),
]
ON_FOUR: list[tuple[Any, ...]] = [
    (Attending, {}, {"precision": "16-mixed"}),
    (Attending, {"sharding": "hybrid", "replicate_size": 2}, {}),
    (Attending, {"cpu_offload": True}, {}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_norms_of_split_heads_are_refused_before_the_first_step(ranks: int, cases: list[Any]) -> None:
    # P-07: previously each rank trained its own copy, in silence
    for refused in on_ranks(each, ranks, _refused, *cases, timeout=150):
        for error, step in refused:
            assert _names(error) == NORMS
            assert step == 0
            assert "SequenceParallel(sequence_dim=2, use_local_output=True)" in error["text"]


def test_a_gradient_that_shows_nothing_is_compared_in_a_later_window() -> None:
    # P-07: it is zero, is not finite, or is None since the weight is frozen or its optimizer's turn comes later
    cases: list[tuple[Any, ...]] = [
        (Opening, {}, {}),
        (Poisoned, {}, {"precision": "16-mixed"}),
        (Unfreezing, {}, {"max_epochs": 2, "limit_train_batches": 3}),
        (Alternating, {}, {}),
    ]
    for refused in on_ranks(each, 2, _refused, *cases):
        assert [_names(error) for error, _ in refused] == [NORMS] * 4
        assert [step for _, step in refused] == [1, 0, 3, 0]


def test_under_sequence_parallelism_a_norm_that_sees_some_tokens_only_is_refused() -> None:
    # P-07: the plan has no style for it
    for ((error, step),) in on_ranks(each, 2, _refused, (Attending, {"plan": TOKENS}, {})):
        assert _names(error) == ["net.blocks.0.norm.weight", "net.blocks.1.norm.weight"]
        assert step == 0


def _trained(kind: type[Attending], plan: Any, options: dict[str, Any], settings: dict[str, Any]) -> torch.Tensor:
    module = kind(plan)
    quiet(strategy=FSDPStrategy(**{"tensor_parallel": 2, **options}), **settings).fit(module, loader(48, 8))
    return weights(module)


def test_what_the_error_advises_equals_one_process() -> None:
    # P-07
    cases: list[tuple[Any, ...]] = [
        (Attending, SUMMED, {}, {}),
        (Attending, GATHERED, {}, {}),
        (Attending, SEQUENCE, {}, {}),
        (Scaled, SUMMED_KEYS, {}, {}),
    ]
    for found in on_ranks(each, 2, _trained, *cases):
        for (kind, *_), trained in zip(cases, found, strict=True):
            reference = kind()
            reference.configure_model()
            train_by_hand(reference, global_batches(48, 8))
            torch.testing.assert_close(trained, weights(reference), **TIGHT)


def _differences(kind: type[Attending], plan: Any, options: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """Train, and return the largest relative difference of each window that was compared."""
    found: list[float] = []
    squares = UnsplitGradients._squares

    def watched(self: UnsplitGradients, parameter: nn.Parameter) -> torch.Tensor:
        difference, size = (result := squares(self, parameter)).tolist()
        found.append(difference / size if size else 0.0)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnsplitGradients, "_squares", watched)
        _trained(kind, plan, options, settings)
    return found


def test_equal_gradients_do_not_differ_by_rounding() -> None:
    # P-07: biases of split layers, norms, embeddings and experts that some ranks do not use
    hybrid = {"sharding": "hybrid", "replicate_size": 2}
    cases: list[tuple[Any, ...]] = [
        (Attending, SEQUENCE, hybrid, {"precision": precision}) for precision in ("32-true", "bf16-mixed", "bf16-true")
    ]
    cases += [(Routed, ROUTED, {"wrap": []}, {}), (Alternating, SUMMED, {}, {})]
    for found in on_ranks(each, 4, _differences, *cases, timeout=150):
        assert [max(differences) for differences in found] == [0.0] * len(cases)


class Dropping(Attending):
    """Drops out some of the blocks' outputs."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net["blocks"]:
            block.out = nn.Sequential(block.out, nn.Dropout(0.3))


class Rounding(Attending):
    """Has whole attention; each rank rounds the gradients of the keys in its own way, as other kernels do."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net["blocks"]:
            block.key_norm = nn.Identity()
            block.key.register_full_backward_pre_hook(_rounded)


def _rounded(layer: nn.Module, gradients: Any) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return tuple(one * (1 + 1e-7 * torch.randn(one.shape, generator=generator)) for one in gradients)


def _trains(kind: type[Attending], plan: Any) -> str:
    with failing() as error:
        _trained(kind, plan, {}, {})
    return error.get("text", "")


def test_dropout_needs_no_seed() -> None:
    # P-07: the ranks of a group read the same data and drew other masks, unless the run had a seed
    for found in on_ranks(_differences, 4, Dropping, SUMMED, {}, {}, timeout=150):
        assert max(found) == 0.0


def test_a_gradient_of_rounding_errors_shows_nothing() -> None:
    # P-07: attention does not depend on the bias of its keys, so the bias's gradient is zero but for rounding
    for text in on_ranks(_trains, 2, Rounding, {"stem": ColwiseParallel(output_layouts=Replicate())}):
        assert text == ""


class Routed(Attending):
    """Experts instead of blocks; ranks may use different ones."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Experts(unused=True)
        for name, style in (self.plan or {}).items():
            parallelize_module(self.net, self.device_mesh["tensor"], {name: style})

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


ROUTED = {"experts.*.up": ColwiseParallel(), "experts.*.down": RowwiseParallel()}
SUMMED_KEYS = {**SPLIT, f"{BLOCK}.key_norm": HEADS}


def _comparisons(kind: type[Attending]) -> int:
    """Train for twelve windows, and return in how many of them gradients were compared."""
    count = 0
    compare = UnsplitGradients.compare

    def counted(self: UnsplitGradients) -> None:
        nonlocal count
        count += 1
        compare(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnsplitGradients, "compare", counted)
        _trained(kind, SUMMED, {}, {"max_epochs": 2})
    return count


def test_gradients_are_compared_in_the_first_window_only() -> None:
    # P-07, H-01: gradients that stay zero are given up after nine windows
    for counts in on_ranks(each, 2, _comparisons, (Attending,), (Closed,)):
        assert counts == [1, WINDOWS]


# A model of Hugging Face


class Qwen3(TrainModule):
    """A tiny Qwen3, split by its own plan; the norms of queries and keys are summed on request."""

    def __init__(self, split: bool = False, summed: bool = False) -> None:
        super().__init__()
        self.split, self.summed = split, summed
        self.net: Any = None

    def configure_model(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        if self.net is None:
            sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
            heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.net = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=8))
        if self.split:
            styles: dict[str, Any] = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
            if self.summed:
                styles["replicated_with_grad_allreduce"] = HEADS
            plan = self.net.config.base_model_tp_plan
            known = {name: styles[style] for name, style in plan.items() if style in styles}
            parallelize_module(self.net.model, self.device_mesh["tensor"], known)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)


def _texts() -> TensorDataset:
    return TensorDataset(torch.randint(0, 32, (20, 8), generator=torch.Generator().manual_seed(3)))


def _qwen3(summed: bool) -> Any:
    module = Qwen3(split=True, summed=summed)
    with failing() as error:
        quiet(strategy=FSDPStrategy(tensor_parallel=2)).fit(module, DataLoader(_texts(), batch_size=4))
    return error, weights(module)


def test_qwen3_with_its_plan() -> None:
    # P-07
    pytest.importorskip("transformers")
    reference = Qwen3()
    reference.configure_model()
    train_by_hand(reference, list(DataLoader(_texts(), batch_size=4)))
    for (error, _), (other, trained) in on_ranks(each, 2, _qwen3, (False,), (True,), timeout=150):
        names = [f"net.model.layers.{n}.self_attn.{norm}.weight" for n in range(2) for norm in ("q_norm", "k_norm")]
        assert _names(error) == names
        assert other["type"] == "nothing was raised", other
        torch.testing.assert_close(trained, weights(reference), **TIGHT)
