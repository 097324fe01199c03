"""Checks the values of arguments: those of `Fit`, whose types were checked before, and single ones of other classes."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from drivetrain.errors import ConfigurationError, nearest

CLIP_ALGORITHMS = ("norm", "value")

LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
"""The arguments that limit the number of micro-batches of a loader."""

COUNTS = {
    "num_nodes": 1,
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "fast_dev_run": 0,
    "log_every_n_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""The arguments that are integers, or None or a bool where their types accept it, with the smallest value of each."""

NOT_IN_BAREBONES = (
    *("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger", "profiler"),
    *("num_sanity_val_steps", "log_every_n_steps", "fast_dev_run", "detect_anomaly"),
)
"""The arguments that ``barebones`` contradicts."""


def check_arguments(values: Mapping[str, Any], chosen: frozenset[str]) -> None:
    """Raise an error for arguments that are invalid or contradict each other.

    Args:
        values: all arguments by name, each of a type that it accepts.
        chosen: the names of the arguments that were set in code, in the environment or in a file.

    Raises:
        ConfigurationError: an argument is invalid. The error names the argument, its value, the reason and a fix.
    """
    for name in LIMITS:
        _check_limit(name, values[name])
    _check_limit("val_check_interval", values["val_check_interval"], allow_zero=False)
    for name, lowest in COUNTS.items():
        if values[name] is not None:
            check_count("Fit", name, int(values[name]), lowest, "a count")
    _check_order(values, "min_epochs", "max_epochs")
    _check_order(values, "min_steps", "max_steps")
    if values["max_time"] is not None:
        parse_duration("max_time", values["max_time"])
    if values["preemption_signals"] not in (None, "auto"):
        signal_numbers(values["preemption_signals"])
    if values["check_val_every_n_epoch"] is None and not isinstance(values["val_check_interval"], int):
        raise ConfigurationError(
            f"check_val_every_n_epoch=None with val_check_interval={values['val_check_interval']!r}.",
            "with None, validation is scheduled by micro-batches across epochs, so a fraction of an epoch has no "
            "meaning.",
            "give val_check_interval as an int.",
        )
    _check_clipping(values["gradient_clip_val"], values["gradient_clip_algorithm"])
    if values["benchmark"] and values["deterministic"]:
        raise ConfigurationError(
            f"benchmark=True with deterministic={values['deterministic']!r}.",
            "cuDNN's benchmark selects algorithms by measured speed, which differs from run to run.",
            "remove one of them.",
        )
    if values["plugins"] is not None:
        raise ConfigurationError(
            f"plugins={values['plugins']!r}.",
            "plugins are not supported; the argument is reserved.",
            "remove plugins=, and pass objects as strategy=, precision= or environment=.",
        )
    if values["barebones"]:
        _check_barebones(values, chosen)


def check_types(owner: type, values: Mapping[str, Any]) -> None:
    """Check the arguments of a class against the annotations of its ``__init__``.

    Args:
        owner: the class.
        values: the arguments by name, such as ``locals()`` of ``__init__`` or, in a dataclass, ``vars(self)``. Other
            names are ignored.

    Raises:
        ConfigurationError: a value has another type. A number may also be one of NumPy's.
    """
    initializer: Any = vars(owner)["__init__"]
    for name, annotation in inspect.get_annotations(initializer, eval_str=True).items():
        if name in values and not fits(values[name], annotation):
            what = f"{owner.__name__}({name}={values[name]!r})"
            raise type_error(what, name, values[name], initializer.__annotations__[name])


def type_error(what: str, name: str, value: Any, annotation: str) -> ConfigurationError:
    """Return the error for an argument of another type than its annotation's.

    Args:
        what: the argument with its value, as it was given.
        name: the argument.
        value: its value.
        annotation: the annotation, as it is written.
    """
    hint = nearest(value, re.findall(r"'(\w+)'", annotation)) if isinstance(value, str) else ""
    return ConfigurationError(
        f"{what}.{hint}",
        f"{name} takes {annotation}, and a {type(value).__name__} was given.",
        "pass a value of this type.",
    )


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value has an annotated type. The types of elements are not compared."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in arguments)
    if origin is Literal:
        return isinstance(value, str | int) and value in arguments
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple | set | frozenset)
    if not isinstance(origin, type) or origin.__module__ == "typing":
        return True
    return isinstance(value, Mapping if origin is dict else origin)


