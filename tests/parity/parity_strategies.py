"""The strategies that must give the reference's numbers. A new one is added by a row here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import parity_device
from parity_features import BY_NAME, PRECISIONS

from cpu_kernels import FP16
from oracle.program import Program

Job = tuple[str, str]
"""A feature's name, and a precision."""


@dataclass(frozen=True)
class Candidate:
    name: str  # the column of the matrix
    ranks: int  # the number of processes on which it runs every feature
    also_on: tuple[int, ...] = ()  # a larger number of processes, for the features that depend on it
    # features that it cannot train, with a part of the error message, raised before or in the first step
    refuses: dict[str, str] = field(default_factory=dict)
    refuses_precisions: dict[str, str] = field(default_factory=dict)  # the same for precisions
    only: tuple[str, ...] = ()  # the only features that it runs; empty for all
    why_only: str = ""  # why the other features show nothing new
    tensor: int = 1  # the number of processes over which layers are split by user code; they read the same data
    variant: str = ""  # the strategy in `oracle.engine`; empty for ``name``

    @property
    def strategy(self) -> str:
        return self.variant or self.name

    @property
    def shards(self) -> bool:
        """Whether a rank holds parts of gradients, so that norms are summed part by part."""
        return self.name.startswith(("fsdp", "hsdp"))

    @property
    def is_zero(self) -> bool:
        return self.name.startswith("deepspeed")

    def refusal(self, job: Job) -> str | None:
        """Return a part of the message with which it refuses a job, or None."""
        feature, precision = job
        return self.refuses_precisions.get(precision) or self.refuses.get(feature)

    def program(self, job: Job, ranks: int) -> Program:
        feature, precision = job
        return BY_NAME[feature].on(self.strategy, ranks // self.tensor, self.tensor, precision)

    def jobs(self, ranks: int) -> list[Job]:
        """Return all jobs on ``ranks`` processes, refusals first: they must not affect later runs (G-07)."""
        jobs = [(name, precision) for precision, plan in PRECISIONS.items() for name in plan.features]
        if self.is_zero:  # whose parameters are in half precision, with statistics in float32
            jobs.append(("BatchNorm", "bf16-mixed"))
        if self.only:
            jobs = [job for job in jobs if job[0] in self.only and job[1] == "32-true"]
        if ranks != self.ranks:
            jobs = [job for job in jobs if BY_NAME[job[0]].four_ranks and job[1] == "32-true"]
            jobs = [job for job in jobs if self.refusal(job) is None]
        jobs = [job for job in jobs if job[0] == "token-weighted" or job[1] not in self.refuses_precisions]
        if parity_device.DEVICE != "cpu":
            chosen = parity_device.CASES
            # NCCL cannot reduce sparse gradients.
            sparse = self.name == "ddp"
            jobs = [job for job in jobs if (not chosen or job[0] in chosen) and not (sparse and "sparse" in job[0])]
        return sorted(jobs, key=lambda job: self.refusal(job) is None)


NO_SPARSE = {"sparse embedding": "an EmbeddingBag with sparse=True"}

BY_ZERO = {
    **NO_SPARSE,
    "clipped by value": "gradient_clip_algorithm='value' under DeepSpeed",
    "several optimizers": "2 optimizers (Muon, AdamW) under DeepSpeed",
    "two optimizers, clipped": "2 optimizers (AdamW, SGD) under DeepSpeed",
    "GAN": "2 optimizers (AdamW, AdamW) that take turns (manual optimization) under DeepSpeed",
    "LBFGS": "LBFGS under DeepSpeed",
    "unfrozen": "add_param_group on AdamW within a run, under DeepSpeed",
}
PRECISIONS_BY_ZERO = {
    "64-true": "a DoublePrecision, under DeepSpeed",
    "bf16-true": "a HalfPrecision, under DeepSpeed",
}
if not FP16 and parity_device.DEVICE == "cpu":
    PRECISIONS_BY_ZERO["16-mixed"] = "which this device does not support"


def zero(name: str, **options: object) -> Candidate:
    return Candidate(name, 2, refuses=BY_ZERO, refuses_precisions=PRECISIONS_BY_ZERO, **options)  # type: ignore[arg-type]


STRATEGIES = [
    Candidate("single_device", ranks=1),
    # C-01: refused by name, in the first step.
    Candidate("ddp", ranks=2, also_on=(4,), refuses={"unused parameter": "got no gradient: 'net.orphan'"}),
    Candidate("ddp_static_graph", ranks=2, refuses={"GAN": "static_graph=True together with manual optimization"}),
    # K-01: with public names only, as in a third-party package.
    Candidate("averaging", ranks=2),
    Candidate(
        "averaging_in_context",
        ranks=2,
        only=("plain", "accumulated", "uneven data, joining ranks", "several optimizers", "LBFGS", "GAN"),
        why_only="it differs from 'averaging' in when gradients are averaged",
    ),
    Candidate(
        "ddp_find_unused_parameters_true",
        ranks=2,
        only=("plain", "accumulated", "unused parameter", "uneven data, joining ranks"),
        why_only="it differs from 'ddp' in the parameters that it waits for",
    ),
    Candidate("fsdp", ranks=2, also_on=(4,), refuses=NO_SPARSE),
    Candidate("fsdp_grad_op", ranks=2, refuses=NO_SPARSE),
    Candidate("hsdp", ranks=4, refuses=NO_SPARSE, variant="hsdp_one_unit"),
    Candidate("fsdp x tp", ranks=4, refuses=NO_SPARSE, tensor=2, variant="fsdp_tensor_parallel"),
    zero("deepspeed_stage_1"),
    zero("deepspeed_stage_2"),
    # It leaves small parameters whole by default (E-13).
    zero("deepspeed_stage_3", also_on=(4,), variant="deepspeed_stage_3_all_sharded"),
    zero(
        "deepspeed_stage_2_offload",
        only=("plain", "clipped by norm", "accumulated", "token-weighted", "zero-weight window", "unused parameter"),
        why_only="it differs from 'deepspeed_stage_2' in where the optimizer steps",
    ),
    zero(
        "deepspeed_stage_3_offload",
        only=("plain", "clipped by norm", "accumulated"),
        why_only="it differs from 'deepspeed_stage_3' in where the optimizer steps",
    ),
]
if parity_device.DEVICE != "cpu":
    STRATEGIES = [
        replace(candidate, ranks=parity_device.RANKS, also_on=())
        for candidate in STRATEGIES
        if candidate.name in parity_device.STRATEGIES and (candidate.ranks > 1 or parity_device.RANKS == 1)
    ]
