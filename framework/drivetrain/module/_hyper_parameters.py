"""Hyper-parameters: the arguments a module was built with, kept so that a checkpoint can build it again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
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


class HyperParametersMixin:
    """Mixed into what is built from arguments worth keeping."""

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept."""
        kept: HyperParameters = self.__dict__.setdefault("_hyper_parameters", HyperParameters())
        return kept

    @property
    def hparams_initial(self) -> HyperParameters:
        """What `hparams` held when `save_hyperparameters` was last called: a copy."""
        kept: HyperParameters = self.__dict__.get("_initial_hyper_parameters", HyperParameters())
        return deepcopy(kept)

    def save_hyperparameters(self, *names: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Keep the arguments of ``__init__`` in `hparams`; they go into every checkpoint.

        Args:
            names: which; all where none are given. Or one mapping or `argparse.Namespace`, whose values are kept; where
                it is an argument of ``__init__``, ``load_from_checkpoint`` passes it again as that argument.
            ignore: names to leave out.
            logger: hand them to the run's loggers.

        Raises:
            ConfigurationError: names a value that JSON cannot hold.
        """
        if len(names) == 1 and _holds_values(names[0]):
            given: Any = names[0]
            whole = given if isinstance(given, Mapping) else vars(given)
            argument = next((name for name, value in _init_arguments(self).items() if value is given), "")
            self.__dict__["_hyper_parameters_argument"] = argument
            self.hparams.update(_checked(self, dict(whole), ignore))
        else:
            self.hparams.update(collect_init_arguments(self, _names(names), ignore))
        self.__dict__["_initial_hyper_parameters"] = deepcopy(self.hparams)
        self.__dict__["_logs_hyper_parameters"] = logger


def _holds_values(given: Any) -> bool:
    # argparse is not imported for it.
    return isinstance(given, Mapping) or any(one.__name__.endswith("Namespace") for one in type(given).__mro__)


def _names(given: Sequence[Any]) -> list[str]:
    for one in given:
        if not isinstance(one, str):
            raise ConfigurationError(
                f"save_hyperparameters was given a {type(one).__name__}.",
                "it takes names of arguments of __init__, or one mapping or argparse.Namespace.",
                "convert it, as save_hyperparameters(dataclasses.asdict(config)), or call it without arguments.",
            )
    return list(given)


def hyper_parameters_argument(owner: HyperParametersMixin) -> str:
    """The argument of ``__init__`` that holds all hyper-parameters; "" where each is an argument."""
    return str(owner.__dict__.get("_hyper_parameters_argument", ""))


def logged_hyper_parameters(owner: HyperParametersMixin) -> Mapping[str, Any]:
    """What loggers get of ``owner``: nothing after ``save_hyperparameters(logger=False)``."""
    return owner.hparams if owner.__dict__.get("_logs_hyper_parameters", True) else {}


def collect_init_arguments(owner: object, names: Sequence[str], ignore: str | Iterable[str]) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` calls of ``owner`` that are under way, subclasses' values first.

    Raises:
        ConfigurationError: called from outside ``__init__``, an unknown name, or a value that JSON cannot hold.
    """
    found = _init_arguments(owner)
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
    return _checked(owner, {name: value for name, value in found.items() if not names or name in names}, ignore)


def _init_arguments(owner: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and _first_argument(frame) is owner:
            found = {**_arguments(frame), **found}
        frame = frame.f_back
    return found


def _checked(owner: object, values: Mapping[str, Any], ignore: str | Iterable[str]) -> dict[str, Any]:
    left_out = {ignore} if isinstance(ignore, str) else set(ignore)
    kept = {name: value for name, value in values.items() if name not in left_out}
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
