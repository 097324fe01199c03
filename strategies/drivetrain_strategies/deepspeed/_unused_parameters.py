"""Parameters that get no gradient: on some ranks, which ZeRO must be told of, or on all, which the user is."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import ControlPlane
from drivetrain_strategies.deepspeed._internals import Zero

logger = logging.getLogger("drivetrain")


class UnusedParameters:
    """Learns in the first window which parameters get a gradient, and watches afterwards that it stays so.

    ZeRO 2 exchanges gradients while backward goes on, in the order in which they arise, and ZeRO 3 gathers parameters
    so as well. Where the ranks use different ones, they wait for ever, or add up what does not belong together without
    a word. So the ranks compare before each backward of the first window what the loss reaches, in a small CPU
    collective. If they differ, ZeRO 2 exchanges gradients after backward from then on, in the parameters' order, zeros
    standing for those that are missing; that costs the memory of whole gradients, and so is not done always. If they
    agree, each rank counts gradients afterwards, without a word to the others, and a parameter that goes out of use or
    comes into it is refused.

    Args:
        names: of the trainable parameters.
        zero: DeepSpeed's engine.
        control: the way to the other ranks.
        asked: None learns and watches; True exchanges in order at stage 2 from the start, and does not watch at stage
            3; False does neither.
    """

    def __init__(self, names: dict[nn.Parameter, str], zero: Zero, control: ControlPlane, asked: bool | None) -> None:
        self._parameters = list(names)
        self._names = list(names.values())
        self._zero = zero
        self._control = control
        self._learns = asked is None and control.world_size > 1 and zero.stage > 1
        self.in_order = bool(asked) and zero.stage == 2
        """Whether gradients are exchanged after backward, in the parameters' order."""
        # What belongs to a leaf module of stage 3 comes and goes with it.
        self._single = torch.tensor([not hasattr(one, "ds_z3_leaf_module") for one in self._parameters])
        self._always = self._single.clone()
        self._never = self._single.clone()
        self._expected: int | None = None
        self._surprised = False
        self._got = torch.zeros(len(names), dtype=torch.int32)
        self._handles = [self._on_gradient(number, self._note) for number in range(len(names))]
        self._watches: list[Any] = []

    def _on_gradient(self, number: int, call: Any) -> Any:
        register: Any = self._parameters[number].register_post_accumulate_grad_hook
        return register(lambda parameter: call(number))

    def _note(self, number: int) -> None:
        self._got[number] = 1

    def _surprise(self, number: int) -> None:
        self._surprised = True

    def before_backward(self, loss: torch.Tensor) -> None:
        """Compare what the loss reaches on each rank, in the first window. Collective there."""
        if not self._learns:
            return
        reached = _reached(loss)
        flags = torch.tensor([id(parameter) in reached for parameter in self._parameters], dtype=torch.int32)
        everywhere = self._control.all_reduce_async(flags).wait()
        self._always &= everywhere == self._control.world_size
        self._never &= everywhere == 0
        partly = self._single & (everywhere > 0) & (everywhere < self._control.world_size)
        if bool(partly.any()) and self._zero.stage == 2:
            self._learns, self.in_order = False, True
            self._tell("%d parameter(s) get a gradient on some ranks only: %s. They wait for one another.", partly)

    def after_backward(self, loss: torch.Tensor) -> None:
        """Look whether the gradients came that came before. Talks to nobody.

        Raises:
            ConfigurationError: they did not; names them.
        """
        if self._expected is None or (self._zero.gradients_seen == self._expected and not self._surprised):
            return
        reached = _reached(loss)
        others = [
            self._names[number]
            for number in self._single.nonzero().flatten().tolist()
            if (id(self._parameters[number]) in reached) != bool(self._always[number])
        ]
        raise ConfigurationError(
            f"In this backward other parameters got a gradient than in the first window: {_listed(others)}.",
            "ZeRO exchanges gradients in the order in which they arise: ranks that differ in it would add up what "
            "does not belong together.",
            "set DeepSpeedStrategy(find_unused_parameters=True), at stage 3 only where all ranks use the same ones; "
            "for experts at stage 3 leaf_modules=[Experts].",
        )

    def after_step(self) -> None:
        """Say, after the first step, what got no gradient anywhere. Collective once."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        everywhere = self._control.all_reduce_async(self._got).wait()
        self._tell(
            "%d parameter(s) got no gradient in the first step: %s. Under ZeRO, whose partitions are flat, a missing "
            "gradient counts as zero: weight decay acts on them. Freeze them to leave them alone. Said once.",
            everywhere == 0,
        )
        if self._learns and bool((self._always | self._never | ~self._single).all()):
            leaves = {id(one.ds_z3_leaf_module) for one in self._parameters if hasattr(one, "ds_z3_leaf_module")}
            self._expected = int(self._always.sum()) + len(leaves)
            self._watches = [
                self._on_gradient(number, self._surprise) for number in self._never.nonzero().flatten().tolist()
            ]
        self._learns = False

    def close(self) -> None:
        """Take the hooks off."""
        for handle in (*self._handles, *self._watches):
            handle.remove()
        self._handles, self._watches = [], []

    def _tell(self, text: str, which: torch.Tensor) -> None:
        names = [self._names[number] for number in which.nonzero().flatten().tolist()]
        if names:
            level = logging.WARNING if self._control.rank == 0 else logging.DEBUG
            logger.log(level, text, len(names), _listed(names))


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")


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
