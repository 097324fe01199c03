"""What a setting takes by name: ours, and what other packages register in a group of entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

_OURS = "drivetrain"
"""The distribution that these modules come with."""


class Names(Generic[T]):
    """The names that one setting of `Fit` takes, and what makes the objects that they stand for.

    Ours are known without the metadata of installed packages: reading it takes 8 ms, and that of an editable install
    may be older than the code. No other package can take one of them.

    Args:
        setting: the argument of `Fit`: "launcher".
        group: of entry points, which is the package with the interface as well: "drivetrain.launchers".
        interface: the class of what a name stands for.
        ours: makes each of ours.
        words: taken too, and no object's name: "auto".
        why: what the setting says, for the error on a name that nobody knows.
        instead: what may be passed in place of a name, for the same.
    """

    def __init__(
        self,
        setting: str,
        group: str,
        interface: type[T],
        ours: Mapping[str, Callable[..., T]],
        *,
        words: Iterable[str] = ("auto",),
        why: str,
        instead: str,
    ) -> None:
        self._setting, self._group, self._interface = setting, group, interface
        self._ours, self._words = dict(ours), tuple(words)
        self._why, self._instead = why, instead

    @property
    def ours(self) -> tuple[str, ...]:
        """The names that come with drivetrain, words included."""
        return (*self._words, *self._ours)

    def registered(self) -> dict[str, EntryPoint]:
        """What is registered in the group, by name; of strategies, which come in by the same door, ours as well."""
        found = _registered(self._group, tuple(sys.path))
        return {name: point for name, point in found.items() if name not in self.ours}

    def check(self, name: object, spelling: str | None = None) -> None:
        """Refuse a name that nobody has. Makes nothing.

        Args:
            name: as the user wrote it.
            spelling: what to look for among the known names, where that is another.

        Raises:
            ConfigurationError: names the known ones and the nearest.
        """
        if isinstance(name, str) and (name in self.ours or self._point(name) is not None):
            return
        known = [*self.ours, *self.registered()]
        hint = nearest(spelling or str(name), known) or nearest(str(name), known)
        raise ConfigurationError(
            f"{self._setting}={name!r} is unknown.{hint}",
            f"{self._why}; those of other packages are in the entry-point group {self._group!r}.",
            f"use one of {', '.join(known)}, or {self._instead}.",
        )

    def make(self, name: str, *arguments: Any) -> T:
        """Make what ``name`` stands for.

        Args:
            name: no word.
            arguments: for the factory: as documented for the group.

        Raises:
            ConfigurationError: nobody has the name; what is registered under it cannot be imported, or makes something
                else.
        """
        if name in self._ours:
            return self._ours[name](*arguments)
        self.check(name)
        point = cast("EntryPoint", self._point(name))
        try:
            factory = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"The {self._setting} {name!r} ({point.value}) cannot be imported.",
                f"{type(error).__name__}: {error}.",
                "install what its package needs, or another version of it.",
            ) from error
        made = factory(*arguments) if callable(factory) else factory
        if not isinstance(made, self._interface):
            kind = self._interface.__name__
            taking = "one argument" if arguments else "no arguments"
            raise ConfigurationError(
                f"The {self._setting} {name!r} ({point.value}) made a {type(made).__name__}, which is not a {kind}.",
                "the engine knows it through that interface.",
                f"make the entry point a callable that takes {taking} and returns a {self._group}.{kind}.",
            )
        return made

    def _point(self, name: str) -> EntryPoint | None:
        if name not in _registered(self._group, tuple(sys.path)):
            _registered.cache_clear()  # its package may have been installed since
        return _registered(self._group, tuple(sys.path)).get(name)


@cache
def _registered(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Read what is installed where modules are imported from: once for each such ``path``."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name not in found or (point.dist is not None and point.dist.name == _OURS):
            found[point.name] = point
    return found
