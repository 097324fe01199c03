"""Attributes by which a module or a data module is given a setting: its own, or hyper-parameters."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from drivetrain.errors import ConfigurationError


def holders_of(name: str, *owners: Any) -> list[Any]:
    """Return who has an attribute ``name`` among ``owners``, of which some may be None, and their ``hparams``."""
    found: list[Any] = []
    for owner in owners:
        if owner is None:
            continue
        hparams = getattr(owner, "hparams", None)
        if name in vars(owner) or hasattr(type(owner), name):
            found.append(owner)
        if isinstance(hparams, MutableMapping) and name in hparams:
            found.append(hparams)
    return found


def get_attribute(name: str, *owners: Any) -> Any:
    """Return the first value that there is of an attribute."""
    first = holders_of(name, *owners)[0]
    return first[name] if isinstance(first, MutableMapping) else getattr(first, name)


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set an attribute everywhere where it is.

    Raises:
        ConfigurationError: it cannot be set: it is a property, say.
    """
    for holder in holders_of(name, *owners):
        try:
            if isinstance(holder, MutableMapping):
                holder[name] = value
            else:
                setattr(holder, name, value)
        except AttributeError as error:
            raise ConfigurationError(
                f"{type(holder).__name__}.{name} cannot be set: {error}.",
                "the finder writes there what it has found.",
                "make it a plain attribute, or name another one.",
            ) from error
