"""A module built anew from the hyper-parameters of a checkpoint; what no longer fits is named."""

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
from drivetrain.errors import CheckpointError, ConfigurationError, listed, nearest
from drivetrain.module._hyper_parameters import HyperParameters

T = TypeVar("T")

_REFUSED = re.compile(
    r"(?:.*\.)?(?P<owner>\w+)\.__init__\(\) (?:got an unexpected keyword argument '(?P<unknown>\w+)'"
    r"|missing \d+ required [a-z-]+ arguments?: (?P<missing>.+))"
)
"""What Python says of a call with other arguments than those that a class takes."""


@dataclass(frozen=True, slots=True)
class SavedArguments:
    """What a checkpoint says of the arguments that a module was built with.

    Attributes:
        path: of the checkpoint.
        kept: the hyper-parameters in it.
        left_out: the names of those that are not, being secrets; joined by dots where nested.
        argument: the one argument that holds them all; "" where each is an argument.
    """

    path: str
    kept: Mapping[str, Any]
    left_out: Sequence[str] = ()
    argument: str = ""

    def build(self, owner: type[T], overrides: Mapping[str, Any], ignore: str | Iterable[str] = ()) -> T:
        """Return an ``owner`` built from them.

        What a base class kept, and ``owner`` now passes to it by itself, is compared with what was saved.

        Args:
            owner: its class.
            overrides: arguments that replace the saved ones, or come in addition.
            ignore: names of saved ones to leave out.

        Raises:
            CheckpointError: ``__init__`` needs what is not there, or takes no longer what is; the error names it.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        if self.argument and self.argument in inspect.signature(owner).parameters:
            return self._build_of_one(owner, overrides, ignored)
        saved = {name: value for name, value in self.kept.items() if name not in ignored}
        parameters = list(inspect.signature(owner).parameters.values())
        plain = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        accepted, open_ended = [one.name for one in plain], any(one.kind is one.VAR_KEYWORD for one in parameters)
        needed = [one.name for one in plain if one.default is one.empty]
        missing = [name for name in needed if name not in saved and name not in overrides]
        of_bases: dict[str, Any] = {}
        if not open_ended:
            unknown = [name for name in overrides if name not in accepted]
            if unknown:
                raise _unknown_overrides(owner, unknown, accepted)
            inherited = _arguments_of_bases(owner)
            removed = [name for name in saved if name not in accepted and name not in inherited]
            if removed:
                raise self._removed(owner, removed, accepted, missing)
            of_bases = {name: saved.pop(name) for name in list(saved) if name not in accepted}
        if missing:
            raise self._missing(owner, missing)
        self._tell_of_secrets(owner, {*overrides, *ignored}, None if open_ended else accepted)
        arguments = {**saved, **overrides}
        by_position = [
            arguments.pop(one.name) for one in plain if one.kind is one.POSITIONAL_ONLY and one.name in arguments
        ]
        try:
            built = owner(*by_position, **arguments)
        except TypeError as error:
            problem = self._refused_by_a_base(owner, str(error), arguments) if open_ended else None
            if problem is None:
                raise
            raise problem from error
        now, _ = without_secrets(getattr(built, "hparams", {}))
        changed = [name for name, value in of_bases.items() if name not in now or repr(now[name]) != repr(value)]
        if changed:
            raise self._removed(owner, changed, accepted)
        return built

    def _build_of_one(self, owner: type[T], overrides: Mapping[str, Any], ignored: set[str]) -> T:
        """Return an ``owner`` whose one argument holds them; what is no argument of it replaces what is in there."""
        accepted = inspect.signature(owner).parameters
        whole = HyperParameters({name: value for name, value in self.kept.items() if name not in ignored})
        whole |= {name: value for name, value in overrides.items() if name not in accepted}
        self._tell_of_secrets(owner, {*overrides, *ignored}, None)
        arguments = {self.argument: whole, **{name: value for name, value in overrides.items() if name in accepted}}
        missing = [
            name
            for name, one in accepted.items()
            if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]
        missing = [name for name in missing if name not in arguments]
        if missing:
            raise self._missing(owner, missing)
        built: T = owner(**arguments)
        return built

    def _missing(self, owner: type, names: Sequence[str]) -> CheckpointError:
        secrets = [name for name in names if name in self.left_out]
        others = [name for name in names if name not in self.left_out]
        why = f"they are what save_hyperparameters() kept: {', '.join(self.kept) or 'none'}." if others else ""
        if secrets:
            why = f"secrets are left out of a checkpoint, and by its name {listed(secrets)} is one. {why}".rstrip()
        also = "" if self.kept or self.left_out else ", and call self.save_hyperparameters() in __init__"
        return CheckpointError(
            f"{owner.__name__} needs {listed(names)}, which is not among the hyper-parameters of {self.path!r}.",
            why,
            f"pass it, as {owner.__name__}.load_from_checkpoint(path, {'=..., '.join(names)}=...){also}.",
        )

    def _removed(
        self, owner: type, names: Sequence[str], accepted: Sequence[str], missing: Sequence[str] = ()
    ) -> CheckpointError:
        ignored = repr(names[0]) if len(names) == 1 else f"({', '.join(map(repr, names))})"
        call = f"{owner.__name__}.load_from_checkpoint(path, ignore={ignored}"
        needed = "".join(f", {name}=..." for name in missing)
        renamed = "" if missing else f"; if it has another name now, pass that as well: {call}, other_name=...)"
        near = nearest(names[0], [name for name in accepted if name not in self.kept])
        return CheckpointError(
            f"{owner.__name__} takes no {listed(names)}, which is among the hyper-parameters of {self.path!r}.{near}",
            f"__init__ takes {', '.join(accepted) or 'no arguments'}: the checkpoint is of another version of the "
            "class, or of another one.",
            f"leave it out, as {call}{needed}){renamed}.",
        )

    def _refused_by_a_base(self, owner: type, said: str, arguments: Mapping[str, Any]) -> CheckpointError | None:
        """What Python says of arguments that ``owner`` has passed on to the ``__init__`` of a class of its own."""
        found = _REFUSED.match(said)
        if found is None or found["owner"] not in {one.__name__ for one in owner.__mro__}:
            return None
        if found["missing"]:
            return self._missing(owner, re.findall(r"'(\w+)'", found["missing"]))
        name, taken = found["unknown"], sorted(_arguments_of_bases(owner))
        if name not in arguments:
            return None
        return self._removed(owner, [name], taken) if name in self.kept else _unknown_overrides(owner, [name], taken)

    def _tell_of_secrets(self, owner: type, given: Container[str], accepted: Container[str] | None) -> None:
        """Warn of secrets that were left out and that nobody passes: it is built with a default, or a part lacks."""
        arguments = [(name, name.partition(".")[0]) for name in self.left_out]
        lacking = [name for name, first in arguments if first not in given and (accepted is None or first in accepted)]
        if lacking:
            first = lacking[0].partition(".")[0]
            warnings.warn(
                f"{owner.__name__} is built without {listed(lacking)}: secrets are left out of checkpoints. Pass them, "
                f"as {owner.__name__}.load_from_checkpoint(path, {first}=...).",
                stacklevel=4,
            )


def path_of(owner: type, path: Any, checkpoint_path: Any) -> Any:
    """Return the one path that ``load_from_checkpoint`` was given, by either name.

    Raises:
        ConfigurationError: it was given none, or two.
    """
    if (path is None) == (checkpoint_path is None):
        raise ConfigurationError(
            f"{owner.__name__}.load_from_checkpoint was given {'no path' if path is None else 'two paths'}.",
            "it builds from one checkpoint.",
            f"write {owner.__name__}.load_from_checkpoint(path).",
        )
    return checkpoint_path if path is None else path


def read_hyper_parameters(path: Any) -> dict[str, Any]:
    """Read a file of hyper-parameters, as loggers write it: JSON, or YAML where PyYAML is installed.

    Raises:
        ConfigurationError: it is of another kind, or holds no names.
    """
    path = os.path.expanduser(os.fspath(path))
    if path.endswith((".yaml", ".yml")):
        from importlib import import_module  # PyYAML, which is none of our requirements

        with open(path, encoding="utf-8") as file:
            found = import_module("yaml").safe_load(file)
    elif path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    else:
        found = None
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"hparams_file={path!r} holds no hyper-parameters by name.",
            "it is a .json file, or a .yaml one, of names and values.",
            "pass hyper-parameters by name instead: load_from_checkpoint(path, width=64).",
        )
    return dict(found)


def _unknown_overrides(owner: type, names: Sequence[str], accepted: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{owner.__name__} takes no {listed(names)}, which was passed to load_from_checkpoint."
        f"{nearest(names[0], accepted)}",
        f"__init__ takes {', '.join(accepted) or 'no arguments'}.",
        "correct the name, or leave it out.",
    )


def _arguments_of_bases(owner: type) -> set[str]:
    """The names of all that the ``__init__`` of ``owner`` and of the classes that it comes from take."""
    found: set[str] = set()
    for one in owner.__mro__:
        init = one.__dict__.get("__init__")
        if inspect.isfunction(init):
            parameters = list(inspect.signature(init).parameters.values())[1:]
            found |= {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return found
