"""Checks the classes that users write: required methods, hooks that the engine would never call, their arguments."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from difflib import get_close_matches
from types import FunctionType, MethodType
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from drivetrain._engine.run_request import RunRequest
from drivetrain._loops.hooks import HOOKS, is_overridden, overridden
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain.callback import Callback
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

logger = logging.getLogger("drivetrain")

_REQUIRED_METHODS = {
    "training_step": "def training_step(self, batch, batch_idx), returning the loss",
    "configure_optimizers": "def configure_optimizers(self), returning an optimizer; None trains nothing",
}

_MIN_SIMILARITY = 0.88
"""A name that is at least this similar to a hook's is warned about, such as "test_steps" but not "training_loss"."""

_VARIANTS = (
    *(("_start", "_begin"), ("_end", "_stop"), ("_end", "_finish"), ("_end", "_finished"), ("_end", "_done")),
    *(("on_train_", "on_training_"), ("on_validation_", "on_val_"), ("on_validation_", "on_valid_")),
    *(("on_test_", "on_testing_"), ("on_predict_", "on_prediction_"), ("_batch_", "_step_")),
)
"""Parts of the names of hooks, and what is written for them by mistake or in other frameworks."""

_EPOCH_END_FIX = "append the steps' outputs to a list on the module, and write {}(self), which gets no outputs"
_FIXES = {
    **{hook.replace(part, other): f"write {hook}" for hook in HOOKS for part, other in _VARIANTS if part in hook},
    "training_epoch_end": _EPOCH_END_FIX.format("on_train_epoch_end"),
    "validation_epoch_end": _EPOCH_END_FIX.format("on_validation_epoch_end"),
    "test_epoch_end": _EPOCH_END_FIX.format("on_test_epoch_end"),
    "predict_epoch_end": _EPOCH_END_FIX.format("on_predict_epoch_end"),
    **dict.fromkeys(
        ("training_end", "training_step_end"), "move its code into training_step, or write on_train_batch_end"
    ),
    **dict.fromkeys(("validation_end", "validation_step_end"), "move its code into validation_step"),
    "test_step_end": "move its code into test_step",
    "on_validation_model_zero_grad": "write on_validation_start(self), and clear the gradients there",
    "configure_sharded_model": "write configure_model(self)",
    "on_epoch_start": "write on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "write on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_batch_end": "write on_train_batch_end",
    **dict.fromkeys(("on_init_start", "on_init_end"), "write setup"),
    "on_keyboard_interrupt": "write on_exception, which gets the KeyboardInterrupt",
    **dict.fromkeys(("training_dataloader", "train_dataloaders"), "write train_dataloader"),
    **dict.fromkeys(("valid_dataloader", "validation_dataloader", "val_dataloaders"), "write val_dataloader"),
    "validation_steps": "write validation_step",
}
"""Methods that are refused: hooks of Lightning's versions and of other frameworks, and what to write instead."""

