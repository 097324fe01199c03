"""Refuses methods whose names resemble hooks, because the engine would silently never call such a method."""

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

_HOOK_PATTERN = re.compile(
    r"on_(fit|train|training|val|valid|validation|validate|eval|evaluation|test|testing|predict|prediction|sanity|epoch|"
    r"batch|step)(_\w+)?_(start|begin|end|stop|finish|finished|done)"
)
_STEP_PATTERN = re.compile(
    r"(train|training|val|valid|validate|validation|test|testing|predict|prediction)"
    r"_(steps?|epoch_(start|begin|end)|dataloaders?)"
)
_LOADER_PATTERN = re.compile(r"\w+_dataloaders?")
_SYNONYMS = {"begin": "start", "stop": "end", "finish": "end", "finished": "end", "done": "end"}
_SYNONYM_PATTERN = re.compile(rf"({'|'.join(_SYNONYMS)})$")
_MIN_SIMILARITY = 0.88
"""A name that is at least this similar to a hook's is refused, such as "validation_steps" but not "training_loss"."""

_EPOCH_END_FIX = "append the steps' outputs to a list on the module, and write {}(self), which gets no outputs"
_LIGHTNING_FIXES = {
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
"""Hooks of past and present Lightning versions that do not exist here, and what to write instead of each."""

_MODULE_HOOKS = (
    *(name for name in vars(ModuleHooks) if not name.startswith("_")),
    *("configure_optimizers", "batch_weight", "backward", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("optimizer_step", "lr_scheduler_step"),
    *("transfer_batch_to_device", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Steps may take any of batch, batch_idx and dataloader_idx. The loops check the signatures of the steps."""

_DATA_HOOKS = tuple(
    name
    for name, value in vars(DataModule).items()
    if isinstance(value, FunctionType) and not name.startswith("_") and "state_dict" not in name
)


def check_hooks(
    owner: TrainModule | Callback | DataModule, given: DataArguments | None = None, stage: str | None = None
) -> None:
    """Refuse methods that look like hooks but are not, and hooks that cannot take the engine's arguments.

    A method that the object's class or the user's script calls is a helper, whatever the method's name.

    Args:
        owner: the object whose class, with the bases that the user wrote, is checked.
        given: the loaders passed to the run. A method that looks like a loader method may have built them.
        stage: "fit", "validate", "test" or "predict"; loader methods that this stage does not call are not checked.
            None if the engine calls no loader method.

    Raises:
        ConfigurationError: a method is refused. The error names the method and the correct hook.
    """
    base, hooks = _base_and_hooks(owner)
    base_attributes = set(dir(base))
    for name in _user_methods(owner, base):
        if name in base_attributes or name.startswith("_"):
            continue
        fix = _suggest_fix(name, base, hooks, given)
        if (
            fix is not None
            and not _is_used_by_own_class(owner, base, name)
            and not _is_called_in_user_files(owner, base, name)
        ):
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} looks like a hook but is not one: the engine never calls it.",
                "its code would not run.",
                f"{fix}. If your own code calls the method, rename it or prefix its name with an underscore.",
            )
    for name in hooks:
        if name not in _STEPS and is_overridden(name, owner, base) and not _is_unused_loader(name, given, stage):
            _check_arguments(owner, name, base)


def _base_and_hooks(owner: object) -> tuple[type, tuple[str, ...]]:
    if isinstance(owner, TrainModule):
        return TrainModule, (*_STEPS, *_MODULE_HOOKS)
    return (Callback, HOOKS) if isinstance(owner, Callback) else (DataModule, _DATA_HOOKS)


def _suggest_fix(name: str, base: type, hooks: Sequence[str], given: DataArguments | None) -> str | None:
    """Return what to write instead of ``name``; None if ``name`` does not resemble a hook."""
    is_on_hook = name.startswith("on_")
    if name in _LIGHTNING_FIXES and (is_on_hook or base is TrainModule):
        return _LIGHTNING_FIXES[name]
    if is_on_hook:
        kinds = (("a module", _MODULE_HOOKS), ("a callback", HOOKS), ("a data module", _DATA_HOOKS))
        owners = [kind for kind, names in kinds if name in names]
        if owners:
            return f"write it in {' or in '.join(owners)}, which has a hook of that name"
    elif base is Callback or (base is DataModule and re.fullmatch(r"\w+_steps?", name)):
        return None
    matches_pattern = (_HOOK_PATTERN if is_on_hook else _STEP_PATTERN).fullmatch(name) is not None
    standard_name = _SYNONYM_PATTERN.sub(lambda match: _SYNONYMS[match[0]], name) if is_on_hook else name
    hook, similarity = _nearest_hook(standard_name, hooks, compare_all=matches_pattern)
    if not matches_pattern and similarity < _MIN_SIMILARITY:
        return None
    # If loaders were passed to the run, the method may be a helper that built them.
    return None if hook.endswith("_dataloader") and _is_given(hook, given) else f"write {hook}"


def _nearest_hook(name: str, hooks: Sequence[str], compare_all: bool) -> tuple[str, float]:
    """Return the hook with the most similar name, and the similarity. ``compare_all`` compares names of any length."""
    nearest, best = "", 0.0
    for hook in hooks:
        # Comparing lengths and first letters rules out most names at almost no cost.
        if compare_all or (abs(len(hook) - len(name)) <= 3 and hook[0] == name[0]):
            similarity = SequenceMatcher(None, name, hook).ratio()
            nearest, best = (hook, similarity) if similarity > best else (nearest, best)
    return nearest, best


def _is_given(loader_method: str, given: DataArguments | None) -> bool:
    if given is None:
        return False
    loaders = given.train if loader_method.startswith("train") else given.evaluate
    return loaders is not None or given.datamodule is not None


def _is_unused_loader(name: str, given: DataArguments | None, stage: str | None) -> bool:
    """Whether ``name`` is a loader method that this run does not call."""
    if not name.endswith("_dataloader"):
        return False
    loops = ("train", "validate") if stage == "fit" else () if stage is None else (stage,)
    if name not in map(loader_method, loops):
        return True
    loaders = None if given is None else given.train if name == "train_dataloader" else given.evaluate
    return loaders is not None


def _user_methods(owner: object, base: type) -> list[str]:
    """Return the names of the methods that the user has written for ``owner``."""
    names = [name for name, value in vars(owner).items() if isinstance(value, FunctionType | MethodType)]
    for kind in _user_classes(owner, base):
        names += [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return names


def _user_classes(owner: object, base: type) -> Iterator[type]:
    for kind in type(owner).__mro__:
        if kind is base:
            return
        if not kind.__module__.startswith("drivetrain."):
            yield kind


def _is_used_by_own_class(owner: object, base: type, method: str) -> bool:
    """Whether another method of ``owner`` uses ``self.<method>``."""
    for kind in _user_classes(owner, base):
        for name, value in vars(kind).items():
            value = getattr(value, "fget", getattr(value, "__func__", value))
            if name != method and isinstance(value, FunctionType) and _uses(value.__code__, method):
                return True
    return False


def _is_called_in_user_files(owner: object, base: type, method: str) -> bool:
    """Whether the user's files call ``method``.

    The result is False for loader methods, because a call of such a name may call the method of another object.
    """
    if _LOADER_PATTERN.fullmatch(method):
        return False
    return is_called_elsewhere(method, {kind.__module__ for kind in _user_classes(owner, base)})


def _uses(code: CodeType, method: str) -> bool:
    if method in code.co_names:
        previous: Any = None
        for instruction in dis.get_instructions(code):
            owner = previous[-1] if isinstance(previous, tuple) and previous else previous
            if instruction.argval == method and owner == "self" and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                return True
            previous = instruction.argval
    return any(_uses(constant, method) for constant in code.co_consts if isinstance(constant, CodeType))


def _check_arguments(owner: object, name: str, base: type) -> None:
    hook = getattr(owner, name)
    if not callable(hook):
        raise ConfigurationError(
            f"{type(owner).__name__}.{name} is a {type(hook).__name__}.",
            "the engine calls a method of that name.",
            f"store the object under another name, and write def {name}(self), which returns it.",
        )
    parameters = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
    expected = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    # Evaluation hooks get dataloader_idx only if there are several loaders.
    passed = [
        parameter.name
        for parameter in expected
        if parameter.name != "dataloader_idx" or parameter.default is inspect.Parameter.empty
    ]
    with_loader_index = [parameter.name for parameter in expected]
    try:
        signature = inspect.signature(hook, follow_wrapped=False)  # a decorator may pass more arguments
    except (TypeError, ValueError):  # the hook is not written in Python
        return
    if with_loader_index != passed and _accepts(signature, with_loader_index):
        return
    try:
        signature.bind(*passed)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(owner).__name__}.{name}{signature} cannot be called with ({', '.join(passed)}): {error}.",
            "the engine calls the method with these arguments.",
            f"write def {name}({', '.join(['self', *passed])}).",
        ) from None


def _accepts(signature: inspect.Signature, passed: Sequence[str]) -> bool:
    try:
        signature.bind(*passed)
    except TypeError:
        return False
    return True
