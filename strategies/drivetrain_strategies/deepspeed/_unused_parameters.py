"""Handles parameters that get no gradient on some ranks, or on any rank. ZeRO does not support such parameters."""

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
    """Records which parameters get a gradient in the first accumulation window, and checks that later windows match.

    ZeRO 2 exchanges gradients during backward, in the order in which they become ready. ZeRO 3 gathers parameters in
    the order of use. Ranks that use different parameters would hang, or silently add up gradients of different
    parameters. Before each backward of the first window, the ranks therefore compare which parameters the loss reaches,
    in a small CPU collective. If the ranks differ, ZeRO 2 exchanges gradients after backward from then on, in the
    parameters' order and with zeros for missing gradients. This needs memory for whole gradients, so it is not the
    default. If the ranks agree, each rank counts its gradients from then on without communication, and refuses a
    parameter that becomes used or unused.

    Args:
        names: names of the trainable parameters.
        zero: DeepSpeed's engine.
        control: exchanges small values between the ranks.
        setting: the strategy's ``find_unused_parameters``. None records and checks. True checks nothing, and makes
            stage 2 exchange gradients after backward from the start. False does neither.
    """

    def __init__(self, names: dict[nn.Parameter, str], zero: Zero, control: ControlPlane, setting: bool | None) -> None:
        self._parameters = list(names)
        self._names = list(names.values())
        self._zero = zero
        self._control = control
        self._in_first_window = setting is None and control.world_size > 1 and zero.stage > 1
        self.in_order = bool(setting) and zero.stage == 2
        """Whether gradients are exchanged after backward, in the parameters' order."""
        # The parameters of a stage 3 leaf module are used, or unused, together.
        self._outside_leaves = torch.tensor(
            [not hasattr(parameter, "ds_z3_leaf_module") for parameter in self._parameters]
        )
        self._used_everywhere = self._outside_leaves.clone()
        self._used_nowhere = self._outside_leaves.clone()
        self._used_on_some_ranks = torch.zeros_like(self._outside_leaves)
        self._expected: int | None = None
        self._unexpected = False
        self._had_gradient = torch.zeros(len(names), dtype=torch.int32)
        self._handles = [self._on_gradient(number, self._note_gradient) for number in range(len(names))]
        self._watch_handles: list[Any] = []

    def _on_gradient(self, number: int, call: Any) -> Any:
        register: Any = self._parameters[number].register_post_accumulate_grad_hook
        return register(lambda parameter: call(number))

    def _note_gradient(self, number: int) -> None:
        self._had_gradient[number] = 1

    def _note_unexpected(self, number: int) -> None:
        self._unexpected = True

    def before_backward(self, loss: torch.Tensor) -> None:
        """Compare the parameters that the loss reaches on each rank. Collective in the first window."""
        if not self._in_first_window:
            return
        reached = _reachable_parameters(loss)
        reached_flags = torch.tensor([id(parameter) in reached for parameter in self._parameters], dtype=torch.int32)
        counts = self._control.all_reduce_async(reached_flags).wait()
        self._used_everywhere &= counts == self._control.world_size
        self._used_nowhere &= counts == 0
        self._used_on_some_ranks = self._outside_leaves & (counts > 0) & (counts < self._control.world_size)
        if bool(self._used_on_some_ranks.any()) and self._zero.stage == 2:
            self._in_first_window, self.in_order = False, True
            self._warn(
                "%d parameter(s) get a gradient on some ranks only: %s. From now on, gradients are exchanged after "
                "backward.",
                self._used_on_some_ranks,
            )

    def after_backward(self, loss: torch.Tensor) -> None:
        """Check that the same parameters got a gradient as in the first window. Does not communicate.

        Raises:
            ConfigurationError: names the parameters that differ.
        """
        if self._expected is None or (self._zero.gradients_seen == self._expected and not self._unexpected):
            return
        changed = self.differing(loss)
        detail = _listed(changed) or f"{self._zero.gradients_seen} instead of {self._expected}"
        raise ConfigurationError(
            f"In this backward, other parameters got a gradient than in the first window: {detail}.",
            "ZeRO exchanges gradients in the order in which they become ready, and ranks with different orders would "
            "add up gradients of different parameters.",
            "set DeepSpeedStrategy(find_unused_parameters=True). At stage 3, do so only if all ranks use the same "
            "parameters; for mixtures of experts, set leaf_modules=[Experts] instead.",
        )

    def differing(self, loss: torch.Tensor) -> list[str]:
        """Return the parameters that this rank knows to be used differently: by some ranks, or in the first window."""
        if self._in_first_window:
            return self._named(self._used_on_some_ranks)
        if self._expected is None:
            return []
        reached = _reachable_parameters(loss)
        used = torch.tensor([id(parameter) in reached for parameter in self._parameters])
        return self._named(self._outside_leaves & (used != self._used_everywhere))

    def _named(self, which: torch.Tensor) -> list[str]:
        return [self._names[number] for number in which.nonzero().flatten().tolist()]

    def after_step(self) -> None:
        """After the first step, warn about parameters that got no gradient on any rank. Collective in that step."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        counts = self._control.all_reduce_async(self._had_gradient).wait()
        self._warn(
            "%d parameter(s) got no gradient in the first step: %s. Under ZeRO, a missing gradient counts as zero, so "
            "weight decay acts on these parameters. Freeze them to prevent this. This warning is shown once.",
            counts == 0,
        )
        # Re-entrant activation checkpointing recomputes in a backward of its own, which the graph of the loss hides.
        recomputed = self._used_nowhere & (counts == self._control.world_size)
        self._used_nowhere &= counts == 0
        constant = self._used_everywhere | self._used_nowhere | recomputed | ~self._outside_leaves
        if self._in_first_window and bool(constant.all()):
            leaves = {
                id(parameter.ds_z3_leaf_module)
                for parameter in self._parameters
                if hasattr(parameter, "ds_z3_leaf_module")
            }
            self._expected = int((self._used_everywhere | recomputed).sum()) + len(leaves)
            self._watch_handles = [
                self._on_gradient(number, self._note_unexpected)
                for number in self._used_nowhere.nonzero().flatten().tolist()
            ]
        self._in_first_window = False

    def close(self) -> None:
        """Remove this object's hooks from the parameters."""
        for handle in (*self._handles, *self._watch_handles):
            handle.remove()
        self._handles, self._watch_handles = [], []

    def _warn(self, text: str, which: torch.Tensor) -> None:
        names = self._named(which)
        if names:
            level = logging.WARNING if self._control.rank == 0 else logging.DEBUG
            logger.log(level, text, len(names), _listed(names))


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")


def _reachable_parameters(loss: torch.Tensor) -> set[int]:
    """Return the ids of the tensors that get a gradient in a backward from ``loss``."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        pending.extend(next_node for next_node, _ in node.next_functions)
    return leaves
