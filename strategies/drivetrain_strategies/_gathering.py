"""What strategies share that gather sharded parameters: the limit after a run, and a check of the order in forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import ControlPlane

GATHER_LIMIT = 8 * 2**30
"""Default of ``gather_limit``, the size in bytes up to which a module's parameters are gathered after a run."""


class GatherOrder:
    """Compares which unit each rank is about to gather, since ranks that gather different units would hang.

    Args:
        units: the modules that are gathered as a whole, by name.
        control: exchanges small values between the ranks.
    """

    def __init__(self, units: Mapping[str, nn.Module], control: ControlPlane) -> None:
        self._units = units
        self._control = control

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare the ranks before every unit's forward within this context.

        Raises:
            DistributedError: ranks reached different units. Every rank raises the error, which names each rank's unit.
        """
        handles = [
            unit.register_forward_pre_hook(self._comparison_hook(name), prepend=True)
            for name, unit in self._units.items()
        ]
        try:
            yield
            self._control.monitored_barrier("the end of the first forward")
        finally:
            for handle in handles:
                handle.remove()

    def _comparison_hook(self, name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def compare(module: nn.Module, args: Any) -> None:
            self._control.monitored_barrier(f"the forward of {name!r}")

        return compare
