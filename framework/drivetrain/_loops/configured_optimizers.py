"""What ``configure_optimizers`` returned, read into one form."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies._optimizer_state import parameter_names
from drivetrain.strategies.strategy import Strategy

_INTERVALS = ("epoch", "step")
_KEYS = ("scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau")

_KEYS_BESIDE = ("optimizer", "lr_scheduler", "monitor", "closure")
_KEYS_OF_A_DICT = "its keys are 'optimizer', 'lr_scheduler', 'monitor' and 'closure'."
_FORMS = (
    "return an optimizer; a list of them; (optimizers, schedulers) as two lists; a dict {'optimizer': o, "
    "'lr_scheduler': s}, where s is a scheduler or {'scheduler', 'interval', 'frequency', 'monitor', 'strict', "
    "'reduce_on_plateau', 'name'}, and with "
    "'closure': True for an optimizer that evaluates the loss anew; or None."
)


@dataclass(slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it steps.

    Attributes:
        scheduler: what ``step`` is called on.
        interval: "epoch" or "step" (optimizer steps).
        frequency: every how many of them.
        monitor: the logged value a plateau scheduler follows.
        name: what `LearningRateMonitor` calls it.
        strict: refuse a ``monitor`` that nobody logged; else the scheduler is not stepped then, which is said once.
        plateau: whether ``step`` takes the monitored value, as that of `ReduceLROnPlateau` does.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    plateau: bool = False

    def __post_init__(self) -> None:
        self.plateau = self.plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def reduce_on_plateau(self) -> bool:
        """`plateau`, by Lightning's name."""
        return self.plateau


def read_optimizers(configured: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Read any form that ``configure_optimizers`` may return, but for what `asks_for_closure` reads.

    Raises:
        ConfigurationError: it is no such form; names what was found.
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
            return [one for found, _ in pairs for one in found], [one for _, found in pairs for one in found]
        return [_optimizer(part) for part in configured], []
    raise _not_a_form(configured)


def asks_for_closure(configured: Any, optimizers: Sequence[Optimizer], automatic: bool) -> bool:
    """Whether an optimizer that ``configure_optimizers`` returned evaluates the loss anew within its step.

    Raises:
        ConfigurationError: what it says under ``"closure"`` cannot be.
    """
    dicts = [configured] if isinstance(configured, Mapping) else configured if isinstance(configured, Sequence) else []
    said = [part["closure"] for part in dicts if isinstance(part, Mapping) and "closure" in part]
    needed = [optimizer for optimizer in optimizers if needs_closure(optimizer)]
    for value in said:
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"configure_optimizers: 'closure': {value!r}.",
                "it says whether the optimizer is given a closure, which the engine makes.",
                "use True or False; to write a closure, set self.automatic_optimization = False and call "
                "optimizer.step(closure).",
            )
        if value and not automatic:
            raise ConfigurationError(
                "configure_optimizers: 'closure': True with manual optimization.",
                "the engine steps no optimizer there, and makes no closure.",
                "leave it out, and call optimizer.step(closure) in training_step.",
            )
        if not value and needed and len(optimizers) == 1:
            raise ConfigurationError(
                f"configure_optimizers: 'closure': False with {type(needed[0]).__name__}.",
                "it cannot step without one.",
                "leave it out.",
            )
    return bool(needed) or any(said)


