"""DefaultDtype: a context in which new floating-point tensors have a given dtype."""

from __future__ import annotations

from types import TracebackType

import torch


class DefaultDtype:
    """Sets torch's default dtype within the context and restores it on exit."""

    __slots__ = ("_dtype", "_previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous = dtype

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._previous)
