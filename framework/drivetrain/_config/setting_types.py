"""Derives the values that the environment and the file may give an argument from the annotation of the argument."""

from __future__ import annotations

import builtins
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import InitVar
from typing import Any, NamedTuple

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a decimal point",
    str: "text",
    dict: "a table",
}
_REFUSED_RESULT = (False, None)


class Accepted(NamedTuple):
    """The plain values that an argument accepts.

    Attributes:
        kinds: the accepted types among bool, int, float, str and dict.
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
        if isinstance(value, str) and self.none and value.strip().lower() == "none":
            return True, None
        if isinstance(value, list):
            return self._take_list(value)
        kind = type(value)  # `isinstance` would take True for an int
        if kind in self.kinds:
            return True, value
        if kind is int and float in self.kinds:
            return True, float(value)
        return _REFUSED_RESULT

    def _take_list(self, values: list[Any]) -> tuple[bool, Any]:
        if self.elements is None:
            return _REFUSED_RESULT
        results = [self.elements.take(value) for value in values]
        return (True, [value for _, value in results]) if all(fits for fits, _ in results) else _REFUSED_RESULT

    def __str__(self) -> str:
        descriptions = [repr(literal) for literal in self.literals]
        descriptions += [words for kind, words in _WORDS.items() if kind in self.kinds]
        if self.elements is not None and not self.elements.only_objects:
            descriptions.append(f"a list whose elements are {self.elements}")
        if self.none:
            descriptions.append("none")
        return " or ".join(descriptions)


def accepted_values(annotation: str, names: Mapping[str, Any]) -> Accepted:
    """Return the values that ``annotation`` accepts.

    Args:
        annotation: the text of a type: of plain types, literals, lists, dicts, None and classes, or a union of them.
        names: the names in the annotation. A name that exists only for type checkers stands for a class.
    """
    # The annotation is source code of drivetrain, not input.
    return _accepted(eval(annotation, {"__builtins__": {}}, _AnnotationNames(names)))


def _accepted(annotation: Any) -> Accepted:
    if isinstance(annotation, InitVar):
        annotation = annotation.type
    if annotation is None or annotation is types.NoneType:
        return Accepted(frozenset(), none=True)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union([_accepted(argument) for argument in arguments])
    if origin is typing.Literal:
        return Accepted(frozenset(), arguments)
    if origin in (list, Sequence):
        return Accepted(frozenset(), elements=_accepted(arguments[0]))
    kind = origin or annotation
    return Accepted(frozenset({kind} if kind in _WORDS else ()))


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
