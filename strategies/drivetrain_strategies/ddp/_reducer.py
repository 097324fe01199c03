"""All uses of DistributedDataParallel's private reducer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError, listed

_UNUSED_INDICES_PATTERN = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def reduction_check(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Return a function that raises if the reducer still waits for gradients after a synchronized backward.

    The returned function is the reducer's bound method, so that a step makes no additional Python call. A reference to
    the function keeps the reducer alive.
    """
    check: Callable[[], None] = ddp.reducer._check_reducer_finalized
    return check


def expect_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Prepare DDP for a backward without a DDP forward. Manual optimization may run several backwards per step.

    ``ddp`` was built with ``find_unused_parameters=True``, so that DDP does not wait for parameters that ``loss`` does
    not reach.
    """
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward([loss])


def enable_static_graph(ddp: DistributedDataParallel) -> None:
    """Switch DDP to a static graph. DDP records the graph in the next backward.

    If DDP were built with ``static_graph=True``, it would record all backwards up to the first synchronizing one,
    including backwards under ``no_sync``. Switching just before the first synchronizing backward lets DDP accumulate
    gradients as usual until then.
    """
    ddp._set_static_graph()  # type: ignore[no-untyped-call]


def broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast rank 0's buffers as a DDP forward does, for a step that runs no DDP forward."""
    if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]


def release_process_group(ddp: DistributedDataParallel) -> None:
    """Drop the references that keep the process group's sockets open, so that peers blocked in a collective fail."""
    attributes: dict[str, Any] = ddp.__dict__
    for name in ("reducer", "logger", "process_group"):
        attributes.pop(name, None)


def raise_explained(error: RuntimeError, ddp: DistributedDataParallel) -> None:
    """Translate a known error of the reducer. Return if ``error`` is another error.

    Raises:
        ConfigurationError: names the unused parameters, or says that the graph changed.
    """
    text = str(error)
    torch_says = f"torch says: {text.strip()[:200]}"
    are_unused = "Expected to have finished reduction in the prior iteration" in text
    if "Your training graph has changed" in text or (are_unused and ddp.static_graph):
        raise ConfigurationError(
            "The graph of training_step changed under static_graph=True.",
            "with a static graph, every step must use the same parameters, in the same order and equally often, since "
            f"DDP plans its communication in the first step. {torch_says}",
            "use DDPStrategy(find_unused_parameters=True), or make every step use the same parameters.",
        ) from error
    if are_unused:
        raise ConfigurationError(
            f"Trainable parameters got no gradient: {listed(_parameter_names_in(text, ddp))}.",
            "plain DDP waits for every trainable parameter's gradient in every step, so the ranks would hang.",
            "use DDPStrategy(static_graph=True) if the unused parameters are always the same, "
            "DDPStrategy(find_unused_parameters=True) if they vary, or freeze them with requires_grad_(False).",
        ) from error
    if "mark a variable ready only once" in text:
        raise ConfigurationError(
            "A parameter's gradient became ready twice in one backward.",
            "DDP expects each gradient once per backward. Re-entrant activation checkpointing (use_reentrant=True), "
            f"with find_unused_parameters=True or around a module used twice, delivers one twice. {torch_says}",
            "checkpoint with use_reentrant=False, or use static_graph=True without find_unused_parameters.",
        ) from error


def _parameter_names_in(text: str, ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that the reducer's message lists as indices into ``trainable_names``."""
    trainable_names: list[str] = ddp.module.trainable_names
    match = _UNUSED_INDICES_PATTERN.search(text)
    return [trainable_names[int(index)] for index in match[1].split()] if match else ["one that torch does not name"]
