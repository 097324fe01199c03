"""Checks of single arguments: their types, one of several names, or a count."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

from drivetrain.errors import ConfigurationError, nearest


def check_types(owner: type, values: Mapping[str, Any]) -> None:
    """Check the arguments of a class against the annotations of its ``__init__``.

    Args:
        owner: the class.
        values: the arguments by name, such as ``locals()`` of ``__init__`` or, in a dataclass, ``vars(self)``. Other
            names are ignored.

    Raises:
        ConfigurationError: a value has another type. A number may also be one of NumPy's, and every value is a bool.
    """
    initializer: Any = vars(owner)["__init__"]
    for name, annotation in inspect.get_annotations(initializer, eval_str=True).items():
        if name in values and not _fits(values[name], annotation):
            raise ConfigurationError(
                f"{owner.__name__}({name}={values[name]!r}).",
                f"a value of type {type(values[name]).__name__} was given, and the type of {name} is "
                f"{initializer.__annotations__[name]}.",
                f"give a value of this type; the documentation of {owner.__name__} describes it.",
            )


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a value has an annotated type. The types of elements are not compared."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(annotation))
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if origin is bool or not isinstance(origin, type) or origin.__module__ == "typing":
        return True
    return isinstance(value, origin)


def check_choice(owner: str, name: str, value: Any, choices: Sequence[str], meaning: str) -> None:
    """Check that an argument is one of several names.

    Args:
        owner: the class or function that takes the argument.
        name: the argument.
        value: its value.
        choices: the names.
        meaning: what the argument selects, as the end of a sentence, such as "when the time is checked".

    Raises:
        ConfigurationError: the value is none of the names. The message suggests the nearest name.
    """
    if value not in choices:
        raise ConfigurationError(
            f"{owner}({name}={value!r}).{nearest(str(value), choices)}",
            f"{name} is {meaning}.",
            f"use {' or '.join(map(repr, choices))}.",
        )


def check_count(owner: str, name: str, value: Any, least: int, meaning: str) -> None:
    """Check that an argument is an integer of at least ``least``.

    Args:
        owner: the class or function that takes the argument.
        name: the argument.
        value: its value.
        least: the smallest value.
        meaning: what the argument counts, as the end of a sentence, such as "the number of steps between two checks".

    Raises:
        ConfigurationError: the value is smaller, or no integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(
            f"{owner}({name}={value!r}).", f"{name} is {meaning}.", f"use an integer, {least} or more."
        )
