"""Reads and writes the attribute or hyper-parameter that a tuner searches for."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from drivetrain.errors import ConfigurationError


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
