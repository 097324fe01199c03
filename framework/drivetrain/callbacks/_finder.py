"""Finder: the base class of callbacks that search for a setting before a run, and the attributes that they set."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.callback import Trials
    from drivetrain.run_context import RunContext


class Finder(Callback):
    """Searches for a setting by trials before a run. Subclasses define `search`, which sets an attribute."""

    _stages: tuple[str, ...] = ("fit", "validate", "test", "predict")  # the stages before which to search
    _was_launched = False

    def search(self, trials: Trials) -> object:
        """Search for the setting, set the attribute, and return the result. A collective operation."""
        raise NotImplementedError

    def before_launch(self, trials: Trials) -> None:
        """Search, unless the run is a dry run."""
        self._was_launched = True
        if not trials.is_dry_run and trials.stage in self._stages:
            self.search(trials)

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Raise an error if this callback was added to the run too late to search."""
        if not self._was_launched and stage in self._stages:
            raise ConfigurationError(
                f"{type(self).__name__} was added after the run had started.",
                "the search runs before set-up, so a finder cannot be added in configure_callbacks or setup.",
                "pass the finder to Fit(callbacks=...).",
            )


def find_holders(name: str, *owners: Any) -> list[Any]:
    """Return the objects that have an attribute ``name``, among ``owners`` (None is skipped) and their ``hparams``."""
    holders: list[Any] = []
    for owner in owners:
        if owner is None:
            continue
        hparams = getattr(owner, "hparams", None)
        if name in vars(owner) or hasattr(type(owner), name):
            holders.append(owner)
        if isinstance(hparams, MutableMapping) and name in hparams:
            holders.append(hparams)
    return holders


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set the attribute ``name`` in every object that has such an attribute or hyper-parameter."""
    for holder in find_holders(name, *owners):
        if isinstance(holder, MutableMapping):
            holder[name] = value
        else:
            setattr(holder, name, value)
