"""What trains in a module, and how to say that it changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from drivetrain.errors import ConfigurationError, listed

TRAINS = attrgetter("requires_grad")
"""``tuple(map(TRAINS, parameters))`` is what trains, read without a Python call."""

Groups = tuple[tuple[tuple[str, ...], ...], ...]
"""For each optimizer, for each of its groups, the names of the parameters."""


@dataclass(frozen=True, slots=True)
class Change:
    """How what trains differs from what trained before, by plain parameter names.

    Attributes:
        unfrozen: train now.
        frozen: train no longer.
        created: are other objects than before, or new.
        removed: are the module's no longer.
        groups: the optimizers' groups, where they are others than before.
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
    ) -> Change:
        """Compare parameters and whether they trained with what they are now."""
        kept = {name: before[name][1] for name, one in now.items() if name in before and before[name][0] is one}
        return cls(
            tuple(name for name, trained in kept.items() if now[name].requires_grad and not trained),
            tuple(name for name, trained in kept.items() if trained and not now[name].requires_grad),
            tuple(name for name in now if name not in kept),
            tuple(name for name in before if name not in now),
            groups_now if groups_now != groups_before else None,
        )

    def __bool__(self) -> bool:
        return bool(self.unfrozen or self.frozen or self.created or self.removed or self.groups is not None)

    def __str__(self) -> str:
        parts = [
            f"{listed(names)} {verb}"
            for names, verb in (
                (self.unfrozen, "now train(s)"),
                (self.frozen, "train(s) no longer"),
                (self.created, "is or are new"),
                (self.removed, "is or are gone"),
            )
            if names
        ]
        if self.groups is not None:
            sizes = [[len(group) for group in groups] for groups in self.groups]
            parts.append(f"the optimizers' groups hold {', '.join(map(str, sizes))} parameters")
        return "; ".join(parts)

    @property
    def digest(self) -> str:
        """Tells two changes apart that read alike, since not every name is shown."""
        return hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()


def created_within_window(names: Iterable[str], strategy: str) -> ConfigurationError:
    """The refusal of parameters that are new in an open window."""
    return ConfigurationError(
        f"A layer was created within training_step or an open accumulation window: {listed(list(names))}.",
        f"{strategy} exchanges the gradients of what trained when the window opened: the new ones' would stay this "
        "rank's own.",
        "build it in configure_model and freeze it until it is wanted; under DDP it may be created between windows, "
        "as in on_train_epoch_start.",
    )


def changed_within_window(names: Iterable[str], strategy: str, toggles: bool = False) -> ConfigurationError:
    """The refusal of parameters whose ``requires_grad`` changed in an open window, or by a toggle left open."""
    return ConfigurationError(
        f"requires_grad of {listed(list(names))} was changed within training_step or an open accumulation window.",
        f"{strategy} exchanges the gradients of what trained when the window opened: those of the others would stay "
        "this rank's own, and the replicas would part.",
        "freeze and unfreeze between windows: in on_train_epoch_start, on_train_batch_start of a window's first batch, "
        "on_before_optimizer_step or later."
        + (" An optimizer that was toggled is let go of before training_step ends." if toggles else ""),
    )
