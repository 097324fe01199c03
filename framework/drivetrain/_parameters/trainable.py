"""Describes changes of a module's trainable parameters, and the errors for changes that a strategy cannot handle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from drivetrain.errors import ConfigurationError, listed

get_requires_grad = attrgetter("requires_grad")
"""``tuple(map(get_requires_grad, parameters))`` reads ``requires_grad`` without a Python call per parameter."""

Groups = tuple[tuple[tuple[str, ...], ...], ...]
"""Parameter names of each group of each optimizer."""


@dataclass(frozen=True, slots=True)
class TrainableChange:
    """A change of the trainable parameters, by plain names.

    Attributes:
        unfrozen: parameters that became trainable.
        frozen: parameters that became frozen.
        created: parameters under a new name, and new parameter objects under a known name.
        removed: parameters that are no longer in the module.
        groups: the optimizers' groups; None if the groups did not change.
    """

    unfrozen: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    groups: Groups | None = None

    @classmethod
    def between(
        cls,
        before: Mapping[str, tuple[nn.Parameter, bool]],
        now: Mapping[str, nn.Parameter],
        groups_before: Groups,
        groups_now: Groups,
    ) -> TrainableChange:
        """Return the difference between two states of parameters, trainability and optimizer groups."""
        trained_before = {
            name: before[name][1] for name, parameter in now.items() if name in before and before[name][0] is parameter
        }
        return cls(
            tuple(name for name, trained in trained_before.items() if now[name].requires_grad and not trained),
            tuple(name for name, trained in trained_before.items() if trained and not now[name].requires_grad),
            tuple(name for name in now if name not in trained_before),
            tuple(name for name in before if name not in now),
            groups_now if groups_now != groups_before else None,
        )

    def __bool__(self) -> bool:
        return bool(self.unfrozen or self.frozen or self.created or self.removed or self.groups is not None)

    def __str__(self) -> str:
        parts = [
            f"{listed(names)} {verb}"
            for names, verb in (
                (self.unfrozen, "unfrozen"),
                (self.frozen, "frozen"),
                (self.created, "created"),
                (self.removed, "removed"),
            )
            if names
        ]
        if self.groups is not None:
            sizes = [[len(group) for group in groups] for groups in self.groups]
            parts.append(f"the optimizers' groups hold {', '.join(map(str, sizes))} parameters")
        return "; ".join(parts)


def parameters_created_within_window(names: Iterable[str], strategy: str) -> ConfigurationError:
    """Return the error for parameters that were created in an open window."""
    return ConfigurationError(
        f"A layer was created within training_step or an open accumulation window: {listed(list(names))}.",
        f"{strategy} exchanges gradients of the parameters that were trainable when the window opened, and not of "
        "the new ones.",
        "build the layer in configure_model, and freeze it until it is needed. DDP allows new layers between windows, "
        "for example in on_train_epoch_start.",
    )


def changed_within_window_error(names: Iterable[str], strategy: str) -> ConfigurationError:
    """Return the error for parameters whose ``requires_grad`` changed in an open window.

    Args:
        names: names of the parameters.
        strategy: the name of the strategy's class.
    """
    return ConfigurationError(
        f"requires_grad of {listed(list(names))} was changed within training_step or an open accumulation window.",
        f"{strategy} exchanges gradients of the parameters that were trainable when the window opened. Other "
        "gradients would not be exchanged, and the replicas would diverge.",
        "freeze and unfreeze between windows: in on_train_epoch_start, on_train_batch_start of a window's first batch, "
        "on_before_optimizer_step or later.",
    )
