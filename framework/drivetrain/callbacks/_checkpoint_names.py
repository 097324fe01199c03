"""What a checkpoint is called: a template filled with counters and logged values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drivetrain.errors import ConfigurationError, nearest

DEFAULT = "{epoch}-{step}"

_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")
COUNTERS = ("epoch", "step")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._=,+-]")


def checkpoint_name(template: str, values: Mapping[str, float], named: bool = True) -> str:
    """Fill a template: ``"{epoch:03d}-{val_loss:.2f}"`` becomes ``epoch=003-val_loss=0.25``.

    Args:
        template: names of values in braces, each with a format if need be.
        values: the counters "epoch" and "step", and what was logged.
        named: put ``name=`` before each value.

    Raises:
        ConfigurationError: nothing of that name was logged, or it cannot be formatted so.
    """

    def filled(found: re.Match[str]) -> str:
        name, form = found[1], found[2] or ""
        if name not in values:
            raise ConfigurationError(
                f"Checkpoint(filename={template!r}): nothing called {name!r} was logged.{nearest(name, values)}",
                f"there are {', '.join(sorted(values))}.",
                "log it before the checkpoint is written, or leave it out of the name.",
            )
        value = values[name]
        try:
            text = format(value, form[1:])
        except ValueError as error:
            raise ConfigurationError(
                f"Checkpoint(filename={template!r}): {name} = {value!r} cannot be formatted as {form[1:]!r}: {error}.",
                "",
                "counters take ':03d', values ':.3f'.",
            ) from error
        return f"{name}={text}" if named else text

    return _FORBIDDEN.sub("_", _FIELD.sub(filled, template))


def names_in(template: str) -> list[str]:
    """The logged values that a template names."""
    return [found[1] for found in _FIELD.finditer(template) if found[1] not in COUNTERS]


def check_template(template: str) -> None:
    """Refuse a template that could not be a name.

    Raises:
        ConfigurationError: it names a folder, or leaves a brace open.
    """
    rest = _FIELD.sub("", template)
    if not template or "/" in rest or "{" in rest or "}" in rest or template.startswith("."):
        raise ConfigurationError(
            f"Checkpoint(filename={template!r}) is no name.",
            "it names a folder within dirpath: text, with values in braces.",
            "write for example '{epoch:03d}-{val_loss:.3f}', and the folder's own path into dirpath.",
        )
