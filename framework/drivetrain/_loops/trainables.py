"""Detects when parameters are frozen, unfrozen or added during a run, and lets the strategy adapt."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from drivetrain._distributed.control_plane import digest_of
from drivetrain._loops.configured_optimizers import check_parameters
from drivetrain._loops.hooks import is_overridden
from drivetrain._parameters.trainable import (
    Groups,
    TrainableChange,
    changed_within_window_error,
    get_requires_grad,
    parameters_created_within_window,
)
from drivetrain._run_state import SchedulerConfig
from drivetrain.errors import ConfigurationError, listed
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

_CHANGE_TIMEOUT = timedelta(seconds=30)
"""The time limit for the ranks' agreement on a change.

A rank that sees no change does not join the agreement. When the limit is reached, an error names that rank.
"""

_SCHEDULERS_WITH_FIXED_GROUPS = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.SequentialLR,
    SWALR,
)
"""Schedulers whose next step fails after a group was added to their optimizer (torch 2.13)."""


class Trainables:
    """Tracks which parameters of a module train, and in which groups of its optimizers.

    The step calls `has_changed` when a window opens, after each forward and when the window closes.

    Args:
        module: the module, wrapped by the strategy.
        strategy: the strategy, which adapts to a change between windows.
    """

    def __init__(self, module: TrainModule, strategy: Strategy) -> None:
        self._module = module
        self._strategy = strategy
        self._optimizers: Sequence[Optimizer] = ()
        self._schedulers: Sequence[SchedulerConfig] = ()
        self._groups: Groups = ()
        self._frozen_by_strategy: set[str] = set()
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self.resuming = False
        """Whether the start hooks of a resumed run are being called. Groups that they add were already restored."""
        self.checks_each_window = strategy.world_size > 1 or is_overridden("trainable_changed", strategy, Strategy)
        """Whether changes are checked in each window because the strategy depends on them; otherwise once an epoch."""
        self.window_open = False
        """Whether a window is open, in which nothing may change: from its first forward to its last gradients."""
        self._has_new_parameters = False
        self.has_changed: Callable[[], bool]
        """Returns whether since the last check a layer or a group was added, or a parameter frozen or unfrozen."""
        self.trained: set[str] = set()
        """The names of the parameters that train or have trained."""
        self._record()

    def begin(self, optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> None:
        """Track new layers and parameter groups until `end`.

        Args:
            optimizers: the optimizers, as the strategy steps them.
            schedulers: their learning rate schedulers.
        """
        self._optimizers, self._schedulers = optimizers, schedulers
        self._groups = self._current_groups()
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self._handles.append(register(lambda *_: self.note_new_parameters()))
        for optimizer in optimizers:
            optimizer.__dict__["add_param_group"] = self._checked_add_param_group(optimizer)

    def end(self) -> None:
        """Remove the hooks that `begin` installed."""
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)

    # Checks

    def note_new_parameters(self) -> None:
        """Note that a layer was created, or a group added to an optimizer."""
        self._has_new_parameters = True
        self._compare_from_now_on()

    def _compare_from_now_on(self) -> None:
        # A step calls `has_changed` several times, so it consists of C functions: a method would cost a call each time.
        flags_now = map(tuple, map(map, repeat(get_requires_grad), repeat(self._parameters)))
        changes = map(operator.ne, flags_now, repeat(self._requires_grad_flags))
        self.has_changed = repeat(True).__next__ if self._has_new_parameters else changes.__next__

    def adapt_strategy(self) -> None:
        """Let the strategy adapt to changes, after all ranks have agreed on them. Collective if something changed.

        Raises:
            DistributedError: the changes differ between ranks. The error names them.
            ConfigurationError: the strategy does not support the change.
        """
        self._has_new_parameters = False
        self._compare_from_now_on()
        strategy = self._strategy
        now = strategy.named_parameters()
        change = TrainableChange.between(self._recorded, now, self._groups, self._current_groups())
        if not change:
            return
        if strategy.world_size > 1:
            # The digest is of all names, since the text lists only some.
            purpose = f"a change of the trainable parameters ({change}; {digest_of(astuple(change))})"
            strategy.control.monitored_barrier(purpose, timeout=_CHANGE_TIMEOUT)
        strategy.trainable_changed(self._module)
        if strategy.rank == 0:
            logger.info("The set of trainable parameters changed: %s.", change)
        self._record()
        self._groups = self._current_groups()
        self.warn_of_unoptimized(self._optimizers)

    def raise_if_changed(self, unfrozen_only: bool = False) -> None:
        """Raise an error if parameters have changed since the window opened.

        Args:
            unfrozen_only: whether to ignore newly frozen parameters, since ``toggle_optimizer`` freezes the parameters
                of other optimizers.

        Raises:
            ConfigurationError: parameters have changed. The error names them.
        """
        strategy_name = type(self._strategy).__name__
        if self._has_new_parameters:
            now = self._strategy.named_parameters()
            recorded = self._recorded
            created = [name for name, value in now.items() if name not in recorded or recorded[name][0] is not value]
            if created:
                raise parameters_created_within_window(created, strategy_name)
        names = {id(parameter): name for name, (parameter, _) in self._recorded.items()}
        changed = [
            names[id(parameter)]
            for parameter, requires_grad in zip(self._parameters, self._requires_grad_flags, strict=True)
            if parameter.requires_grad != requires_grad and (parameter.requires_grad or not unfrozen_only)
        ]
        if changed:
            raise changed_within_window_error(changed, strategy_name)

    def warn_of_unoptimized(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn, once per parameter, about trainable parameters that are in no optimizer."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        names = [
            name
            for name, parameter in self._strategy.named_parameters().items()
            if parameter.requires_grad and id(parameter) not in optimized and name not in self._warned
        ]
        self._warned.update(names)
        if names and optimizers and self._strategy.rank == 0:
            logger.warning(
                "%d trainable parameter(s) are in no optimizer: %s. They get gradients that are never used: add them "
                "to an optimizer (optimizer.add_param_group), or freeze them. This warning is not repeated.",
                len(names),
                listed(names),
            )

    # Frozen parameters

    def accept_strategy_changes(self, before: Mapping[str, tuple[torch.nn.Parameter, bool]]) -> None:
        """Record what the strategy changed in ``setup_optimizers``. Parameters that it froze count as trainable.

        Args:
            before: the result of `current_state` just before ``setup_optimizers``.
        """
        after = self.current_state()
        changed = {name for name, state in after.items() if before.get(name) != state}
        self._frozen_by_strategy = {
            name for name in changed if name in before and before[name][1] and not after[name][1]
        }
        self._recorded.update((name, after[name]) for name in changed)
        self._update_requires_grad_flags()

    def current_state(self) -> dict[str, tuple[torch.nn.Parameter, bool]]:
        """Return every parameter by name, and whether it trains."""
        named = self._strategy.named_parameters().items()
        return {name: (parameter, parameter.requires_grad) for name, parameter in named}

    def frozen(self) -> list[str]:
        """Return the names of the frozen parameters, without those that the strategy froze."""
        is_running = self._strategy.module is not None
        named = self._strategy.named_parameters().items() if is_running else self._module.named_parameters()
        return [
            name for name, parameter in named if not parameter.requires_grad and name not in self._frozen_by_strategy
        ]

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names of the frozen parameters, and which of them have trained before."""
        frozen = self.frozen()
        return {"frozen": frozen, "trained": [name for name in frozen if name in self.trained]}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Freeze and unfreeze parameters as when `state_dict` was called."""
        self.freeze_as_saved(state["frozen"], None)
        self.trained |= {*state["trained"]}
        self.note_new_parameters()

    def freeze_as_saved(self, names: Iterable[str], hook_name: str | None) -> None:
        """Freeze ``names`` and unfreeze all other parameters, as they were in the run that is resumed.

        Args:
            names: the parameters that were frozen when the run was saved.
            hook_name: the hook whose changes are undone, for the warning; None for no warning.
        """
        undone = freeze_only(self._strategy.named_parameters(), {*names, *self._frozen_by_strategy})
        if undone and hook_name is not None and self._strategy.rank == 0:
            logger.warning(
                "%s froze or unfroze %d parameter(s): %s. This was undone: a resumed run trains the parameters that "
                "trained in its checkpoint.",
                hook_name,
                len(undone),
                listed(undone),
            )

    # Notifications of new layers and groups

    def _checked_add_param_group(self, optimizer: Optimizer) -> Callable[[dict[str, Any]], None]:
        add = type(optimizer).add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            strategy, module = self._strategy, self._module
            group = dict(param_group)
            params = group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            group["params"] = params
            tensors = [param[1] if isinstance(param, tuple) else param for param in params]
            grouped = {id(param) for other in optimizer.param_groups for param in other["params"]}
            if self.resuming and tensors and all(id(tensor) in grouped for tensor in tensors):
                if strategy.rank == 0:
                    logger.warning(
                        "A group of %d parameter(s) was not added again, since it was already restored from the "
                        "checkpoint.",
                        len(tensors),
                    )
                return
            if self.window_open:
                raise ConfigurationError(
                    "add_param_group within training_step or an open accumulation window.",
                    f"{type(strategy).__name__} exchanges gradients of the parameters that were trainable when the "
                    "window opened.",
                    "add the group between windows: in on_train_epoch_start, on_before_optimizer_step or later.",
                )
            if any("param_names" in other for other in optimizer.param_groups):
                # torch then demands names of each group. Callbacks such as BackboneFinetuning add groups without.
                names = {id(parameter): name for name, parameter in strategy.named_parameters().items()}
                group["params"] = [
                    param if isinstance(param, tuple) else (names.get(id(param), ""), param) for param in params
                ]
            strategy.check_added_group(optimizer)
            self._check_schedulers(optimizer)
            add(optimizer, group)
            try:
                strategy.adopt_parameters([optimizer])
                check_parameters(
                    module, self._optimizers, module.automatic_optimization, only=optimizer.param_groups[-1]
                )
            except ConfigurationError:
                del optimizer.param_groups[-1]
                raise
            self.note_new_parameters()

        return add_param_group

    def _check_schedulers(self, optimizer: Optimizer) -> None:
        for config in self._schedulers:
            for scheduler in _with_inner_schedulers(config.scheduler):
                if isinstance(scheduler, _SCHEDULERS_WITH_FIXED_GROUPS) and scheduler.optimizer is optimizer:
                    raise ConfigurationError(
                        f"add_param_group on {type(optimizer).__name__}, whose scheduler is a "
                        f"{type(scheduler).__name__}.",
                        "the scheduler holds one value for each group that existed when it was built, so its next step "
                        "would fail.",
                        "give the optimizer the group from the start, with frozen parameters, which are not updated; "
                        "or use a scheduler that works on the groups' current learning rates, such as StepLR, "
                        "ExponentialLR or LinearLR.",
                    )

    # The recorded state

    def _record(self) -> None:
        self._recorded = self.current_state()
        self._update_requires_grad_flags()

    def _update_requires_grad_flags(self) -> None:
        self._parameters = tuple(parameter for parameter, _ in self._recorded.values())
        self._requires_grad_flags = tuple(trained for _, trained in self._recorded.values())
        self.trained |= {name for name, (_, trained) in self._recorded.items() if trained}
        self._compare_from_now_on()

    def _current_groups(self) -> Groups:
        names = {id(parameter): name for name, parameter in self._strategy.named_parameters().items()}
        return tuple(
            tuple(tuple(names.get(id(param), "?") for param in group["params"]) for group in optimizer.param_groups)
            for optimizer in self._optimizers
        )


def freeze_only(named: Mapping[str, torch.nn.Parameter], frozen: set[str]) -> list[str]:
    """Freeze the parameters named in ``frozen`` and unfreeze all others; return the names of those that changed."""
    changed = [
        name
        for name, parameter in named.items()
        if parameter.requires_grad == (name in frozen) and (parameter.is_floating_point() or parameter.is_complex())
    ]
    for name in changed:
        named[name].requires_grad_(name not in frozen)
    return changed


def _with_inner_schedulers(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner_schedulers(inner)
