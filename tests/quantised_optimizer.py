"""An optimizer whose state is of a tensor subclass that wraps other tensors, as that of 8-bit optimizers is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

BLOCK = 4


class Quantised(torch.Tensor):
    """Rounds a tensor to 8 bits, with a scale for each block of four elements."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, value: torch.Tensor) -> Quantised:
        blocks = torch.nn.functional.pad(value.reshape(-1), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1).clamp(min=1e-12) / 127
        codes = (blocks / scales[:, None]).round().to(torch.int8)
        return cls(codes.view(-1)[: value.numel()].view(value.shape), scales, value.dtype)

    def dequantise(self) -> torch.Tensor:
        scales = self.scales.repeat_interleave(BLOCK)[: self.codes.numel()]
        return self.codes.to(self.dtype) * scales.view(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.dtype, {"block": BLOCK})

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Quantised:
        dtype, options = context
        assert options == {"block": BLOCK}
        return cls(tensors["codes"], tensors["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, value = func.overloadpacket.__name__, args[0]
        if name in ("detach", "view", "clone", "_to_copy", "alias"):
            device = (kwargs or {}).get("device")
            return cls(value.codes.to(device), value.scales.to(device), value.dtype)
        if name == "is_pinned":
            return False
        if name == "slice":  # of all elements or a part, as DeepSpeed cuts the state of its flat tensors
            return func(value.dequantise(), *args[1:], **(kwargs or {}))
        raise NotImplementedError(f"Quantised does not implement {name}")


class WithoutFlatten(Quantised):
    __tensor_flatten__ = None  # type: ignore[assignment]


class QuantisedMomentum(Optimizer):
    """SGD with a momentum that is rounded to 8 bits, if a parameter's part on this rank has ``smallest`` elements."""

    def __init__(self, params: Any, lr: float = 0.1, smallest: int = 0, kind: type[Quantised] = Quantised) -> None:
        super().__init__(params, {"lr": lr})
        self.smallest, self.kind = smallest, kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: torch.Tensor, lr: float) -> None:
        state, gradient = self.state[parameter], local(parameter.grad)
        momentum = gradient.clone()
        if "momentum" in state:
            before = local(state["momentum"])
            momentum += 0.5 * (before.dequantise() if isinstance(before, Quantised) else before)
        local(parameter).sub_(momentum, alpha=lr)
        rounded = self.kind.of(momentum) if momentum.numel() >= max(1, self.smallest) else momentum
        state["momentum"] = rounded
        if isinstance(parameter, DTensor):
            layout: Any = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
            layout |= {"shape": parameter.shape, "stride": parameter.stride()}
            state["momentum"] = DTensor.from_local(rounded, run_check=False, **layout)


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
