"""FSDP on two-dimensional meshes, hybrid or with the user's tensor parallelism, and the parts that ranks hold."""

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

# The pieces of sharded values are compared with the whole.
from drivetrain._distributed.shards import Box, ParameterShard, Region, cut
from drivetrain.callbacks import LambdaCallback
from drivetrain.environments import Placement
from drivetrain_strategies import FSDPStrategy

# Layouts of many meshes, without their ranks.
from drivetrain_strategies.fsdp._device_mesh import resolve_layout
from worlds import on_ranks


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

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = seeded(lambda: Deep(width=width))
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
    module = Split()
    fit = quiet(strategy=FSDPStrategy(**options), accumulate_grad_batches=2, gradient_clip_val=0.5)
    batches = DataLoader(Stream(), batch_size=None) if stream else loader(40, 4 if "tensor_parallel" in options else 2)
    fit.fit(module, batches)
    outputs = torch.cat(quiet(strategy=FSDPStrategy(**options)).predict(module, loader(10, 2)))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert len(dist.distributed_c10d._world.pg_map) == 1  # in a user's process group, no group of ours is left
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    return {"weights": weights(module), "metrics": metrics, "seen": fit.samples_seen, "outputs": outputs}


@pytest.fixture(scope="module")
def reference() -> Any:
    module: Any = Split()
    module.training_step = lambda part, _: module.loss(part)
    optimizer = module.configure_optimizers()

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)

    optimizer.register_step_pre_hook(clip)
    module.configure_optimizers = lambda: optimizer
    return train_by_hand(module, global_batches(40, 8), window=2)


HYBRID = {"sharding": "hybrid", "replicate_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("options", "stream"),
    [({**HYBRID, "wrap": [Block]}, False), (TENSOR, True), ({**TENSOR, **HYBRID}, False)],
    ids=["hybrid", "tensor parallel on streams", "hybrid and tensor parallel"],
)
def test_two_by_two_equals_the_reference(options: dict[str, Any], stream: bool, reference: Any) -> None:
    # D-04, D-08, B-05, B-12, B-14
    runs = on_ranks(_run, 4, options, stream)
    for run in runs:
        torch.testing.assert_close(run["weights"], weights(reference), **TIGHT)
        assert run["metrics"] == {"count": 40, "metric": 40}
        assert run["seen"] == 40
        assert torch.equal(run["weights"], runs[0]["weights"])
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


def _parts(strategy: Any, state: Any) -> dict[str, Any]:
    parts = {}
    for name, value in state.items():
        shard = strategy.shard_of(value)
        if isinstance(shard, ParameterShard):
            parts[name] = shard.local.clone(), shard.shape, shard.region, shard.is_primary, shard.full_tensor().clone()
    return parts


def _provided(options: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    found: dict[str, Any] = {}

    def look(trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        found["model"] = _parts(strategy, strategy.model_state())
        moments = {name: state["exp_avg"] for name, state in strategy.optimizer_state()["state"].items()}
        found["moments"] = _parts(strategy, moments)
        wanted = found["wanted"] = strategy.model_regions()
        # Doubled values are loaded from parts of this rank's own, without communication.
        doubled: dict[str, Any] = {}
        for name, value in strategy.model_state().items():
            shard = strategy.shard_of(value)
            whole = not isinstance(shard, ParameterShard)
            doubled[name] = 2 * shard if whole else ParameterShard(2 * shard.local, shard.shape, wanted[name])
        strategy.load_model_state(doubled)
        try:
            strategy.load_model_state({**doubled, "net.head.bias": torch.zeros(3), "odd": torch.zeros(1)})
        except Exception as error:
            found["refused"] = str(error)

    module = Split(width=6)  # not divisible by four
    quiet(strategy=FSDPStrategy(**options), callbacks=LambdaCallback(on_train_end=look)).fit(module, loader(16, 2))
    return found, weights(module)


def _part(whole: Tensor, region: Region) -> Tensor:
    return whole[region.index] if isinstance(region, Box) else whole.view(-1)[region.start : region.stop]


@pytest.mark.parametrize(
    ("ranks", "options", "share"),
    [(2, {}, 1 / 2), (4, TENSOR, 1 / 4), (4, {**TENSOR, **HYBRID}, 1 / 2)],
    ids=["full", "tensor parallel", "hybrid and tensor parallel"],
)
def test_the_provided_parts_make_up_the_whole(ranks: int, options: dict[str, Any], share: float) -> None:
    # D-01, F-13
    runs = on_ranks(_provided, ranks, options)
    for what in ("model", "moments"):
        assert set(runs[0][0][what]) == {name for name, _ in Split().named_parameters()}
        for name, (_, shape, _, _, whole) in runs[0][0][what].items():
            made, count = torch.full(shape, float("nan")), torch.zeros(shape)
            for found, _ in runs:
                local, _, region, is_primary, _ = found[what][name]
                assert region == found["wanted"][name]
                assert torch.equal(cut(whole, region), local)
                assert "blocks.0.up.weight" not in name or local.numel() == share * whole.numel()
                if is_primary:
                    _part(made, region).copy_(local)
                    _part(count, region).add_(1)
            assert torch.equal(made, whole), name
            assert bool((count == 1).all()), name
    doubled = torch.cat([2 * part[-1].flatten() for part in runs[0][0]["model"].values()])
    for found, trained in runs:
        assert torch.equal(trained.sort().values, doubled.sort().values)
        assert "net.head.bias ((3,) instead of (1,))" in found["refused"]
        assert "odd" in found["refused"]


class Measuring(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [{name: float(norm) for name, norm in grad_norm(self, order).items()} for order in (1, 2, "inf")]


def _norms(strategy: str) -> list[dict[str, float]]:
    module = Measuring()
    quiet(strategy=strategy, max_steps=1).fit(module, loader(8, 4 if strategy == "fsdp" else 8))
    return module.norms


def test_norms_of_gradients_of_which_a_rank_holds_nothing() -> None:
    expected = _norms("auto")  # a bias of one value leaves all ranks but one without a part of it
    for norms in on_ranks(_norms, 2, "fsdp"):
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-6)
