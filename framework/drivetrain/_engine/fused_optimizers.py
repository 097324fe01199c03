"""What an optimizer leaves on the table: kernels that torch has for it and does not choose by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# Measured on a CPU, one thread, a linear layer to a small GPT, how many times as long torch's own choice takes.
# Plain parameters, over fused: Adam and AdamW 1.6 to 3.7, SGD with momentum 1.4 to 2.6, Adagrad 1.4 to 2.6; without
# momentum SGD gains next to nothing, and foreach is a loop on a CPU. On CUDA torch chooses foreach, and fused saves
# passes over the state. Sharded parameters (DTensor), for which torch chooses a loop on every device: over fused Adam
# and AdamW 5.8; the other two have no fused kernel there, and take 1.6 to 2.3 times as long as with foreach.
_PLAIN = {"cpu": (Adam, AdamW, SGD, Adagrad), "cuda": (Adam, AdamW, SGD)}
_SHARDED = {Adam: "fused", AdamW: "fused", SGD: "foreach", Adagrad: "foreach"}


def suggest_fused_optimizers(optimizers: Sequence[Optimizer]) -> str | None:
    """Return one line that names the optimizers that a switch of theirs makes faster; None where there is none.

    Only torch's own classes count, and only where the user said nothing of ``fused``, ``foreach`` and
    ``differentiable``, and the kernel takes every parameter.
    """
    found = {f"{type(one).__name__}({switch}=True)": None for one in optimizers if (switch := _switch(one)) is not None}
    if not found:
        return None
    kernels = " and ".join(dict.fromkeys(name.partition("(")[2].removesuffix("=True)") for name in found))
    kept = next(iter(found)).replace("True", "False")
    return (
        f"{', '.join(found)} would be faster here: the {kernels} kernel updates all parameters at once, and torch does "
        f"not choose it by itself. {kept} keeps torch's choice and silences this line."
    )


def _switch(optimizer: Optimizer) -> str | None:
    kind = type(optimizer)
    if kind not in _SHARDED:
        return None
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        said = (group.get("fused"), group.get("foreach"), group.get("differentiable") or None)
        if said != (None, None, None) or isinstance(group["lr"], Tensor):
            return None
        if kind is SGD and not group["momentum"]:
            return None
        parameters += group["params"]
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) != 1 or not all(map(torch.is_floating_point, parameters)):
        return None
    if all(type(parameter) in (Tensor, Parameter) for parameter in parameters):
        return "fused" if kind in _PLAIN.get(devices.pop(), ()) else None
    return _SHARDED[kind] if all(hasattr(parameter, "device_mesh") for parameter in parameters) else None
