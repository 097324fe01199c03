"""Parses and validates the result of ``configure_optimizers``."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain._parameters.optimizer_state import parameter_names
from drivetrain._run_state import SchedulerConfig
from drivetrain.errors import ConfigurationError, nearest

_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau")

_DICT_KEYS = ("optimizer", "lr_scheduler", "monitor", "closure", "elementwise")
_FORMS = (
    "return an optimizer; a list of them; (optimizers, schedulers) as two lists; a dict {'optimizer': o, "
    "'lr_scheduler': s, 'closure': False, 'elementwise': False}, where s is a scheduler or {'scheduler', 'interval', "
    "'frequency', 'monitor', 'strict', 'reduce_on_plateau', 'name'}; or None."
)


def parse_optimizers(configured: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers that ``configure_optimizers`` returned, in any supported form.

    Raises:
        ConfigurationError: the result has an unsupported type. The error names the type.
    """
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        return _from_dict(configured)
    if isinstance(configured, Sequence):
        if len(configured) == 2 and all(isinstance(part, list | tuple) for part in configured):
            optimizers = [_optimizer(part) for part in configured[0]]
            return optimizers, [_scheduler(part) for part in configured[1]]
        if configured and all(isinstance(part, Mapping) for part in configured):
            pairs = [_from_dict(part) for part in configured]
            optimizers = [optimizer for of_dict, _ in pairs for optimizer in of_dict]
            return optimizers, [scheduler for _, of_dict in pairs for scheduler in of_dict]
        return [_optimizer(part) for part in configured], []
    raise _unsupported(configured)


def needs_engine_closure(configured: Any, optimizers: Sequence[Optimizer], automatic: bool) -> bool:
    """Return whether the engine has to pass the optimizer a closure that evaluates the loss again.

    Raises:
        ConfigurationError: ``"closure"`` is True with manual optimization, which would ignore it.
    """
    declared = any(part.get("closure") for part in _dicts(configured))
    if declared and not automatic:
        raise ConfigurationError(
            "configure_optimizers: 'closure': True with manual optimization.",
            "with manual optimization, the engine neither steps the optimizers nor builds a closure.",
            "leave 'closure' out, and call optimizer.step(closure) in training_step.",
        )
    return declared or any(map(needs_closure, optimizers))


def declared_elementwise(configured: Any) -> list[Optimizer]:
    """Return the optimizers that ``configure_optimizers`` returned with ``"elementwise": True``."""
    return [part["optimizer"] for part in _dicts(configured) if part.get("elementwise")]


def _dicts(configured: Any) -> list[Mapping[str, Any]]:
    parts = configured if isinstance(configured, Sequence) else [configured]
    return [part for part in parts if isinstance(part, Mapping)]


def _check_keys(configured: Mapping[str, Any], required: str, known: Sequence[str], description: str) -> None:
    unknown = [key for key in configured if key not in known]
    if required not in configured or unknown:
        problem = f"unknown keys {unknown}.{nearest(str(unknown[0]), known)}" if unknown else f"no {required!r}."
        raise ConfigurationError(
            f"configure_optimizers returned {description} with {problem}",
            f"its keys are {', '.join(map(repr, known))}.",
            _FORMS,
        )


