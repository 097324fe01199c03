"""The settings of a run, for strategies that wrap another training engine, such as DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of `Fit` that a strategy's engine (DeepSpeed's, for example) would otherwise choose itself.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        accumulate_grad_batches: micro-batches per window.
        gradient_clip_val: clipping threshold; None or 0 disables clipping.
        gradient_clip_algorithm: "norm" or "value".
        batch_size: samples in one rank's micro-batch; None if the loader has no attribute ``batch_size``.
        automatic_optimization: False if ``training_step`` runs backward and steps itself.
    """

    stage: str = "fit"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    batch_size: int | None = None
    automatic_optimization: bool = True
