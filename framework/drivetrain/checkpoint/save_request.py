"""SaveRequest: a checkpoint that a run is asked to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that a run is asked to write, by `RunContext.save`.

    Attributes:
        path: a path or an fsspec URL.
        weights_only: leave out the state that only a resumed run needs.
        trainable_only: store only checksums of parameters that have never trained.
        background: copy the state, and write the copy while training continues.
        digest: the digest to store for each file: "sha256", or None for checksums only. Rank 0's value is used.
        identifier: the identifier in the checkpoint's manifest; "" for a random identifier. Rank 0's value is used.
        on_complete: called on every rank once the checkpoint is complete.
    """

    path: str
    weights_only: bool = False
    trainable_only: bool = False
    background: bool = False
    digest: str | None = None
    identifier: str = ""
    on_complete: Callable[[], None] | None = None
