"""Clipping of every kind of gradient in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import ConfigurationError
from drivetrain.precision import FullPrecision
from drivetrain.testing import requires_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, requires_cuda()])]


def parameters(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index, shape in enumerate([(3, 4), (5,), (), (2, 2, 2)]):
        dtype = dtypes[index % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(device, dtype)
        made.append(parameter)
    return [*made, nn.Parameter(torch.zeros(2, device=device))]  # the last one has no gradient


def optimizers(made: list[nn.Parameter], count: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(made[index::count], lr=1.0) for index in range(count)]


def grads(made: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad.to_dense() for p in made if p.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=["one", "two"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["active", "idle"])
def test_norm_equals_torch(device: str, count: int, dtypes: tuple[torch.dtype, ...], max_norm: float) -> None:  # B-05
    ours, theirs = parameters(device, dtypes), parameters(device, dtypes)
    norm = FullPrecision().clip_gradients(optimizers(ours, count), max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=1e-6, atol=0)
    assert ours[-1].grad is None


def test_norm_of_two_dtypes_equals_torch_bit_for_bit() -> None:  # B-05
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):  # the order in which the norms are added changes the last bit in about 1 of 8 of these
        gradients = [torch.randn(3, generator=generator, dtype=dtype) for dtype in (torch.complex64, torch.float32)]
        gradients.append(torch.randn(1, generator=generator))
        made = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = FullPrecision().clip_gradients(optimizers(made, 1), 0.5)
        assert torch.equal(norm, nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [0.3, 1e6], ids=["active", "idle"])
def test_value_equals_torch(device: str, limit: float) -> None:  # B-05
    ours, theirs = parameters(device), parameters(device)
    largest = max(grad.abs().max() for grad in grads(theirs))
    returned = FullPrecision().clip_gradients(optimizers(ours, 2), limit, "value")
    nn.utils.clip_grad_value_(theirs, limit)
    torch.testing.assert_close(returned, largest, rtol=0, atol=0)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_gradients_count_as_what_they_sum_to(algorithm: str) -> None:
    # B-05, B-20: rows that are looked up several times occur several times
    def gradients_of(sparse: bool) -> list[nn.Parameter]:
        torch.manual_seed(0)
        table, head = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1)
        (head(table(torch.tensor([1, 3, 1, 1, 7]))).sum() * 3).backward()
        return [*table.parameters(), *head.parameters()]

    sparse, dense = gradients_of(True), gradients_of(False)
    norm = FullPrecision().clip_gradients(torch.optim.SGD(sparse, lr=1.0), 0.7, algorithm)
    expected = FullPrecision().clip_gradients(torch.optim.SGD(dense, lr=1.0), 0.7, algorithm)
    torch.testing.assert_close(norm, expected)
    assert norm > 0.7
    assert sparse[0].grad is not None
    assert sparse[0].grad.is_sparse
    torch.testing.assert_close(grads(sparse), grads(dense))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_norms_of_special_gradients_and_an_unknown_algorithm(algorithm: str) -> None:
    assert FullPrecision().clip_gradients(optimizers([nn.Parameter(torch.zeros(2))], 1), 1.0, algorithm).item() == 0.0
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight**2).sum().backward(create_graph=True)  # gradients have a graph of their own
    norm = FullPrecision().clip_gradients(torch.optim.SGD([weight], lr=1.0), 1.0, algorithm)
    torch.testing.assert_close(norm, torch.tensor(10.0 if algorithm == "norm" else 8.0))
    assert not norm.requires_grad
    with pytest.raises(ConfigurationError, match=r"'nrm' does not exist. Did you mean 'norm'"):  # G-06
        FullPrecision().clip_gradients(optimizers(parameters(), 1), 1.0, "nrm")
