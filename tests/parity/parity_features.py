"""The features of the matrix: each is a program that every strategy trains, in full precision or in the one it states.

A new feature is added by a row here, and a new precision by a row in `PRECISIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oracle.program import Average, Change, Data, Log, Net, Optimizer, Program, Resume, Scheduler, Turn, Validation


@dataclass(frozen=True)
class Feature:
    name: str  # the name of the row
    shows: str  # the ids of behaviours, and a short description
    program: Program  # what is trained; its data has the batch size of a global micro-batch, which the ranks share
    four_ranks: bool = False  # also run on four ranks
    # why the ranks together do not equal one process that trains on each window as one big batch; empty if they do
    by_rank: str = ""
    compares_state: bool = True  # also compare the optimizer state

    def on(self, strategy: str, ranks: int, tensor_parallel: int, precision: str) -> Program:
        """Return the program under a strategy, on ``ranks`` ranks of ``tensor_parallel`` processes each."""
        data = replace(self.program.data, batch=self.program.data.batch // ranks)
        resume = self.program.resume and replace(self.program.resume, strategy=strategy, ranks=ranks)
        settings = {"strategy": strategy, "ranks": ranks, "tensor_parallel": tensor_parallel, "precision": precision}
        return replace(self.program, data=data, resume=resume, **settings)  # type: ignore[arg-type]

    def as_one_batch(self) -> Program:
        """Return the program in one process, with every window as one batch."""
        batch = self.program.data.batch * self.program.accumulate
        return replace(self.program, data=replace(self.program.data, batch=batch), accumulate=1)


# The default eps amplifies rounding in gradients that are nearly zero (B-01). The fused kernel takes two thirds of the
# time under FSDP.
ADAMW = Optimizer("adamw", fused=True, eps=1e-5)
STEPWISE = (Scheduler("warmup", "step"),)


def numbers(samples: int, batch: int = 8, shuffle: bool = True) -> Data:
    return Data(samples=samples, batch=batch, shuffle=shuffle)


def tokens(samples: int, *without: tuple[int, int]) -> Data:
    """Return samples with one to five tokens, in order and in micro-batches of eight, and with none in some ranges."""
    return Data(samples=samples, batch=8, without_tokens=without)


def mlp(data: Data = numbers(24), net: Net = Net("deep_mlp"), **settings: object) -> Program:  # noqa: B008
    program = Program(net=net, data=data, optimizers=(ADAMW,), seed=5, measures_norms=True)
    return replace(program, **settings)  # type: ignore[arg-type]


def tied(data: Data, **settings: object) -> Program:
    return mlp(data, Net("mixer", tied=True), **settings)


FEATURES = [
    Feature("plain", "B-01, B-11: 4 steps of AdamW", mlp(numbers(128, 32))),
    Feature(
        "clipped by norm",
        "B-04, B-05: clipping is active; 70 samples in global batches of 32",
        mlp(numbers(70, 32), clip=0.1),
    ),
    Feature("clipped by value", "B-05: clipping is active", mlp(clip=0.02, clip_by="value")),
    Feature(
        "accumulated",
        "B-02, B-09: K=3 over 5 micro-batches, steps after 3 and 5; a scheduler by step",
        mlp(numbers(40), accumulate=3, schedulers=STEPWISE),
    ),
    Feature(
        "token-weighted",
        "B-03, B-05, B-21: uneven weights over ranks and micro-batches, some zero with a NaN loss; K=2, clipped",
        # Without tokens: one rank's part of the first micro-batch; the third one, the first of a window; the part of
        # one of four ranks in the fourth; rank 0's part of the last.
        tied(tokens(48, (4, 8), (16, 24), (30, 32), (40, 44)), accumulate=2, token_weighted=True, clip=0.1),
        four_ranks=True,
    ),
    Feature(
        "zero-weight window",
        "B-21: no step, no NaN, no scheduler step",
        tied(tokens(40, (16, 32)), accumulate=2, token_weighted=True, schedulers=STEPWISE),
    ),
    Feature(
        "zero-weight micro-batch",
        "B-21: no step for it, also in one process, where a window is one micro-batch",
        tied(tokens(24, (8, 16)), token_weighted=True, schedulers=STEPWISE),
    ),
    Feature("tied weights", "B-07", tied(tokens(24)), by_rank="samples, which weight the loss, have uneven tokens"),
    Feature(
        "frozen parameters",
        "B-08: no gradient, no decay, no state; the others in two groups",
        mlp(net=Net("deep_mlp", frozen="first"), optimizers=(replace(ADAMW, holds_frozen=True, split=True),)),
    ),
    Feature("unused parameter", "B-08, C-01: no gradient, no decay, no state", mlp(net=Net("deep_mlp", unused=True))),
    Feature("scheduler by epoch", "B-09", mlp(numbers(8), epochs=3, schedulers=(Scheduler(),))),
    Feature(
        "BatchNorm",
        "B-08: normalised over each rank's samples; running statistics are rank 0's",
        mlp(numbers(48, 16), Net("deep_mlp", norm="batch")),
        by_rank="BatchNorm sees a rank's samples, not the global batch's",
    ),
    Feature(
        "uneven data, joining ranks",
        "B-04, B-14: the last global batch has 1 sample; torchmetrics leave joining ranks out and restart every epoch",
        mlp(numbers(33, 16), epochs=2, logs=(Log(what="metric", on_step=False, on_epoch=True),)),
        four_ranks=True,
    ),
    Feature(
        "uneven data, accumulated",
        "B-02, B-04: a joining rank within a short last window",
        mlp(numbers(33), accumulate=3),
    ),
    Feature(
        "several optimizers",
        "B-17: Muon for the matrices, AdamW for the rest, clipped together",
        mlp(optimizers=(Optimizer("muon", "matrices", 0.02), replace(ADAMW, of="vectors")), clip=0.1),
        by_rank="Muon computes in bf16, which turns the last bit of a gradient into a percent of its update",
    ),
    Feature(
        "LBFGS",
        "B-16: strong_wolfe over windows of two micro-batches, a joining rank in the last",
        mlp(numbers(49, 16), optimizers=(Optimizer("line_search"),), accumulate=2),
        compares_state=False,
    ),
    Feature(
        "iterable data",
        "B-04: iterables of different length, whose ranks exchange the weights of micro-batches; K=2",
        mlp(Data("iterable", 30, 8, length_error=None), accumulate=2),
        by_rank="each rank reads a part of its own",
        four_ranks=True,
    ),
    Feature(
        "GAN",
        "B-13, B-04: manual optimization, two optimizers that step alternately; a joining rank in the last window",
        mlp(
            numbers(33, 16),
            Net("gan"),
            optimizers=(replace(ADAMW, of="body"), replace(ADAMW, of="head")),
            manual=(Turn(1, toggles=True), Turn(0, toggles=True)),
        ),
        four_ranks=True,
    ),
    Feature("sparse embedding", "B-20", mlp(tokens(32), Net("bag"), optimizers=(Optimizer(),), accumulate=2, clip=0.1)),
    Feature(
        "validation, averaged weights",
        "B-04, B-12, L-01: validation on 5 samples with averaged weights, which the module keeps",
        mlp(
            numbers(16),
            epochs=2,
            validation=Validation(samples=5, batch=1),
            average=Average(),
            logs=(Log("validation_step", on_step=False, on_epoch=True),),
        ),
    ),
    Feature(
        "unfrozen",
        "I-03: a part that is frozen at first trains from the second epoch on, in a group of its own",
        mlp(
            numbers(16),
            Net("deep_mlp", frozen="body"),
            optimizers=(replace(ADAMW, of="head"),),
            epochs=2,
            changes=(Change("group", "body"),),
        ),
    ),
    Feature(
        "combined loaders, resumed",
        "B-04, F-02: within an epoch, of an iterable and a stateful loader in pairs, which differ by rank",
        mlp(Data("combined", 24, 8, length_error=None), epochs=2, resume=Resume("on_train_batch_end", 0)),
        by_rank="each rank reads a part of its own",
    ),
    Feature(
        "resumed",
        "F-02: within an epoch, with a scheduler",
        mlp(numbers(16), epochs=2, schedulers=STEPWISE, resume=Resume("on_train_batch_end", 0)),
    ),
    Feature(
        "resumed between epochs",
        "F-02, L-01: with validation and averaged weights",
        mlp(
            numbers(16),
            epochs=2,
            validation=Validation(samples=5, batch=1),
            average=Average(),
            resume=Resume(),
        ),
    ),
]

OVERFLOW = Feature(
    "fp16 overflow on one rank",
    "B-06: skipped everywhere, the scale halved, no scheduler step",
    mlp(Data(samples=32, batch=8, overflows=23), schedulers=STEPWISE),
)
TWO_OPTIMIZERS = Feature(
    "two optimizers, clipped",
    "B-15: one scaler update a step",
    mlp(optimizers=(replace(ADAMW, of="body"), Optimizer("momentum", "head")), clip=0.1),
)

BY_NAME = {feature.name: feature for feature in [*FEATURES, OVERFLOW, TWO_OPTIMIZERS]}


@dataclass(frozen=True)
class Precision:
    """A precision, with the tolerance of its comparison, and the features that are run in it.

    "token-weighted" also clips, accumulates and ties weights. Other features do not depend on the precision.
    """

    atol: float
    features: tuple[str, ...]


PRECISIONS = {
    "32-true": Precision(1e-5, tuple(feature.name for feature in FEATURES)),  # a sum in another order
    "64-true": Precision(1e-12, ("token-weighted",)),
    "bf16-mixed": Precision(1e-6, ("token-weighted", TWO_OPTIMIZERS.name)),  # the norm is summed up in another order
    "16-mixed": Precision(1e-6, ("token-weighted", TWO_OPTIMIZERS.name, OVERFLOW.name)),
    "bf16-true": Precision(0.0, ("token-weighted", "plain")),
}
