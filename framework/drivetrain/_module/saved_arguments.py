"""Rebuilds a module or a data module from the hyper-parameters in a checkpoint."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain._config.secret_values import without_secrets
from drivetrain._module.hyper_parameters import HyperParameters, with_attributes
from drivetrain.errors import CheckpointError, ConfigurationError, listed, nearest

T = TypeVar("T")

_SIGNATURE_ERROR = re.compile(r"(?:.*\.)?(\w+)\.__init__\(\) (got an unexpected keyword|missing \d+ required)")
"""The beginning of Python's error message for a constructor call whose arguments do not match its signature."""


@dataclass(frozen=True, slots=True)
class SavedArguments:
    """The constructor arguments that a checkpoint contains.

    Attributes:
        path: the checkpoint's path.
        hyper_parameters: the saved hyper-parameters.
        secrets: the names of the hyper-parameters that were not saved because they are secrets. Nested names are joined
            by dots.
        argument: the name of the single argument that holds all hyper-parameters; "" if each hyper-parameter is an
            argument.
    """

    path: str
    hyper_parameters: Mapping[str, Any]
    secrets: Sequence[str] = ()
    argument: str = ""

    def build(self, owner: type[T], overrides: Mapping[str, Any], ignore: str | Iterable[str] = ()) -> T:
        """Return an instance of ``owner`` built from the saved arguments.

        If only a base class takes a saved argument, the ``__init__`` of ``owner`` must pass the saved value to this
        class.

        Args:
            owner: the class to build.
            overrides: arguments that replace saved arguments or are added to them.
            ignore: the names of saved arguments to omit.

        Raises:
            CheckpointError: ``__init__`` needs an argument that was not saved, or does not take an argument that was
                saved. The message names the argument.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        saved = {name: with_attributes(value) for name, value in self.hyper_parameters.items() if name not in ignored}
        parameters = list(inspect.signature(owner).parameters.values())
        named = [param for param in parameters if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)]
        accepted = [param.name for param in named]
        takes_any = any(param.kind is param.VAR_KEYWORD for param in parameters)
        passed = {*overrides, *ignored}
        in_mapping = self.argument in accepted
        if in_mapping:  # overrides that are no arguments replace hyper-parameters
            replaced = {name: value for name, value in overrides.items() if name not in accepted}
            overrides = {name: value for name, value in overrides.items() if name in accepted}
            saved = {self.argument: HyperParameters(saved | replaced)}
        needed = [param.name for param in named if param.default is param.empty]
        missing = [name for name in needed if name not in saved and name not in overrides]
        inherited_values: dict[str, Any] = {}
        if not takes_any:
            unknown = [name for name in overrides if name not in accepted]
            if unknown:
                raise _unknown_overrides_error(owner, unknown, accepted)
            inherited = _inherited_arguments(owner)
            removed = [name for name in saved if name not in accepted and name not in inherited]
            if removed:
                raise self._removed_error(owner, removed, accepted, missing)
            inherited_values = {name: saved.pop(name) for name in list(saved) if name not in accepted}
        if missing:
            raise self._missing_error(owner, missing)
        self._warn_about_secrets(owner, passed, None if takes_any or in_mapping else accepted)
        arguments = {**saved, **overrides}
        positional = [param.name for param in named if param.kind is param.POSITIONAL_ONLY and param.name in arguments]
        by_position = [arguments.pop(name) for name in positional]
        try:
            instance = owner(*by_position, **arguments)
        except TypeError as error:
            problem = self._explain_base_error(owner, str(error), arguments) if takes_any else None
            if problem is None:
                raise
            raise problem from error
        current, _ = without_secrets(getattr(instance, "hparams", {}))
        changed = [
            name
            for name, value in inherited_values.items()
            if name not in current or repr(current[name]) != repr(value)
        ]
        if changed:
            raise self._removed_error(owner, changed, accepted)
        return instance

    def _missing_error(self, owner: type, names: Sequence[str]) -> CheckpointError:
        secrets = [name for name in names if name in self.secrets]
        others = [name for name in names if name not in self.secrets]
        why = f"save_hyperparameters() saved these: {', '.join(self.hyper_parameters) or 'none'}." if others else ""
        if secrets:
            why = f"checkpoints do not contain secrets, such as {listed(secrets)}. {why}".rstrip()
        hint = "" if self.hyper_parameters or self.secrets else ", and call self.save_hyperparameters() in __init__"
        return CheckpointError(
            f"{owner.__name__} needs {listed(names)}, which is not among the hyper-parameters of {self.path!r}.",
            why,
            f"pass the value, as in {owner.__name__}.load_from_checkpoint(path, {'=..., '.join(names)}=...){hint}.",
        )

    def _removed_error(
        self, owner: type, names: Sequence[str], accepted: Sequence[str], missing: Sequence[str] = ()
    ) -> CheckpointError:
        ignored = repr(names[0]) if len(names) == 1 else f"({', '.join(map(repr, names))})"
        call = f"{owner.__name__}.load_from_checkpoint(path, ignore={ignored}"
        needed = "".join(f", {name}=..." for name in missing)
        renamed = "" if missing else f"; if it was renamed, also pass it by the new name: {call}, new_name=...)"
        suggestion = nearest(names[0], [name for name in accepted if name not in self.hyper_parameters])
        return CheckpointError(
            f"{owner.__name__} does not take {listed(names)}, which is among the hyper-parameters of {self.path!r}."
            f"{suggestion}",
            f"__init__ takes {', '.join(accepted) or 'no arguments'}: the checkpoint was written by another version of "
            "the class, or by another class.",
            f"omit it, as in {call}{needed}){renamed}.",
        )

    def _explain_base_error(self, owner: type, message: str, arguments: Mapping[str, Any]) -> CheckpointError | None:
        """Return the error for a `TypeError` from a base class's ``__init__``, or None if the cause is another one."""
        match = _SIGNATURE_ERROR.match(message)
        if match is None or match[1] not in {base.__name__ for base in owner.__mro__}:
            return None
        names = re.findall(r"'(\w+)'", message)
        if match[2].startswith("missing"):
            return self._missing_error(owner, names)
        name = names[0]  # a second one is Python's suggestion
        if name not in arguments:
            return None
        accepted = sorted(_inherited_arguments(owner))
        if name in self.hyper_parameters:
            return self._removed_error(owner, [name], accepted)
        return _unknown_overrides_error(owner, [name], accepted)

    def _warn_about_secrets(self, owner: type, passed: Container[str], accepted: Container[str] | None) -> None:
        """Warn about secrets that neither the checkpoint nor the caller provides."""
        arguments = [(name, name.partition(".")[0]) for name in self.secrets]
        missing_secrets = [
            name for name, first in arguments if first not in passed and (accepted is None or first in accepted)
        ]
        if missing_secrets:
            first = missing_secrets[0].partition(".")[0]
            warnings.warn(
                f"{owner.__name__} is built without {listed(missing_secrets)}: checkpoints do not contain secrets. "
                f"Pass them, as in {owner.__name__}.load_from_checkpoint(path, {first}=...).",
                stacklevel=4,
            )


