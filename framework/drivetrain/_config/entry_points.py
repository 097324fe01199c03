"""Registries of names for settings: built-in names, and names that other packages register as entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

_DISTRIBUTION = "drivetrain"
"""The name of the distribution that contains drivetrain."""


class EntryPointRegistry(Generic[T]):
    """The names that one setting of `Fit` accepts, and the factories of the objects that they stand for.

    Built-in names do not need the metadata of installed packages. Reading the metadata takes 8 ms, and the metadata of
    an editable install may be outdated. Other packages cannot override built-in names.

    Args:
        setting: the argument of `Fit`, such as "launcher".
        group: the entry-point group, which is also the package of the interface, such as "drivetrain.launchers".
        interface: the class of the objects.
        factories: the factories of the built-in names.
        other_values: accepted values that are not names of objects, such as "auto".
        meaning: what the setting means, for errors about unknown names.
        alternatives: what can be passed instead of a name, for errors about unknown names.
    """

    def __init__(
        self,
        setting: str,
        group: str,
        interface: type[T],
        factories: Mapping[str, Callable[..., T]],
        *,
        other_values: Iterable[str] = ("auto",),
        meaning: str,
        alternatives: str,
    ) -> None:
        self._setting, self._group, self._interface = setting, group, interface
        self._factories, self._other_values = dict(factories), tuple(other_values)
        self._meaning, self._alternatives = meaning, alternatives

    @property
    def builtin_names(self) -> tuple[str, ...]:
        """The built-in names and ``other_values``."""
        return (*self._other_values, *self._factories)

    def registered(self) -> dict[str, EntryPoint]:
        """Return the entry points of the group by name, without the built-in names."""
        points = _registered(self._group, tuple(sys.path))
        return {name: point for name, point in points.items() if name not in self.builtin_names}

    def check(self, name: object, spelling: str | None = None) -> None:
        """Raise an error for an unknown name, without constructing anything.

        Args:
            name: the name as the user wrote it.
            spelling: the spelling to compare with known names, if it differs from ``name``.

        Raises:
            ConfigurationError: the name is unknown. The message lists the known names and suggests the closest one.
        """
        known: list[str] = list(self.builtin_names)
        if name in known:
            return
        known += sorted(self.registered())
        if name in known:
            return
        hint = nearest(spelling or str(name), known) or nearest(str(name), known)
        raise ConfigurationError(
            f"{self._setting}={name!r} is unknown.{hint}",
            f"{self._meaning}; other packages register names in the entry-point group {self._group!r}.",
            f"use one of {', '.join(known)}, or {self._alternatives}.",
        )

    def make(self, name: str, *arguments: Any) -> T:
        """Return the object that ``name`` stands for.

        Args:
            name: a name that is not one of ``other_values``.
            arguments: arguments for the factory, as documented for the group.

        Raises:
            ConfigurationError: the name is unknown, or its entry point cannot be imported or returns another type.
        """
        if name in self._factories:
            return self._factories[name](*arguments)
        self.check(name)
        point = self.registered()[name]
        try:
            factory = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"The {self._setting} {name!r} ({point.value}) cannot be imported.",
                f"{type(error).__name__}: {error}.",
                "install what the package that registers this name needs, or another version of that package.",
            ) from error
        value = factory(*arguments) if callable(factory) else factory
        if not isinstance(value, self._interface):
            interface = self._interface.__name__
            expected = "one argument" if arguments else "no arguments"
            raise ConfigurationError(
                f"The {self._setting} {name!r} ({point.value}) made a {type(value).__name__}, not a {interface}.",
                "the engine uses the object through that interface.",
                f"make the entry point a callable that takes {expected} and returns a {self._group}.{interface}.",
            )
        return value


@cache
def _registered(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the installed entry points of a group. ``path`` is the current ``sys.path``, a key of the cache."""
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name not in points or (point.dist is not None and point.dist.name == _DISTRIBUTION):
            points[point.name] = point
    return points
