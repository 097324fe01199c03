"""Finder: the base class of callbacks that search for a setting before a run, and the attributes that they set."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from drivetrain._format import load
from drivetrain.callback import Callback
from drivetrain.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from drivetrain.callback import Trials
    from drivetrain.run_context import RunContext

_AUTOMATIC_PATHS = ("auto", "last", "best")


class Finder(Callback):
    """Searches for a setting by trials, unless the run resumes from a checkpoint that contains the setting.

    Subclasses define `search`, which sets an attribute to what it finds, and `restore`, which sets the attribute again.
    """

    _stages: tuple[str, ...] = ("fit", "validate", "test", "predict")  # the stages before which to search
    _was_launched = False

    def search(self, trials: Trials) -> object:
        """Search for the setting, set the attribute, and return the result. A collective operation."""
        raise NotImplementedError

    def restore(self, saved: dict[str, Any], trials: Trials) -> None:
        """Use the setting that this callback's state in a checkpoint contains."""
        raise NotImplementedError

    def before_launch(self, trials: Trials) -> None:
        """Search for the setting, or restore it."""
        self._was_launched = True
        if trials.is_dry_run or trials.stage not in self._stages:
            return
        saved = _saved_state(trials.ckpt_path, self.state_key) if trials.stage == "fit" else None
        if saved is None:
            self.search(trials)
        else:
            self.restore(saved, trials)

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
    """Set the attribute ``name`` in every object that has such an attribute or hyper-parameter.

    Raises:
        ConfigurationError: the attribute cannot be set, for example because it is a property.
    """
    for holder in find_holders(name, *owners):
        try:
            if isinstance(holder, MutableMapping):
                holder[name] = value
            else:
                setattr(holder, name, value)
        except AttributeError as error:
            raise ConfigurationError(
                f"{type(holder).__name__}.{name} cannot be set: {error}.",
                "the search sets this attribute.",
                "make it a plain attribute, or pass the name of another attribute.",
            ) from error


def _saved_state(ckpt_path: str | None, key: str) -> dict[str, Any] | None:
    """Return the state of a finder in the checkpoint that a run resumes from.

    Args:
        ckpt_path: the run's ``ckpt_path``.
        key: the finder's ``state_key``.

    Returns:
        The state, or {} if the checkpoint does not contain the state or cannot be read. None if ``ckpt_path`` is None,
        "auto", "last" or "best", and thus not the path of a checkpoint.
    """
    if ckpt_path is None or ckpt_path in _AUTOMATIC_PATHS:
        return None
    try:
        saved = load(ckpt_path).state()["callbacks"][key]
    except (CheckpointError, KeyError, TypeError):  # The run raises an error when it loads the checkpoint.
        return {}
    return saved if isinstance(saved, dict) else {}
