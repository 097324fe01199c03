"""Steps optimizers whose update is not element-wise under ZeRO, which flattens parameters and steps them in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from drivetrain.strategies import check_optimizer_fits, cut, named_optimizer_state
from drivetrain_strategies._gathered_step import GatheredStep, map_state, map_tensors
from drivetrain_strategies.deepspeed._internals import Fragment, Zero
from drivetrain_strategies.deepspeed._state import gather, part_of, sharded, whole_of


class GradientCollector(Optimizer):
    """Takes an optimizer's place in DeepSpeed's engine. Its step keeps the gradients, which are unscaled and clipped.

    Args:
        optimizer: the optimizer whose parameters DeepSpeed shards.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], {"lr": 0.0})
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        """Copies of the gradients of the flat tensors, since DeepSpeed writes the next ones into the same buffers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self.gradients[flat] = flat.grad.clone()


class WholeStep(GatheredStep):
    """Steps the user's optimizer with the module's own parameters, which hold whole master weights during the step.

    Between steps, state of the parameter's shape is a `ParameterShard` of this rank's part of the master weights. Other
    state is the same on every rank.

    Args:
        optimizer: the user's optimizer, whose groups hold the module's parameters.
        module: the module.
        zero: DeepSpeed's engine, which steps ``collector``.
        collector: collects the gradients.
        device: the device on which the optimizer computes.
    """

    def __init__(
        self, optimizer: Optimizer, module: nn.Module, zero: Zero, collector: GradientCollector, device: torch.device
    ) -> None:
        super().__init__(optimizer)
        self._module = module
        self._zero = zero
        self._collector = collector
        self._device = device
        self._fragments: Sequence[Fragment] = list(zero.fragments())
        self._compute_weights: list[torch.Tensor] = []

    @property
    def is_entered(self) -> bool:
        """Whether the module's parameters are whole master weights at this moment."""
        return bool(self._compute_weights)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer with the collected gradients. Collective."""
        try:
            result = super().step(closure)
        finally:
            self._collector.gradients = {}
        self._zero.update_compute_weights()
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        for fragment in self._fragments:
            parameter = fragment.parameter
            if not torch.equal(self._part_of(fragment, parameter.detach()), fragment.master):
                # `ClosureStep` must see that the optimizer moved the parameter, whose compute weights may be empty.
                increment_version(parameter)
        self.leave()
        self._zero.update_compute_weights()
        loss = closure()
        self.enter()
        return loss

    @torch.no_grad()
    def enter(self) -> None:
        gradients = self._collector.gradients
        whole = []
        for fragment in self._fragments:
            shape, span = fragment.shape, fragment.span
            master = gather(fragment.master, shape, span).to(self._device)
            gradient = None
            if gradients:
                part = gradients.get(fragment.flat)
                local = torch.zeros_like(fragment.master) if part is None else fragment.slice_of(part)
                gradient = gather(local, shape, span).to(self._device)
            map_state(self.optimizer.state, fragment.parameter, whole_of)
            whole.append((master, gradient))
        self._compute_weights = [fragment.parameter.data for fragment in self._fragments]
        for fragment, (master, gradient) in zip(self._fragments, whole, strict=True):
            fragment.parameter.data = master
            fragment.parameter.grad = gradient

    @torch.no_grad()
    def leave(self) -> None:
        compute_weights, self._compute_weights = self._compute_weights, []
        for fragment, weights in zip(self._fragments, compute_weights, strict=False):  # none, after an error
            parameter = fragment.parameter
            fragment.master.copy_(self._part_of(fragment, parameter.detach()))
            map_state(self.optimizer.state, parameter, partial(self._sharded, fragment))
            parameter.grad = None
            parameter.data = weights

    def mark_overflow(self) -> None:
        """Make the next gradients NaN, as those of a closure that overflowed are in a loop of one process."""
        self._collector.gradients = {
            fragment.flat: torch.full_like(fragment.flat, torch.nan) for fragment in self._fragments
        }

    @staticmethod
    def _part_of(fragment: Fragment, value: torch.Tensor) -> torch.Tensor:
        return cut(value, fragment.span).to(fragment.flat.device)

    def _sharded(self, fragment: Fragment, value: Any) -> Any:
        """Return a tensor of state as it is kept between steps: a shard, if it is shaped like the parameter."""
        if not fragment.shape or tuple(value.shape) != fragment.shape or hasattr(value, "__tensor_flatten__"):
            return value
        part = part_of(value, fragment.span).to(fragment.flat.device, copy=True)
        return sharded(part, fragment.shape, fragment.span)

    # State of a checkpoint

    def state(self) -> dict[str, Any]:
        """Return state and parameter groups by parameter names."""
        return named_optimizer_state(self._module, self.optimizer)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Load state by parameter names. Collective if it is sharded in another way.

        Raises:
            CheckpointError: the state has other parameters or groups.
        """
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        groups = self.optimizer.param_groups
        check_optimizer_fits(self.optimizer, [[names[id(one)] for one in group["params"]] for group in groups], saved)
        for group, settings in zip(groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        self.optimizer.state.clear()
        for fragment in self._fragments:
            values = saved["state"].get(names[id(fragment.parameter)])
            if values is not None:
                self.optimizer.state[fragment.parameter] = map_tensors(dict(values), partial(self._loaded, fragment))

    def _loaded(self, fragment: Fragment, value: Any) -> Any:
        kept = self._sharded(fragment, value)
        # A counter stays on the host, where torch's optimizers keep it.
        return kept.to(self._device, copy=True) if isinstance(kept, torch.Tensor) and kept.dim() else kept
