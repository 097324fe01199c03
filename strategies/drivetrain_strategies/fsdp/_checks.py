"""Checks that refuse settings, modules and optimizers that FSDP does not support, before anything is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, listed, nearest
from drivetrain.strategies import refuse_embedding_max_norm
from drivetrain_strategies._module_checks import refuse_accumulate_hook, refuse_device_map, refuse_sparse_embeddings
from drivetrain_strategies.fsdp._internals import REQUIRED_METHODS

SHARDINGS = ("full", "grad_op", "hybrid")


def check_torch() -> None:
    """Refuse a torch version without the internals of `fully_shard` that this strategy uses.

    Raises:
        ConfigurationError: names the version and the missing names.
    """
    missing = [f"{owner.__name__}.{name}" for owner, name in REQUIRED_METHODS if not hasattr(owner, name)]
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
    replicate_size: int | None,
    shard_size: int | None,
    tensor_parallel: int,
) -> None:
    """Refuse arguments that contradict each other.

    Raises:
        ConfigurationError: names the argument.
    """
    if sharding not in SHARDINGS:
        raise ConfigurationError(
            f"sharding={sharding!r}.{nearest(str(sharding), SHARDINGS)}",
            "sharding selects what is sharded over the ranks.",
            f"use one of {', '.join(SHARDINGS)}.",
        )
    if not isinstance(reshard_after_forward, bool | None):
        raise ConfigurationError(
            f"reshard_after_forward={reshard_after_forward!r}.",
            "after forward, parameters are sharded over all ranks of a copy again, or stay gathered.",
            "use True or False. To gather parameters within a node, use sharding='hybrid' with shard_size.",
        )
    if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}.",
            "FSDP takes the dtypes of the weights and of the exchange from a policy.",
            "use torch.distributed.fsdp.MixedPrecisionPolicy, such as MixedPrecisionPolicy(torch.bfloat16).",
        )
    if sharding == "grad_op" and reshard_after_forward not in (None, False):
        raise ConfigurationError(
            f"sharding='grad_op' together with reshard_after_forward={reshard_after_forward!r}.",
            "'grad_op' keeps parameters gathered after forward.",
            "use sharding='full', or leave reshard_after_forward out.",
        )
    if sharding != "hybrid" and replicate_size not in (None, 1):
        raise ConfigurationError(
            f"replicate_size={replicate_size} with sharding={sharding!r}.",
            f"{sharding!r} keeps one copy of the parameters.",
            "use sharding='hybrid'.",
        )
    for name, value in (
        ("replicate_size", replicate_size),
        ("shard_size", shard_size),
        ("tensor_parallel", tensor_parallel),
    ):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name}={value!r}.", f"{name} is a number of ranks.", "use an int of 1 or more.")


def check_offload(cpu_offload: bool | OffloadPolicy, device: torch.device) -> None:
    """Refuse CPU offload from CUDA if the process group has no backend for CPU tensors.

    Raises:
        ConfigurationError: names the group's backend.
    """
    offloads = cpu_offload is True or isinstance(cpu_offload, CPUOffloadPolicy)
    backends = dist.get_backend_config()  # a string such as "cpu:gloo,cuda:nccl"
    if offloads and device.type == "cuda" and "cpu:" not in backends:
        raise ConfigurationError(
            f"FSDPStrategy(cpu_offload=True) with a process group on {dist.get_backend()!r}.",
            "the norm of offloaded gradients is reduced on the CPU, which NCCL cannot do.",
            "leave process_group_backend out. If you initialize the group yourself, use backend='cpu:gloo,cuda:nccl'.",
        )


def check_module(module: nn.Module, world_size: int, tensor_parallel: int) -> None:
    """Refuse a module that cannot be sharded.

    Raises:
        ConfigurationError: names the submodule or the parameter.
    """
    refuse_device_map(module)
    refuse_embedding_max_norm(module, world_size)
    refuse_sparse_embeddings(module, "gradients of sharded parameters are dense.")
    for name, parameter in module.named_parameters():
        refuse_accumulate_hook(name, parameter)
    if tensor_parallel > 1 and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ConfigurationError(
            f"tensor_parallel={tensor_parallel}, but no layer of {type(module).__name__} is split.",
            f"{tensor_parallel} ranks would compute the same. After each run, all layers are whole again.",
            "split layers in configure_model, in every run: parallelize_module(layer, self.device_mesh['tensor'], "
            "...).",
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update on shards differs from the update on whole parameters.

    Raises:
        ConfigurationError: names the optimizer and the reason.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{type(optimizer).__name__} under FSDP.",
            "sharded gradients are dense.",
            "use another optimizer, or strategy='ddp'.",
        )
