"""Checks what the engine relies on of a strategy, which anyone may write."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import StepRunner, Strategy


def check_control_plane(strategy: Strategy, placement: Placement) -> None:
    """Check that a strategy's control plane connects the ranks. Unconnected ranks would train separately.

    Args:
        strategy: the strategy, after its `setup_environment`.
        placement: this process's placement.

    Raises:
        ConfigurationError: the strategy or its control plane has another rank or world size.
    """
    name, control = type(strategy).__name__, strategy.control
    expected = placement.rank, placement.world_size
    for owner, rank, world_size in (
        (name, strategy.rank, strategy.world_size),
        (f"{name}.control, a {type(control).__name__},", control.rank, control.world_size),
    ):
        if (rank, world_size) != expected:
            raise ConfigurationError(
                f"{owner} is rank {rank} of {world_size}, in a process that is rank {expected[0]} of {expected[1]}.",
                "the ranks would not be connected, or would split the data over other ranks than they average over.",
                "subclass drivetrain.strategies.DistributedStrategy, whose setup_environment connects the ranks (call "
                "it if you override it), and leave rank and world_size as `bind` sets them; a strategy for one process "
                "sets single_process = True.",
            )


def check_distinct_devices(strategy: Strategy) -> None:
    """Check that no two ranks use one GPU. NCCL's error in the first collective does not name the ranks. Collective.

    Args:
        strategy: the strategy, after its `setup_environment`.

    Raises:
        ConfigurationError: ranks share a GPU. Every rank raises the error, which names these ranks.
    """
    if strategy.device.type == "cuda" and strategy.world_size > 1:
        refuse_shared_devices(strategy.control.gather_objects(_identity(strategy.device)))


def _identity(device: torch.device) -> str:
    """Return a name that is unique to the GPU, across nodes."""
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if not identity:
        return f"{device} of {visible} on {socket.gethostname()}"
    return f"{identity} {visible}" if "MIG" in visible else identity  # each MIG slice of a GPU is a device


def refuse_shared_devices(devices: Sequence[str]) -> None:
    """Raise an error if several ranks use the same device.

    Args:
        devices: the unique name of each rank's device.

    Raises:
        ConfigurationError: ranks share a device. The error names the ranks.
    """
    for identity in dict.fromkeys(devices):
        ranks = [rank for rank, device in enumerate(devices) if device == identity]
        if len(ranks) > 1:
            raise ConfigurationError(
                f"Ranks {', '.join(map(str, ranks))} are on one GPU ({identity}).",
                "each rank needs its own: NCCL refuses duplicate devices, and the ranks would share its memory.",
                "start as many processes on a node as it has GPUs, or give each process its own by "
                "CUDA_VISIBLE_DEVICES.",
            )


def set_up_module(strategy: Strategy, module: Module) -> StepRunner:
    """Let the strategy set up the module. Return what runs its steps, in the forward context of the precision.

    Raises:
        ConfigurationError: ``strategy.module`` is not the module, or `setup_module` has not returned a function.
    """
    runner = strategy.setup_module(module)
    if strategy.module is not module or runner is module or not callable(runner):
        raise ConfigurationError(
            f"{type(strategy).__name__}.setup_module has set self.module to a {type(strategy.module).__name__}, and "
            f"returned a {type(runner).__name__}.",
            "weights and gradients are looked up in self.module by their plain names; steps run by what is returned.",
            "set self.module to the module itself; return runner, for which runner(step, *arguments) returns "
            "step(*arguments), such as operator.call.",
        )
    if not strategy.precision.has_forward_context:
        return runner
    # All steps share one context object, because building it costs more than entering it.
    context = strategy.precision.forward_context()

    def run_in_context(step: Callable[..., Any], *args: Any) -> Any:
        with context:
            return runner(step, *args)

    return run_in_context


def asks_for_sync_batchnorm(sync_batchnorm: bool, strategy: Strategy, device: torch.device) -> bool:
    """Return whether batch normalization spans all ranks.

    Raises:
        ConfigurationError: the strategy or the device does not support synchronized batch normalization.
    """
    if not sync_batchnorm:
        return False
    if not (strategy.single_process or strategy.supports_sync_batchnorm):
        raise ConfigurationError(
            f"sync_batchnorm=True with strategy={strategy.name!r}.",
            "each rank would still normalise over its own samples only.",
            "use strategy='ddp', or normalise with GroupNorm or LayerNorm.",
        )
    if device.type == "cpu":
        raise ConfigurationError(
            "sync_batchnorm=True on the CPU.",
            "torch's SyncBatchNorm needs an accelerator.",
            "leave out sync_batchnorm, or normalise with GroupNorm or LayerNorm.",
        )
    return True
