"""Names of parameters, buffers and classes as the user defined them, without what `torch.compile` and FSDP add."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

COMPILED = "_orig_mod."
"""What ``torch.compile(submodule)`` puts into the names of the submodule's parameters."""


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts of compiled modules, so that code without compilation has it too."""
    return name.replace(COMPILED, "") if COMPILED in name else name


def plain_class(module: Any) -> type:
    """Return a module's class without the subclass that `fully_shard` creates."""
    classes = type(module).__mro__
    return next(cls for cls in classes if not any(base.__name__ == "FSDPModule" for base in cls.__mro__))


class PlainNames(nn.Module):
    """Gives a module the same names whether or not its submodules are compiled by ``torch.compile(submodule)``."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names, without ``_orig_mod.``."""
        for name, value in super().named_parameters(prefix, recurse, remove_duplicate):
            yield plain_name(name), value

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield buffers with their names, without ``_orig_mod.``."""
        for name, value in super().named_buffers(prefix, recurse, remove_duplicate):
            yield plain_name(name), value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of torch's ``state_dict``, with names without ``_orig_mod.``."""
        state = super().state_dict(*args, **kwargs)
        if not any(COMPILED in name for name in state):
            return state
        plain = OrderedDict((plain_name(name), value) for name, value in state.items())
        metadata = {plain_name(name): value for name, value in state._metadata.items()}
        state.clear()  # torch passes on the same object to nested modules
        state.update(plain)
        state._metadata.clear()
        state._metadata.update(metadata)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, whether or not the same submodules are compiled as in the module that it is of."""
        compiled = [name for name, _ in self.named_modules(remove_duplicate=False) if _is_compiled(name)]
        if not compiled and not any(COMPILED in name for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        own = OrderedDict((_own_name(plain_name(name), compiled), value) for name, value in state_dict.items())
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            own._metadata = {  # type: ignore[attr-defined]
                _own_name(f"{plain_name(name)}.", compiled)[:-1]: value for name, value in metadata.items()
            }
        result = super().load_state_dict(own, strict, assign)
        return type(result)(*([plain_name(name) for name in names] for names in result))


def _is_compiled(name: str) -> bool:
    return f".{name}".endswith(f".{COMPILED[:-1]}")


def _own_name(name: str, compiled: list[str]) -> str:
    for path in compiled:  # outer modules come first
        outer = path[: -len(COMPILED) + 1]
        if name.startswith(outer):
            name = f"{path}.{name[len(outer) :]}"
    return name
