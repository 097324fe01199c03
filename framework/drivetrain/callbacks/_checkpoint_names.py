"""Names of checkpoints: templates that are filled with counters and logged values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drivetrain._format.checkpoint_folder import is_checkpoint_file
from drivetrain._runs.checkpoint_folders import LATEST
from drivetrain.errors import ConfigurationError, nearest

DEFAULT_TEMPLATE = "{epoch}-{step}"

_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")
COUNTERS = ("epoch", "step")
_LONGEST_NAME = 230  # characters; values of a run may be longer than those in `check_template`, and get a version
_FORBIDDEN_CHARACTER = re.compile(r"[^A-Za-z0-9._=,+-]")


def checkpoint_name(template: str, values: Mapping[str, float], named: bool = True) -> str:
    """Fill a template. For example, ``"{epoch:03d}-{val_loss:.2f}"`` becomes ``epoch=003-val_loss=0.25``.

    Args:
        template: text with names of values in braces, each optionally with a format.
        values: the counters "epoch" and "step", and logged values.
        named: whether to put ``name=`` before each value.

    Raises:
        ConfigurationError: the template names a value that was not logged.
        ValueError: a format does not fit its value.
    """

    def format_field(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        if name not in values:
            raise ConfigurationError(
                f"Checkpoint(filename={template!r}): no value {name!r} was logged.{nearest(name, values)}",
                f"available: {', '.join(sorted(values))}.",
                "log the value before the checkpoint is written, or remove it from filename.",
            )
        text = format(values[name], form[1:])
        return f"{name}={text}" if named else text

    return _FORBIDDEN_CHARACTER.sub("_", _FIELD.sub(format_field, template))


def names_in(template: str) -> list[str]:
    """Return the names of the logged values in a template."""
    return [match[1] for match in _FIELD.finditer(template) if match[1] not in COUNTERS]


def check_template(template: str, named: bool) -> None:
    """Validate a template, and the length and form of the names that it makes.

    Args:
        template: the template.
        named: whether ``name=`` is put before each value.

    Raises:
        ConfigurationError: the template is no name of a folder, or makes names that are too long or that belong to
            other files.
        ValueError: a format does not fit its value.
    """
    rest = _FIELD.sub("", template)
    name = checkpoint_name(template, {**dict.fromkeys(names_in(template), 0.0), "epoch": 0, "step": 0}, named)
    is_text = rest.isprintable() and set("/{}").isdisjoint(rest)
    is_taken = name.lower() == LATEST or is_checkpoint_file(name.lower())
    if not name or not is_text or is_taken or name.startswith(".") or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"Checkpoint(filename={template!r:.250}) is not a valid name.",
            "filename is the name of a folder in dirpath: printable text, with values in braces, that has "
            f"no slash, begins with no dot, has at most {_LONGEST_NAME} characters, and names no file of checkpoints.",
            "write for example '{epoch:03d}-{val_loss:.3f}', and pass the path as dirpath.",
        )
