"""Parameters that get no gradient: on some ranks, which ZeRO must be told of, or on all, which the user is."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from drivetrain.control import ControlPlane

logger = logging.getLogger("drivetrain")


class UnusedParameters:
    """Watches the first window.

    ZeRO 2 exchanges gradients while backward goes on, in the order in which they arise. Where one arises on some ranks
    only, the ranks would add up different parameters, or wait for ever. So before each backward of the first window the
    ranks compare what the loss reaches; if they differ, gradients are exchanged after backward from then on, in the
    parameters' order, zeros standing for those that are missing. That costs the memory of whole gradients, and is why
    it is not done always.

    Args:
        names: of the trainable parameters.
        control: the way to the other ranks.
        asked: at stage 2, True exchanges in order from the start, False never compares; None compares. Elsewhere False.
    """

    def __init__(self, names: dict[nn.Parameter, str], control: ControlPlane, asked: bool | None) -> None:
        self._parameters = list(names)
        self._names = list(names.values())
        self._control = control
        self._compares = asked is None and control.world_size > 1
        self.in_order = bool(asked)
        """Whether gradients are exchanged after backward, in the parameters' order."""
        self._got = torch.zeros(len(names), dtype=torch.int32)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    def _note(self, number: int) -> Any:
        def note(parameter: torch.Tensor) -> None:
            self._got[number] = 1

        return note

    def before_backward(self, loss: torch.Tensor) -> None:
        """Compare what the loss reaches on each rank, in the first window. Collective there."""
        if not self._compares:
            return
        reached = _reached(loss)
        flags = torch.tensor([id(parameter) in reached for parameter in self._parameters], dtype=torch.int32)
        everywhere = self._control.all_reduce_async(flags).wait()
        partly = (everywhere > 0) & (everywhere < self._control.world_size)
        if bool(partly.any()):
            self._compares, self.in_order = False, True
            names = [self._names[number] for number in partly.nonzero().flatten().tolist()]
            self._tell(
                "%d parameter(s) get a gradient on some ranks only: %s. Gradients are exchanged in order.", names
            )

    def after_step(self) -> None:
        """Say, after the first step, what got no gradient anywhere. Collective once."""
        if not self._handles:
            return
        self.close()
        everywhere = self._control.all_reduce_async(self._got).wait()
        names = [self._names[number] for number in (everywhere == 0).nonzero().flatten().tolist()]
        if names:
            self._tell(
                "%d parameter(s) got no gradient in the first step: %s. Under ZeRO, whose partitions are flat, a "
                "missing gradient counts as zero: weight decay acts on them. Freeze them to leave them alone. "
                "Said once.",
                names,
            )

    def close(self) -> None:
        """Watch no longer."""
        self._compares = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _tell(self, text: str, names: list[str]) -> None:
        more = ", ..." if len(names) > 10 else ""
        level = logging.WARNING if self._control.rank == 0 else logging.DEBUG
        logger.log(level, text, len(names), ", ".join(map(repr, names[:10])) + more)


def _reached(loss: torch.Tensor) -> set[int]:
    """The ids of the leaves that a backward from ``loss`` gives a gradient."""
    found: set[int] = set()
    seen: set[Any] = set()
    coming: list[Any] = [loss.grad_fn]
    while coming:
        node = coming.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        coming.extend(following for following, _ in node.next_functions)
    return found
