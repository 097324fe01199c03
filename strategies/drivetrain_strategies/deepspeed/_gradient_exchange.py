"""Refuses gradients that ranks would exchange differently, and names parameters that get no gradient."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import ControlPlane
from drivetrain_strategies._user_calls import leaves_reached
from drivetrain_strategies.deepspeed._error_messages import DIFFERENT_PARAMETERS
from drivetrain_strategies.deepspeed._internals import Zero

logger = logging.getLogger("drivetrain")


class GradientExchange:
    """Compares the exchange of gradients on all ranks in the first window, and later with the first window's.

    ZeRO 2 and 3 exchange gradients during backward, in buckets that are filled as gradients become ready, and ZeRO 3
    gathers parameters in the order of use. Ranks that use other parameters, or use them in another order, would hang or
    add up gradients of different parameters. In the first window, the ranks compare in small CPU collectives which
    parameters the loss reaches, before backward, and what each bucket holds, before it is exchanged. Later, each rank
    compares its buckets with those of its first window, without communication.

    Args:
        names: names of the trainable parameters.
        zero: DeepSpeed's engine.
        control: exchanges small values between the ranks.
        compares: whether to compare. Otherwise only parameters that get no gradient in the first window are reported.
    """

    def __init__(self, names: dict[nn.Parameter, str], zero: Zero, control: ControlPlane, compares: bool) -> None:
        self._names = {id(parameter): name for parameter, name in names.items()}
        # The parameters of a leaf module of stage 3 are used, or unused, together.
        self._in_leaves = {id(one) for one in names if hasattr(one, "ds_z3_leaf_module")}
        self._control = control
        self._compares_ranks = compares
        self._reached: set[int] = set()
        self._order: list[str] = []  # of the parameters in the buckets of this backward
        self._known: list[list[str]] = []  # the orders of the backwards of the first window
        if compares:
            zero.before_each_exchange(self._before_exchange)
        self._had_gradient = torch.zeros(len(names), dtype=torch.int32)
        self._handles: list[Any] = [self._note_gradient(number, one) for number, one in enumerate(names)]

    def _note_gradient(self, number: int, parameter: Any) -> Any:
        def note(_: Any) -> None:
            self._had_gradient[number] = 1

        return parameter.register_post_accumulate_grad_hook(note)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Compare the parameters that the loss reaches on each rank. Collective in the first window.

        Raises:
            ConfigurationError: names the parameters that only some ranks use.
        """
        self._order = []
        if not self._compares_ranks:
            return
        self._reached |= (reached := leaves_reached([loss]))
        reached -= self._in_leaves
        flags = torch.tensor([key in reached for key in self._names], dtype=torch.int32)
        counts = self._control.all_reduce_async(flags)().tolist()
        differing = [
            name
            for name, count in zip(self._names.values(), counts, strict=True)
            if 0 < count < self._control.world_size
        ]
        if differing:
            raise ConfigurationError(
                f"{len(differing)} parameter(s) get a gradient on some ranks only: {listed(differing)}.",
                *DIFFERENT_PARAMETERS,
            )

    def _before_exchange(self, parameters: list[nn.Parameter]) -> None:
        """Compare a bucket before it is exchanged. Collective in the first window."""
        names = [self._names[id(parameter)] for parameter in parameters]
        self._order += names
        if self._compares_ranks:
            first, *others = self._control.gather_objects(names)
            for other in others:
                if other != first:
                    raise _refusal(other, first)
        elif self._order not in [known[: len(self._order)] for known in self._known]:
            raise _refusal(self._order, self._known[0][: len(self._order)] if self._known else [])

    def after_backward(self) -> None:
        """Compare this backward with those of the first window. Does not communicate.

        Raises:
            ConfigurationError: names the parameters that differ.
        """
        order = self._order
        if order in self._known:
            return
        if self._compares_ranks:
            # A rank could not know later which of two orders of the same parameters the other ranks use.
            for known in self._known:
                if sorted(known) == sorted(order):
                    raise _refusal(order, known)
            self._known.append(order)
        elif self._known:
            raise _refusal(order, self._known[0])

    def differing(self, loss: torch.Tensor) -> list[str]:
        """Return the parameters that this loss reaches, but no loss of the first window, and those of the reverse."""
        changed = (leaves_reached([loss]) ^ self._reached) - self._in_leaves
        return [name for key, name in self._names.items() if key in changed] if self._known else []

    def after_step(self) -> None:
        """After the first step, warn about parameters that got no gradient on any rank. Collective in that step."""
        if not self._handles:
            return
        self.close()
        self._compares_ranks = False
        counts = self._control.all_reduce_async(self._had_gradient)().tolist()
        unused = [name for name, count in zip(self._names.values(), counts, strict=True) if not count]
        if unused and self._control.rank == 0:
            logger.warning(
                "%d parameter(s) got no gradient in the first step: %s. Under ZeRO, a missing gradient counts as zero, "
                "so weight decay acts on these parameters. Freeze them to prevent this. This warning is shown once.",
                len(unused),
                listed(unused),
            )

    def close(self) -> None:
        """Remove this object's hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refusal(found: list[str], expected: list[str]) -> ConfigurationError:
    changed = set(found) ^ set(expected) or {one for one, other in zip(found, expected, strict=False) if one != other}
    return ConfigurationError(
        f"Gradients became ready in another order than before or on another rank: {listed(sorted(changed))}.",
        "ZeRO exchanges gradients during backward, in the order in which they become ready, and ranks with different "
        "orders would add up gradients of different parameters. The order differs if the forward depends on a rank's "
        "samples.",
        "at stage 2, set DeepSpeedStrategy(find_unused_parameters=True), which exchanges gradients in the parameters' "
        "order. At stage 3, do so only if all ranks use the same parameters; for mixtures of experts, set "
        "leaf_modules=[Experts] instead. Stage 1 and strategy='fsdp' need no setting.",
    )
