"""LambdaCallback: a callback built from functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain._loops.hooks import HOOKS
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, nearest


class LambdaCallback(Callback):
    """A callback whose hooks are functions, for cases that do not need a class.

    ``LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch))``

    Args:
        priority: the callback's position, as in `Callback.priority`.
        **hooks: functions by hook name, with the arguments of the `Callback` method of that name.

    Raises:
        ConfigurationError: a name is not the name of a hook.
    """

    _key_arguments = ("hooks",)

    def __init__(self, *, priority: int = 0, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise ConfigurationError(
                    f"LambdaCallback({name}=...): there is no hook of that name.{nearest(name, HOOKS)}",
                    "the function would never be called",
                    f"use one of {', '.join(HOOKS)}",
                )
            setattr(self, name, function)
        self.priority = priority
        self.hooks = tuple(sorted(hooks))
