"""What trains may change within a run: noticed as a window opens, agreed on by the ranks, told to the strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from drivetrain._loops.configured_optimizers import SchedulerConfig, check_group
from drivetrain._loops.hooks import is_overridden
from drivetrain.errors import ConfigurationError, listed
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies._trainable import (
    Groups,
    TrainableChange,
    changed_within_window,
    parameters_created_within_window,
)
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

_CHANGE_TIMEOUT = timedelta(seconds=30)
"""A rank on which nothing changed does not come: it waits in a collective of its step, and is named."""

_FIXED_SCHEDULERS = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.SequentialLR,
    SWALR,
)
"""Those that raise at their next step once their optimizer has a group more (torch 2.13)."""


class Trainables:
    """Watches what trains in a module, and in which groups of its optimizers.

    Whether anything changed is asked as each window opens, by comparing ``tuple(map(REQUIRES_GRAD, parameters))`` with
    ``flags``: that is no Python call. Layers that are created, and groups that are added, say so themselves
    (``touched``).

    Args:
        module: as the strategy holds it, just wrapped.
        strategy: is told of a change between windows.
    """

    __slots__ = (
        "_aside",
        "_groups",
        "_handles",
        "_known",
        "_module",
        "_optimizers",
        "_patched",
        "_resuming",
        "_schedulers",
        "_strategy",
        "_told",
        "flags",
        "holds",
        "open",
        "parameters",
        "touched",
        "trained",
        "watches",
    )

    def __init__(self, module: TrainModule, strategy: Strategy) -> None:
        self._module = module
        self._strategy = strategy
        self._optimizers: Sequence[Optimizer] = ()
        self._schedulers: Sequence[SchedulerConfig] = ()
        self._groups: Groups = ()
        self._aside: set[str] = set()
        self._told: set[str] = set()
        self._handles: list[Any] = []
        self._patched: list[Optimizer] = []
        self._resuming = False
        self.watches = strategy.world_size > 1 or is_overridden("trainable_changed", strategy, Strategy)
        """Whether the strategy wants to know of changes; else what is asked once an epoch will do."""
        self.holds = self.watches
        """Whether nothing may change in an open window."""
        self.open = False
        """Whether a window is: from its first forward until ``on_before_optimizer_step`` begins."""
        self.touched = False
        """Whether a layer was created, or a group added, since the last look."""
        self.trained: set[str] = set()
        """The names of what trains, or has trained."""
        self._note()

    def begin(self, optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> None:
        """Watch from here on, until `end`, what is created and added.

        Args:
            optimizers: as the strategy steps them.
            schedulers: of their learning rates.
        """
        self._optimizers, self._schedulers = optimizers, schedulers
        self._groups = self._groups_now()
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self._handles.append(register(self._created))
        for optimizer in optimizers:
            self._patched.append(optimizer)
            optimizer.__dict__["add_param_group"] = self._adding(optimizer)

    def end(self) -> None:
        """Leave no trace."""
        for handle in self._handles:
            handle.remove()
        for optimizer in self._patched:
            optimizer.__dict__.pop("add_param_group", None)
        self._handles, self._patched = [], []

    # Between windows

    def settle(self) -> None:
        """Tell the strategy what has changed, once all ranks agree on it; nothing where nothing has. Collective.

        Raises:
            DistributedError: the ranks differ; names them.
            ConfigurationError: the strategy cannot take the change.
        """
        self.touched = False
        strategy = self._strategy
        now = strategy.named_parameters()
        change = TrainableChange.between(self._known, now, self._groups, self._groups_now())
        if not change:
            return
        if strategy.world_size > 1:
            strategy.control.agree(f"a change of what trains ({change}; {change.digest})", timeout=_CHANGE_TIMEOUT)
        strategy.trainable_changed(self._module)
        if strategy.rank == 0:
            logger.info("What trains has changed: %s.", change)
        self._note()
        self._groups = self._groups_now()
        self.tell_unheld(self._optimizers)

    def refuse_within(self, unfrozen_only: bool = False, toggles: bool = False) -> None:
        """Refuse what has changed since the window opened, if anything did.

        Args:
            unfrozen_only: let pass what does not train for a while (a toggled optimizer).
            toggles: it may be a toggle that was left open.

        Raises:
            ConfigurationError: names the parameters.
        """
        strategy = type(self._strategy).__name__
        if self.touched:
            now = self._strategy.named_parameters()
            created = [name for name, one in now.items() if name not in self._known or self._known[name][0] is not one]
            if created:
                raise parameters_created_within_window(created, strategy)
        names = {id(one): name for name, (one, _) in self._known.items()}
        found = [
            names[id(one)]
            for one, trained in zip(self.parameters, self.flags, strict=True)
            if one.requires_grad != trained and (one.requires_grad or not unfrozen_only)
        ]
        if found:
            raise changed_within_window(found, strategy, toggles)

    def tell_unheld(self, optimizers: Sequence[Optimizer]) -> None:
        """Name, once, what trains and is in no optimizer."""
        held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        named = self._strategy.named_parameters().items()
        names = [name for name, one in named if one.requires_grad and id(one) not in held and name not in self._told]
        self._told.update(names)
        if names and optimizers and self._strategy.rank == 0:
            logger.warning(
                "%d trainable parameter(s) are in no optimizer: %s. They get gradients, and nobody steps on them: give "
                "them to an optimizer (optimizer.add_param_group), or freeze them. Said once.",
                len(names),
                listed(names),
            )

    # What a checkpoint keeps

    def set_aside(self, before: Mapping[str, tuple[torch.nn.Parameter, bool]]) -> None:
        """Take for no change what the strategy did in ``setup_optimizers``, and for trainable what it froze there.

        Args:
            before: what `present` gave just before it.
        """
        after = self.present()
        changed = {name for name, (one, trains) in after.items() if before.get(name) != (one, trains)}
        self._aside = {name for name in changed if name in before and before[name][1] and not after[name][1]}
        self._known.update((name, after[name]) for name in changed)
        self._list()

    def present(self) -> dict[str, tuple[torch.nn.Parameter, bool]]:
        """Every parameter by name, and whether it trains."""
        return {name: (one, one.requires_grad) for name, one in self._strategy.named_parameters().items()}

    def frozen(self) -> list[str]:
        """The names of what does not train, as the user has it."""
        return [
            name
            for name, one in self._strategy.named_parameters().items()
            if not one.requires_grad and name not in self._aside
        ]

    def keep_frozen(self, names: Iterable[str], where: str | None) -> None:
        """Let everything train but ``names``, as in the run that goes on.

        Args:
            names: what was frozen when it was saved.
            where: whose freezing is undone, for the message; None says nothing.
        """
        undone = restore_frozen(self._strategy.named_parameters(), {*names, *self._aside})
        if undone and where is not None and self._strategy.rank == 0:
            logger.warning(
                "%s froze or unfroze %d parameter(s): %s. The run goes on from a checkpoint, with what trained in it: "
                "that was undone.",
                where,
                len(undone),
                listed(undone),
            )

    def resuming(self, value: bool) -> None:
        """Whether hooks that begin a resumed run are called: groups that they add are there already."""
        self._resuming = value

    # What says so itself

    def _created(self, module: Any, name: str, value: Any) -> None:
        self.touched = True

    def _adding(self, optimizer: Optimizer) -> Callable[[dict[str, Any]], None]:
        add = type(optimizer).add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            strategy, module = self._strategy, self._module
            group = dict(param_group)
            given = group["params"]
            given = [given] if isinstance(given, torch.Tensor) else list(given)
            group["params"] = given
            tensors = [one[1] if isinstance(one, tuple) else one for one in given]
            held = {id(one) for other in optimizer.param_groups for one in other["params"]}
            if self._resuming and tensors and all(id(one) in held for one in tensors):
                if strategy.rank == 0:
                    logger.warning(
                        "A group of %d parameter(s) was added that the checkpoint brought already: it is not added "
                        "again.",
                        len(tensors),
                    )
                return
            if self.open and self.holds:
                raise ConfigurationError(
                    "add_param_group within training_step or an open accumulation window.",
                    f"{type(strategy).__name__} exchanges the gradients of what trained when the window opened.",
                    "add it between windows: in on_train_epoch_start, on_before_optimizer_step or later.",
                )
            strategy.adding_group(optimizer)
            self._refuse_schedulers(optimizer)
            before = len(optimizer.param_groups)
            if (
                before
                and "param_names" in optimizer.param_groups[0]
                and all(isinstance(one, torch.Tensor) for one in given)
            ):
                # Built of named parameters, it takes no group without names.
                names = {id(one): name for name, one in strategy.named_parameters().items()}
                if all(id(one) in names for one in given):
                    group["params"] = [(names[id(one)], one) for one in given]
            add(optimizer, group)
            try:
                strategy.adopt_parameters([optimizer])
                check_group(module, optimizer, self._optimizers)
            except ConfigurationError:
                del optimizer.param_groups[before:]
                raise
            self.touched = True

        return add_param_group

    def _refuse_schedulers(self, optimizer: Optimizer) -> None:
        for config in self._schedulers:
            for scheduler in _and_those_within(config.scheduler):
                if _is_fixed(scheduler) and getattr(scheduler, "optimizer", None) is optimizer:
                    raise ConfigurationError(
                        f"add_param_group on {type(optimizer).__name__}, whose scheduler is a "
                        f"{type(scheduler).__name__}.",
                        "it keeps a value for each group of when it was built: torch fails at its next step.",
                        "give the optimizer the group from the start, since what is frozen is left alone; or use one "
                        "that goes by the groups' present rates: StepLR, ExponentialLR, LinearLR.",
                    )

    # What is known

    def _note(self) -> None:
        self._known = self.present()
        self._list()

    def _list(self) -> None:
        self.parameters = tuple(one for one, _ in self._known.values())
        self.flags = tuple(trained for _, trained in self._known.values())
        self.trained |= {name for name, (_, trained) in self._known.items() if trained}

    def _groups_now(self) -> Groups:
        names = {id(one): name for name, one in self._strategy.named_parameters().items()}
        return tuple(
            tuple(tuple(names.get(id(one), "?") for one in group["params"]) for group in optimizer.param_groups)
            for optimizer in self._optimizers
        )


def restore_frozen(named: Mapping[str, torch.nn.Parameter], frozen: set[str]) -> list[str]:
    """Let everything train but what is ``frozen``; return the names of what was changed."""
    undone = [
        name
        for name, one in named.items()
        if one.requires_grad == (name in frozen) and (one.is_floating_point() or one.is_complex())
    ]
    for name in undone:
        named[name].requires_grad_(name not in frozen)
    return undone


def _is_fixed(scheduler: Any) -> bool:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return getattr(scheduler, "default_min_lr", 0.0) is None  # min_lr is a list, of a number a group
    return isinstance(scheduler, _FIXED_SCHEDULERS)


def _and_those_within(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _and_those_within(inner)
