"""MemoryAdvice: a change of settings that reduces memory, as suggested by a strategy or a precision."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MemoryAdvice(NamedTuple):
    """One change of settings that reduces memory.

    Attributes:
        lessens: "state" (parameters, gradients and optimizer state) or "activations" (including batches). Advice on the
            larger of the two is shown first.
        text: what to change and, after a colon, the effect: ``"strategy='fsdp': each rank holds its part"``.
    """

    lessens: Literal["state", "activations"]
    text: str
