"""Derives the values that the environment and the file may give an argument from the annotation of the argument."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_SEQUENCE_TYPES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPING_TYPES = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_PLAIN_TYPES = frozenset({bool, int, float, str})
_REFUSED_RESULT = (False, None)


class Accepted(NamedTuple):
    """The plain values that an argument accepts.

    Attributes:
        kinds: the accepted types among bool, int, float, str, `Path` and dict.
        literals: single accepted values.
        none: whether None is accepted.
        elements: the values that the elements of a list may have; None if no list is accepted.
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
        """Parse ``text`` as a TOML value or as plain text. Return whether the value is accepted, and the value."""
        word = text.strip().lower()
        if self.none and word == "none":
            return True, None
        if word in ("true", "false"):  # the spellings of Python, True and False, are accepted too
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
        kind = type(value)  # `isinstance` would take True for an int
        if kind in self.kinds:
            return True, value
        if kind is int and float in self.kinds:
            return True, float(value)
        return _REFUSED_RESULT

    def _take_text(self, text: str) -> tuple[bool, Any]:
        if self.none and text.strip().lower() == "none":
            return True, None
        if str in self.kinds:
            return True, text
        return (True, Path(text)) if Path in self.kinds else _REFUSED_RESULT

    def _take_list(self, values: list[Any]) -> tuple[bool, Any]:
        if self.elements is None:
            return _REFUSED_RESULT
        results = [self.elements.take(value) for value in values]
        return (True, [value for _, value in results]) if all(fits for fits, _ in results) else _REFUSED_RESULT

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
        names: the globals of the function. A name that exists only for type checkers stands for a class.
    """
    if isinstance(annotation, str):
        annotation = eval(
            annotation, {"__builtins__": {}}, _AnnotationNames(names)
        )  # the annotation is source code of drivetrain, not input
    return _accepted(annotation)


def _accepted(annotation: Any) -> Accepted:
    if annotation is None or annotation is type(None):
        return Accepted(frozenset(), none=True)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return Accepted(_PLAIN_TYPES | {dict}, none=True, elements=Accepted(_PLAIN_TYPES | {dict}))
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
    if container in _SEQUENCE_TYPES:
        element = _accepted(arguments[0]) if arguments else Accepted(_PLAIN_TYPES)
        return Accepted(frozenset(), elements=element)
    if container in _MAPPING_TYPES:
        return Accepted(frozenset({dict}))
    return Accepted(frozenset({annotation}) if annotation in _PLAIN_TYPES | {Path} else frozenset())


def _union(members: list[Accepted]) -> Accepted:
    lists = [member.elements for member in members if member.elements is not None]
    return Accepted(
        frozenset().union(*(member.kinds for member in members)),
        tuple(literal for member in members for literal in member.literals),
        any(member.none for member in members),
        _union(lists) if lists else None,
    )


class _AnnotationNames(dict[str, Any]):
    """The names in an annotation. A name that is only imported for type checkers stands for an empty class."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # If the table has several keys, the text contained a line break and was not a single value.
    return table["value"] if len(table) == 1 else text