def check_choice(owner: str, name: str, value: Any, choices: Sequence[str], meaning: str) -> None:
    """Check that an argument is one of several names.

    Args:
        owner: the class or function that takes the argument.
        name: the argument.
        value: its value.
        choices: the names.
        meaning: what the argument selects, as the end of a sentence, such as "when the time is checked".

    Raises:
        ConfigurationError: the value is none of the names. The message suggests the nearest name.
    """
    if value not in choices:
        raise ConfigurationError(
            f"{owner}({name}={value!r}).{nearest(str(value), choices)}",
            f"{name} is {meaning}.",
            f"use {' or '.join(map(repr, choices))}.",
        )


def check_count(owner: str, name: str, value: Any, least: int, meaning: str) -> None:
    """Check that an argument is an integer of at least ``least``.

    Args:
        owner: the class or function that takes the argument.
        name: the argument.
        value: its value.
        least: the smallest value.
        meaning: what the argument counts, as the end of a sentence, such as "the number of steps between two checks".

    Raises:
        ConfigurationError: the value is smaller, or no integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(
            f"{owner}({name}={value!r}).", f"{name} is {meaning}.", f"use an integer, {least} or more."
        )


def parse_duration(name: str, value: Any) -> timedelta:
    """Parse a duration: a timedelta, a dict of its arguments, or "DD:HH:MM:SS".

    Args:
        name: the argument, for the error.
        value: the duration.

    Raises:
        ConfigurationError: ``value`` has another form, or its duration is not positive.
    """
    result = None
    if isinstance(value, timedelta):
        result = value
    elif isinstance(value, Mapping):
        try:
            result = timedelta(**value)
        except TypeError:
            result = None
    elif isinstance(value, str) and re.fullmatch(r"\d+:\d\d?:\d\d?:\d\d?", value):
        days, hours, minutes, seconds = map(int, value.split(":"))
        result = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if result is None or result <= timedelta(0):
        raise ConfigurationError(
            f"{name}={value!r} is not a duration.",
            f"{name} limits the time of training, as DD:HH:MM:SS, a timedelta or a dict of its arguments.",
            "use '00:12:00:00', timedelta(hours=12) or {'hours': 12}.",
        )
    return result


def signal_numbers(names: Any) -> list[int]:
    """Return the numbers of ``preemption_signals``, which is the name of a signal or a sequence of names.

    Raises:
        ConfigurationError: a name is not the name of a signal, or the signal cannot be handled.
    """
    catchable = [each.name for each in signal.Signals if each.name not in ("SIGKILL", "SIGSTOP")]
    chosen = [names] if isinstance(names, str) else names
    for name in chosen:
        meaning = "a signal on which a run saves a checkpoint and exits"
        check_choice("Fit", "preemption_signals", name, catchable, meaning)
    return [int(signal.Signals[name]) for name in chosen]


def _check_limit(name: str, value: Any, allow_zero: bool = True) -> None:
    if value is None:
        return
    is_count = type(value) is int and value >= (0 if allow_zero else 1)
    is_fraction = type(value) is float and 0.0 <= value <= 1.0 and (allow_zero or value > 0.0)
    if not (is_count or is_fraction):
        raise ConfigurationError(
            f"{name}={value!r}.",
            "an int is a number of micro-batches, and a float is a fraction of an epoch, from 0.0 to 1.0.",
            f"use {name}=10 for ten, or {name}=0.1 for a tenth.",
        )


def _check_order(values: Mapping[str, Any], low: str, high: str) -> None:
    smallest, largest = values[low], values[high]
    if smallest is not None and largest is not None and 0 <= largest < smallest:
        raise ConfigurationError(
            f"{low}={smallest} with {high}={largest}.",
            "the minimum exceeds the maximum.",
            f"lower {low}, or raise {high}.",
        )


def _check_clipping(value: Any, algorithm: Any) -> None:
    check_choice("Fit", "gradient_clip_algorithm", algorithm, CLIP_ALGORITHMS, "how gradients are clipped")
    if value is not None and not value >= 0:
        raise ConfigurationError(
            f"gradient_clip_val={value!r}.",
            "gradient_clip_val bounds the norm of the gradients or the magnitude of their elements.",
            "use a number >= 0, or None.",
        )


def _check_barebones(values: Mapping[str, Any], chosen: frozenset[str]) -> None:
    for name in NOT_IN_BAREBONES:
        if name in chosen and values[name]:
            raise ConfigurationError(
                f"barebones=True with {name}={values[name]!r}.",
                "barebones runs only the training loop, so that its overhead can be measured.",
                f"remove {name}, or barebones.",
            )
