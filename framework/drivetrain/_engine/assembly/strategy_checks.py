"""Checks that a strategy, which anyone may write, has set up what the engine relies on."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
from torch.nn import Module

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy


def check_control_plane(strategy: Strategy, placement: Placement) -> None:
    """Check that a strategy's control plane connects the ranks. Unconnected ranks would train separately.

    Args:
        strategy: the strategy, after its `setup_environment`.
        placement: this process's placement.

    Raises:
        ConfigurationError: the strategy or its control plane has another rank or world size.
    """
    control = strategy.control
    expected = (placement.rank, placement.world_size)
    if (strategy.rank, strategy.world_size) != expected:
        raise ConfigurationError(
            f"{type(strategy).__name__} says that it is rank {strategy.rank} of {strategy.world_size}, in a process "
            f"that is rank {placement.rank} of {placement.world_size}.",
            "the data would be split over other ranks than the gradients are averaged over.",
            "leave Strategy.rank and world_size as `bind` sets them; shares of the data are data_rank and "
            "data_world_size.",
        )
    if (control.rank, control.world_size) != expected:
        raise ConfigurationError(
            f"{type(strategy).__name__}.control is a {type(control).__name__} of rank {control.rank} of "
            f"{control.world_size}, in a process that is rank {placement.rank} of {placement.world_size}.",
            "the ranks would not be connected: each would train on its own, on its part of the data.",
            "subclass drivetrain.strategies.DistributedStrategy, whose setup_environment connects the ranks (call "
            "it if you override it); a strategy for one process sets single_process = True.",
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


def check_module_setup(strategy: Strategy, module: Module, run_step: object) -> None:
    """Check the result of a strategy's `setup_module`. Mistakes would otherwise cause wrong values or names later.

    Args:
        strategy: the strategy, after its `setup_module`.
        module: the run's module.
        run_step: the return value of `setup_module`.

    Raises:
        ConfigurationError: ``strategy.module`` is not the module, or ``run_step`` is not a function.
    """
    name = type(strategy).__name__
    if strategy.module is not module:
        current = "None" if strategy.module is None else f"a {type(strategy.module).__name__}"
        raise ConfigurationError(
            f"{name}.setup_module left self.module as {current}.",
            "weights and gradients are looked up there by their plain names, and a wrapper's names differ.",
            "set self.module to the module that setup_module receives; store a wrapper in another attribute.",
        )
    if run_step is module or not callable(run_step):
        returned = "the module itself" if run_step is module else repr(run_step)
        raise ConfigurationError(
            f"{name}.setup_module returned {returned}.",
            "it must return a function that calls a step: runner(step, *arguments) returns step(*arguments).",
            "return operator.call if the strategy does nothing around a step.",
        )


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
