"""What DeepSpeed refuses, or would train wrongly in silence: said by name, before anything is wrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import RunSettings, refuse_embedding_max_norm
from drivetrain_strategies._missing_weights import left_by_deepspeed, refuse_weights_left
from drivetrain_strategies._module_checks import refuse_device_map, refuse_sparse_embeddings

_TORCH = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop")

_ELEMENTWISE = {
    *(f"torch.optim.{name}" for name in _TORCH),
    *("deepspeed.FusedAdam", "deepspeed.DeepSpeedCPUAdam", "deepspeed.FusedLion", "deepspeed.DeepSpeedCPULion"),
}
"""Optimizers whose update of an element depends on that element alone."""

_REASONS: dict[type, str] = {
    torch.optim.LBFGS: "it evaluates the loss anew in its step, where DeepSpeed's engine gives it one",
    torch.optim.Adafactor: (
        "it looks at a parameter's rows and columns, which ZeRO flattens away: measured, weights move by half"
    ),
    torch.optim.Muon: "it looks at a parameter as a matrix, which ZeRO flattens away",
    torch.optim.SparseAdam: "ZeRO's gradients are dense",
    torch.optim.Adagrad: "DeepSpeed steps another one in its place, which no scheduler reaches",
}


def check_module(module: nn.Module, run: RunSettings, world_size: int, mixed: bool) -> None:
    """Refuse a module that DeepSpeed cannot train as torch would.

    Raises:
        ConfigurationError: names the submodule or the parameter.
    """
    refuse_device_map(module)
    if not left_by_deepspeed(module):
        refuse_weights_left(module)
    refuse_embedding_max_norm(module, world_size)
    refuse_sparse_embeddings(module, "ZeRO's gradients are dense.")
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigurationError(
                f"{name!r} is of {parameter.dtype}.", "ZeRO keeps float32 masters.", "use strategy='ddp'."
            )
        dtypes.setdefault(parameter.dtype, name)
    if not mixed and set(dtypes) - {torch.float32}:
        found = ", ".join(f"{name!r} is of {dtype}" for dtype, name in dtypes.items())
        raise ConfigurationError(
            f"precision='32-true' and parameters of other dtypes: {found}.",
            "ZeRO would make them float32 in silence, or compute in half precision without saying so.",
            "use precision='bf16-mixed', or module.float().",
        )
    if run.gradient_clip_val and run.gradient_clip_algorithm != "norm":
        raise clipping_by_value()


def check_leaves(module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Refuse leaf modules that are not there.

    Raises:
        ConfigurationError: names the class.
    """
    for wanted in classes:
        if not any(isinstance(child, wanted) for child in module.modules()):
            found = sorted({type(child).__name__ for child in module.modules()} - {type(module).__name__})
            raise ConfigurationError(
                f"leaf_modules: no module of class {wanted.__name__} is in {type(module).__name__}.",
                f"the classes in it are {', '.join(found)}.",
                "name one of these.",
            )


def clipping_by_value() -> ConfigurationError:
    return ConfigurationError(
        "gradient_clip_algorithm='value' under DeepSpeed.",
        "its engine clips by the norm alone, and the gradients are its own.",
        "use gradient_clip_algorithm='norm', or strategy='fsdp'.",
    )