def _from_dict(configured: Mapping[str, Any]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    unknown = [key for key in configured if key not in _KEYS_BESIDE]
    if "optimizer" not in configured or unknown:
        problem = f"unknown keys {unknown}" if unknown else "no 'optimizer'"
        hint = nearest(str(unknown[0]), _KEYS_BESIDE) if unknown else ""
        raise ConfigurationError(f"configure_optimizers returned a dict with {problem}.{hint}", _KEYS_OF_A_DICT, _FORMS)
    schedulers, monitor = [], configured.get("monitor")
    if configured.get("lr_scheduler") is not None:
        schedulers = [_scheduler(configured["lr_scheduler"])]
        if schedulers[0].monitor is None:
            schedulers[0].monitor = _checked_monitor(monitor)
    elif monitor is not None and "lr_scheduler" not in configured:  # None is a scheduler that is switched off
        raise ConfigurationError(
            f"configure_optimizers: 'monitor': {monitor!r} without an 'lr_scheduler'.",
            "nothing would go by it.",
            "drop it, or return the scheduler beside it.",
        )
    return [_optimizer(configured["optimizer"])], schedulers


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise _not_a_form(value)
    return value


def _scheduler(value: Any) -> SchedulerConfig:
    if not isinstance(value, Mapping):
        if not callable(getattr(value, "step", None)):
            raise _not_a_form(value)
        return SchedulerConfig(value)
    for key in value:
        if key not in _KEYS:
            raise ConfigurationError(
                f"configure_optimizers: unknown key {key!r} beside a scheduler.{nearest(str(key), _KEYS)}",
                f"the keys are {', '.join(_KEYS)}.",
                _FORMS,
            )
    if "scheduler" not in value:
        raise ConfigurationError(
            "configure_optimizers: a scheduler's dict has no 'scheduler'.", "there is nothing to step.", _FORMS
        )
    interval, frequency = value.get("interval", "epoch"), value.get("frequency", 1)
    if interval not in _INTERVALS:
        raise ConfigurationError(
            f"configure_optimizers: interval={interval!r}.{nearest(str(interval), _INTERVALS)}",
            "a scheduler steps once every so many epochs or optimizer steps.",
            "use 'epoch' or 'step'.",
        )
    if type(frequency) is not int or frequency < 1:
        raise ConfigurationError(
            f"configure_optimizers: frequency={frequency!r}.", "it counts epochs or steps.", "use an int of 1 or more."
        )
    scheduler, strict, plateau = value["scheduler"], value.get("strict", True), value.get("reduce_on_plateau")
    if not callable(getattr(scheduler, "step", None)):
        raise _not_a_form(scheduler)
    for key, given, known in (("strict", strict, (True, False)), ("reduce_on_plateau", plateau, (True, False, None))):
        if not any(given is one for one in known):
            raise ConfigurationError(
                f"configure_optimizers: {key!r}: {given!r}.", "it is a switch.", "use True or False."
            )
    if plateau is False and isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "configure_optimizers: 'reduce_on_plateau': False with ReduceLROnPlateau.",
            "it cannot step without the monitored value.",
            "leave it out.",
        )
    monitor = _checked_monitor(value.get("monitor"))
    return SchedulerConfig(scheduler, interval, frequency, monitor, value.get("name"), strict, bool(plateau))


def _checked_monitor(monitor: Any) -> str | None:
    if monitor is not None and not isinstance(monitor, str):
        raise ConfigurationError(
            f"configure_optimizers: 'monitor': {monitor!r}.",
            "it is the name of a logged value.",
            "use a name, such as 'monitor': 'val_loss'.",
        )
    return monitor


def _not_a_form(value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"configure_optimizers returned {'a list holding ' if not isinstance(value, Sequence) else ''}"
        f"a {type(value).__name__}.",
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
    """Refuse optimizers and schedulers that cannot train ``module``.

    Raises:
        ConfigurationError: names the parameter, the optimizer or the scheduler.
    """
    names = parameter_names(module)
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigurationError(
                        f"Optimizer {number} ({type(optimizer).__name__}) holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the module's.",
                        "it would train something that nobody saves, moves or synchronises.",
                        "assign the layer to the module (self.layer = ...), and pass its parameters.",
                    )
                before = owner.setdefault(id(parameter), number)
                if automatic and before != number:
                    raise ConfigurationError(
                        f"Optimizers {before} and {number} share the parameter {names[id(parameter)]!r}.",
                        "in automatic optimization all of them step after one backward, so it would move twice.",
                        "give them disjoint parameters, or set self.automatic_optimization = False.",
                    )
    if automatic and closure and len(optimizers) > 1:
        first = next((number for number, optimizer in enumerate(optimizers) if needs_closure(optimizer)), None)
        which = "One" if first is None else f"Optimizer {first} ({type(optimizers[first]).__name__})"
        raise ConfigurationError(
            f"{which} evaluates the loss anew in its step, and there are {len(optimizers)} optimizers.",
            "the others would step on gradients of a point that it has left.",
            "use it alone, or set self.automatic_optimization = False.",
        )
    for config in schedulers:
        if config.plateau and config.monitor is None and automatic:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} without a 'monitor'.",
                "it steps by the value of a logged metric.",
                "return {'optimizer': o, 'lr_scheduler': {'scheduler': s, 'monitor': 'val_loss'}}.",
            )
        held = getattr(config.scheduler, "optimizer", None)
        if held is not None and all(held is not optimizer for optimizer in optimizers):
            raise ConfigurationError(
                f"The scheduler {type(config.scheduler).__name__} is over an optimizer that was not returned.",
                "its learning rates would move nothing.",
                "return the optimizer that the scheduler was built with.",
            )


