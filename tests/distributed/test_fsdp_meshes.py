"""FSDP on two-dimensional meshes, hybrid or with tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from fsdp_nets import Block, Deep
from small_runs import TIGHT, Regression, data, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import grad_norm
from drivetrain.callbacks import LambdaCallback
from drivetrain.environments import Placement
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp._device_mesh import resolve_layout
from worlds import on_ranks

# Layouts of many meshes, without their ranks.


@pytest.mark.parametrize(
    ("local", "nodes", "sizes", "expected"),
    [(4, 2, {}, (2, 4)), (8, 1, {}, (1, 8)), (4, 2, {"shard_size": 2}, (4, 2)), (4, 2, {"replicate_size": 8}, (8, 1))],
)
def test_the_sizes_of_a_hybrid(local: int, nodes: int, sizes: dict[str, int], expected: tuple[int, int]) -> None:
    # D-04: shard within a node, replicate across nodes
    placement = Placement(0, local * nodes, 0, local, 0, nodes)
    layout = resolve_layout(placement, "hybrid", sizes.get("replicate_size"), sizes.get("shard_size"), 1)
    assert (layout.replicate, layout.shard) == expected


class Split(Regression):
    """Layers that are split if there is a mesh for it, and values that would be wrong if a rank were counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Deep)
        self.total = torchmetrics.SumMetric()

    def configure_model(self) -> None:  # in every run: layers are whole again after one has ended
        if "tensor" not in (self.device_mesh.mesh_dim_names or ()):
            return
        for block in self.net.blocks:
            parallelize_module(block, self.device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.total.update(float(len(batch[0])))
        self.log("metric", self.total, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [grad_norm(self, order) for order in (1, 2, "inf")]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)


class Stream(IterableDataset[Any]):
    """Each pair of ranks reads its own part, in batches."""

    def __iter__(self) -> Any:
        x, y = data(40).tensors
        part = dist.get_rank() * 2 // dist.get_world_size()
        for start in range(4 * part, 40, 8):
            yield x[start : start + 4], y[start : start + 4]


def _run(options: dict[str, Any], stream: bool) -> dict[str, Any]:
    module, parts = Split(), {}

    def record_parts(trainer: Any, module: Any, optimizer: Any) -> None:
        for layer in ("blocks.0.up", "blocks.0.down", "stem"):
            weight = module.net.get_submodule(layer).weight
            parts[layer] = [one.to_local().numel() / one.numel() for one in (weight, weight.grad)]

    settings: dict[str, Any] = {"callbacks": LambdaCallback(on_before_optimizer_step=record_parts)}
    fit = quiet(strategy=FSDPStrategy(**options), accumulate_grad_batches=2, gradient_clip_val=0.5, **settings)
    batches = DataLoader(Stream(), batch_size=None) if stream else loader(40, 4 if "tensor_parallel" in options else 2)
    fit.fit(module, batches)
    outputs = torch.cat(quiet(strategy=FSDPStrategy(**options)).predict(module, loader(10, 2)))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert len(dist.distributed_c10d._world.pg_map) == 1  # in a user's process group, no group of ours is left
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    found = {"weights": weights(module), "norms": module.norms, "outputs": outputs}
    return {**found, "metrics": metrics, "seen": fit.samples_seen, "parts": parts}


@pytest.fixture(scope="module")
def reference() -> Any:
    module = Split()
    optimizer = module.configure_optimizers()

    def clip(*_: Any) -> None:
        module.on_before_optimizer_step(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)

    optimizer.register_step_pre_hook(clip)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    return train_by_hand(module, global_batches(40, 8), window=2, step=lambda batch, _: module.loss(batch))


HYBRID = {"sharding": "hybrid", "replicate_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("options", "stream", "split", "whole"),  # what a rank holds of a layer that may be split, and of another one
    [
        ({**HYBRID, "wrap": [Block]}, False, 1 / 2, 1 / 2),
        (TENSOR, True, 1 / 4, 1 / 2),
        ({**TENSOR, **HYBRID}, False, 1 / 2, 1),
    ],
    ids=["hybrid", "tensor parallel on streams", "hybrid and tensor parallel"],
)
def test_two_by_two_equals_the_reference(
    options: dict[str, Any], stream: bool, split: float, whole: float, reference: Any
) -> None:
    # D-01, D-04, D-08, B-05, B-12, B-14; Q-11: norms, also of a bias of one value, of which most ranks hold nothing
    runs = on_ranks(_run, 4, options, stream)
    for run in runs:
        assert torch.equal(run["weights"], runs[0]["weights"])
        torch.testing.assert_close(run["weights"], weights(reference), **TIGHT)
        torch.testing.assert_close(run["norms"], reference.norms, rtol=1e-4, atol=1e-5)
        assert run["metrics"] == {"count": 40, "metric": 40}
        assert run["seen"] == 40
        assert run["parts"] == {"blocks.0.up": [split] * 2, "blocks.0.down": [split] * 2, "stem": [whole] * 2}
        with torch.no_grad():
            torch.testing.assert_close(run["outputs"], reference.net(data(10).tensors[0]), atol=1e-5, rtol=1e-4)


def _overflowing(options: dict[str, Any], name: str) -> tuple[list[float], int, Tensor]:
    scales: list[float] = []

    def overflow(trainer: Any, module: Any) -> None:
        if trainer.micro_batches == 1 and dist.get_rank() == dist.get_world_size() - 1:
            gradient = module.get_parameter(name).grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = torch.inf

    def note(trainer: Any, *_: Any) -> None:
        scales.append(trainer.strategy.precision.scaler.get_scale())

    module: Any = Split()
    module.loss = lambda batch: 1e-2 * Split.loss(module, batch)  # does not overflow at the initial scale
    callback = LambdaCallback(on_after_backward=overflow, on_train_batch_end=note)
    fit = quiet(strategy=FSDPStrategy(**options), precision="16-mixed", callbacks=callback)
    fit.fit(module, loader(32, 4))
    return scales, fit.global_step, weights(module)


@pytest.mark.parametrize(
    ("options", "ranks", "name"),
    [(TENSOR, 4, "net.blocks.1.up.weight"), ({"ignored": ["net.head.*"]}, 2, "net.head.weight")],
    ids=["tensor parallel", "ignored"],
)
def test_an_overflow_in_one_rank_s_gradient_is_skipped_everywhere(options: Any, ranks: int, name: str) -> None:
    # B-06: no other rank has that number
    runs = on_ranks(_overflowing, ranks, options, name)
    for scales, steps, found in runs:
        assert scales == [65536.0] + [32768.0] * (len(scales) - 1)
        assert steps == len(scales) - 1
        assert torch.equal(found, runs[0][2])
        assert bool(found.isfinite().all())
