"""Finds uses of parameters of stage 3 outside of the forwards of their layers, where their tensors are empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._user_calls import is_called_by_library, refuse_gradients_through, tensors_in
from drivetrain_strategies.deepspeed._internals import gathered_for_use, is_gathered

_ATTRIBUTES_WITHOUT_VALUES = {
    *("grad", "requires_grad", "is_leaf", "grad_fn", "device", "dtype", "layout", "is_sparse", "is_meta", "is_cpu"),
    *("is_cuda", "is_nested", "is_quantized", "is_mkldnn", "names", "retains_grad", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "output_nr", "itemsize"),
}
_METHODS_WITHOUT_VALUES = {
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "data_ptr", "untyped_storage"),
}


class EmptyParameters(TorchFunctionMode):
    """Acts on uses of empty parameters by user code within this context.

    The shape and the number of elements are those of the whole parameter. Everything else that needs its values is an
    error, unless there is an ``engine``: the parameter is then gathered, until the end of the step if autograd records
    the use.

    Args:
        names: names of the module's parameters, by the parameter's ``id``.
        engine: DeepSpeed's engine, which gathers parameters. Pass it only where every rank runs the same operators.
    """

    def __init__(self, names: Mapping[int, str], engine: Any = None) -> None:
        self._names = names
        self._engine = engine
        self.found = False
        """Whether user code has used an empty parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            outputs = args[0] if args else (kwargs or {})["outputs"]
            refuse_gradients_through(outputs, self._names, "DeepSpeedStrategy(stage=3)")
        arguments = (*args, *(kwargs or {}).values())
        if any(map(self._concerns, tensors_in(arguments))) and not is_called_by_library():
            return self._use(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _concerns(self, value: Any) -> bool:
        """Return whether a value is a parameter that is empty, or that backward may find empty."""
        if id(value) not in self._names:
            return False
        # Stage 3 may partition a parameter before backward if no running layer owns it.
        may_become_empty = self._engine is not None and not value.ds_active_sub_modules and not value.is_external_param
        return may_become_empty or not is_gathered(value)

    def _use(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in _ATTRIBUTES_WITHOUT_VALUES:
                return func(*args, **kwargs)
            if attribute in ("shape", "ndim") and name == "__get__":
                return args[0].ds_shape if attribute == "shape" else len(args[0].ds_shape)
        elif name in _METHODS_WITHOUT_VALUES:
            return func(*args, **kwargs)
        elif name in ("numel", "nelement", "dim", "__len__", "size") and not kwargs:
            shape = args[0].ds_shape
            answers = {"dim": len(shape), "__len__": shape[0] if shape else 0, "size": shape}
            answer = answers.get(name, args[0].ds_numel)
            return answer[args[1]] if name == "size" and len(args) > 1 else answer
        in_place = (name.endswith("_") and not name.endswith("__")) or name == "__set__" or "out" in kwargs
        in_place = in_place or (name.startswith("__i") and name.endswith("__"))
        if in_place or self._engine is None:
            self._refuse([*args, *kwargs.values()])
        self.found = True
        concerned = list(filter(self._concerns, tensors_in([*args, *kwargs.values()])))
        with gathered_for_use(self._engine, concerned):
            return func(*args, **kwargs)

    def _refuse(self, values: list[Any]) -> None:
        name = next(self._names[id(one)] for one in tensors_in(values) if self._concerns(one))
        raise ConfigurationError(
            f"{name!r} is partitioned by DeepSpeedStrategy(stage=3), but its values were used.",
            "outside of its layer's forward, a partitioned parameter is an empty tensor.",
            "use it within 'with self.trainer.strategy.gathered(parameters):' on every rank, which keeps changes.",
        )
