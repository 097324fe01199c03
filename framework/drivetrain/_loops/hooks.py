"""The table of overridden hooks, which is built once and holds a flat tuple of bound calls for each hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain._runtime.generators import drawing_alike
from drivetrain.callback import Callback
from drivetrain.module._module_hooks import ModuleHooks

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

Call = Callable[..., Any]

HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)

_DRAW_ALIKE = frozenset(
    name
    for name in HOOKS
    if name.startswith(("on_fit_", "on_train_", "on_sanity_", "on_before_", "on_after_", "on_validation_"))
)
"""The hooks in which users may change weights that are trained."""


def is_overridden(name: str, owner: object, base: type) -> bool:
    """Return whether ``owner`` overrides the method ``name`` of ``base``, in its class or on the instance.

    If the instance has an attribute ``name`` that is None, the method does not count as overridden.
    """
    instance_attributes = getattr(owner, "__dict__", {})
    if name in instance_attributes:
        return instance_attributes[name] is not None
    method = getattr(type(owner), name, None)
    return method is not None and method is not getattr(base, name, None)


def is_built_in(callback: object) -> bool:
    """Return whether all hooks of ``callback`` are drivetrain's own, without functions that users set as hooks."""
    return type(callback).__module__.startswith("drivetrain.") and not getattr(callback, "__dict__", {}).keys() & HOOKS


class HookTable:
    """The calls of each hook in order: callbacks by descending priority, the module, callbacks of negative priority.

    ``table.on_train_batch_start`` is a tuple, empty if the hook is not overridden. Callbacks' entries are bound to
    ``(trainer, module)``, so that all entries of a hook take the same arguments.

    ``table.early[name]`` ends with the module's hook, and ``table.late[name]`` holds the calls after that hook.

    Args:
        trainer: passed to the hooks of callbacks.
        module: the user's module.
        callbacks: the callbacks of the run.
        draw_alike: whether the users' hooks of training draw the same random numbers on all ranks.
    """

    def __init__(
        self, trainer: RunContext, module: Any, callbacks: Sequence[Callback], draw_alike: bool = False
    ) -> None:
        ordered = sorted(callbacks, key=lambda callback: -callback.priority)
        self.early: dict[str, tuple[Call, ...]] = {}
        self.late: dict[str, tuple[Call, ...]] = {}

        self.draws_alike = False
        """Whether there is a hook that draws the same random numbers on all ranks."""

        def method(owner: Any, name: str) -> Call:
            call: Call = getattr(owner, name)
            if not draw_alike or name not in _DRAW_ALIKE or is_built_in(owner):
                return call
            self.draws_alike = True
            return drawing_alike(call)

        for name in HOOKS:
            calls: dict[int, Call] = {
                id(callback): partial(method(callback, name), trainer, module)
                for callback in ordered
                if is_overridden(name, callback, Callback)
            }
            early_calls = [
                calls[id(callback)] for callback in ordered if callback.priority >= 0 and id(callback) in calls
            ]
            late_calls = [
                calls[id(callback)] for callback in ordered if callback.priority < 0 and id(callback) in calls
            ]
            if hasattr(ModuleHooks, name) and is_overridden(name, module, ModuleHooks):
                early_calls.append(method(module, name))
            self.early[name] = tuple(early_calls)
            self.late[name] = tuple(late_calls)

    def __getattr__(self, name: str) -> tuple[Call, ...]:
        # Python calls this once for each name, since the tuple is an ordinary attribute afterwards.
        if name not in HOOKS:
            raise AttributeError(name)
        calls = self.early[name] + self.late[name]
        setattr(self, name, calls)
        return calls
