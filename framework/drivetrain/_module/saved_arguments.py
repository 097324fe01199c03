"""Rebuilds a module or a data module from the hyper-parameters in a checkpoint."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from drivetrain._config.secret_values import without_secrets
from drivetrain._module.hyper_parameters import HyperParameters, with_attributes
from drivetrain.errors import CheckpointError, ConfigurationError, listed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavedArguments:
    """The constructor arguments that a checkpoint contains.

    Attributes:
        path: the checkpoint's path.
        hyper_parameters: the saved hyper-parameters.
        argument: the name of the single argument that holds all hyper-parameters; "" if each hyper-parameter is an
            argument.
    """

    path: str
    hyper_parameters: Mapping[str, Any]
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
        if self.argument in accepted:  # overrides that are no arguments replace hyper-parameters
            replaced = {name: value for name, value in overrides.items() if name not in accepted}
            overrides = {name: value for name, value in overrides.items() if name in accepted}
            saved = {self.argument: HyperParameters(saved | replaced)}
        inherited: dict[str, Any] = {}
        if not any(param.kind is param.VAR_KEYWORD for param in parameters):
            of_bases = _inherited_arguments(owner)
            inherited = {name: saved.pop(name) for name in list(saved) if name in of_bases and name not in accepted}
            self._refuse(owner, [name for name in saved if name not in accepted], accepted)
        arguments = {**saved, **overrides}
        missing = [param.name for param in named if param.default is param.empty and param.name not in arguments]
        if missing:
            raise CheckpointError(
                f"{owner.__name__} needs {listed(missing)}, which is not among the hyper-parameters of {self.path!r}.",
                f"save_hyperparameters() saved {listed(list(self.hyper_parameters)) or 'none'}; checkpoints do not "
                "contain secrets.",
                f"pass the value, as in {owner.__name__}.load_from_checkpoint(path, {'=..., '.join(missing)}=...).",
            )
        by_position = [
            arguments.pop(param.name)
            for param in named
            if param.kind is param.POSITIONAL_ONLY and param.name in arguments
        ]
        instance = owner(*by_position, **arguments)
        current, _ = without_secrets(getattr(instance, "hparams", {}))
        changed = [name for name, value in inherited.items() if repr(current.get(name)) != repr(value)]
        self._refuse(owner, changed, accepted)
        return instance

    def _refuse(self, owner: type, names: Sequence[str], accepted: Sequence[str]) -> None:
        """Raise an error for saved arguments that ``owner`` does not take, if there are any."""
        if names:
            raise CheckpointError(
                f"{owner.__name__} does not take {listed(names)}, a hyper-parameter of {self.path!r}.",
                f"__init__ takes {', '.join(accepted) or 'no arguments'}: the checkpoint was written by another "
                "version of the class, or by another class.",
                f"omit it, as in {owner.__name__}.load_from_checkpoint(path, ignore={list(names)}), and if it was "
                "renamed, pass it by the new name.",
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
    """Read hyper-parameters from a JSON file, or from a YAML file if PyYAML is installed."""
    text = Path(path).expanduser().read_text(encoding="utf-8")
    is_yaml = os.fspath(path).endswith((".yaml", ".yml"))
    return dict(import_module("yaml").safe_load(text) if is_yaml else json.loads(text))


def _inherited_arguments(owner: type) -> set[str]:
    """Return the names of the arguments of ``__init__`` of ``owner`` and of its base classes."""
    names: set[str] = set()
    for base in owner.__mro__:
        init = base.__dict__.get("__init__")
        if inspect.isfunction(init):
            parameters = list(inspect.signature(init).parameters.values())[1:]
            names |= {param.name for param in parameters if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)}
    return names
