"""Methods that look like hooks and are none: nobody calls them, and a run would pass them over in silence."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from types import CodeType, FunctionType, MethodType
from typing import Any

from drivetrain._engine.call_search import is_called_elsewhere
from drivetrain._engine.stage_loaders import DataArguments, loader_method
from drivetrain._loops.hooks import HOOKS, is_overridden
from drivetrain.callback import Callback
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.module._module_hooks import ModuleHooks
from drivetrain.module.train_module import TrainModule

_MOMENT = re.compile(
    r"on_(fit|train|training|val|valid|validation|validate|eval|evaluation|test|testing|predict|prediction|sanity|epoch|"
    r"batch|step)(_\w+)?_(start|begin|end|stop|finish|finished|done)"
)
_STEP = re.compile(
    r"(train|training|val|valid|validate|validation|test|testing|predict|prediction)"
    r"_(steps?|epoch_(start|begin|end)|dataloaders?)"
)
_LOADER = re.compile(r"\w+_dataloaders?")
_SYNONYMS = {"begin": "start", "stop": "end", "finish": "end", "finished": "end", "done": "end"}
_SYNONYM = re.compile(rf"({'|'.join(_SYNONYMS)})$")
_ALIKE = 0.88
"""How near a name must be to a hook's: "validation_steps" is, "training_loss" is not."""

_AFTER_EPOCH = "keep what the steps give in a list of the module's own, and write {}(self), which takes nothing more"
_GRADIENTS = (
    "on_before_zero_grad(self, optimizer) is called before it; to clear them another way, set "
    "self.automatic_optimization = False and call zero_grad in training_step"
)
_FLAGS = "set the mode of what is special in on_{}_start(self) and put it back in on_{}_end(self)"
_OTHERS = {
    "training_epoch_end": _AFTER_EPOCH.format("on_train_epoch_end"),
    "validation_epoch_end": _AFTER_EPOCH.format("on_validation_epoch_end"),
    "test_epoch_end": _AFTER_EPOCH.format("on_test_epoch_end"),
    "predict_epoch_end": _AFTER_EPOCH.format("on_predict_epoch_end"),
    **dict.fromkeys(("training_end", "training_step_end"), "do it in training_step, or write on_train_batch_end"),
    **dict.fromkeys(("validation_end", "validation_step_end"), "do it in validation_step"),
    "test_step_end": "do it in test_step",
    "backward": (
        "on_before_backward(self, loss) and on_after_backward(self) are called around it; for a backward of your own "
        "set self.automatic_optimization = False and call self.manual_backward(loss) in training_step"
    ),
    "optimizer_zero_grad": _GRADIENTS,
    "on_validation_model_zero_grad": _GRADIENTS,
    **{
        f"on_{stage}_model_{mode}": _FLAGS.format(stage, stage)
        for stage in ("validation", "test", "predict")
        for mode in ("eval", "train")
    },
    "configure_sharded_model": "write configure_model(self)",
    "on_configure_sharded_model": "write configure_model(self)",
    "on_before_accelerator_backend_setup": "write setup(self, stage)",
    "tbptt_split_batch": "split the batch in training_step, with self.automatic_optimization = False",
    "get_progress_bar_dict": "use self.log(..., prog_bar=True)",
    "on_epoch_start": "write on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "write on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_batch_end": "write on_train_batch_end",
    **dict.fromkeys(("on_pretrain_routine_start", "on_pretrain_routine_end"), "write on_fit_start"),
    **dict.fromkeys(("on_init_start", "on_init_end"), "write setup"),
    "on_keyboard_interrupt": "write on_exception, which gets the KeyboardInterrupt",
    **dict.fromkeys(("on_hpc_save", "hpc_save"), "write on_save_checkpoint"),
    **dict.fromkeys(("on_hpc_load", "hpc_load"), "write on_load_checkpoint"),
    "tng_dataloader": "write train_dataloader",
}
"""Hooks of other trainers, and what stands for them here."""

