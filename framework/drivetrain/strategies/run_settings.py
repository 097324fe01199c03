"""What a strategy with an engine of its own must know of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The part of `Fit`'s settings that an engine beneath a strategy would otherwise decide by itself.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        accumulate_grad_batches: micro-batches of a window.
        gradient_clip_val: None or 0 where nothing is clipped.
        gradient_clip_algorithm: "norm" or "value".
        batch_size: samples of one rank's micro-batch; None where the loader does not say.
        automatic_optimization: False where ``training_step`` runs backward and steps itself.
    """

    stage: str = "fit"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    batch_size: int | None = None
    automatic_optimization: bool = True
