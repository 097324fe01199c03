"""The uses of DistributedDataParallel's private reducer, all in one place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def verifier(ddp: DistributedDataParallel) -> Callable[[], None]:
    """What raises, after a backward that exchanged gradients, where the reducer still waits for some.

    It is the reducer's own method, so that a step makes no Python call for it, and keeps the reducer alive.
    """
    check: Callable[[], None] = ddp.reducer._check_reducer_finalized
    return check


def expect_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Prepare for a backward that no DDP forward announced, as manual optimization runs several a forward.

    ``ddp`` was built with ``find_unused_parameters=True``: what ``loss`` does not reach is not waited for.
    """
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward([loss])


def take_as_told(ddp: DistributedDataParallel) -> None:
    """Let torch say here, where nobody hears it, what it says once in a process about ``find_unused_parameters=True``.

    It advises against it where a backward reaches every parameter: in manual optimization that is our choice, and not
    the user's. What it says goes to standard error, from every rank, but within a backward it is a Python warning.
    """
    global _taken_as_told
    if _taken_as_told:
        return
    _taken_as_told = True
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        reaches_all = sum(one.reshape(-1)[:1].sum() for one in ddp.module.parameters() if one.requires_grad)
        probe = torch.zeros((), requires_grad=True)
        # It only marks what is reached: without a hook of a parameter's nothing is begun that would have to end.
        probe.register_hook(lambda gradient: ddp.reducer.prepare_for_backward([reaches_all]))  # type: ignore[no-untyped-call]
        (probe * 1.0).backward()  # type: ignore[no-untyped-call]


_taken_as_told = False


def plan_on_next_backward(ddp: DistributedDataParallel) -> None:
    """Make the graph a static one, on whose next backward DDP plans the rest.

    DDP built with ``static_graph=True`` takes the first backward for that, even under ``no_sync``, and counts with it
    those that follow until one synchronises. Until it is told, it accumulates as any other does.
    """
    ddp._set_static_graph()  # type: ignore[no-untyped-call]


def gives_out_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether there are buffers, and rank 0's are to be everybody's before each forward."""
    return bool(ddp.will_sync_module_buffers())  # type: ignore[no-untyped-call]


def give_out_buffers(ddp: DistributedDataParallel) -> None:
    """Do what a DDP forward does before anything else, for a step that is none."""
    ddp._sync_buffers()  # type: ignore[no-untyped-call]


def let_go(ddp: DistributedDataParallel) -> None:
    """Drop what keeps the process group's sockets open, so that peers blocked in a collective fall out."""
    attributes: dict[str, Any] = ddp.__dict__
    for name in ("reducer", "logger", "process_group"):
        attributes.pop(name, None)


def explain(error: RuntimeError, ddp: DistributedDataParallel) -> None:
    """Raise an error of the reducer's as one of ours, with the way out; return where it is something else.

    Raises:
        ConfigurationError: names the parameters, or what the graph did.
    """
    text = str(error)
    said = f"torch says: {text.strip().splitlines()[0][:200]}" if text.strip() else ""
    if "Expected to have finished reduction in the prior iteration" in text:
        raise _unused(_names_in(text, ddp), bool(ddp.static_graph)) from error
    if "Your training graph has changed" in text:
        raise ConfigurationError(
            "The graph of training_step changed under static_graph=True.",
            "a static graph uses the same parameters, in the same order and as often, in every step; DDP planned its "
            f"communication on the first one. {said}",
            "use DDPStrategy(find_unused_parameters=True), or make every step use the same parameters.",
        ) from error
    if "mark a variable ready only once" in text:
        raise ConfigurationError(
            "A parameter's gradient became ready twice in one backward.",
            "DDP counts each parameter once a backward; re-entrant activation checkpointing (use_reentrant=True), with "
            f"find_unused_parameters=True or around a module used twice, breaks that count. {said}",
            "checkpoint with use_reentrant=False, or use static_graph=True without find_unused_parameters.",
        ) from error


def _unused(names: list[str], static_graph: bool) -> ConfigurationError:
    """The refusal of parameters that got no gradient, by the names they have in the bare module."""
    what = (
        f"{len(names)} trainable parameter(s) got no gradient: {', '.join(repr(name) for name in names[:20])}"
        f"{', ...' if len(names) > 20 else ''}."
    )
    if static_graph:
        return ConfigurationError(
            f"The graph of training_step changed under static_graph=True. {what}",
            "they had one in this rank's first step, and so DDP waits for it in every step: the ranks would hang.",
            "use DDPStrategy(find_unused_parameters=True), or make every step use the same parameters.",
        )
    return ConfigurationError(
        what,
        "plain DDP waits for every trainable parameter's gradient in every step, so the ranks would hang.",
        "use DDPStrategy(static_graph=True) where it is always the same ones, "
        "DDPStrategy(find_unused_parameters=True) where it varies, or freeze them with requires_grad_(False).",
    )


def _names_in(text: str, ddp: DistributedDataParallel) -> list[str]:
    """Read the reducer's complaint, which tells parameters by their number among those that trained at the start."""
    trained: list[str] = ddp.module.trained
    found = _INDICES.search(text)
    return [trained[int(index)] for index in found[1].split()] if found else ["one that torch does not name"]
