"""MemoryAdvice: a change of settings that reduces memory, which a strategy or a precision suggests."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MemoryAdvice(NamedTuple):
    """One change of settings that reduces memory.

    Attributes:
        reduces: the kind of memory that the change reduces. "state" stands for parameters, gradients and optimizer
            state, "activations" for activations and batches. On CUDA, advice on the larger kind is shown first.
        text: what to change and, after a colon, the effect: ``"strategy='fsdp': each rank holds its part"``.
    """

    reduces: Literal["state", "activations"]
    text: str
