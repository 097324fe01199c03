"""Resolves settings. Code takes precedence over the environment, and the environment over the file.

The fields of the class that `resolved_settings` decorates define the arguments, their types and defaults. Reading
settings has no side effects.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, TypeVar

from drivetrain._config.argument_checks import fits, type_error
from drivetrain._config.secret_values import without_secrets, without_url_passwords
from drivetrain.errors import ConfigurationError, nearest, shortened

PREFIX = "DRIVETRAIN_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
CONFIG_FILE = "drivetrain.toml"

_WORDS = {"none": None, "true": True, "false": False}
"""What words of the environment stand for, in any case, as TOML knows no none and Python writes True."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved argument.

    Attributes:
        value: the value.
        source: where the value comes from: ``"code"``, ``"environment DRIVETRAIN_X"``, ``"file PATH"`` or
            ``"default"``.
    """

    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.value!r} ({self.source})"


class Settings(dict[str, Setting]):
    """All arguments by name, with their values and sources. ``str()`` lists them, one a line."""

    def __str__(self) -> str:
        return "\n".join(f"{_format_argument(name, each.value)} ({each.source})" for name, each in self.items())

    def format_call(self, owner: str) -> str:
        """Return the call of ``owner`` with the arguments that code, the environment or a file set, without secrets."""
        given = [_format_argument(name, each.value) for name, each in self.items() if each.source != "default"]
        return f"{owner}({', '.join(given)})"


def resolved_settings(cls: type[S]) -> type[S]:
    """Let a dataclass resolve each of its fields from code, environment, file or its default, in this order.

    The ``__init__`` of the decorated class sets ``self.settings`` to the `Settings`, and goes on with the resolved
    values. An argument that the caller passes counts as set, even if it equals the default.

    The environment sets an argument with the variable ``DRIVETRAIN_<NAME>``. The file sets an argument with a top-level
    key; the file is the one that ``DRIVETRAIN_CONFIG`` names, or ``drivetrain.toml`` in the working directory. Values
    are TOML (``4``, ``0.5``, ``true``, ``[0, 1]``). In the environment, text that is not TOML is taken literally.
    ``none`` means None.

    Raises:
        ConfigurationError: an argument, variable or key is unknown; a value does not have the annotated type; or a file
            is missing or not TOML.
    """
    init = cls.__init__
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        init.__annotations__[name] = _annotation(field)  # `help` shows the type of an argument alone

    @functools.wraps(init)
    def resolving(self: Any, /, **kwargs: Any) -> None:
        try:
            self.settings = settings = _resolve(cls, kwargs)
            init(self, **{name: setting.value for name, setting in settings.items()})
        except ConfigurationError as error:
            raise shortened(error)  # noqa: B904 - the same error

    cls.__init__ = resolving  # type: ignore[assignment,method-assign]
    return cls


def _resolve(cls: type, given: Mapping[str, Any]) -> Settings:
    """Resolve the fields of ``cls``, in their order, from ``given``, the environment and the file."""
    known: Mapping[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    for name, value in given.items():
        if name not in known:
            what = f"{cls.__name__}() has no argument {name!r}."
            raise _unknown_setting_error(name, what, _format_argument(name, value), known)
    settings = {name: Setting(field.default, "default") for name, field in known.items()}
    names = {name: value for base in cls.__mro__ for name, value in vars(sys.modules[base.__module__]).items()}
    # All values of the environment and the file are checked, because an error in them is raised even if code
    # overrides the value. The environment comes last and overrides the file.
    for name, readings, source in (*_from_file(known), *_from_environment(known)):
        annotation = _evaluated(known[name], names)
        fitting = [value for value in readings if fits(value, annotation)]
        if not fitting:
            what = f"{_format_argument(name, readings[-1])} ({source})"
            raise type_error(what, name, readings[-1], _annotation(known[name]))
        settings[name] = Setting(fitting[0], source)
    for name, value in given.items():
        if not fits(value, _evaluated(known[name], names)):
            raise type_error(_format_argument(name, value), name, value, _annotation(known[name]))
        settings[name] = Setting(value, "code")
    return Settings(settings)


def _annotation(field: Field[Any]) -> str:
    return re.sub(r"^InitVar\[(.*)\]$", r"\1", str(field.type))


def _evaluated(field: Field[Any], names: Mapping[str, Any]) -> Any:
    # The annotation is source code of drivetrain, not input.
    return eval(_annotation(field), {"__builtins__": {}}, _AnnotationNames(names))


def _from_environment(known: Collection[str]) -> Iterator[tuple[str, list[Any], str]]:
    """Yield each argument that the environment sets, what its text may stand for, and the variable."""
    names = {PREFIX + name.upper(): name for name in known}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in names:
            given = _format_argument(variable, text)
            what = f"The environment variable {given} is not a setting."
            variables = [*names, CONFIG_VARIABLE]
            raise _unknown_setting_error(variable.upper(), what, given, variables, f"Unset {variable}")
        yield names[variable], [*_values_of(text), text], f"environment {variable}"


def _values_of(text: str) -> list[Any]:
    """Return the value for which a text of the environment stands, if it is more than text."""
    import tomllib  # imported only if there are such texts

    word = text.strip().lower()
    if word in _WORDS:
        return [_WORDS[word]]
    try:
        table = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        return []
    # If the table has several keys, the text contained a line break and was not a single value.
    return [table["value"]] if len(table) == 1 else []


def _from_file(known: Collection[str]) -> Iterator[tuple[str, list[Any], str]]:
    """Yield each argument that the file sets, what its value may stand for, and the file."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(CONFIG_FILE if named is None else named).expanduser()
    try:
        if named is None and not path.exists():
            return
        import tomllib  # imported only if there is a file

        path = Path.cwd() / path
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The config file {path} cannot be read.",
            f"{type(error).__name__}: {error}",
            f"write one 'name = value' a line, with text in quotes; {CONFIG_VARIABLE} may name another file.",
        ) from error
    for key, value in table.items():
        if key not in known:
            what = f"The config file {path} sets {key!r}, which is not a setting."
            raise _unknown_setting_error(key, what, _format_argument(key, value, " = "), known)
        yield key, [None, value] if value == "none" else [value], f"file {path}"


def _unknown_setting_error(
    name: str, what: str, given: str, known: Iterable[str], removal: str = "Remove it"
) -> ConfigurationError:
    from drivetrain._config.foreign_names import find_replacement  # imported only for this error

    replacement = find_replacement(name.removeprefix(PREFIX))
    if replacement is not None:
        return ConfigurationError(
            what,
            f"{given} has another name in drivetrain, or is set in another place.",
            f"{removal}, and {replacement}.",
        )
    return ConfigurationError(
        what + nearest(name, known),
        f"{given} would have no effect.",
        f"{removal}, or correct its name. The names are {', '.join(known)}.",
    )


def _format_argument(name: str, value: Any, sign: str = "=") -> str:
    """Format a name with its value for an error message. The value of a secret is replaced by ``...``."""
    public, _ = without_secrets({name: value})
    return f"{name}{sign}{_short(public[name])}" if name in public else f"{name}{sign}..."


def _short(value: Any, width: int = 60) -> str:
    text = without_url_passwords(repr(value))
    return text if len(text) <= width else text[: width - 3] + "..."


class _AnnotationNames(dict[str, Any]):
    """The names in an annotation. A name that is only imported for type checkers stands for every object."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)
