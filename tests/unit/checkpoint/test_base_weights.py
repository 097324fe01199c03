"""Checksums of the base weights of a trainable-only checkpoint: independent of sharding, different for other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, ParameterShard, Span, cut
from drivetrain.checkpoint import load, show, verify
from drivetrain.checkpoint._base_weights import base_checksums
from drivetrain.errors import CheckpointError

WHOLE = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))


def sum_of(value: Any) -> int:
    """Return the checksum of a tensor, or the contribution of a shard."""
    return int(base_checksums({"w": value}, LocalControl())["w"], 16)


def _boxes(*cuts: tuple[int, int]) -> list[Any]:
    """Return boxes that cut ``WHOLE`` in two in some of its dimensions."""
    boxes = [Box((0, 0, 0), (6, 4, 5))]
    for dimension, at in cuts:
        halves = []
        for box in boxes:
            for begin, end in ((0, at), (at, WHOLE.shape[dimension])):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dimension], sizes[dimension] = begin, end - begin
                halves.append(Box(tuple(offsets), tuple(sizes)))
        boxes = halves
    return boxes


@pytest.mark.parametrize(
    "regions",
    [
        [Span(0, 50), Span(50, 50), Span(50, 120)],
        _boxes((0, 2)),
        _boxes((1, 1)),
        _boxes((2, 3)),
        _boxes((0, 6)),  # one of them empty
        _boxes((0, 2), (2, 1)),
        _boxes((0, 3), (1, 2), (2, 4)),
    ],
    ids=str,
)
def test_a_sum_is_the_same_however_the_tensor_is_spread(regions: list[Any]) -> None:  # L-08
    parts = [sum_of(ParameterShard(cut(WHOLE, region), tuple(WHOLE.shape), region)) for region in regions]
    assert sum(parts) % 2**64 == sum_of(WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64])
def test_every_element_counts_and_where_it_is(dtype: torch.dtype) -> None:  # L-08
    values = (WHOLE * 10).to(dtype)
    sums = {sum_of(values), sum_of(values.flip(0))}
    for index in range(0, values.numel(), 7):
        other = values.clone()
        other.view(-1)[index] += 1
        sums.add(sum_of(other))
    assert len(sums) == 2 + len(range(0, values.numel(), 7))


def test_a_base_in_half_precision_is_the_same_held_in_float32() -> None:  # L-08
    half = WHOLE.bfloat16()
    assert base_checksums({"w": half}, LocalControl()) == base_checksums({"w": half.float()}, LocalControl())


def test_another_rank_speaks_for_a_part() -> None:
    one = ParameterShard(WHOLE, (6, 4, 5), Span(0, 120), is_primary=False)
    assert base_checksums({"w": one}, LocalControl()) == {"w": "0" * 16}


class Adapted(TrainModule):
    """A frozen base and a trainable head."""

    count: torch.Tensor

    def __init__(self, seed: int = 0, trains_base: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters("seed")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 1)
        self.base[1].weight = self.base[0].weight
        self.base.requires_grad_(trains_base)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        return self.head(torch.tanh(self.base(batch[0]))).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trained(folder: Path, module: Adapted, **settings: Any) -> Fit:
    fit = Fit(accelerator="cpu", barebones=True, max_epochs=2, seed=1, default_root_dir=folder, **settings)
    fit.fit(module, rows())
    return fit


def saved(folder: Path) -> tuple[Adapted, str]:
    module = Adapted()
    trained(folder, module).save_checkpoint(folder / "adapter", trainable_only=True)
    return module, str(folder / "adapter")


def test_what_never_trained_is_left_out_and_known_again(tmp_path: Path) -> None:  # L-08
    module, path = saved(tmp_path)
    checkpoint = load(path)
    assert set(checkpoint.weights()) == {"head.weight", "head.bias", "count"}
    assert set(checkpoint.manifest.metadata.base) == {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"}
    assert verify(path) == []
    assert "a base of 4 weights, which are not in it" in show(path)
    again = Adapted.load_from_checkpoint(path)
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_another_base_is_refused_by_name(tmp_path: Path) -> None:  # L-08
    _, path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"trained on another base: .*base\.0\.weight.* has other values here"):
        Adapted.load_from_checkpoint(path, seed=1)
    other = Adapted(seed=1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for run in (
        lambda: Fit(accelerator="cpu", barebones=True).validate(other, rows(), ckpt_path=path),
        lambda: Fit(accelerator="cpu", barebones=True, max_epochs=3, seed=1).fit(other, rows(), ckpt_path=path),
    ):
        with pytest.raises(CheckpointError, match="trained on another base"):
            run()
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_module_without_a_part_of_the_base_is_refused(tmp_path: Path) -> None:  # L-08
    class Smaller(Adapted):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.base = nn.Sequential(self.base[0])

    _, path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"base\.1\.bias.* is missing here"):
        Smaller.load_from_checkpoint(path)


def test_evaluation_and_training_go_on_with_it(tmp_path: Path) -> None:  # L-08
    module, path = saved(tmp_path)
    fresh = Adapted()
    Fit(accelerator="cpu", barebones=True).validate(fresh, rows(), ckpt_path=path, verbose=False)
    assert torch.equal(fresh.head.weight, module.head.weight)
    resumed, undisturbed = Adapted(), Adapted()
    Fit(accelerator="cpu", barebones=True, max_epochs=4, seed=1).fit(resumed, rows(), ckpt_path=path)
    Fit(accelerator="cpu", barebones=True, max_epochs=4, seed=1).fit(undisturbed, rows())
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


class Wavering(Adapted):
    """Trains its base for one epoch, then freezes it again."""

    def on_train_epoch_start(self) -> None:
        self.base.requires_grad_(self.trainer.current_epoch == 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_what_has_trained_and_is_frozen_again_is_kept(tmp_path: Path) -> None:  # L-08
    module = Wavering(trains_base=True)
    trained(tmp_path, module).save_checkpoint(tmp_path / "c", trainable_only=True)
    assert not module.base[0].weight.requires_grad
    assert set(load(tmp_path / "c").weights()) == set(module.state_dict())
    assert not load(tmp_path / "c").manifest.metadata.base


class Plain(Wavering):
    """Its optimizer keeps no state that would show which parameters trained."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_trained_before_a_run_went_on_is_kept(tmp_path: Path) -> None:  # L-08
    first = trained(tmp_path, Plain(trains_base=True))
    first.save_checkpoint(tmp_path / "whole")
    first.save_checkpoint(tmp_path / "after", trainable_only=True)  # after the run
    assert not load(tmp_path / "after").manifest.metadata.base
    module = Plain(trains_base=True)
    fit = Fit(accelerator="cpu", barebones=True, max_epochs=3, seed=1, default_root_dir=tmp_path)
    fit.fit(module, rows(), ckpt_path=tmp_path / "whole")
    fit.save_checkpoint(tmp_path / "c", trainable_only=True)
    assert not module.base[0].weight.requires_grad
    assert set(load(tmp_path / "c").weights()) == set(module.state_dict())


def test_where_everything_trains_nothing_is_left_out(tmp_path: Path) -> None:  # L-08
    module = Adapted(trains_base=True)
    trained(tmp_path, module).save_checkpoint(tmp_path / "c", trainable_only=True)
    assert set(load(tmp_path / "c").weights()) == set(module.state_dict())


def test_an_adapter_in_half_precision_fits_the_base_in_float32(tmp_path: Path) -> None:  # L-08
    module = Adapted()
    trained(tmp_path, module, precision="bf16-true").save_checkpoint(tmp_path / "c", trainable_only=True)
    again = Adapted.load_from_checkpoint(tmp_path / "c")
    assert torch.equal(again.head.weight, module.head.weight.float())
    with pytest.raises(CheckpointError, match="trained on another base"):
        Adapted.load_from_checkpoint(tmp_path / "c", seed=1)
