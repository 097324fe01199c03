"""The strategies that must give the reference's numbers. A new one is added by a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import parity_device

from averaging import Averaging, AveragingInContext
from cpu_kernels import FP16
from drivetrain import Strategy
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy

Job = tuple[str, str]
"""A case's name, and a precision."""


@dataclass(frozen=True)
class Candidate:
    """A strategy as the suite runs it.

    Attributes:
        name: as `Fit(strategy=...)` takes it, except if layers are split.
        ranks: the number of ranks on which it runs every case.
        also_on: a larger number of ranks, for the cases that depend on it.
        refuses: cases that it cannot train, with a part of the error message, raised before or in the first step.
        refuses_precisions: the same for precisions.
        only: the only cases that it runs; empty for all.
        shards: a rank holds parts of gradients, so norms are summed part by part.
        tensor: the number of ranks over which layers are split by user code; these ranks read the same data.
        make: builds it with settings that its name does not include.
        zero: a parameter without a gradient counts as one whose gradient is zero; mixed precision keeps parameters in
            half precision; at stages 2 and 3 gradients are exchanged after every micro-batch.
    """

    name: str
    ranks: int
    also_on: tuple[int, ...] = ()
    refuses: dict[str, str] = field(default_factory=dict)
    refuses_precisions: dict[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    shards: bool = False
    tensor: int = 1
    make: Callable[[], Strategy] | None = None
    zero: int = 0

    def strategy(self) -> str | Strategy:
        """Return the argument of `Fit`."""
        if self.make is not None:
            return self.make()
        return self.name

    def refusal(self, job: Job) -> str | None:
        """Return a part of the message with which it refuses a job, or None."""
        case, precision = job
        return self.refuses_precisions.get(precision) or self.refuses.get(case)


NO_SPARSE = {"sparse embedding": "an EmbeddingBag with sparse=True"}

BY_ZERO = {
    **NO_SPARSE,
    "clipped by value": "gradient_clip_algorithm='value' under DeepSpeed",
    "several optimizers": "2 optimizers (Muon, AdamW) under DeepSpeed",
    "two optimizers, clipped": "2 optimizers (AdamW, SGD) under DeepSpeed",
    "GAN": "2 optimizers (AdamW, AdamW) that take turns (manual optimization) under DeepSpeed",
    "LBFGS": "LBFGS under DeepSpeed may not be element-wise",
}
PRECISIONS_BY_ZERO = {
    "64-true": "DeepSpeed's optimizers keep float32 master weights",
    "bf16-true": "without float32 master weights",
}
if not FP16 and parity_device.DEVICE == "cpu":
    PRECISIONS_BY_ZERO["16-mixed"] = "which this device does not support"


def everything_spread() -> Strategy:
    """Return ZeRO 3 with all parameters sharded; it leaves small ones whole by default (E-13)."""
    return DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0)


def copied_shards() -> Strategy:
    """Return a hybrid with one unit; several units on two by two ranks are tested in test_fsdp_meshes.py."""
    return FSDPStrategy(sharding="hybrid", wrap=[])


def split_layers() -> Strategy:
    """Return the same, with layers additionally split over two ranks."""
    return FSDPStrategy(tensor_parallel=2, wrap=[])


STRATEGIES = [
    Candidate("single_device", ranks=1),
    Candidate(
        "ddp",
        ranks=2,
        also_on=(4,),
        # C-01: refused by name, in the first step.
        refuses={"unused parameter": "got no gradient: 'net.spare.weight', 'net.spare.bias'"},
    ),
    Candidate(
        "ddp_static_graph",
        ranks=2,
        also_on=(4,),
        refuses={"GAN": "static_graph=True together with manual optimization"},
    ),
    # K-01: with public names only, as in a third-party package.
    Candidate("averaging", ranks=2, make=Averaging),
    Candidate(
        "averaging_in_context",
        ranks=2,
        only=("plain", "accumulated", "uneven data, joining ranks", "several optimizers", "LBFGS", "GAN"),
        make=AveragingInContext,
    ),
    # It differs from "ddp" in the parameters that it waits for.
    Candidate(
        "ddp_find_unused_parameters_true",
        ranks=2,
        only=("plain", "accumulated", "unused parameter", "uneven data, joining ranks"),
    ),
    Candidate("fsdp", ranks=2, also_on=(4,), refuses=NO_SPARSE, shards=True),
    Candidate("fsdp_grad_op", ranks=2, refuses=NO_SPARSE, shards=True),
    Candidate("hsdp", ranks=4, refuses=NO_SPARSE, shards=True, make=copied_shards),
    Candidate("fsdp x tp", ranks=4, refuses=NO_SPARSE, shards=True, tensor=2, make=split_layers),
    Candidate("deepspeed_stage_1", ranks=2, refuses=BY_ZERO, refuses_precisions=PRECISIONS_BY_ZERO, zero=1),
    Candidate(
        "deepspeed_stage_2", ranks=2, also_on=(4,), refuses=BY_ZERO, refuses_precisions=PRECISIONS_BY_ZERO, zero=2
    ),
    Candidate(
        "deepspeed_stage_3",
        ranks=2,
        also_on=(4,),
        refuses=BY_ZERO,
        refuses_precisions=PRECISIONS_BY_ZERO,
        make=everything_spread,
        zero=3,
    ),
    Candidate(
        "deepspeed_stage_2_offload",
        ranks=2,
        only=("plain", "clipped by norm", "accumulated", "token-weighted", "zero-weight window", "unused parameter"),
        zero=2,
    ),
    Candidate("deepspeed_stage_3_offload", ranks=2, only=("plain", "clipped by norm", "accumulated"), zero=3),
]
if parity_device.DEVICE != "cpu":
    STRATEGIES = [
        replace(candidate, ranks=parity_device.RANKS, also_on=())
        for candidate in STRATEGIES
        if candidate.name in parity_device.STRATEGIES and (candidate.ranks > 1 or parity_device.RANKS == 1)
    ]
