"""Registers DDP communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError, nearest

CommHook = str | Callable[..., Any] | tuple[Any, Callable[..., Any]]

HOOK_NAMES = ("fp16", "bf16", "powersgd")


def register_comm_hook(ddp: DistributedDataParallel, hook: CommHook) -> None:
    """Register ``hook``, which is a name, a hook or a tuple (state, hook), on ``ddp``.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if callable(hook):
        ddp.register_comm_hook(None, hook)
    elif isinstance(hook, tuple):
        ddp.register_comm_hook(*hook)
    else:
        ddp.register_comm_hook(*_hook_by_name(hook))


def refuse_user_state(hook: CommHook | None) -> None:
    """Refuse to rebuild DDP with a hook that has a state from the user. The state belongs to the previous buckets.

    Raises:
        ConfigurationError: names the state's class.
    """
    if isinstance(hook, tuple) and hook[0] is not None:
        raise ConfigurationError(
            f"The set of trainable parameters changed within a run, with a comm_hook that has a "
            f"{type(hook[0]).__name__}.",
            "this state belongs to DDP's gradient buckets, which have changed.",
            "pass a name (comm_hook='powersgd'), for which new state is created, or a hook without state.",
        )


def _hook_by_name(name: str) -> tuple[Any, Callable[..., Any]]:
    # Imported here, since hooks are rarely used and their modules cost start-up time.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook
    if name in HOOK_NAMES:
        return None, getattr(default_hooks, f"{name}_compress_hook")
    raise ConfigurationError(
        f"Unknown comm_hook {name!r}.{nearest(name, HOOK_NAMES)}",
        "a str must be the name of a known communication hook.",
        f"use one of {', '.join(HOOK_NAMES)}, a hook, or a tuple (state, hook).",
    )
