"""Gradients under tensor parallelism whose parts a plan leaves unsummed: norms of split heads (P-07)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import TIGHT, Regression, each, failing, global_batches, loader, quiet, train_by_hand, weights
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn.functional import scaled_dot_product_attention

from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

WIDTH, HEAD = 8, 4
BLOCK = "blocks.*"
SPLIT: dict[str, Any] = {
    f"{BLOCK}.query": parallel.ColwiseParallel(),
    f"{BLOCK}.key": parallel.ColwiseParallel(),
    f"{BLOCK}.value": parallel.ColwiseParallel(),
    f"{BLOCK}.out": parallel.RowwiseParallel(),
}
HEADS = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)  # (samples, tokens, heads, head)
SUMMED = {**SPLIT, f"{BLOCK}.query_norm": HEADS, f"{BLOCK}.key_norm": HEADS}
TOKENS = {
    "blocks": [
        parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
        parallel.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    ],
    **dict.fromkeys(list(SPLIT)[:3], parallel.ColwiseParallel(input_layouts=Shard(1))),
    f"{BLOCK}.out": parallel.RowwiseParallel(output_layouts=Shard(1)),
    f"{BLOCK}.query_norm": HEADS,
    f"{BLOCK}.key_norm": HEADS,
}
"""Also splits the tokens between the layers, but for the blocks' first norm."""
SEQUENCE = {**TOKENS, f"{BLOCK}.norm": parallel.SequenceParallel()}
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
                stem, blocks = nn.Linear(1, WIDTH), nn.Sequential(Attention(), Attention())
                self.net = nn.ModuleDict({"stem": stem, "blocks": blocks, "head": nn.Linear(WIDTH, 1)})
        if self.plan is not None:
            for name, styles in self.plan.items():
                for style in styles if isinstance(styles, list) else [styles]:
                    parallel.parallelize_module(self.net, self.device_mesh["tensor"], {name: style})

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
    """Steps the optimizers itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        found = self.optimizers()
        for optimizer in found if isinstance(found, list) else [found]:
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()


class Alternating(Manual):
    """Steps an optimizer of the weights around the blocks first, and then one of the blocks."""

    def configure_optimizers(self) -> Any:
        parts = (self.net["stem"], self.net["head"]), (self.net["blocks"],)
        return [torch.optim.SGD([p for one in part for p in one.parameters()], lr=0.01) for part in parts]


class Opening(Attending):
    """The output of attention is zero before the first step."""

    def configure_model(self) -> None:
        new = self.net is None
        super().configure_model()
        for block in self.net["blocks"] if new else ():
            nn.init.zeros_(block.out.weight)


class Unfreezing(Attending):
    """Trains the norms of queries and keys from the second epoch."""

    def on_fit_start(self) -> None:
        self.on_train_epoch_start()

    def on_train_epoch_start(self) -> None:
        for name, parameter in self.named_parameters():
            if name in NORMS:
                parameter.requires_grad_(self.trainer.current_epoch > 0)


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


def _trained(kind: type[Attending], plan: Any, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Train; return the error and the number of steps, with the weights."""
    module, fit = kind(plan), quiet(strategy=FSDPStrategy(**{"tensor_parallel": 2, **options}), **settings)
    with failing() as error:
        fit.fit(module, loader(48, 8))
    return error, fit.global_step, None if error["text"] else weights(module)


def _names(error: dict[str, str]) -> list[str]:
    assert error["type"] == "ConfigurationError", error
    listed = error["text"].partition("the gradients of ")[2].partition(" differ between")[0]
    return [name.strip("'") for name in listed.split(", ")]


REPLICATED: dict[str, Any] = {"sharding": "hybrid", "replicate_size": 2}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (
            2,
            [
                (Attending, SPLIT, {}, {}),
                (Attending, SPLIT, {"wrap": []}, {"precision": "bf16-mixed"}),
                (Attending, SPLIT, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
                (Attending, SPLIT, {"ignored": ["*query_norm*"]}, {}),
                (Manual, SPLIT, {}, {}),
            ],
        ),
        (
            4,
            [
                (Attending, SPLIT, {}, {"precision": "16-mixed"}),
                (Attending, SPLIT, REPLICATED, {}),
                (Attending, SPLIT, {"cpu_offload": True}, {}),
            ],
        ),
    ],
)
def test_norms_of_split_heads_are_refused_before_the_first_step(ranks: int, cases: list[Any]) -> None:  # P-07
    for refused in on_ranks(each, ranks, _trained, *cases, timeout=150):
        for error, step, _ in refused:
            assert _names(error) == NORMS
            assert step == 0
            assert "SequenceParallel(sequence_dim=2, use_local_output=True)" in error["text"]


def test_a_gradient_that_shows_nothing_is_compared_in_a_later_window() -> None:
    # P-07: it is zero, is not finite, or is None since the weight is frozen or its optimizer's turn comes later
    cases: Any = [
        (Opening, SPLIT, {}, {}),
        (Poisoned, SPLIT, {}, {"precision": "16-mixed"}),
        (Unfreezing, SPLIT, {}, {"max_epochs": 2, "limit_train_batches": 3}),
        (Alternating, SPLIT, {}, {}),
        (Attending, TOKENS, {}, {}),  # sequence parallelism, without a style for a norm that sees some tokens only
    ]
    for *refused, (error, step, _) in on_ranks(each, 2, _trained, *cases):
        assert [_names(one) for one, *_ in refused] == [NORMS] * 4
        assert [steps for _, steps, _ in refused] == [1, 0, 3, 0]
        assert _names(error) == ["net.blocks.0.norm.weight", "net.blocks.1.norm.weight"]
        assert step == 0


def test_equal_gradients_are_accepted_and_what_the_error_advises_equals_one_process() -> None:
    # P-07: biases of split layers and norms
    reference = Attending()
    reference.configure_model()
    train_by_hand(reference, global_batches(48, 8))
    # Attention does not depend on the bias of its keys, so the bias's gradient is zero but for rounding.
    whole = {"stem": parallel.ColwiseParallel(output_layouts=Replicate())}
    cases: Any = [(Attending, SUMMED, {}, {}), (Attending, SEQUENCE, {}, {}), (Rounding, whole, {}, {})]
    for found in on_ranks(each, 2, _trained, *cases):
        assert not [error for error, *_ in found if error["text"]]
        for _, _, held in found[:2]:
            torch.testing.assert_close(held, weights(reference), **TIGHT)
    cases = [
        *[(Attending, SEQUENCE, REPLICATED, {"precision": precision}) for precision in ("32-true", "bf16-mixed")],
        (Alternating, SUMMED, {}, {}),
        (Dropping, SUMMED, {}, {}),  # ranks of a group draw the same masks, without a seed of the run too
    ]
    for found in on_ranks(each, 4, _trained, *cases, timeout=150):
        assert not [error for error, *_ in found if error["text"]]
