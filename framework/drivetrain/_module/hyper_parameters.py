"""Hyper-parameters: the constructor's arguments, saved so that a checkpoint can rebuild the object."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError


class HyperParameters(dict[str, Any]):
    """A dict whose entries can also be read and set as attributes, like those of a ``DictConfig``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            advice = (
                f"the names are {', '.join(self)}" if self else "call self.save_hyperparameters() in __init__ first"
            )
            raise AttributeError(f"no hyper-parameter {name!r}: {advice}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParametersMixin:
    """Mixin of `TrainModule` and `DataModule` that saves constructor arguments."""

    @property
    def hparams(self) -> HyperParameters:
        """The hyper-parameters that `save_hyperparameters` saved."""
        hyper_parameters: HyperParameters = self.__dict__.setdefault("_hyper_parameters", HyperParameters())
        return hyper_parameters

    @property
    def hparams_initial(self) -> HyperParameters:
        """A copy of `hparams` as of the last call of `save_hyperparameters`."""
        hyper_parameters: HyperParameters = self.__dict__.get("_initial_hyper_parameters", HyperParameters())
        return deepcopy(hyper_parameters)

    def save_hyperparameters(self, *names: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Save the arguments of ``__init__`` in `hparams`, which every checkpoint contains.

        Args:
            names: the names of the arguments to save. Without names, all arguments are saved. Alternatively a single
                mapping or `argparse.Namespace` whose values are saved. If the mapping or namespace is an argument of
                ``__init__``, ``load_from_checkpoint`` passes the saved values as that argument.
            ignore: the names to omit.
            logger: whether to pass the hyper-parameters to the run's loggers.

        Raises:
            ConfigurationError: a name is unknown, or a value cannot be represented in JSON. The message names the
                argument.
        """
        if len(names) == 1 and _is_mapping_or_namespace(names[0]):
            values: Any = names[0]
            mapping = values if isinstance(values, Mapping) else vars(values)
            argument = next((name for name, value in _init_arguments(self).items() if value is values), "")
            self.__dict__["_hyper_parameters_argument"] = argument
            self.hparams.update(_validated(self, dict(mapping), ignore))
        else:
            self.hparams.update(_validated(self, _selected(_init_arguments(self), names), ignore))
        self.__dict__["_initial_hyper_parameters"] = deepcopy(self.hparams)
        self.__dict__["_logs_hyper_parameters"] = logger


def _is_mapping_or_namespace(value: Any) -> bool:
    # `argparse.Namespace` is recognised by its name, so that argparse need not be imported.
    return isinstance(value, Mapping) or any(base.__name__.endswith("Namespace") for base in type(value).__mro__)


def hyper_parameters_argument(owner: HyperParametersMixin) -> str:
    """Return the argument of ``__init__`` that holds all hyper-parameters; "" if each of them is an argument."""
    return str(owner.__dict__.get("_hyper_parameters_argument", ""))


def logged_hyper_parameters(owner: HyperParametersMixin) -> Mapping[str, Any]:
    """Return the hyper-parameters for loggers, or no hyper-parameters after ``save_hyperparameters(logger=False)``."""
    return owner.hparams if owner.__dict__.get("_logs_hyper_parameters", True) else {}


def _selected(arguments: Mapping[str, Any], names: Sequence[Any]) -> Mapping[str, Any]:
    unknown = [name for name in names if name not in arguments]
    if unknown:
        raise ConfigurationError(
            f"save_hyperparameters: {', '.join(map(repr, unknown))} are not arguments of __init__.",
            f"the arguments of the __init__ that calls it are {', '.join(arguments) or 'none'}.",
            "pass names of arguments, or one mapping, such as dataclasses.asdict(config).",
        )
    return {name: arguments[name] for name in names} if names else arguments


def _init_arguments(owner: object) -> dict[str, Any]:
    """Return the arguments of ``owner``'s ``__init__`` methods that are on the call stack, those of subclasses first.

    If a base class has an argument of the same name, the value from the subclass is returned.
    """
    arguments: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and _first_argument(frame) is owner:
            arguments = {**_arguments(frame), **arguments}
        frame = frame.f_back
    return arguments


def _validated(owner: object, values: Mapping[str, Any], ignore: str | Iterable[str]) -> dict[str, Any]:
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    hyper_parameters = {name: _copied(value) for name, value in values.items() if name not in ignored}
    for name, value in hyper_parameters.items():
        _check_json(type(owner).__name__, name, value)
    return hyper_parameters


def _copied(value: Any) -> Any:
    """Copy nested containers, so that later changes do not reach the saved value; other mappings become dicts."""
    if isinstance(value, Mapping):
        kind = dict if type(value) is dict else HyperParameters
        return kind({key: _copied(entry) for key, entry in value.items()})
    if isinstance(value, tuple):
        return value if hasattr(value, "_fields") else tuple(map(_copied, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(map(_copied, value))
    return value


def with_attributes(value: Any) -> Any:
    """Return a value with its dicts, nested ones too, as `HyperParameters`, as which a checkpoint passes them."""
    if isinstance(value, dict):
        return HyperParameters({key: with_attributes(entry) for key, entry in value.items()})
    return [with_attributes(entry) for entry in value] if isinstance(value, list) else value


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _arguments(frame: FrameType) -> dict[str, Any]:
    names, _, varkw, values = inspect.getargvalues(frame)  # the names of keyword-only arguments come last
    arguments = {name: values[name] for name in names[1:] if name in values}
    if varkw is not None:
        arguments.update(values[varkw])
    return arguments


def _check_json(owner: str, name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"save_hyperparameters: {owner}'s argument {name!r} is a {type(value).__name__}: {error}.",
            "hyper-parameters are saved as JSON, so that loading a checkpoint cannot run code.",
            f"omit it with save_hyperparameters(ignore={name!r}), or pass plain values, such as "
            "dataclasses.asdict(config) or vars(config).",
        ) from error


if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):  # a decorator, named like ``classmethod``
        """A class method that builds a new object; called on an instance, it raises an error.

        The instance would stay as it is, although the call reads as if it were changed.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            method = super().__get__(instance, owner)
            if instance is None:
                return method

            @wraps(method)
            def refused(*args: Any, **kwargs: Any) -> Any:
                owner_name, name = type(instance).__name__, method.__name__
                raise ConfigurationError(
                    f"{name} was called on an instance of {owner_name}.",
                    "it returns a new object and does not change the instance.",
                    f"write {owner_name.lower()} = {owner_name}.{name}(...).",
                )

            return refused
