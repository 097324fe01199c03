"""Parameters that the loss does not use, on some ranks or on all."""

from __future__ import annotations

import logging
from typing import Any

import torch

from drivetrain.strategies import ControlPlane

logger = logging.getLogger("drivetrain")


class UnusedParameters:
    """Leaves a parameter that no rank used without a gradient, as a single process would.

    A rank that did not use a parameter sends zeros for it, or the others would wait. A parameter that nobody used then
    has a gradient of zero where it should have none, and an optimizer would decay it. Only the ranks together know.

    In the first window that exchanges gradients, all ranks agree whether any of them missed a gradient: one word in the
    store, no collective. If nobody did, that is the end of it, and no later step pays. If somebody did, every later
    window sums, over the small CPU group, a flag for each parameter: how many ranks used it. All ranks take the same
    decision from the same count, and so none is ever waited for in vain. A parameter that goes out of use only after a
    first window that used everything is told of once, by name; ``find_unused_parameters=True`` then counts from the
    start.

    Args:
        asked: True counts in every window, False in none, None lets the first window decide.
        names: of the parameters, by ``id`` of what torch keeps for each.
        control: the way to the other ranks.
    """

    def __init__(self, asked: bool | None, names: dict[int, str], control: ControlPlane) -> None:
        self._asked = self._counts = asked
        self._position = {key: number for number, key in enumerate(names)}
        self._names = list(names.values())
        self._control = control
        self._told = False

    def begin_anew(self) -> None:
        """Let the next window decide, since what trains has changed."""
        self._counts = self._asked
        self._told = False

    def settle(self, unused: list[Any]) -> None:
        """After a backward that exchanged gradients: take the zeros off what nobody used. Collective where it counts.

        Args:
            unused: what had no gradient here.
        """
        if self._counts is None:
            (anywhere,) = self._control.agree("parameters without a gradient", bool(unused))
            self._counts = anywhere > 0
        if not self._counts:
            if unused and not self._told:
                self._tell(unused)
            return
        flags = torch.zeros(len(self._names), dtype=torch.int32)
        for parameter in unused:
            flags[self._position[id(parameter)]] = 1
        missed = self._control.all_reduce_async(flags).wait()
        everybody = self._control.world_size
        for parameter in unused:
            if int(missed[self._position[id(parameter)]]) == everybody:
                parameter.sharded_param.grad = None

    def _tell(self, unused: list[Any]) -> None:
        self._told = True
        names = [self._names[self._position[id(parameter)]] for parameter in unused]
        logger.warning(
            "%d parameter(s) got no gradient on this rank, though all did in the first step: %s. They count as zero, "
            "also where no rank uses them. FSDPStrategy(find_unused_parameters=True) leaves those alone. Said once.",
            len(names),
            ", ".join(repr(name) for name in names[:10]),
        )
