"""The table of overridden hooks, which is built once and holds a flat tuple of bound calls for each hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain._module.module_hooks import ModuleHooks
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

Call = Callable[..., Any]

HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)


def is_overridden(name: str, owner: object, base: type) -> bool:
    """Return whether ``owner`` overrides the method ``name`` of ``base``, in its class or on the instance.

    If the instance has an attribute ``name`` that is None, the method does not count as overridden.
    """
    instance_attributes = getattr(owner, "__dict__", {})
    if name in instance_attributes:
        return instance_attributes[name] is not None
    method = getattr(type(owner), name, None)
    return method is not None and method is not getattr(base, name, None)


def overridden(names: Iterable[str], owner: object, base: type) -> list[str]:
    """Return those of the methods of ``base`` that ``owner`` overrides."""
    return [name for name in names if is_overridden(name, owner, base)]


class HookTable:
    """The calls of each hook in order: callbacks by descending priority, the module, callbacks of negative priority.

    ``table.on_train_batch_start`` is a tuple, empty if the hook is not overridden. Callbacks' entries are bound to
    ``(trainer, module)``, so that all entries of a hook take the same arguments.

    ``table.early[name]`` ends with the module's hook, and ``table.late[name]`` holds the calls after that hook.
    """

    def __init__(self, trainer: RunContext, module: Any, callbacks: Sequence[Callback]) -> None:
        ordered = sorted(callbacks, key=lambda callback: -callback.priority)
        before_module = [callback for callback in ordered if callback.priority >= 0]
        after_module = [callback for callback in ordered if callback.priority < 0]
        self.early: dict[str, tuple[Call, ...]] = {}
        self.late: dict[str, tuple[Call, ...]] = {}
        for name in HOOKS:
            early, late = (
                [partial(getattr(each, name), trainer, module) for each in group if is_overridden(name, each, Callback)]
                for group in (before_module, after_module)
            )
            in_module = hasattr(ModuleHooks, name) and is_overridden(name, module, ModuleHooks)
            self.early[name] = (*early, getattr(module, name)) if in_module else tuple(early)
            self.late[name] = tuple(late)
            setattr(self, name, self.early[name] + self.late[name])

    def wrap(self, names: Iterable[str], wrap: Callable[[str, int, Call], Call]) -> None:
        """Replace each call of some hooks by ``wrap(name, number, call)``, where numbers count in `early` or `late`."""
        for name in names:
            for calls in (self.early, self.late):
                calls[name] = tuple(wrap(name, number, call) for number, call in enumerate(calls[name]))
            setattr(self, name, self.early[name] + self.late[name])

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Call, ...]: ...


def is_users_hook(call: Call) -> bool:
    """Return whether a call in the table of hooks belongs to the user's code."""
    owner = getattr(getattr(call, "func", call), "__self__", None)
    return not type(owner).__module__.startswith(("drivetrain.", "drivetrain_strategies."))