def _from_dict(configured: Mapping[str, Any]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    _check_keys(configured, "optimizer", _DICT_KEYS, "a dict")
    schedulers, monitor = [], configured.get("monitor")
    if configured.get("lr_scheduler") is not None:
        schedulers = [_scheduler(configured["lr_scheduler"])]
        if schedulers[0].monitor is None:
            schedulers[0].monitor = monitor
    elif monitor is not None and "lr_scheduler" not in configured:  # an explicit None means no scheduler
        raise ConfigurationError(
            f"configure_optimizers: 'monitor': {monitor!r} without an 'lr_scheduler'.",
            "no scheduler would use it.",
            "drop 'monitor', or return the scheduler in the same dict.",
        )
    return [_optimizer(configured["optimizer"])], schedulers


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise _unsupported(value)
    return value


def _scheduler(value: Any) -> SchedulerConfig:
    if not isinstance(value, Mapping):
        if not callable(getattr(value, "step", None)):
            raise _unsupported(value)
        return SchedulerConfig(value)
    _check_keys(value, "scheduler", _SCHEDULER_KEYS, "a scheduler's dict")
    interval, frequency = value.get("interval", "epoch"), value.get("frequency", 1)
    if interval not in ("epoch", "step") or type(frequency) is not int or frequency < 1:
        raise ConfigurationError(
            f"configure_optimizers: interval={interval!r}, frequency={frequency!r}.",
            "a scheduler steps after every so many epochs or optimizer steps.",
            "use the interval 'epoch' or 'step', and as frequency an int of 1 or more.",
        )
    if not callable(getattr(value["scheduler"], "step", None)):
        raise _unsupported(value["scheduler"])
    return SchedulerConfig(**value)


def _unsupported(value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"configure_optimizers returned a {type(value).__name__}, or a list or dict that contains one.",
        "the engine steps torch optimizers.",
        _FORMS,
    )


def check_optimizers(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Iterable[SchedulerConfig],
    automatic: bool,
    closure: bool = False,
) -> None:
    """Check that optimizers and schedulers can train ``module``.

    Raises:
        ConfigurationError: they cannot train it. The error names the parameter, the optimizer or the scheduler.
    """
    check_parameters(module, optimizers, automatic)
    if automatic and closure and len(optimizers) > 1:
        raise ConfigurationError(
            f"An optimizer evaluates the loss again in its step, and there are {len(optimizers)} optimizers.",
            "the other optimizers would step with gradients that were computed before its step.",
            "use this optimizer alone, or set self.automatic_optimization = False.",
        )
    for config in schedulers:
        if config.reduce_on_plateau and config.monitor is None and automatic:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} without a 'monitor'.",
                "the scheduler's step needs the value of a logged metric.",
                "return {'optimizer': o, 'lr_scheduler': {'scheduler': s, 'monitor': 'val_loss'}}.",
            )
        scheduled_optimizer = getattr(config.scheduler, "optimizer", None)
        if scheduled_optimizer is not None and all(scheduled_optimizer is not optimizer for optimizer in optimizers):
            raise ConfigurationError(
                f"The scheduler {type(config.scheduler).__name__} was built with an optimizer that was not returned.",
                "the learning rates that the scheduler sets would have no effect.",
                "return the optimizer that the scheduler was built with.",
            )


def check_parameters(
    module: nn.Module, optimizers: Sequence[Optimizer], automatic: bool, only: dict[str, Any] | None = None
) -> None:
    """Check that ``module`` holds the parameters of ``optimizers``, and that automatic optimization steps each once.

    Args:
        module: the module.
        optimizers: the optimizers.
        automatic: whether the engine steps the optimizers.
        only: the group whose parameters must be the module's, which may have replaced the layers of earlier groups;
            None for all groups.

    Raises:
        ConfigurationError: one of the two does not hold. The error names the parameter, or its shape.
    """
    names = parameter_names(module)
    owner_numbers: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names and (only is None or only is group):
                    raise ConfigurationError(
                        f"Optimizer {number} ({type(optimizer).__name__}) holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the module's.",
                        "the optimizer would train a tensor that is not saved, moved or synchronized.",
                        "assign the layer to the module (self.layer = ...) first, and pass the layer's parameters. If "
                        "an earlier run stepped this optimizer, build a new one in configure_optimizers.",
                    )
                other = owner_numbers.setdefault(id(parameter), number)
                if automatic and other != number:
                    raise ConfigurationError(
                        f"Optimizers {other} and {number} share the parameter {names[id(parameter)]!r}.",
                        "with automatic optimization all optimizers step, so the parameter would be updated twice.",
                        "give the optimizers disjoint parameters, or set self.automatic_optimization = False.",
                    )


# Optimizers that evaluate the loss again within their step


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` requires a closure by its signature, as that of LBFGS does."""
    # The signature is read from the class, since schedulers patch `step` on the instance.
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Return whether torch defines the optimizer's ``step``. Torch's steps evaluate a closure before anything else."""
    return type(optimizer).step.__module__.startswith("torch.optim")


def evaluates_once(optimizer: Optimizer) -> bool:
    """Return whether calling the closure first and then ``step()`` is equivalent to ``step(closure)``."""
    return is_torch_optimizer(optimizer) and not needs_closure(optimizer)


def explain_missing_closure(error: Exception, optimizer: Optimizer) -> None:
    """Raise a `ConfigurationError` if ``error`` came from a missing closure; otherwise return.

    A failed assertion may have no message, and a call of None no name. The line that failed then names the closure.

    Raises:
        ConfigurationError: the closure was missing. The error says how to pass one.
    """
    found = f"{error} {traceback.extract_tb(error.__traceback__)[-1].line}"
    if isinstance(error, AssertionError | TypeError) and re.search(r"\bclosure\b", found):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step was called without a closure and ended in {error!r}.",
            "the optimizer evaluates the loss again in its step, although the step's signature requires no closure.",
            "return {'optimizer': optimizer, 'closure': True} from configure_optimizers; or set "
            "self.automatic_optimization = False and call optimizer.step(closure) in training_step.",
        ) from error
