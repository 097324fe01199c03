"""Clipping and loss scaling with gradients that are sharded over real processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.precision import FullPrecision, MixedPrecision
from worlds import on_ranks

# No size is divisible by the number of ranks, and one parameter has fewer rows than there are ranks.
SHAPES = {"a": (7, 6), "b": (5,), "c": (3, 4), "d": (6, 3), "e": (2, 2)}


class Case(NamedTuple):
    """The number of ranks, and how each parameter is spread: None for plain, otherwise mesh name and placements by
    dimension.

    A letter and a digit is a shard of that dimension, "r" a replica.
    """

    ranks: int
    spread: dict[str, tuple[str, str] | None]


CASES = {
    "plain": Case(2, dict.fromkeys(SHAPES)),
    "sharded": Case(2, dict.fromkeys(SHAPES, ("all", "0"))),
    "plain and sharded": Case(2, {"a": ("all", "0"), "b": None, "c": ("all", "1"), "d": None, "e": ("all", "0")}),
    "sharded and replicated": Case(2, {"a": ("all", "0"), "b": ("all", "r"), "c": ("all", "0"), "d": None, "e": None}),
    "hybrid": Case(4, dict.fromkeys(SHAPES, ("both", "r0"))),
    "two meshes": Case(
        4, {"a": ("both", "01"), "b": ("outer", "0"), "c": ("outer", "0"), "d": ("both", "10"), "e": ("outer", "0")}
    ),
    "two meshes and plain": Case(
        4, {"a": ("both", "01"), "b": None, "c": ("outer", "0"), "d": ("inner", "1"), "e": ("all", "0")}
    ),
}


def whole_gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread_parameters(case: Case) -> dict[str, nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    meshes: dict[str, Any] = {"all": init_device_mesh("cpu", (case.ranks,))}
    if case.ranks == 4:
        meshes["both"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        meshes |= {name: meshes["both"][name] for name in ("outer", "inner")}
    parameters: dict[str, nn.Parameter] = {}
    for name, gradient in whole_gradients().items():
        how = case.spread[name]
        if how is not None:
            places: list[Placement] = [Replicate() if letter == "r" else Shard(int(letter)) for letter in how[1]]
            gradient = distribute_tensor(gradient, meshes[how[0]], places)
        parameters[name] = nn.Parameter(torch.zeros_like(gradient))
        parameters[name].grad = gradient
    return parameters


def split_optimizers(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    values = list(parameters.values())
    return [torch.optim.SGD(values[:2], lr=1.0), torch.optim.SGD(values[2:], lr=1.0)]


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_on_a_rank(case: Case, limit: float, algorithm: str) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = spread_parameters(case)
    norm = FullPrecision().clip_gradients(split_optimizers(parameters), limit, algorithm)
    assert type(norm) is Tensor
    assert norm.shape == ()
    return norm, {name: whole(parameter.grad) for name, parameter in parameters.items()}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("case", CASES)
def test_clipping_equals_that_of_whole_gradients(case: str, algorithm: str) -> None:
    # B-05: over two optimizers, clipping active, the global norm on every rank
    limit = 0.4
    reference = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for parameter, gradient in zip(reference, whole_gradients().values(), strict=True):
        parameter.grad = gradient
    if algorithm == "norm":
        expected = nn.utils.clip_grad_norm_(reference, limit)
    else:
        expected = torch.stack([gradient.abs().max() for gradient in whole_gradients().values()]).max()
        nn.utils.clip_grad_value_(reference, limit)
    assert expected > limit
    for norm, gradients in on_ranks(clip_on_a_rank, CASES[case].ranks, CASES[case], limit, algorithm):
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for parameter, gradient in zip(reference, gradients.values(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-8)


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def overflow_on_a_rank(case: Case, bad: str | None) -> dict[str, Any]:
    precision = fp16()
    parameters = spread_parameters(case)
    optimizers = split_optimizers(parameters)
    # Scaling a loss, as any run does, initializes the scale.
    precision.backward(nn.Parameter(torch.ones(())) * 1.0)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        parameter.grad.mul_(1024.0)
        local: Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
        # One of all shards; with replicas, the same one in each of them, as the reduction over them leaves it.
        poisoned = dist.get_rank() % 2 == 1 if case == CASES["hybrid"] else dist.get_rank() == dist.get_world_size() - 1
        if name == bad and poisoned:
            local.view(-1)[-1] = float("inf")
    for optimizer in optimizers:
        precision.unscale(optimizer)
    norm = precision.clip_gradients(optimizers, 1e6)
    stepped = [precision.step(optimizer) for optimizer in optimizers]
    precision.update()
    weights = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    return {"norm": norm, "stepped": stepped, "scale": precision.state_dict()["scale"], "weights": weights}


@pytest.mark.parametrize(
    ("case", "bad"),
    [
        *((case, bad) for case in ("sharded", "hybrid", "two meshes") for bad in (None, "a", "d")),
        *(("plain and sharded", bad) for bad in (None, "a", "c")),
    ],
)
def test_an_overflow_in_one_shard_skips_every_rank(case: str, bad: str | None) -> None:
    # B-06, B-15
    for result in on_ranks(overflow_on_a_rank, CASES[case].ranks, CASES[case], bad):
        assert result["stepped"] == ([True, True] if bad is None else [False, False])
        assert result["scale"] == (1024.0 if bad is None else 512.0)
        for name, gradient in whole_gradients().items():
            expected = torch.zeros_like(gradient) if bad else -gradient
            torch.testing.assert_close(result["weights"][name], expected, rtol=1e-6, atol=0)
        assert bool(result["norm"].isfinite()) is (bad is None)


def overflow_on_one_rank(reduces: bool) -> tuple[bool, float]:
    precision = fp16()
    if reduces:
        precision.found_inf_reducer = lambda found: dist.all_reduce(found, dist.ReduceOp.MAX)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.backward((weight * (float("inf") if dist.get_rank() == 1 else 1.0)).sum())
    stepped = precision.step(optimizer)
    precision.update()
    return stepped, precision.state_dict()["scale"]


def test_the_reducer_shares_an_overflow() -> None:
    # B-06: gradients that no wrapper averages
    assert on_ranks(overflow_on_one_rank, 2, True) == [(False, 512.0), (False, 512.0)]
    assert on_ranks(overflow_on_one_rank, 2, False) == [(True, 1024.0), (False, 512.0)]
