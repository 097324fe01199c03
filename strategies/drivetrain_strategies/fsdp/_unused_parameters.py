"""Handles parameters that the loss does not use on some ranks, or on any rank."""

from __future__ import annotations

import logging

import torch

from drivetrain.errors import listed
from drivetrain.strategies import ControlPlane
from drivetrain_strategies.fsdp._internals import Sharded

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
        sharded: the sharded module.
        control: the control plane.
    """

    def __init__(self, setting: bool | None, sharded: Sharded, control: ControlPlane) -> None:
        self._setting = self._counts_unused = setting
        self._sharded = sharded
        self._positions = {id(parameter): number for number, parameter in enumerate(sharded.parameters)}
        self._control = control
        self._warned = False

    def reset(self) -> None:
        """Forget the decision after a change of the trainable parameters. The next window decides again."""
        self._counts_unused = self._setting
        self._warned = False

    def clear_gradients(self) -> None:
        """Remove the zero gradients of parameters that no rank used, after a synchronized backward.

        Collective if the flags are summed.
        """
        unused = self._sharded.take_unused()
        if self._counts_unused is None:
            (missing_anywhere,) = self._control.count_flags("parameters without a gradient", bool(unused))
            self._counts_unused = missing_anywhere > 0
        if not self._counts_unused:
            if unused and not self._warned:
                self._warned = True
                logger.warning(
                    "%d parameter(s) got no gradient on this rank, although all parameters did in the first step: %s. "
                    "These gradients count as zero, even if no rank uses the parameters. With "
                    "FSDPStrategy(find_unused_parameters=True), parameters that no rank uses get no gradient. "
                    "This warning is shown once.",
                    len(unused),
                    listed(self._sharded.names_of(unused)),
                )
            return
        flags = torch.zeros(len(self._positions), dtype=torch.int32)
        for parameter in unused:
            flags[self._positions[id(parameter)]] = 1
        counts = self._control.all_reduce_async(flags).wait()
        for parameter in unused:
            if int(counts[self._positions[id(parameter)]]) == self._control.world_size:
                parameter.sharded_param.grad = None
