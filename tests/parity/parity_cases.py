"""The training cases, shared by the reference loop and the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from parity_nets import (
    PADDING,
    Batch,
    FrozenMlp,
    Gan,
    Mlp,
    Net,
    NormedMlp,
    OrphanMlp,
    SparseBag,
    TiedSamples,
    TiedTokens,
    numbers,
    tokens,
)
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from drivetrain.data import order

SEED = 5
"""Of the order of samples and of initialisation."""

Schedulers = list[tuple[Any, str]]
"""Each with its interval, "step" or "epoch"."""


def adamw(net: Net) -> list[Optimizer]:
    # The default eps amplifies rounding in gradients that are nearly zero (acceptance B-01). The fused kernel takes two
    # thirds of the time under FSDP. Cases with optimizers of their own step one parameter at a time.
    return [AdamW(net.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1, fused=True)]


def sgd(net: Net) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=0.1)]


def no_schedule(optimizers: Sequence[Optimizer]) -> Schedulers:
    return []


@dataclass(frozen=True)
class Case:
    """A training that must give the same results under every strategy.

    Attributes:
        name: the name of the row in the matrix.
        shows: the acceptance rows, and a short description.
        net: builds the network.
        data: builds the data set's tensors; their first dimension is the sample.
        batch: samples of a global micro-batch: W * b.
        epochs: to train.
        optimize: builds the optimizers.
        schedule: builds the schedulers.
        accumulate: micro-batches per window.
        clip: value and algorithm.
        weighs: the module overrides ``batch_weight``.
        by_rank: why the reference computes each rank's micro-batch separately and averages, instead of one big batch;
            empty otherwise.
        worlds: also run on four ranks.
        own_parts: for every rank that reads a stream of its own, the samples of its batches.
        atol: absolute tolerance of losses, norms, weights and optimizer state.
        why: the reason for a tolerance wider than 1e-5.
        compares_state: also compare the optimizer state.
        automatic: False for manual optimization.
    """

    name: str
    shows: str
    net: Callable[[], Net] = Mlp
    data: Callable[[], Batch] = lambda: numbers(80)
    batch: int = 8
    epochs: int = 2
    optimize: Callable[[Any], list[Optimizer]] = adamw
    schedule: Callable[[Sequence[Optimizer]], Schedulers] = no_schedule
    accumulate: int = 1
    clip: tuple[float, str] | None = None
    weighs: bool = False
    by_rank: str = ""
    four_ranks: bool = False
    own_parts: tuple[tuple[int, ...], ...] = ()
    atol: float = 1e-5
    why: str = ""
    compares_state: bool = True
    automatic: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def position_of(samples: int, start: int, stop: int) -> torch.Tensor:
    """Return the samples that the first epoch deals at positions ``start`` to ``stop``."""
    return order(samples, SEED, 0)(torch.arange(start, stop))


def uneven_tokens() -> Batch:
    """Return samples with one to five tokens, and with none in some stretches of the first epoch."""
    words, labels, indices = tokens(80)
    keep = torch.randint(1, 6, (80,), generator=torch.Generator().manual_seed(3))
    labels = labels.masked_fill(torch.arange(5) >= keep[:, None], PADDING)
    # Micro-batches are 8 positions: 4 for each of two ranks, or 2 for each of four ranks.
    for start, stop in (
        (20, 24),  # one rank's part of the third
        (32, 40),  # the whole fifth, the first of a window of two
        (46, 48),  # one of four ranks in the sixth
        (72, 76),  # rank 0's part of the last
    ):
        labels[position_of(80, start, stop)] = PADDING
    return words, labels, indices


def weightless_window_tokens() -> Batch:
    """Return tokens of which the second window of two micro-batches has none."""
    words, labels, indices = uneven_tokens()
    labels[position_of(80, 16, 32)] = PADDING
    return words, labels, indices


def overflowing_numbers() -> Batch:
    """Return data in which one sample, dealt to the last rank in the fourth step, overflows in fp16."""
    x, y, indices = numbers(80)
    x = x.clone()
    x[position_of(80, 31, 32)] = 1e30
    # Small enough that nothing else overflows at the initial scale, 65536.
    return x, 0.3 * y, indices


def groups(net: Mlp) -> list[Optimizer]:
    parts: list[dict[str, Any]] = [
        {"params": net.body.parameters(), "lr": 2e-3, "weight_decay": 0.0},
        {"params": net.head.parameters(), "betas": (0.8, 0.9)},
    ]
    return [AdamW(parts, lr=1e-2, eps=1e-5, weight_decay=0.3)]


def matrices_and_rest(net: Net) -> list[Optimizer]:
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in net.parameters() if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=2e-2), AdamW(rest, lr=1e-2, eps=1e-5)]


def body_and_head(net: Mlp) -> list[Optimizer]:
    return [AdamW(net.body.parameters(), lr=1e-2, eps=1e-5), SGD(net.head.parameters(), lr=0.1, momentum=0.9)]


def lbfgs(net: Net) -> list[Optimizer]:
    return [torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")]


def both_players(net: Gan) -> list[Optimizer]:
    return [
        AdamW(net.generator.parameters(), lr=1e-2, eps=1e-5),
        AdamW(net.discriminator.parameters(), lr=1e-2, eps=1e-5),
    ]


def warm_up(optimizers: Sequence[Optimizer]) -> Schedulers:
    return [(LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6)), "step") for optimizer in optimizers]


def by_epoch(optimizers: Sequence[Optimizer]) -> Schedulers:
    return [(StepLR(optimizer, step_size=1, gamma=0.5), "epoch") for optimizer in optimizers]


def few() -> Batch:
    """Five steps, for effects that show at once."""
    return numbers(40)


CASES = [
    Case("plain", "B-01, B-11: 10 steps of AdamW", epochs=1, four_ranks=True),
    Case("clipped by norm", "B-05: clipping is active", clip=(0.3, "norm"), data=few, epochs=1),
    Case("clipped by value", "B-05: clipping is active", clip=(0.02, "value"), data=few, epochs=1),
    Case(
        "accumulated",
        "B-02, B-09: K=4 over 10 micro-batches, steps after 4, 8 and 10",
        accumulate=4,
        epochs=1,
        schedule=warm_up,
        four_ranks=True,
    ),
    Case(
        "accumulated, clipped",
        "B-02, B-05: the norm is of the whole window",
        accumulate=4,
        clip=(0.3, "norm"),
        epochs=1,
    ),
    Case(
        "token-weighted",
        "B-03, B-21: uneven weights over ranks and micro-batches, some zero with a NaN loss; K=2",
        net=TiedTokens,
        data=uneven_tokens,
        epochs=1,
        accumulate=2,
        weighs=True,
        four_ranks=True,
    ),
    Case(
        "zero-weight window",
        "B-21: no step, no NaN, no scheduler step",
        net=TiedTokens,
        data=weightless_window_tokens,
        epochs=1,
        accumulate=2,
        weighs=True,
        schedule=warm_up,
    ),
    Case(
        "zero-weight micro-batch",
        "B-21: no step for it, also in one process, where a window is one micro-batch",
        net=TiedTokens,
        data=weightless_window_tokens,
        epochs=1,
        weighs=True,
        schedule=warm_up,
    ),
    Case("tied weights", "B-07", net=TiedSamples, data=lambda: tokens(40), epochs=1),
    Case("frozen parameters", "B-08: no gradient, no decay, no state", net=FrozenMlp, data=few, epochs=1),
    Case("unused parameter", "B-08, C-01: no gradient, no decay, no state", net=OrphanMlp, data=few, epochs=1),
    Case("parameter groups", "B-08", optimize=groups, data=few, epochs=1),
    Case("scheduler by step", "B-09", schedule=warm_up, data=lambda: numbers(64), epochs=1),
    Case("scheduler by epoch", "B-09", schedule=by_epoch, data=lambda: numbers(24), epochs=3),
    Case(
        "BatchNorm",
        "B-08: normalised over each rank's samples; running statistics are rank 0's",
        net=NormedMlp,
        batch=16,  # four samples per rank even on four ranks: with two, normalization amplifies rounding a thousandfold
        epochs=1,
        by_rank="BatchNorm sees a rank's samples, not the global batch's",
    ),
    Case(
        "uneven data",
        "B-04: 102 samples in global batches of 32",
        data=lambda: numbers(102),
        batch=32,
        epochs=1,
        four_ranks=True,
    ),
    Case(
        "uneven data, joining ranks",
        "B-04: the last global batch has 1 sample; ranks without a sample join",
        data=lambda: numbers(65),
        batch=32,
        four_ranks=True,
    ),
    Case(
        "uneven data, accumulated",
        "B-02, B-04: a joining rank within a short last window",
        data=lambda: numbers(81),
        batch=16,
        epochs=1,
        accumulate=4,
        four_ranks=True,
    ),
    Case(
        "several optimizers",
        "B-17: Muon for the matrices, AdamW for the rest, clipped together",
        optimize=matrices_and_rest,
        clip=(0.3, "norm"),
        data=few,
        epochs=1,
        by_rank="Muon computes in bf16, which turns the last bit of a gradient into a percent of its update",
    ),
    Case(
        "LBFGS",
        "B-16: strong_wolfe over windows of two micro-batches, a joining rank in the last",
        optimize=lbfgs,
        epochs=1,
        accumulate=2,
        data=lambda: numbers(81),
        batch=16,
        four_ranks=True,
        compares_state=False,
    ),
    Case(
        "iterable data",
        "B-04: iterables of different length, whose ranks exchange the weights of micro-batches; K=2",
        own_parts=((4, 4, 4, 2), (4, 3, 4, 4, 4, 4, 1), (2,), (4, 4, 4, 4, 4)),
        epochs=1,
        accumulate=2,
        four_ranks=True,
    ),
    Case(
        "GAN",
        "B-13, B-04: manual optimization, two optimizers that step alternately; a joining rank in the last window",
        net=Gan,
        optimize=both_players,
        automatic=False,
        data=lambda: numbers(65),
        batch=32,
        epochs=1,
        four_ranks=True,
    ),
    Case(
        "sparse embedding",
        "B-20",
        net=SparseBag,
        data=lambda: tokens(40),
        optimize=sgd,
        accumulate=2,
        clip=(0.3, "norm"),
        epochs=1,
    ),
]

OVERFLOW = Case(
    "fp16 overflow on one rank",
    "B-06: skipped everywhere, the scale halved, no scheduler step",
    data=overflowing_numbers,
    epochs=1,
    schedule=warm_up,
)
SEVERAL = Case(
    "two optimizers, clipped",
    "B-15: one scaler update a step",
    optimize=body_and_head,
    clip=(0.3, "norm"),
    epochs=1,
)

BY_NAME = {case.name: case for case in [*CASES, OVERFLOW, SEVERAL]}