def resolve_checkpoint_path(owner: type, path: Any, checkpoint_path: Any) -> Any:
    """Return the path that was passed to ``load_from_checkpoint`` by either name.

    Raises:
        ConfigurationError: none or both were passed.
    """
    if (path is None) == (checkpoint_path is None):
        raise ConfigurationError(
            f"{owner.__name__}.load_from_checkpoint got {'no path' if path is None else 'two paths'}.",
            "load_from_checkpoint loads one checkpoint.",
            f"write {owner.__name__}.load_from_checkpoint(path).",
        )
    return checkpoint_path if path is None else path


def read_hyper_parameters(path: Any) -> dict[str, Any]:
    """Read hyper-parameters from a JSON file, or from a YAML file if PyYAML is installed.

    Raises:
        ConfigurationError: the file is neither JSON nor YAML, or does not contain a mapping.
    """
    path = os.path.expanduser(os.fspath(path))
    if path.endswith((".yaml", ".yml")):
        from importlib import import_module  # PyYAML is optional

        with open(path, encoding="utf-8") as file:
            document = import_module("yaml").safe_load(file)
    elif path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    else:
        document = None
    if not isinstance(document, Mapping):
        raise ConfigurationError(
            f"hparams_file={path!r} does not contain hyper-parameters by name.",
            "it must be a .json or .yaml file with names and values.",
            "pass hyper-parameters by name instead: load_from_checkpoint(path, width=64).",
        )
    return dict(document)


def _unknown_overrides_error(owner: type, names: Sequence[str], accepted: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{owner.__name__} does not take {listed(names)}, which was passed to load_from_checkpoint."
        f"{nearest(names[0], accepted)}",
        f"__init__ takes {', '.join(accepted) or 'no arguments'}.",
        "correct the name, or omit it.",
    )


def _inherited_arguments(owner: type) -> set[str]:
    """Return the names of the arguments of ``__init__`` of ``owner`` and of its base classes."""
    names: set[str] = set()
    for base in owner.__mro__:
        init = base.__dict__.get("__init__")
        if inspect.isfunction(init):
            parameters = list(inspect.signature(init).parameters.values())[1:]
            names |= {param.name for param in parameters if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)}
    return names
