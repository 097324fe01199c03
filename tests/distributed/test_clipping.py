"""Clipping and loss scaling with gradients that are sharded over real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import each
from torch import Tensor, nn

from drivetrain.precision import FullPrecision, MixedPrecision
from oracle.outcome import whole
from worlds import on_ranks

# No size is divisible by the number of ranks, and one parameter has fewer rows than there are ranks.
SHAPES = {"a": (7, 6), "b": (5,), "c": (3, 4), "d": (6, 3), "e": (2, 2)}

Spread = dict[str, tuple[str, str] | None]
"""By parameter, None for plain, or its mesh, and for each of the mesh's dimensions "r" (replica) or what it shards."""

CASES: dict[str, Spread] = {
    "plain": dict.fromkeys(SHAPES),
    "sharded": dict.fromkeys(SHAPES, ("all", "0")),
    "plain and sharded": {"a": ("all", "0"), "b": None, "c": ("all", "1"), "d": None, "e": ("all", "0")},
    "sharded and replicated": {"a": ("all", "0"), "b": ("all", "r"), "c": ("all", "0"), "d": None, "e": None},
    "hybrid": dict.fromkeys(SHAPES, ("both", "r0")),
    "two meshes": {**dict.fromkeys("bce", ("outer", "0")), "a": ("both", "01"), "d": ("both", "10")},
    "all at once": {"a": ("both", "01"), "b": None, "c": ("outer", "0"), "d": ("inner", "1"), "e": ("all", "0")},
}
FOUR_RANKS = ("hybrid", "two meshes", "all at once")


def whole_gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread_parameters(case: str) -> dict[str, nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    meshes: dict[str, Any] = {"all": init_device_mesh("cpu", (dist.get_world_size(),))}
    if case in FOUR_RANKS:
        meshes["both"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        meshes |= {name: meshes["both"][name] for name in ("outer", "inner")}
    parameters: dict[str, nn.Parameter] = {}
    for name, gradient in whole_gradients().items():
        how = CASES[case][name]
        if how is not None:
            places: list[Placement] = [Replicate() if letter == "r" else Shard(int(letter)) for letter in how[1]]
            gradient = distribute_tensor(gradient, meshes[how[0]], places)
        parameters[name] = nn.Parameter(torch.zeros_like(gradient))
        parameters[name].grad = gradient
    return parameters


def split_optimizers(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    values = list(parameters.values())
    return [torch.optim.SGD(values[:2], lr=1.0), torch.optim.SGD(values[2:], lr=1.0)]


def clip_on_a_rank(case: str, limit: float, algorithm: str) -> tuple[Tensor, list[Tensor]]:
    parameters = spread_parameters(case)
    norm = FullPrecision().clip_gradients(split_optimizers(parameters), limit, algorithm)
    assert type(norm) is Tensor
    assert norm.shape == ()
    return norm, [whole(parameter.grad) for parameter in parameters.values()]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("case", CASES)
def test_clipping_equals_that_of_whole_gradients(case: str, algorithm: str) -> None:
    # B-05: over two optimizers, clipping active, the global norm on every rank
    limit, gradients = 0.4, [*whole_gradients().values()]
    if algorithm == "norm":
        expected = nn.utils.get_total_norm(gradients)
        wanted = [gradient * (limit / expected) for gradient in gradients]
    else:
        expected = torch.stack([gradient.abs().max() for gradient in gradients]).max()
        wanted = [gradient.clamp(-limit, limit) for gradient in gradients]
    assert expected > limit
    for found in on_ranks(clip_on_a_rank, 4 if case in FOUR_RANKS else 2, case, limit, algorithm):
        torch.testing.assert_close(found, (expected, wanted), rtol=1e-6, atol=1e-8)


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def overflow_on_a_rank(case: str, bad: str) -> dict[str, Any]:
    """Poison one of all shards of a parameter; with replicas, the same one in each, as their reduction leaves it."""
    precision, parameters = fp16(), spread_parameters(case)
    optimizers = split_optimizers(parameters)
    # Scaling a loss, as any run does, initializes the scale.
    precision.backward(nn.Parameter(torch.ones(())) * 1.0)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        parameter.grad.mul_(1024.0)
        local: Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
        poisoned = dist.get_rank() % 2 == 1 if case == "hybrid" else dist.get_rank() == dist.get_world_size() - 1
        if name == bad and poisoned:
            local.view(-1)[-1] = float("inf")
    for optimizer in optimizers:
        precision.unscale(optimizer)
    norm = precision.clip_gradients(optimizers, 1e6)
    stepped = [precision.step(optimizer) for optimizer in optimizers]
    precision.update()
    weights = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    return {"finite": bool(norm.isfinite()), "stepped": stepped, **precision.state_dict(), "weights": weights}


@pytest.mark.parametrize(
    ("case", "second"), [("sharded", "d"), ("hybrid", "d"), ("two meshes", "d"), ("plain and sharded", "c")]
)
def test_an_overflow_in_one_shard_skips_every_rank(case: str, second: str) -> None:
    # B-06, B-15: in a parameter of either optimizer
    cases = [(case, bad) for bad in ("", "a", second)]
    for results in on_ranks(each, 4 if case in FOUR_RANKS else 2, overflow_on_a_rank, *cases):
        for (_, bad), result in zip(cases, results, strict=True):
            assert result["stepped"] == [not bad, not bad]
            assert result["scale"] == (512.0 if bad else 1024.0)
            assert result["finite"] == (not bad)
            expected = {name: gradient * (0 if bad else -1) for name, gradient in whole_gradients().items()}
            torch.testing.assert_close(result["weights"], expected, rtol=1e-6, atol=0)


def overflow_on_one_rank(reduces: bool, has_gradient: bool = True) -> tuple[bool, float]:
    precision = fp16()
    if reduces:
        precision.found_inf_reducer = lambda found: dist.all_reduce(found, dist.ReduceOp.MAX)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.backward((weight * (float("inf") if dist.get_rank() == 1 else 1.0)).sum())
    if dist.get_rank() == 0 and not has_gradient:
        weight.grad = None
    stepped = precision.step(optimizer)
    precision.update()
    return stepped, precision.state_dict()["scale"]


def test_the_reducer_shares_an_overflow() -> None:  # B-06: gradients that no wrapper averages, and a rank that has none
    first, second = on_ranks(each, 2, overflow_on_one_rank, (True,), (False,), (True, False))
    assert first == [(False, 512.0), (True, 1024.0), (False, 512.0)]
    assert second == [(False, 512.0)] * 3
