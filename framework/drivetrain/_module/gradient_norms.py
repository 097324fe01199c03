"""grad_norm: the norm of each parameter's gradient, by name."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, nn


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each gradient of ``module``, and the norm of all gradients together, for `log_dict`.

    Call it in ``on_before_optimizer_step``, where gradients are unscaled, on every rank: under FSDP the norms are those
    of the whole gradients, which takes a collective for each. ZeRO keeps gradients out of ``parameter.grad``; read
    ``trainer.gradient_norm`` there.

    Args:
        module: the module, or one of its layers.
        norm_type: the order of the norm, above 0, or "inf".
        group_separator: the text between the prefix ``grad_<norm_type>_norm`` and the parameter's name.

    Returns:
        Norms of shape () by key, the last of them ``grad_<norm_type>_norm_total``; {} if there is no gradient.
    """
    order = float(norm_type)
    prefix = f"grad_{order}_norm"
    norms = {
        f"{prefix}{group_separator}{name}": _norm(parameter.grad, order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"{prefix}_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms


def _norm(gradient: Any, order: float) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if order == inf and hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()  # torch takes no "inf" norm of a rank's part that is empty
    if not gradient.numel():
        return torch.zeros((), device=gradient.device)
    # Half precision overflows at a norm of 65504, or keeps two digits.
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Any = torch.linalg.vector_norm(gradient.detach(), order, dtype=dtype)
    # A DTensor is recognized by its method rather than by its class, since importing the class is slow.
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