def check_group(module: TrainModule, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
    """Refuse the last group of ``optimizer``, just added, where it cannot train ``module``.

    Raises:
        ConfigurationError: names the parameter, or its shape.
    """
    names = parameter_names(module)
    others = {
        id(parameter)
        for other in optimizers
        if other is not optimizer
        for group in other.param_groups
        for parameter in group["params"]
    }
    for parameter in optimizer.param_groups[-1]["params"]:
        if id(parameter) not in names:
            raise ConfigurationError(
                f"add_param_group: a parameter of shape {tuple(parameter.shape)} is not the module's.",
                "it would train something that nobody saves, moves or synchronises.",
                "assign the layer to the module (self.layer = ...) first, and add its parameters.",
            )
        if module.automatic_optimization and id(parameter) in others:
            raise ConfigurationError(
                f"add_param_group: another optimizer holds {names[id(parameter)]!r} already.",
                "in automatic optimization all of them step after one backward, so it would move twice.",
                "add it to one of them alone, or set self.automatic_optimization = False.",
            )


# Optimizers that evaluate the loss anew within their step


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the signature of ``optimizer.step`` says that it cannot do without a closure, as LBFGS's does."""
    # Schedulers patch `step` on the object; the class tells.
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Whether its ``step`` is one of torch's, all of which evaluate a closure before they do anything else."""
    return type(optimizer).step.__module__.startswith("torch.optim")


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether a closure may as well be evaluated before a step without one."""
    return is_torch_optimizer(optimizer) and not needs_closure(optimizer)


def explain_missing_closure(error: Exception, optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise what became of a step without a closure as an error of ours; return where it is something else.

    Raises:
        ConfigurationError: names both ways to give the optimizer one, and what refuses it under ``strategy``.
    """
    if isinstance(error, DrivetrainError) or not _misses_closure(error):
        return
    said = f": {error}" if str(error) else ""
    ways = (
        "return {'optimizer': optimizer, 'closure': True} from configure_optimizers; or set "
        "self.automatic_optimization = False and call optimizer.step(closure) in training_step."
    )
    refusing = []
    if not strategy.takes_closures:
        refusing.append("use strategy='ddp' or 'fsdp', since this one evaluates nothing within a step")
    if strategy.precision.scales_loss:
        refusing.append("use precision='bf16-mixed' or '32-true', since scaled gradients serve no closure")
    if refusing:
        ways = f"take another optimizer; or {' and '.join(refusing)}, and {ways}"
    raise ConfigurationError(
        f"{type(optimizer).__name__}.step was called without a closure and ended in {type(error).__name__}{said}.",
        "it evaluates the loss anew within its step, whatever its signature says.",
        ways,
    ) from error


def _misses_closure(error: Exception) -> bool:
    if not isinstance(error, AssertionError | TypeError | ValueError | RuntimeError):
        return False
    if "closure" in str(error).lower():
        return True
    # An assertion need not say anything: then the frame that it failed in tells.
    trace, local = error.__traceback__, {}
    called_none = isinstance(error, TypeError) and "'NoneType' object is not callable" in str(error)
    while trace is not None:
        if trace.tb_next is None or called_none:
            local = trace.tb_frame.f_locals
            if "closure" in local and local["closure"] is None:
                return True
        trace = trace.tb_next
    return False
