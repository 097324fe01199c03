"""DDP communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError, nearest

CommHook = str | Callable[..., Any] | tuple[Any, Callable[..., Any]]

NAMES = ("fp16", "bf16", "powersgd")


def register_comm_hook(ddp: DistributedDataParallel, hook: CommHook | None) -> None:
    """Register ``hook`` on ``ddp``: a name, a hook, or a pair of a state and a hook.

    Raises:
        ConfigurationError: an unknown name, or one that the backend cannot run.
    """
    if hook is None:
        return
    if callable(hook):
        ddp.register_comm_hook(None, hook)
    elif isinstance(hook, tuple):
        ddp.register_comm_hook(*hook)
    else:
        state, found = _by_name(hook)
        try:
            ddp.register_comm_hook(state, found)
        except TypeError as error:  # torch's answer to bf16 without NCCL
            raise ConfigurationError(
                f"comm_hook={hook!r} on the backend {dist.get_backend()!r}.",
                f"torch says: {str(error).splitlines()[0]}",
                "use comm_hook='fp16', or none.",
            ) from error


def refuse_kept_state(hook: CommHook | None) -> None:
    """Refuse that DDP is built anew over a hook whose state is the user's: it is of the buckets that were.

    Raises:
        ConfigurationError: names the state.
    """
    if isinstance(hook, tuple) and hook[0] is not None:
        raise ConfigurationError(
            f"What trains changed within a run, under a comm_hook with a {type(hook[0]).__name__}.",
            "such state is kept by bucket of gradients, and the buckets are others now.",
            "name the hook (comm_hook='powersgd'), which then begins with fresh state; or use one without state.",
        )


def _by_name(name: str) -> tuple[Any, Callable[..., Any]]:
    # Imported here, since they are wanted rarely and cost start-up time.
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook.PowerSGDState(process_group=None), powerSGD_hook.powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "fp16":
        return None, default_hooks.fp16_compress_hook
    if name == "bf16":
        return None, default_hooks.bf16_compress_hook
    raise ConfigurationError(
        f"Unknown comm_hook {name!r}.{nearest(name, NAMES)}",
        "communication hooks are found by name.",
        f"use one of {', '.join(NAMES)}, a hook, or a pair of a state and a hook.",
    )