_MODULE_HOOKS = (
    *(name for name in vars(ModuleHooks) if not name.startswith("_")),
    *("configure_optimizers", "batch_weight", "backward", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("optimizer_step", "lr_scheduler_step"),
    *("transfer_batch_to_device", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

_DATA_HOOKS = tuple(
    name
    for name, value in vars(DataModule).items()
    if isinstance(value, FunctionType) and not name.startswith("_") and "state_dict" not in name
)


def check_requirements(request: RunRequest) -> None:
    """Check that the module has the methods that training calls, and no misnamed hooks, and that loaders are loaders.

    Raises:
        ConfigurationError: a method is missing or misnamed, or a loader is not a loader. The error says how to fix it.
    """
    stage, module = request.stage, request.module
    if stage == "fit":
        for name, signature in _REQUIRED_METHODS.items():
            if not is_overridden(name, module, TrainModule):
                raise ConfigurationError(
                    f"{type(module).__name__} has no {name}.",
                    f"fit cannot train without {name}.",
                    f"write {signature}.",
                )
    for owner in (module, request.datamodule):
        if owner is not None:
            check_hooks(owner, request)
    for loaders in (request.train, request.evaluate):
        for loader in _each(loaders):
            if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
                raise ConfigurationError(
                    f"{stage} was given a {type(loader).__name__}, which is a data set.",
                    "a data set yields single samples, and steps take batches.",
                    "wrap it in a loader: torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True).",
                )


def check_hooks(owner: TrainModule | Callback | DataModule, request: RunRequest | None = None) -> None:
    """Refuse methods that have the name of another framework's hook, and hooks that cannot take their arguments.

    Args:
        owner: the object whose class, with the bases that the user wrote, is checked.
        request: the call of `Fit`; None for a callback.

    Raises:
        ConfigurationError: a method is refused. The error names the method and the correct hook.
    """
    base, hooks = _base_and_hooks(owner)
    for name in _other_methods(owner, base):
        fix = _suggest_fix(name, base, request)
        if fix is not None:
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} looks like a hook but is not one: the engine never calls it.",
                "its code would not run.",
                f"{fix}. If your own code calls the method, rename it or prefix its name with an underscore.",
            )
    for name in overridden(hooks, owner, base):
        if name.startswith("on_"):
            _check_arguments(owner, name, base)


def warn_of_similar_names(*owners: TrainModule | Callback | DataModule | None) -> None:
    """Warn of methods whose names are similar to those of hooks."""
    for owner in owners:
        if owner is None:  # there is no data module
            continue
        base, hooks = _base_and_hooks(owner)
        similar = {name: get_close_matches(name, hooks, 1, _MIN_SIMILARITY) for name in _other_methods(owner, base)}
        pairs = [f"{name} (did you mean {match[0]}?)" for name, match in similar.items() if match]
        if pairs:
            logger.warning(
                "%s has methods whose names resemble hooks, and which the engine never calls: %s. If your own code "
                "calls them, a leading underscore in the name avoids this warning.",
                type(owner).__name__,
                ", ".join(pairs),
            )


def _each(loaders: Any) -> list[Any]:
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def _base_and_hooks(owner: object) -> tuple[type, tuple[str, ...]]:
    if isinstance(owner, TrainModule):
        return TrainModule, (*_STEPS, *_MODULE_HOOKS)
    return (Callback, HOOKS) if isinstance(owner, Callback) else (DataModule, _DATA_HOOKS)


def _suggest_fix(name: str, base: type, request: RunRequest | None) -> str | None:
    """Return what to write instead of ``name``; None if the name is not refused."""
    fix = _FIXES.get(name)
    if name.startswith("on_"):
        kinds = (("a module", _MODULE_HOOKS), ("a callback", HOOKS), ("a data module", _DATA_HOOKS))
        owners = [kind for kind, names in kinds if name in names]
        return f"write it in {' or in '.join(owners)}, which has a hook of that name" if owners else fix
    is_loader = name.endswith(("_dataloader", "_dataloaders"))
    if base is Callback or (base is DataModule and not is_loader):
        return None
    if is_loader and fix is not None and base is TrainModule and request is not None:
        loaders = request.train if "train" in fix else request.evaluate
        if loaders is not None or request.datamodule is not None:
            return None  # the method may be a helper that built the loaders
    return fix


def _other_methods(owner: object, base: type) -> list[str]:
    """Return the names of the public methods that the user has written for ``owner``, without those of ``base``."""
    names = [name for name, value in vars(owner).items() if isinstance(value, FunctionType | MethodType)]
    kinds = type(owner).__mro__
    for kind in kinds[: kinds.index(base)]:
        if not kind.__module__.startswith("drivetrain."):
            names += [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and not hasattr(base, name)]


def _check_arguments(owner: object, name: str, base: type) -> None:
    """Refuse a hook whose call would fail in mid-run, perhaps after hours."""
    parameters = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
    # Hooks of an evaluation get dataloader_idx only if there are several loaders.
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    try:
        signature = inspect.signature(getattr(owner, name), follow_wrapped=False)  # a decorator may pass more arguments
    except (TypeError, ValueError):  # the hook is not written in Python
        return
    for arguments in (parameters, required):
        with suppress(TypeError):
            signature.bind(*arguments)
            return
    raise ConfigurationError(
        f"{type(owner).__name__}.{name}{signature} cannot be called with ({', '.join(required)}).",
        "the engine calls the method with these arguments.",
        f"write def {name}({', '.join(['self', *required])}).",
    )
