"""Resolves settings. Code takes precedence over the environment, and the environment over the file.

The fields of the class that `resolved_settings` decorates define the arguments, their types and defaults. `Accepted`
is what a type accepts. Reading settings has no side effects.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
import types
import typing
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, TypeVar

from drivetrain._config.argument_checks import CHECKED_WITH_ITS_VALUE, fits
from drivetrain._config.secret_values import without_secrets, without_url_passwords
from drivetrain.errors import ConfigurationError, nearest, shortened

PREFIX = "DRIVETRAIN_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
CONFIG_FILE = "drivetrain.toml"

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


class Settings(Mapping[str, Setting]):
    """All arguments by name, with their values and sources. ``str()`` formats them as a table."""

    __slots__ = ("_settings",)

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = dict(settings)

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def items(self) -> ItemsView[str, Setting]:
        return self._settings.items()

    def __str__(self) -> str:
        rows = [("setting", "value", "source")]
        rows += [(name, _short(setting.value), setting.source) for name, setting in self.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)

    def format_call(self, owner: str) -> str:
        """Return the call of ``owner`` with the arguments that code, the environment or a file set, without secrets."""
        given = [_format_argument(name, each.value) for name, each in self.items() if each.source != "default"]
        return f"{owner}({', '.join(given)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings!r})"


def resolved_settings(cls: type[S]) -> type[S]:
    """Let a dataclass resolve each of its fields from code, environment, file or its default, in this order.

    The ``__init__`` of the decorated class sets ``self.settings`` to the `Settings`, and goes on with the resolved
    values. An argument that the caller passes counts as set, even if it equals the default.

    The environment sets an argument with the variable ``DRIVETRAIN_<NAME>``. The file sets an argument with a top-level
    key; the file is the one that ``DRIVETRAIN_CONFIG`` names, or ``drivetrain.toml`` in the working directory. Values
    are TOML (``4``, ``0.5``, ``true``, ``[0, 1]``). In the environment, text that is not TOML is taken literally.
    ``none`` means None.

    Raises:
        ConfigurationError: an argument, variable or key is unknown; a value does not have the annotated type; an
            argument for objects is set outside code; or a file is missing or not TOML.
    """
    init = cls.__init__
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        init.__annotations__[name] = _annotation(field)  # `help` shows the type of an argument alone

    @functools.wraps(init)
    def resolving(self: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            self.settings = settings = _resolve(cls, args, kwargs)
            init(self, **{name: setting.value for name, setting in settings.items()})
        except ConfigurationError as error:
            raise shortened(error)  # noqa: B904 - the same error

    cls.__init__ = resolving  # type: ignore[assignment,method-assign]
    return cls


def _resolve(cls: type, args: Sequence[Any], given: Mapping[str, Any]) -> Settings:
    """Resolve the fields of ``cls``, in their order, from ``given``, the environment and the file."""
    known: Mapping[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    owner = cls.__name__
    if args:
        raise ConfigurationError(
            f"{owner}() got positional arguments: {', '.join(map(repr, args))}.",
            "All arguments are keyword-only.",
            f"Write {owner}({next(iter(known))}=...).",
        )
    for name, value in given.items():
        if name not in known:
            what = f"{owner}() has no argument {name!r}."
            raise _unknown_setting_error(name, what, _format_argument(name, value), known)
    # All values of the environment and the file are checked, because an error in them is raised even if code
    # overrides the value. The environment comes last and overrides the file.
    settings = {name: Setting(field.default, "default") for name, field in known.items()}
    names = {name: value for base in cls.__mro__ for name, value in vars(sys.modules[base.__module__]).items()}
    for source in (_from_file(known), _from_environment(known)):
        for name, (value, where, is_text) in source.items():
            accepted = Accepted(_evaluated(known[name], names))
            settings[name] = Setting(_validated(name, value, where, is_text, accepted), where)
    for name, value in given.items():
        if (value is None or name not in CHECKED_WITH_ITS_VALUE) and not fits(value, _evaluated(known[name], names)):
            raise _type_error(known[name], value)
        settings[name] = Setting(value, "code")
    return Settings(settings)


def _annotation(field: Field[Any]) -> str:
    return re.sub(r"^InitVar\[(.*)\]$", r"\1", str(field.type))


def _evaluated(field: Field[Any], names: Mapping[str, Any]) -> Any:
    # The annotation is source code of drivetrain, not input.
    return eval(_annotation(field), {"__builtins__": {}}, _AnnotationNames(names))


def _from_environment(known: Collection[str]) -> dict[str, tuple[Any, str, bool]]:
    names = {PREFIX + name.upper(): name for name in known}
    values: dict[str, tuple[Any, str, bool]] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in names:
            given = _format_argument(variable, text)
            what = f"The environment variable {given} is not a setting."
            variables = [*names, CONFIG_VARIABLE]
            raise _unknown_setting_error(variable.upper(), what, given, variables, f"Unset {variable}")
        values[names[variable]] = (text, f"environment {variable}", True)
    return values


def _from_file(known: Collection[str]) -> dict[str, tuple[Any, str, bool]]:
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named).expanduser() if named is not None else Path(CONFIG_FILE)
    try:
        path = Path.cwd() / path
        # A missing default file is not an error. A missing file that the user named is an error.
        if named is None and not path.exists():
            return {}
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if named is None and isinstance(error, FileNotFoundError):  # the working directory no longer exists
            return {}
        what = f"{CONFIG_VARIABLE}={named!r}" if named is not None else f"The config file {path}"
        raise ConfigurationError(
            f"{what} cannot be read.",
            f"{type(error).__name__}: {error}",
            f"Set {CONFIG_VARIABLE} to the path of a TOML file, or unset it."
            if named is not None
            else "Repair or remove the file.",
        ) from error
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"The config file {path} is not TOML.",
            str(error),
            "Write one 'name = value' per line, with text in quotes.",
        ) from error
    for key in table:
        if key not in known:
            what = f"The config file {path} sets {key!r}, which is not a setting."
            raise _unknown_setting_error(key, what, _format_argument(key, table[key], " = "), known)
    return {key: (value, f"file {path}", False) for key, value in table.items()}


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


def _validated(name: str, value: Any, where: str, is_text: bool, accepted: Accepted) -> Any:
    if accepted.only_objects:
        raise ConfigurationError(
            f"{name} was set to {without_url_passwords(repr(value))} ({where}).",
            f"{name} takes Python objects, which the environment and files cannot represent.",
            f"Pass {name}= in code.",
        )
    is_accepted, converted = accepted.read(value) if is_text else accepted.take(value)
    if not is_accepted:
        raise ConfigurationError(
            f"{name} was set to {without_url_passwords(repr(value))} ({where}).",
            f"{name} accepts {accepted}.",
            f"Correct the value in {where}, or remove it there.",
        )
    return converted


def _type_error(field: Field[Any], value: Any) -> ConfigurationError:
    annotation = _annotation(field)
    hint = nearest(value, re.findall(r"'(\w+)'", annotation)) if isinstance(value, str) else ""
    why, fix = f"a {type(value).__name__} was given, and {field.name} takes {annotation}.", "pass a value of this type"
    if annotation == "bool":
        why, fix = (
            "only True and False switch it; bool('no') is True, so other values are not converted.",
            "use True or False",
        )
    return ConfigurationError(
        f"{_format_argument(field.name, value)}.{hint}", why, f"{fix}, or leave {field.name} out for {field.default!r}."
    )


def _format_argument(name: str, value: Any, sign: str = "=") -> str:
    """Format a name with its value for an error message. The value of a secret is replaced by ``...``."""
    public, _ = without_secrets({name: value})
    return f"{name}{sign}{_short(public[name])}" if name in public else f"{name}{sign}..."


def _short(value: Any, width: int = 60) -> str:
    text = without_url_passwords(repr(value))
    return text if len(text) <= width else text[: width - 3] + "..."


# The values that a type accepts

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a decimal point",
    str: "text",
    dict: "a table",
    types.NoneType: "none",
}


class Accepted:
    """The values that an annotation accepts from text or a file: plain types, literals, lists, dicts and None."""

    def __init__(self, annotation: Any) -> None:
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        members = typing.get_args(annotation) if is_union else (annotation,)
        self._described = {member: words for member in members if (words := _description(member))}

    @property
    def only_objects(self) -> bool:
        """Whether the argument accepts only objects (or None), which cannot be written as text."""
        return not self._described.keys() - {types.NoneType}

    def read(self, text: str) -> tuple[bool, Any]:
        """Parse ``text`` as a TOML value or as plain text. Return whether the value is accepted, and the value."""
        word = text.strip().lower()
        # The spellings of Python, True and False, are accepted too.
        text_value: Any = word == "true" if word in ("true", "false") else _toml_value(text.strip())
        fitting, value = self.take(text_value)
        return (fitting, value) if fitting else self.take(text)

    def take(self, value: Any) -> tuple[bool, Any]:
        """Return whether a value of the file or of text is accepted, and the value to pass on."""
        if isinstance(value, str) and value.strip().lower() == "none" and types.NoneType in self._described:
            return True, None
        return any(fits(value, member) for member in self._described), value

    def __str__(self) -> str:
        return " or ".join(self._described.values())


def _description(annotation: Any) -> str:
    """Return words for what is written for an annotation; "" if it stands for objects."""
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind is typing.Literal:
        return " or ".join(map(repr, arguments))
    if kind in (list, Sequence):
        elements = Accepted(arguments[0])
        return "" if elements.only_objects else f"a list whose elements are {elements}"
    return _WORDS.get(kind, "")


class _AnnotationNames(dict[str, Any]):
    """The names in an annotation. A name that is only imported for type checkers stands for every object."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # If the table has several keys, the text contained a line break and was not a single value.
    return table["value"] if len(table) == 1 else text
