"""Registers DDP communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError, nearest

CommHook = str | Callable[..., Any] | tuple[Any, Callable[..., Any]]

HOOK_NAMES = ("fp16", "bf16", "powersgd")


def register_comm_hook(ddp: DistributedDataParallel, hook: CommHook) -> None:
    """Register ``hook``, which is a name, a hook or a tuple (state, hook), on ``ddp``.

    Raises:
        ConfigurationError: the name is unknown, or the backend cannot run the hook.
    """
    if callable(hook):
        ddp.register_comm_hook(None, hook)
    elif isinstance(hook, tuple):
        ddp.register_comm_hook(*hook)
    else:
        state, function = _hook_by_name(hook)
        try:
            ddp.register_comm_hook(state, function)
        except TypeError as error:  # torch refuses bf16 if it was built without NCCL
            raise ConfigurationError(
                f"comm_hook={hook!r} on the backend {dist.get_backend()!r}.",
                f"torch says: {str(error).splitlines()[0]}",
                "use comm_hook='fp16', or leave comm_hook out.",
            ) from error


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
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "fp16":
        return None, default_hooks.fp16_compress_hook
    if name == "bf16":
        return None, default_hooks.bf16_compress_hook
    raise ConfigurationError(
        f"Unknown comm_hook {name!r}.{nearest(name, HOOK_NAMES)}",
        "a str must be the name of a known communication hook.",
        f"use one of {', '.join(HOOK_NAMES)}, a hook, or a tuple (state, hook).",
    )