def check_optimizers(
    optimizers: Sequence[Optimizer], config: dict[str, Any], names: dict[int, str], run: RunSettings, stage: int
) -> None:
    """Refuse optimizers that ZeRO cannot drive.

    Args:
        optimizers: what ``configure_optimizers`` returned.
        config: the user's.
        names: of the module's parameters, by id.
        run: what `Fit` is going to do.
        stage: of ZeRO.

    Raises:
        ConfigurationError: names them and the reason.
    """
    if run.stage == "fit" and not optimizers and stage == 3 and "optimizer" not in config:
        raise ConfigurationError(
            "configure_optimizers returned None, at stage 3.",
            "its parameters are in parts, and a backward needs the optimizer's gradients to go to.",
            "return an optimizer, name one in the config, or use stage 2; validate and predict need none.",
        )
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if len(optimizers) > 1:
        how = "" if run.automatic_optimization else " that take turns (manual optimization)"
        raise ConfigurationError(
            f"{len(optimizers)} optimizers ({kinds}){how} under DeepSpeed.",
            "its engine owns the backward and the step of one optimizer over all parameters.",
            "use one with several parameter groups, or strategy='fsdp' or 'ddp'.",
        )
    section = config.get("optimizer")
    if optimizers and section is not None:
        raise ConfigurationError(
            f"config: optimizer={section.get('type')!r}, and configure_optimizers returned {kinds}.",
            "only one of them can step.",
            "return None from configure_optimizers, or take the section out of the config.",
        )
    for optimizer in optimizers:
        scheduler = config.get("scheduler")
        if scheduler is not None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigurationError(
                f"config: scheduler={scheduler.get('type')!r}, and configure_optimizers returned a scheduler.",
                "both would set the learning rate.",
                "keep one of them.",
            )
        _check_kind(optimizer, allowed=bool(config.get("zero_allow_untested_optimizer")))
        for number, group in enumerate(optimizer.param_groups):
            if not any(parameter.requires_grad for parameter in group["params"]):
                held = [names.get(id(parameter), "?") for parameter in group["params"]]
                raise ConfigurationError(
                    f"Parameter group {number} of {type(optimizer).__name__} has nothing to train: {held[:10]}.",
                    "ZeRO flattens a group's trainable parameters into one tensor, and here there are none.",
                    "leave the group out.",
                )


_PHASES = (
    "freeze in __init__, configure_model or configure_optimizers and train each phase in a fit of its own, or use "
    "strategy='fsdp' or 'ddp', under which what trains may change."
)


def check_trainable(module: nn.Module, held: Mapping[str, tuple[nn.Parameter, bool]]) -> None:
    """Refuse that what trains changed within a run.

    Args:
        module: as it is now.
        held: each parameter when the engine was built, and whether it trained, by name.

    Raises:
        ConfigurationError: names the parameters.
    """
    created = [name for name, one in module.named_parameters() if name not in held or held[name][0] is not one]
    if created:
        raise ConfigurationError(
            f"A layer was created within a run, under DeepSpeed: {listed(created)}.",
            "its engine has flattened what trains into its own tensors: it would never see the layer.",
            "build it in configure_model, or use strategy='ddp'.",
        )
    for verb, names in (
        ("unfrozen", [name for name, (one, trained) in held.items() if one.requires_grad and not trained]),
        ("frozen", [name for name, (one, trained) in held.items() if trained and not one.requires_grad]),
    ):
        if names:
            raise ConfigurationError(
                f"{len(names)} parameter(s) were {verb} within a run, under DeepSpeed: {listed(names)}.",
                "its engine flattened what trained at the start: it never trains the others and decays what is frozen.",
                _PHASES,
            )


def adding_a_group(optimizer: Optimizer) -> ConfigurationError:
    """The refusal of ``add_param_group`` within a run."""
    return ConfigurationError(
        f"add_param_group on {type(optimizer).__name__} within a run, under DeepSpeed.",
        "its engine has flattened the groups that were there: it would step on no other.",
        f"return all groups from configure_optimizers; {_PHASES}",
    )


def _check_kind(optimizer: Optimizer, allowed: bool) -> None:
    kind = type(optimizer)
    theirs = kind.__module__.partition(".")[0]
    path = f"torch.optim.{kind.__name__}" if theirs == "torch" else f"{theirs}.{kind.__name__}"
    if path in _ELEMENTWISE:
        return
    for base in kind.__mro__:
        reason = _REASONS.get(base)
        if reason is not None:
            raise ConfigurationError(
                f"{kind.__name__} under DeepSpeed.",
                f"{reason}.",
                "use another optimizer (AdamW, SGD), or strategy='fsdp' or 'ddp'.",
            )
    if not allowed:
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__name__} under DeepSpeed.",
            "ZeRO flattens parameters: only an optimizer that treats each element by itself steps as it should.",
            "if it does, say so: config={'zero_allow_untested_optimizer': True}.",
        )
