"""FSDP on two-dimensional meshes: hybrid, and with the user's tensor parallelism: D-04, B-12, B-14."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, DeepRegression
from small_runs import TIGHT, Regression, data, global_batches, loader, quiet, train_by_hand, weights
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.environments import Placement
from drivetrain_strategies import FSDPStrategy
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


SETTINGS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}


class Scored(Regression):
    """Layers that may be split, and values that would be wrong if a rank were counted twice."""

    def __init__(self, split: bool, iterable: bool = False) -> None:
        import torchmetrics

        super().__init__()
        self.net = None
        self.split = split
        self.total = torchmetrics.SumMetric()

    def configure_model(self) -> None:
        if self.net is None:
            from fsdp_nets import Deep

            with torch.random.fork_rng():
                torch.manual_seed(11)
                self.net = Deep()
        if self.split:  # in every run: layers are whole again after one has ended
            for block in self.net.blocks:
                parallelize_module(
                    block, self.device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )

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

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __iter__(self) -> Any:
        x, y = data(40).tensors
        part = dist.get_rank() * 2 // self.ranks
        for start in range(0, 40, 8):
            yield x[start + 4 * part : start + 4 * part + 4], y[start + 4 * part : start + 4 * part + 4]


def _run(options: dict[str, Any], precision: str, stream: bool, two: bool = False) -> dict[str, Any]:
    split = options.get("tensor_parallel", 1) > 1
    module = Scored(split)
    fit = quiet(strategy=FSDPStrategy(**options), precision=precision, **SETTINGS)
    size = 4 if split or two else 2
    data_loader = DataLoader(Stream(dist.get_world_size()), batch_size=None) if stream else loader(40, size)
    fit.fit(module, data_loader)
    outputs = torch.cat(quiet(strategy=FSDPStrategy(**options)).predict(module, loader(10, 2)))
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    return {
        "weights": weights(module),
        "metrics": metrics,
        "seen": fit.samples_seen,
        "outputs": outputs,
        "plain": [type(parameter) is nn.Parameter for parameter in module.parameters()],
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


@pytest.fixture(scope="module")
def reference() -> Any:
    module = Scored(False)
    module.configure_model()
    optimizer = module.configure_optimizers()
    step = optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        step()

    optimizer.step = clipped
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    for _ in range(2):
        train_by_hand(module, global_batches(40, 8), window=2, step=lambda part, _: module.loss(part))
    return module


HYBRID = {"sharding": "hybrid", "replicate_size": 2, "wrap": [Block]}
TENSOR: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("options", "stream"),
    [
        (HYBRID, False),
        (TENSOR, False),
        (TENSOR, True),
        ({**TENSOR, "sharding": "hybrid", "replicate_size": 2}, False),
    ],
    ids=["hybrid", "tensor parallel", "tensor parallel on streams", "hybrid and tensor parallel"],
)
def test_two_by_two_equals_the_reference(options: dict[str, Any], stream: bool, reference: Any) -> None:
    # D-04, D-08, B-05, B-12, B-14
    runs = on_ranks(_run, 4, options, "32-true", stream)
    for run in runs:
        torch.testing.assert_close(run["weights"], weights(reference), **TIGHT)
        assert run["metrics"]["count"] == 40
        assert run["metrics"]["metric"] == 40
        assert run["seen"] == 80
        assert all(run["plain"])
        assert run["groups"] == 1  # in a user's process group, no group of ours is left
        assert torch.equal(run["weights"], runs[0]["weights"])
        with torch.no_grad():
            torch.testing.assert_close(run["outputs"], reference.net(data(10).tensors[0]), atol=1e-5, rtol=1e-4)


def _shares() -> Any:
    from drivetrain.callbacks import LambdaCallback

    found: dict[str, float] = {}

    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = dict(module.named_parameters())
        for kind, tensors in (
            ("weight", parameters),
            ("gradient", {name: one.grad for name, one in parameters.items()}),
        ):
            for layer in ("blocks.0.up", "blocks.0.down", "stem"):
                whole = tensors[f"net.{layer}.weight"]
                found[f"{layer} {kind}"] = whole.to_local().numel() / whole.numel()

    strategy = FSDPStrategy(**TENSOR)
    quiet(strategy=strategy, callbacks=LambdaCallback(on_before_optimizer_step=look)).fit(Scored(True), loader(16, 4))
    return found


def test_a_rank_holds_its_part_of_a_split_layer() -> None:
    # D-01: a half of a half; of layers that are not split, half
    for found in on_ranks(_shares, 4):
        for kind in ("weight", "gradient"):
            assert found[f"blocks.0.up {kind}"] == found[f"blocks.0.down {kind}"] == 1 / 4
            assert found[f"stem {kind}"] == 1 / 2


class Overflowing(Scored):
    """Overflows on the ranks that read one half of the data, in one batch."""

    def __init__(self, split: bool, scale: float = 1e30) -> None:
        super().__init__(split)
        self.scale = scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * 1e-2  # otherwise the first overflows at the initial scale
        return loss * self.scale if batch_idx == 1 and self.trainer.strategy.data_rank == 1 else loss


def _overflowing(options: dict[str, Any]) -> Any:
    from drivetrain.callbacks import LambdaCallback

    scales: list[float] = []
    note = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: scales.append(trainer.strategy.precision.scaler.get_scale())
    )
    module = Overflowing(options.get("tensor_parallel", 1) > 1)
    fit = quiet(strategy=FSDPStrategy(**options), precision="16-mixed", callbacks=note)
    fit.fit(module, loader(32, 4))
    return scales, fit.global_step, weights(module)


@pytest.mark.parametrize(("options", "ranks"), [(TENSOR, 4), ({"ignored": ["net.head.*"]}, 2), ({}, 2)])
def test_an_overflow_anywhere_is_skipped_everywhere(options: dict[str, Any], ranks: int) -> None:
    # B-06: also across meshes, and for parameters that are not sharded
    runs = on_ranks(_overflowing, ranks, options)
    for scales, steps, found in runs:
        assert scales == [65536.0] + [32768.0] * 3
        assert steps == 3
        assert torch.equal(found, runs[0][2])
        assert bool(found.isfinite().all())


def _poisoned(options: dict[str, Any], poisoned: set[int]) -> Any:
    from drivetrain.callbacks import LambdaCallback

    scales: list[float] = []

    def poison(trainer: Any, module: Any) -> None:
        if trainer.micro_batches == 1 and dist.get_rank() in poisoned:
            module.net.blocks[1].up.weight.grad.to_local().view(-1)[0] = torch.inf

    note = LambdaCallback(
        on_after_backward=poison,
        on_train_batch_end=lambda trainer, *_: scales.append(trainer.strategy.precision.scaler.get_scale()),
    )
    module = Overflowing(options.get("tensor_parallel", 1) > 1, scale=1.0)
    fit = quiet(strategy=FSDPStrategy(**options), precision="16-mixed", callbacks=note)
    fit.fit(module, loader(32, 4))
    return scales, fit.global_step, weights(module)


@pytest.mark.parametrize(
    ("options", "ranks", "poisoned"),
    [(TENSOR, 4, {3}), (HYBRID, 4, {1, 3}), ({}, 2, {1})],  # each replica of a hybrid has it
    ids=["tensor parallel", "hybrid", "full"],
)
def test_one_infinite_number_in_one_shard_is_skipped_everywhere(
    options: dict[str, Any], ranks: int, poisoned: set[int]
) -> None:
    # B-06: no other shard contains it
    runs = on_ranks(_poisoned, ranks, options, poisoned)
    for scales, steps, found in runs:
        halvings = [after for before, after in zip([65536.0, *scales], scales, strict=False) if after < before]
        assert halvings == [32768.0]
        assert steps == len(scales) - 1
        assert torch.equal(found, runs[0][2])
        assert bool(found.isfinite().all())


def _compiled(options: dict[str, Any]) -> Any:
    module = DeepRegression()
    quiet(strategy=FSDPStrategy(**options)).fit(module, loader(32, 4))
    assert not any("forward" in child.__dict__ for child in module.modules())
    return weights(module)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": [Block]}], ids=["plain", "checkpointed"])
def test_blocks_that_are_compiled(options: dict[str, Any]) -> None:
    # D-09: after activation checkpointing, before sharding
    expected = weights(train_by_hand(DeepRegression(), global_batches(32, 8)))
    found = on_ranks(_compiled, 2, {"compile": {"backend": "aot_eager"}, **options}, timeout=120)
    torch.testing.assert_close(found[0], expected, **TIGHT)
