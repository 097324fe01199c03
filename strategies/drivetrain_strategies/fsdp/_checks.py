"""Checks that refuse settings that FSDP does not support, before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from drivetrain.errors import ConfigurationError, listed, nearest
from drivetrain_strategies.fsdp._internals import OVERRIDDEN_METHODS

SHARDINGS = ("full", "grad_op", "hybrid")


def check_torch() -> None:
    """Refuse a torch version without the internals of `fully_shard` that this strategy uses.

    Raises:
        ConfigurationError: names the version and the missing names.
    """
    missing = [f"{owner.__name__}.{name}" for owner, name in OVERRIDDEN_METHODS if not hasattr(owner, name)]
    if missing:
        raise ConfigurationError(
            f"FSDPStrategy cannot run on torch {torch.__version__}.",
            f"the strategy needs {listed(missing)}, which this version does not have.",
            "install torch 2.11 to 2.15, or use strategy='ddp' or 'deepspeed_stage_3'.",
        )


def check_arguments(
    sharding: str,
    reshard_after_forward: bool | None,
    mixed_precision: MixedPrecisionPolicy | None,
    sizes: Mapping[str, int | None],
) -> None:
    """Refuse arguments that are unknown or contradict each other.

    Raises:
        ConfigurationError: names the argument.
    """
    if sharding not in SHARDINGS:
        raise ConfigurationError(
            f"sharding={sharding!r}.{nearest(str(sharding), SHARDINGS)}",
            "sharding selects what is sharded over the ranks.",
            f"use one of {', '.join(SHARDINGS)}.",
        )
    if reshard_after_forward not in (None, False, sharding != "grad_op"):
        raise ConfigurationError(
            f"sharding={sharding!r} together with reshard_after_forward={reshard_after_forward!r}.",
            "after forward, parameters are sharded over all ranks of a copy again, or stay gathered ('grad_op').",
            "use True or False with sharding='full', or sharding='hybrid' to gather parameters within a node.",
        )
    if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}.",
            "FSDP takes the dtypes of the weights and of the exchange from a policy.",
            "use torch.distributed.fsdp.MixedPrecisionPolicy, such as MixedPrecisionPolicy(torch.bfloat16).",
        )
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigurationError(f"{name}={size!r}.", f"{name} is a number of ranks.", "use an int of 1 or more.")
    if sharding != "hybrid" and sizes["replicate_size"] not in (None, 1):
        raise ConfigurationError(
            f"replicate_size={sizes['replicate_size']} with sharding={sharding!r}.",
            f"{sharding!r} keeps one copy of the parameters.",
            "use sharding='hybrid'.",
        )


def check_offload(cpu_offload: bool, device: torch.device) -> None:
    """Refuse CPU offload from CUDA if the process group has no backend for CPU tensors.

    Raises:
        ConfigurationError: names the group's backend.
    """
    backends = dist.get_backend_config()  # a string such as "cpu:gloo,cuda:nccl"
    if cpu_offload and device.type == "cuda" and "cpu:" not in backends:
        raise ConfigurationError(
            f"FSDPStrategy(cpu_offload=True) with a process group on {dist.get_backend()!r}.",
            "the norm of offloaded gradients is reduced on the CPU, which NCCL cannot do.",
            "leave process_group_backend out. If you initialize the group yourself, use backend='cpu:gloo,cuda:nccl'.",
        )
