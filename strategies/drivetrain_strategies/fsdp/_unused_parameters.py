"""Handles parameters that the loss does not use on some ranks, or on any rank."""

from __future__ import annotations

import logging
from typing import Any

import torch

from drivetrain.strategies import ControlPlane

logger = logging.getLogger("drivetrain")


class UnusedParameters:
    """Removes the gradient of a parameter that no rank used, as in a single process.

    A rank that did not use a parameter sends a gradient of zeros, since the other ranks wait for one. A parameter that
    no rank used therefore gets a gradient of zeros instead of none, and weight decay would act on the parameter.

    In the first synchronized window the ranks agree, over the store, whether any gradient was missing. If no gradient
    was missing, later steps do no extra work. Otherwise, every window sums a flag per parameter over the CPU group, so
    that all ranks know which parameters no rank used. If a parameter becomes unused only later, a warning names the
    parameter once. ``find_unused_parameters=True`` sums the flags in every window, without this decision.

    Args:
        setting: ``find_unused_parameters``. True sums the flags in every window, False never does, and None decides in
            the first window.
        names: names of the parameters by ``id`` of torch's `FSDPParam`.
        control: the control plane.
    """

    def __init__(self, setting: bool | None, names: dict[int, str], control: ControlPlane) -> None:
        self._setting = self._counts_unused = setting
        self._position = {key: number for number, key in enumerate(names)}
        self._names = list(names.values())
        self._control = control
        self._warned = False

    def reset(self) -> None:
        """Forget the decision after a change of the trainable parameters. The next window decides again."""
        self._counts_unused = self._setting
        self._warned = False

    def clear_unused_gradients(self, unused: list[Any]) -> None:
        """Remove the zero gradients of parameters that no rank used, after a synchronized backward.

        Collective if the flags are summed.

        Args:
            unused: parameters without a gradient on this rank.
        """
        if self._counts_unused is None:
            (missing_anywhere,) = self._control.count_flags("parameters without a gradient", bool(unused))
            self._counts_unused = missing_anywhere > 0
        if not self._counts_unused:
            if unused and not self._warned:
                self._warn(unused)
            return
        unused_flags = torch.zeros(len(self._names), dtype=torch.int32)
        for parameter in unused:
            unused_flags[self._position[id(parameter)]] = 1
        missing_counts = self._control.all_reduce_async(unused_flags).wait()
        world_size = self._control.world_size
        for parameter in unused:
            if int(missing_counts[self._position[id(parameter)]]) == world_size:
                parameter.sharded_param.grad = None

    def _warn(self, unused: list[Any]) -> None:
        self._warned = True
        names = [self._names[self._position[id(parameter)]] for parameter in unused]
        logger.warning(
            "%d parameter(s) got no gradient on this rank, although all parameters did in the first step: %s. These "
            "gradients count as zero, even if no rank uses the parameters. With "
            "FSDPStrategy(find_unused_parameters=True), parameters that no rank uses get no gradient. "
            "This warning is shown once.",
            len(names),
            ", ".join(repr(name) for name in names[:10]),
        )
