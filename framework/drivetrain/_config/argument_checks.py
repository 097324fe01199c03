"""Checks of single arguments: one of several names, or a count."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from drivetrain.errors import ConfigurationError, nearest


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
