"""Hyper-parameters: the arguments a module was built with, kept so that a checkpoint can build it again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from drivetrain.errors import ConfigurationError


class HyperParameters(dict[str, Any]):
    """A dict whose keys also read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class KeepsHyperParameters:
    """Mixed into what is built from arguments worth keeping."""

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept."""
        kept: HyperParameters = self.__dict__.setdefault("_hyper_parameters", HyperParameters())
        return kept

    def save_hyperparameters(self, *names: str, ignore: str | Iterable[str] = ()) -> None:
        """Keep the arguments of ``__init__`` in `hparams`; a module's go into every checkpoint.

        Args:
            names: which; all where none are given.
            ignore: names to leave out.

        Raises:
            ConfigurationError: names a value that JSON cannot hold.
        """
        self.hparams.update(collect_init_arguments(self, names, ignore))


def collect_init_arguments(owner: object, names: Sequence[str], ignore: str | Iterable[str]) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` calls of ``owner`` that are under way, subclasses' values first.

    Raises:
        ConfigurationError: called from outside ``__init__``, an unknown name, or a value that JSON cannot hold.
    """
    left_out = {ignore} if isinstance(ignore, str) else set(ignore)
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and _first_argument(frame) is owner:
            found = {**_arguments(frame), **found}
        frame = frame.f_back
    if not found and names:
        raise ConfigurationError(
            f"save_hyperparameters({', '.join(map(repr, names))}) found no arguments.",
            "it reads the arguments of the __init__ that calls it.",
            "call it in __init__.",
        )
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ConfigurationError(
            f"save_hyperparameters: {', '.join(map(repr, unknown))} are no arguments of __init__.",
            f"the arguments are {', '.join(found)}.",
            "name arguments only.",
        )
    kept = {name: value for name, value in found.items() if name not in left_out and (not names or name in names)}
    for name, value in kept.items():
        _refuse_unless_json(type(owner).__name__, name, value)
    return kept


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _arguments(frame: FrameType) -> dict[str, Any]:
    names, _, varkw, values = inspect.getargvalues(frame)
    arguments = {name: values[name] for name in names[1:] if name in values}
    code = frame.f_code
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    arguments.update({name: values[name] for name in keyword_only if name in values})
    if varkw is not None:
        arguments.update(values[varkw])
    return arguments


def _refuse_unless_json(owner: str, name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"save_hyperparameters: {owner}'s argument {name!r} is a {type(value).__name__}: {error}.",
            "hyper-parameters are kept as JSON, so that loading a checkpoint can run no code.",
            f"leave it out with save_hyperparameters(ignore={name!r}).",
        ) from error
