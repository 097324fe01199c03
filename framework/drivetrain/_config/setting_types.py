"""Derives the values that an argument accepts from environment and file from its annotation."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_PLAIN = frozenset({bool, int, float, str})
_REFUSED = (False, None)


class Accepted(NamedTuple):
    """The plain values that an argument accepts.

    Attributes:
        kinds: types among bool, int, float, str, `Path` and dict.
        literals: single values.
        none: whether None is accepted.
        elements: what the elements of a list may be; None if no list is accepted.
    """

    kinds: frozenset[type]
    literals: tuple[Any, ...] = ()
    none: bool = False
    elements: Accepted | None = None

    @property
    def only_objects(self) -> bool:
        """Whether the argument accepts only objects (or None), which cannot be written as text."""
        return not self.kinds and not self.literals and (self.elements is None or self.elements.only_objects)

    def read(self, text: str) -> tuple[bool, Any]:
        """Parse ``text`` as a TOML value or as plain text; return whether it is accepted, and the value."""
        word = text.strip().lower()
        if self.none and word == "none":
            return True, None
        if word in ("true", "false"):  # Python's True and False too
            text_value: Any = word == "true"
        else:
            text_value = _toml_value(text.strip())
        fits, value = self.take(text_value)
        return (fits, value) if fits else self.take(text)

    def take(self, value: Any) -> tuple[bool, Any]:
        """Return whether ``value`` is accepted, and the value to pass on."""
        if any(value == literal and type(value) is type(literal) for literal in self.literals):
            return True, value
        if isinstance(value, str):
            return self._take_text(value)
        if isinstance(value, list):
            return self._take_list(value)
        kind = type(value)  # not isinstance, since True is an int
        if kind in self.kinds:
            return True, value
        if kind is int and float in self.kinds:
            return True, float(value)
        return _REFUSED

    def _take_text(self, text: str) -> tuple[bool, Any]:
        if self.none and text.strip().lower() == "none":
            return True, None
        if str in self.kinds:
            return True, text
        return (True, Path(text)) if Path in self.kinds else _REFUSED

    def _take_list(self, values: list[Any]) -> tuple[bool, Any]:
        if self.elements is None:
            return _REFUSED
        results = [self.elements.take(value) for value in values]
        return (True, [value for _, value in results]) if all(fits for fits, _ in results) else _REFUSED

    def __str__(self) -> str:
        names = {
            bool: "true or false",
            int: "a whole number",
            float: "a number with a decimal point",
            str: "text",
            Path: "a path",
            dict: "a table",
        }
        descriptions = [repr(literal) for literal in self.literals]
        descriptions += [words for kind, words in names.items() if kind in self.kinds]
        if self.elements is not None and not self.elements.only_objects:
            descriptions.append(f"a list whose elements are {self.elements}")
        if self.none:
            descriptions.append("none")
        return " or ".join(descriptions)


def accepted_values(annotation: Any, names: Mapping[str, Any]) -> Accepted:
    """Return the values that ``annotation`` accepts.

    Args:
        annotation: a type, or its text under ``from __future__ import annotations``, as `inspect.signature` returns it.
        names: the function's globals; names that exist only for type checkers stand for classes.
    """
    if isinstance(annotation, str):
        annotation = eval(annotation, {"__builtins__": {}}, _AnnotationNames(names))  # our own source, not input
    return _accepted(annotation)


def _accepted(annotation: Any) -> Accepted:
    if annotation is None or annotation is type(None):
        return Accepted(frozenset(), none=True)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return Accepted(_PLAIN | {dict}, none=True, elements=Accepted(_PLAIN | {dict}))
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union([_accepted(argument) for argument in arguments])
    if origin is typing.Annotated:
        return _accepted(arguments[0])
    if origin is typing.Literal:
        literals = tuple(argument for argument in arguments if argument is not None)
        return Accepted(frozenset(), literals, none=None in arguments)
    container = origin or annotation
    if container in _SEQUENCES:
        element = _accepted(arguments[0]) if arguments else Accepted(_PLAIN)
        return Accepted(frozenset(), elements=element)
    if container in _MAPPINGS:
        return Accepted(frozenset({dict}))
    return Accepted(frozenset({annotation}) if annotation in _PLAIN | {Path} else frozenset())


def _union(members: list[Accepted]) -> Accepted:
    lists = [member.elements for member in members if member.elements is not None]
    return Accepted(
        frozenset().union(*(member.kinds for member in members)),
        tuple(literal for member in members for literal in member.literals),
        any(member.none for member in members),
        _union(lists) if lists else None,
    )


class _AnnotationNames(dict[str, Any]):
    """The names in an annotation; one that cannot be resolved (imported for type checkers only) is an empty class."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # More than one key: the text contained a line break and was not a single value.
    return table["value"] if len(table) == 1 else text