_OF_MODULES = (
    *(name for name in vars(ModuleHooks) if not name.startswith("_")),
    *("configure_optimizers", "batch_weight", "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step"),
    *("transfer_batch_to_device", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""They take what they like of batch, batch_idx and dataloader_idx, which is looked at where they are called."""

_OF_DATA = tuple(
    name
    for name, value in vars(DataModule).items()
    if isinstance(value, FunctionType) and not name.startswith("_") and "state_dict" not in name
)


def check_hooks(
    owner: TrainModule | Callback | DataModule, given: DataArguments | None = None, stage: str | None = None
) -> None:
    """Refuse methods that look like hooks and are none, and hooks that take other arguments than they are given.

    A method that the object itself or the user's script calls is a helper, by whatever name.

    Args:
        owner: whose class, and its bases as far as they are the user's, are looked at.
        given: the loaders of the run: where there are some, a method that looks like theirs may be where they are from.
        stage: "fit", "validate", "test" or "predict", whose loaders the engine asks for; None where it asks for none.

    Raises:
        ConfigurationError: names the method, and what to write for it.
    """
    base, hooks = _kind(owner)
    known = set(dir(base))
    for name in _own_functions(owner, base):
        if name in known or name.startswith("_"):
            continue
        way = _way_out(name, base, hooks, given)
        if way is not None and not _calls_itself(owner, base, name) and not _is_called(owner, base, name):
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} looks like a hook, and is none: nobody calls it.",
                "what it is meant to do would not be done.",
                f"{way}. A method that is called from elsewhere needs another name, or an underscore before it.",
            )
    for name in hooks:
        if name not in _STEPS and is_overridden(name, owner, base) and not _is_spared(name, given, stage):
            _check_arguments(owner, name, base)


def _kind(owner: object) -> tuple[type, tuple[str, ...]]:
    if isinstance(owner, TrainModule):
        return TrainModule, (*_STEPS, *_OF_MODULES)
    return (Callback, HOOKS) if isinstance(owner, Callback) else (DataModule, _OF_DATA)


def _way_out(name: str, base: type, hooks: Sequence[str], given: DataArguments | None) -> str | None:
    """What to write for ``name``; None where it is no hook's name, nor like one."""
    on = name.startswith("on_")
    if name in _OTHERS and (on or base is TrainModule):
        return _OTHERS[name]
    if on:
        kinds = (("a module", _OF_MODULES), ("a callback", HOOKS), ("a data module", _OF_DATA))
        elsewhere = [kind for kind, theirs in kinds if name in theirs]
        if elsewhere:
            return f"it is a hook of {' and of '.join(elsewhere)}: write it there"
    elif base is Callback or (base is DataModule and re.fullmatch(r"\w+_steps?", name)):
        return None
    alike = (_MOMENT if on else _STEP).fullmatch(name) is not None
    near, likeness = _nearest(_SYNONYM.sub(lambda found: _SYNONYMS[found[0]], name) if on else name, hooks, alike)
    if not alike and likeness < _ALIKE:
        return None
    # Where loaders were given, this may be the method that gave them.
    return None if near.endswith("_dataloader") and _is_given(near, given) else f"write {near}"


def _nearest(name: str, hooks: Sequence[str], anyway: bool) -> tuple[str, float]:
    """The hook whose name is nearest, and how near; ``anyway`` says that it is wanted however far it is."""
    found, best = "", 0.0
    for hook in hooks:
        # Most names are told apart by their lengths and beginnings, at next to no cost.
        if anyway or (abs(len(hook) - len(name)) <= 3 and hook[0] == name[0]):
            likeness = SequenceMatcher(None, name, hook).ratio()
            found, best = (hook, likeness) if likeness > best else (found, best)
    return found, best


def _is_given(loader_method: str, given: DataArguments | None) -> bool:
    if given is None:
        return False
    loaders = given.train if loader_method.startswith("train") else given.evaluate
    return loaders is not None or given.datamodule is not None


def _is_spared(name: str, given: DataArguments | None, stage: str | None) -> bool:
    """Whether a loader's method is the user's own affair: this run does not ask it for one."""
    if not name.endswith("_dataloader"):
        return False
    asked = ("train", "validate") if stage == "fit" else () if stage is None else (stage,)
    if name not in map(loader_method, asked):
        return True
    loaders = None if given is None else given.train if name == "train_dataloader" else given.evaluate
    return loaders is not None


def _own_functions(owner: object, base: type) -> list[str]:
    """The names of the methods that a user has written for ``owner``."""
    found = [name for name, value in vars(owner).items() if isinstance(value, FunctionType | MethodType)]
    for kind in _own_classes(owner, base):
        found += [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return found


def _own_classes(owner: object, base: type) -> Iterator[type]:
    for kind in type(owner).__mro__:
        if kind is base:
            return
        if not kind.__module__.startswith("drivetrain."):
            yield kind


def _calls_itself(owner: object, base: type, method: str) -> bool:
    """Whether another method of ``owner`` uses ``self.<method>``."""
    for kind in _own_classes(owner, base):
        for name, value in vars(kind).items():
            value = getattr(value, "fget", getattr(value, "__func__", value))
            if name != method and isinstance(value, FunctionType) and _uses(value.__code__, method):
                return True
    return False


def _is_called(owner: object, base: type, method: str) -> bool:
    """Whether the user's files call it; a loss has a ``backward``, and where loaders are from is seen from the run."""
    if method == "backward" or _LOADER.fullmatch(method):
        return False
    return is_called_elsewhere(method, {kind.__module__ for kind in _own_classes(owner, base)})


def _uses(code: CodeType, method: str) -> bool:
    if method in code.co_names:
        before: Any = None
        for instruction in dis.get_instructions(code):
            owner = before[-1] if isinstance(before, tuple) and before else before
            if instruction.argval == method and owner == "self" and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                return True
            before = instruction.argval
    return any(_uses(constant, method) for constant in code.co_consts if isinstance(constant, CodeType))


def _check_arguments(owner: object, name: str, base: type) -> None:
    hook = getattr(owner, name)
    if not callable(hook):
        raise ConfigurationError(
            f"{type(owner).__name__}.{name} is a {type(hook).__name__}.",
            "the engine calls a method of that name.",
            f"keep it under another name, and write def {name}(self), which returns it.",
        )
    expected = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
    # Evaluation hooks get the number of the loader where there are several.
    passed = [one.name for one in expected if one.name != "dataloader_idx" or one.default is inspect.Parameter.empty]
    several = [one.name for one in expected]
    try:
        signature = inspect.signature(hook, follow_wrapped=False)  # a decorator may give it more
    except (TypeError, ValueError):  # not written in Python
        return
    if several != passed and _takes(signature, several):
        return
    try:
        signature.bind(*passed)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(owner).__name__}.{name}{signature} cannot be called with ({', '.join(passed)}): {error}.",
            "that is how the engine calls it.",
            f"write def {name}({', '.join(['self', *passed])}).",
        ) from None


def _takes(signature: inspect.Signature, passed: Sequence[str]) -> bool:
    try:
        signature.bind(*passed)
    except TypeError:
        return False
    return True
