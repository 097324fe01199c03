"""Lets hooks of the user read and edit gradients and weights, which ZeRO keeps apart from the module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import cut
from drivetrain_strategies.deepspeed._empty_parameters import EmptyParameters
from drivetrain_strategies.deepspeed._internals import Fragment, Zero
from drivetrain_strategies.deepspeed._state import State, gather

_VERSION = attrgetter("_version")
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


class UserHooks:
    """What hooks of the user see of a run's gradients and weights, and what they write there.

    In hooks that follow a backward, ``parameter.grad`` is the whole gradient of the window, and the groups of the
    optimizer hold the module's parameters. The step uses what a hook wrote. Weights that a hook wrote are copied to the
    master weights before these are used.

    Args:
        module: the user's module.
        zero: DeepSpeed's engine.
        state: the state of the module.
        gather_limit: size in bytes up to which gradients are gathered.
    """

    def __init__(self, module: nn.Module, zero: Zero, state: State, gather_limit: int) -> None:
        self._zero = zero
        self._state = state
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._gather_limit = gather_limit
        self._fragments = list(zero.fragments())
        self._parameters = [fragment.parameter for fragment in self._fragments]
        self._params = [(fragment.flat_index, fragment.parameter) for fragment in self._fragments]
        self._may_have_written = False
        self._before_step: list[int] | None = None

    @contextmanager
    def context(self, name: str, window_is_complete: bool) -> Iterator[None]:
        """Context manager in which a hook of the user runs; see `Strategy.hook_context`."""
        self._may_have_written = True
        with ExitStack() as contexts:
            if name in _GRADIENT_HOOKS:
                withheld = self._why_withheld(name, window_is_complete)
                contexts.enter_context(
                    self._shown_gradients() if withheld is None else self._withheld_gradients(*withheld)
                )
            if self._zero.stage == 3:
                contexts.enter_context(EmptyParameters(self._names))
            yield

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Return what a step of the user's module returns at stages 1 and 2, and note whether it wrote weights."""
        self._before_step = self._marks()
        output = step()
        if self._before_step != self._marks():
            self._may_have_written = True
        self._before_step = None
        return output

    def after_optimizer_step(self) -> None:
        """Accept the weights that an optimizer's step has written within a step of the user's module."""
        self._before_step = self._marks()

    def _marks(self) -> list[int]:
        """Return numbers that change when a weight is written in place, or is given other memory."""
        return [*map(_VERSION, self._parameters), *map(torch.Tensor.data_ptr, self._parameters)]

    def keep_writes(self) -> None:
        """Copy weights that hooks may have written into the master weights. Does not communicate."""
        within_step = self._before_step is not None
        if self._may_have_written or (within_step and self._before_step != self._marks()):
            self._may_have_written = False
            self._state.adopt_compute_weights()

    def _why_withheld(self, name: str, window_is_complete: bool) -> tuple[str, str] | None:
        """Return why the hook cannot read gradients, and the fix; None if it can."""
        if not window_is_complete:
            return (
                f"ZeRO has the whole gradients only at the end of a window, and {name} runs before.",
                "read and edit gradients in on_before_optimizer_step.",
            )
        other_strategy = "use strategy='fsdp', or trainer.gradient_norm for the norm of all gradients."
        if any(map(self._zero.is_swapped, range(len(self._zero.flat_tensors())))):
            return "the gradients are on a drive.", other_strategy
        nbytes = sum(fragment.numel * fragment.flat.element_size() for fragment in self._fragments)
        if nbytes > self._gather_limit:
            return (
                f"the whole gradients take {nbytes:,} bytes, but gather_limit is {self._gather_limit:,}.",
                f"set DeepSpeedStrategy(gather_limit={nbytes}), or {other_strategy}",
            )
        return None

    @contextmanager
    def _shown_gradients(self) -> Iterator[None]:
        """Show whole gradients within this context, and let the step use what user code makes of them. Collective."""
        zero, fragments = self._zero, self._fragments
        zero.reduce()
        scale = zero.loss_scale
        gradients: dict[int, torch.Tensor | None] = {}
        with torch.no_grad():
            for fragment in fragments:
                whole = gather(zero.gradient(fragment).float(), fragment.shape, fragment.span)
                gradients[id(fragment.parameter)] = whole.div_(scale).to(fragment.parameter.device)

        def read(parameter: Any) -> Any:
            return gradients[id(parameter)]

        def write(parameter: Any, value: Any) -> None:
            gradients[id(parameter)] = value

        with zero.params_in_groups(self._params), _gradient_property(fragments, read, write):
            yield
        changed = []
        with torch.no_grad():
            for fragment in fragments:
                gradient = gradients[id(fragment.parameter)]
                part = zero.gradient(fragment)
                if gradient is None:  # as that of a parameter that the loss does not use
                    new = torch.zeros_like(part)
                else:
                    new = (cut(gradient, fragment.span) * scale).to(part)
                if not torch.equal(part, new):
                    part.copy_(new)
                    changed.append(fragment)
        zero.gradients_changed(changed)

    @contextmanager
    def _withheld_gradients(self, why: str, fix: str) -> Iterator[None]:
        """Make reading and writing gradients an error within this context."""

        def refuse(parameter: Any, *value: Any) -> Any:
            what = f"A hook used the gradient of {self._names.get(id(parameter), '?')!r} under DeepSpeed."
            raise ConfigurationError(what, why, fix)

        with self._zero.params_in_groups(self._params), _gradient_property(self._fragments, refuse, refuse):
            yield


@contextmanager
def _gradient_property(
    fragments: list[Fragment], read: Callable[..., Any], write: Callable[..., Any]
) -> Iterator[None]:
    """Let ``parameter.grad`` call ``read`` and ``write`` within this context.

    Torch itself accepts no gradient of the whole shape for a parameter that is empty.
    """
    classes: dict[type, type] = {}
    before = [type(fragment.parameter) for fragment in fragments]
    for fragment, kind in zip(fragments, before, strict=True):
        if kind not in classes:
            classes[kind] = type(kind.__name__, (kind,), {"grad": property(read, write)})
        fragment.parameter.__class__ = classes[kind]
    try:
        yield
    finally:
        for fragment, kind in zip(fragments, before, strict=True):
            fragment.parameter.__class__ = kind
