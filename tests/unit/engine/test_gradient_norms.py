"""``grad_norm`` gives the norms of whole gradients, by Lightning's keys."""

from __future__ import annotations

import pytest
import torch

from drivetrain import ConfigurationError, grad_norm


def test_the_norms_are_those_of_the_gradients() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).requires_grad_(False))
    assert grad_norm(net, 2) == {}
    net(torch.randn(4, 3)).sum().backward()
    for order in (1, 2, 3.0, "inf"):
        name = f"grad_{float(order)}_norm"
        norms = grad_norm(net, order, group_separator=".")
        assert list(norms) == [f"{name}.0.weight", f"{name}.0.bias", f"{name}_total"]
        gradients = [p.grad.flatten() for p in net[0].parameters() if p.grad is not None]
        torch.testing.assert_close(norms[f"{name}_total"], torch.cat(gradients).norm(float(order)))
        torch.testing.assert_close(norms[f"{name}.0.weight"], gradients[0].norm(float(order)))
    for wrong in (0, -1, "nan"):
        with pytest.raises(ConfigurationError, match="norm_type"):
            grad_norm(net, wrong)


def test_norms_are_computed_in_float32_or_float64() -> None:
    for dtype, value in ((torch.float16, 2000.0), (torch.bfloat16, 0.01), (torch.float64, 1e200)):
        layer = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
        layer.weight.grad = torch.full_like(layer.weight, value)
        total = grad_norm(layer, 2)["grad_2.0_norm_total"]
        torch.testing.assert_close(total.double(), layer.weight.grad.double().norm())
