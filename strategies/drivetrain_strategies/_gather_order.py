"""Do all ranks gather the same units in the same order? Asked in the first forward, where the answer costs least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import ControlPlane


class UnitOrder:
    """Compares, over the store, which unit each rank is about to gather; gathering different ones would hang.

    Args:
        units: by name.
        control: the way to the other ranks.
    """

    def __init__(self, units: Mapping[str, nn.Module], control: ControlPlane) -> None:
        self._units = units
        self._control = control

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Within it every unit's forward is compared.

        Raises:
            DistributedError: on every rank: names who came to which unit.
        """
        handles = [
            unit.register_forward_pre_hook(self._asker(name), prepend=True) for name, unit in self._units.items()
        ]
        try:
            yield
            self._control.agree("the end of the first forward")
        finally:
            for handle in handles:
                handle.remove()

    def _asker(self, name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def ask(module: nn.Module, args: Any) -> None:
            if self._control.world_size > 1:
                self._control.agree(f"the forward of {name!r}")

        return ask
