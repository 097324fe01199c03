"""Checks that refuse modules and optimizers that DeepSpeed cannot train, or would train incorrectly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import RunSettings, TrainableChange
from drivetrain_strategies._elementwise import is_elementwise
from drivetrain_strategies._module_checks import refuse_device_map, refuse_sparse_embeddings

_ELEMENTWISE_OF_DEEPSPEED = frozenset({"FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion"})
"""Class names of DeepSpeed's optimizers whose update is element-wise."""

_REFUSAL_REASONS = {
    torch.optim.SparseAdam: "ZeRO's gradients are dense.",
    torch.optim.Adagrad: "DeepSpeed replaces it by an Adagrad of its own, which ignores learning rate schedulers.",
    torch.optim.ASGD: "ZeRO flattens the parameters of a group, and this optimizer has state for each parameter.",
}
"""Why ZeRO cannot step an optimizer, even if it was declared element-wise."""


def check_module(module: nn.Module, run: RunSettings, mixed: bool) -> None:
    """Refuse a module that DeepSpeed cannot train as torch would.

    Raises:
        ConfigurationError: names the submodule or the parameter.
    """
    refuse_device_map(module)
    refuse_sparse_embeddings(module, "ZeRO's gradients are dense.")
    for name, parameter in module.named_parameters():
        if getattr(parameter, "ds_numel", parameter.numel()) == 0:
            raise ConfigurationError(
                f"{name!r} has no elements: its shape is {tuple(getattr(parameter, 'ds_shape', parameter.shape))}.",
                "ZeRO divides the elements of each parameter among the ranks, and fails on a parameter without any.",
                "leave the parameter out, for example with register_parameter(name, None), or use strategy='ddp' or "
                "'fsdp'.",
            )
        if not parameter.is_floating_point() or (not mixed and parameter.dtype != torch.float32):
            raise ConfigurationError(
                f"{name!r} has dtype {parameter.dtype}.",
                "ZeRO would silently convert it to float32, or to the half precision that the module computes in.",
                "convert the module with module.float(); for half precision, use precision='bf16-mixed'.",
            )
    if run.gradient_clip_val and run.gradient_clip_algorithm != "norm":
        raise clip_by_value_error()


def clip_by_value_error() -> ConfigurationError:
    return ConfigurationError(
        "gradient_clip_algorithm='value' under DeepSpeed.",
        "DeepSpeed's engine clips the gradients, and only by norm.",
        "use gradient_clip_algorithm='norm', or strategy='fsdp'.",
    )


def check_optimizers(
    optimizers: Sequence[Optimizer],
    declared: Sequence[Optimizer],
    config: dict[str, Any],
    names: dict[int, str],
    run: RunSettings,
    stage: int,
) -> None:
    """Refuse optimizers that ZeRO cannot step.

    Args:
        optimizers: the optimizers that ``configure_optimizers`` returned.
        declared: those of them that the user declared element-wise.
        config: the user's config.
        names: names of the module's parameters, by the parameter's ``id``.
        run: the run's settings.
        stage: ZeRO stage.

    Raises:
        ConfigurationError: ZeRO cannot step the optimizers. The error names the optimizers and the reason.
    """
    if run.stage == "fit" and not optimizers and stage == 3 and "optimizer" not in config:
        raise ConfigurationError(
            "configure_optimizers returned None, at stage 3.",
            "stage 3 partitions parameters, and a backward needs DeepSpeed's optimizer to receive the gradients.",
            "return an optimizer, set one in the config, or use stage 2; validate and predict need no optimizer.",
        )
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if len(optimizers) > 1:
        suffix = "" if run.automatic_optimization else " that take turns (manual optimization)"
        raise ConfigurationError(
            f"{len(optimizers)} optimizers ({kinds}){suffix} under DeepSpeed.",
            "DeepSpeed's engine steps one optimizer, which holds all parameters.",
            "use one optimizer with several parameter groups, or strategy='fsdp' or 'ddp'.",
        )
    for optimizer in optimizers:
        is_scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        for section in ("optimizer", "scheduler") if is_scheduled else ("optimizer",):
            if section in config:
                raise ConfigurationError(
                    f"config: {section}={config[section].get('type')!r}, but configure_optimizers also returned one.",
                    f"DeepSpeed's engine has one {section}.",
                    "remove the section from the config, or do not return one from configure_optimizers.",
                )
        _check_kind(optimizer, declared)
        if optimizer.state:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has state, from earlier steps or from its constructor.",
                "DeepSpeed's engine steps flat tensors in place of the parameters, and these have no state yet.",
                "build a new optimizer in configure_optimizers. To go on with saved state, pass ckpt_path.",
            )
        for number, group in enumerate(optimizer.param_groups):
            if not any(parameter.requires_grad for parameter in group["params"]):
                members = [names.get(id(parameter), "?") for parameter in group["params"]]
                raise ConfigurationError(
                    f"Parameter group {number} of {type(optimizer).__name__} has nothing to train: {members[:10]}.",
                    "ZeRO flattens a group's trainable parameters into one tensor, and this group has none.",
                    "remove the group.",
                )


_FIX_FOR_TRAINABLE_CHANGES = (
    "build and freeze layers in __init__, configure_model or configure_optimizers, and call fit once per training "
    "phase; or use strategy='ddp', which supports such changes."
)


def check_trainable(module: nn.Module, recorded: Mapping[str, tuple[nn.Parameter, bool]]) -> None:
    """Refuse a change of the trainable parameters within a run.

    Args:
        module: the module.
        recorded: the parameters when the engine was built, by name, each with whether the parameter was trainable.

    Raises:
        ConfigurationError: names the parameters.
    """
    change = TrainableChange.between(recorded, dict(module.named_parameters()), (), ())
    for verb, names in (("created", change.created), ("unfrozen", change.unfrozen), ("frozen", change.frozen)):
        if names:
            raise ConfigurationError(
                f"{len(names)} parameter(s) were {verb} within a run, under DeepSpeed: {listed(names)}.",
                "DeepSpeed's engine flattened the parameters that were trainable at the start. The engine never trains "
                "other parameters, and weight decay still acts on parameters that were frozen later.",
                _FIX_FOR_TRAINABLE_CHANGES,
            )


def add_param_group_error(optimizer: Optimizer) -> ConfigurationError:
    """Return the error for ``add_param_group`` within a run."""
    return ConfigurationError(
        f"add_param_group on {type(optimizer).__name__} within a run, under DeepSpeed.",
        "DeepSpeed's engine has flattened the existing groups and would not step another group.",
        f"return all groups from configure_optimizers; {_FIX_FOR_TRAINABLE_CHANGES}",
    )


def is_known(optimizer: Optimizer) -> bool:
    """Return whether torch or DeepSpeed wrote the optimizer, and its update is element-wise."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] == "deepspeed":
        return kind.__name__ in _ELEMENTWISE_OF_DEEPSPEED
    return is_elementwise(optimizer, ())


def _check_kind(optimizer: Optimizer, declared: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that may not be element-wise, since ZeRO steps parts of flat parameters."""
    kind = type(optimizer)
    reason = _REFUSAL_REASONS.get(kind)
    if reason is None and not is_known(optimizer) and not any(other is optimizer for other in declared):
        reason = "ZeRO flattens parameters, each rank steps a part of them, and the update may not be element-wise."
    if reason is not None:
        raise ConfigurationError(
            f"{kind.__name__} under DeepSpeed.",
            reason,
            "use AdamW or SGD, or strategy='fsdp' or 'ddp'. If the update of an element depends on that element alone, "
            "return {'optimizer': optimizer, 'elementwise': True} from configure_optimizers.",
        )
