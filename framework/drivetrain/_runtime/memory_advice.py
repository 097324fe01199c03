"""MemoryAdvice: a change by which a run takes less memory, as a strategy or a precision proposes it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MemoryAdvice(NamedTuple):
    """One change of the settings by which a run takes less memory.

    Attributes:
        lessens: "state" (parameters, gradients and the optimizer's state) or "activations" (those and batches). Advice
            on what takes most of the memory is told first.
        text: what to change, and after a colon what that does: ``"strategy='fsdp': each rank holds its part"``.
    """

    lessens: Literal["state", "activations"]
    text: str
