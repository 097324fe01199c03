"""FSDP on two-dimensional meshes: hybrid, with tensor parallelism, or within a strategy that holds it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from fsdp_nets import Block, Deep
from small_runs import TIGHT, Regression, data, global_batches, loader, quiet, refusal, seeded, train_by_hand, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import grad_norm
from drivetrain.callbacks import LambdaCallback
from drivetrain.environments import Placement
from drivetrain.strategies import DistributedStrategy
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp._device_mesh import mesh_sizes
from worlds import on_ranks

# Layouts of many meshes, without their ranks.


@pytest.mark.parametrize(
    ("local", "nodes", "sizes", "expected"),
    [(4, 2, {}, (2, 4)), (8, 1, {}, (1, 8)), (4, 2, {"shard_size": 2}, (4, 2)), (4, 2, {"replicate_size": 8}, (8, 1))],
)
def test_the_sizes_of_a_hybrid(local: int, nodes: int, sizes: dict[str, int], expected: tuple[int, int]) -> None:
    # D-04: shard within a node, replicate across nodes
    placement = Placement(0, local * nodes, 0, local, 0, nodes)
    found = mesh_sizes(placement, "hybrid", sizes.get("replicate_size"), sizes.get("shard_size"), 1)
    assert found == dict(zip(("replicate", "shard"), expected, strict=True))


DELEGATED = [
    *("module_init_context", "hook_context", "check", "adopt_parameters", "named_parameters", "broadcast_module"),
    *("trainable_changed", "gradient_sync", "zeroed_gradients", "requiring_grad_only_for", "backward"),
    *("forget_gradients", "optimizer_step", "model_state", "load_model_state", "optimizer_state"),
    *("load_optimizer_state", "shard_of", "model_regions", "restore_module", "memory_advice"),
]


class Holding(DistributedStrategy):
    """Shards by an `FSDPStrategy` that it holds. ``copies`` neighbours read the same batches, as stages do."""

    name = "holding"
    collective_forward = shards_parameters = has_hook_contexts = True
    data_rank, data_world_size, is_data_leader = 0, 1, True
    data_group: Any = None
    device_mesh: Any = None

    def __init__(self, copies: int, **options: Any) -> None:
        super().__init__()
        self.copies = copies
        self.held = FSDPStrategy(**options)

    def bind(self, placement: Placement, device: torch.device, precision: Any, store: Any = None) -> None:
        super().bind(placement, device, precision, store)
        self.data_rank, copy = divmod(placement.rank, self.copies)
        self.data_world_size, self.is_data_leader = placement.world_size // self.copies, copy == 0
        self.held.bind(Placement(self.data_rank, self.data_world_size), device, precision)

    def setup_environment(self) -> None:
        super().setup_environment()
        size, hybrid = self.data_world_size, self.held.sharding == "hybrid"
        sizes = {"replicate": 2, "shard": size // 2} if hybrid else {"data": size}
        mesh = init_device_mesh("cpu", (*sizes.values(), self.copies), mesh_dim_names=(*sizes, "copy"))
        self.device_mesh = mesh
        self.data_group = dist.group.WORLD if hybrid else mesh["data"].get_group()
        self.held.use_mesh(mesh[tuple(sizes)], self.data_group, self.control)

    def setup_module(self, module: nn.Module) -> Any:
        self.module = module
        return self.held.setup_module(module)

    def setup_optimizers(self, optimizers: Any) -> Any:
        self.held.elementwise_optimizers = self.elementwise_optimizers
        return super().setup_optimizers(self.held.setup_optimizers(optimizers))

    def teardown(self) -> None:
        self.held.teardown()
        for group in {id(one): one for one in self.device_mesh.get_all_groups()}.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self.device_mesh = self.data_group = None
        super().teardown()


for delegated in DELEGATED:
    setattr(Holding, delegated, property(attrgetter(f"held.{delegated}")))


def _strategy(options: dict[str, Any]) -> Any:
    return Holding(**options) if "copies" in options else FSDPStrategy(**options)


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
    fit = quiet(strategy=_strategy(options), accumulate_grad_batches=2, gradient_clip_val=0.5, **settings)
    sharing = options.get("tensor_parallel", 1) * options.get("copies", 1)
    batches = DataLoader(Stream(), batch_size=None) if stream else loader(40, 8 * sharing // dist.get_world_size())
    fit.fit(module, batches)
    outputs = torch.cat(quiet(strategy=_strategy(options)).predict(module, loader(10, 2)))
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
        ({"copies": 2}, True, 1 / 2, 1 / 2),
        ({"copies": 1, **HYBRID, "wrap": [Block]}, False, 1 / 2, 1 / 2),
    ],
    ids=["hybrid", "tensor parallel on streams", "hybrid and tensor parallel", "held", "held and hybrid"],
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


def test_a_held_strategy_gives_the_numbers_of_fsdp() -> None:  # K-01: by public names alone
    plain = on_ranks(_run, 2, {}, False)[0]
    for run in on_ranks(_run, 4, {"copies": 2}, False):
        assert torch.equal(run["weights"], plain["weights"])
        assert run["metrics"] == plain["metrics"]


def _of_another_shape() -> str:
    return refusal(Split(), loader(16, 4), strategy=Holding(1, sharding="hybrid", replicate_size=1))


def test_a_mesh_of_another_shape_is_refused() -> None:
    for text in on_ranks(_of_another_shape, 2):
        assert "FSDPStrategy got a mesh of shape (2, 1)" in text
        assert "over 2 data ranks needs one of shape (1, 2)" in text


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
