"""A trainable-only checkpoint leaves out its base and recognizes it by checksums. L-08."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import quiet
from torch import nn

from drivetrain import Fit, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, ParameterShard, Span, cut
from drivetrain._parameters.base_weights import base_checksums  # private: no run shards a tensor in all of these ways
from drivetrain.checkpoint import consolidate, load, show, verify
from drivetrain.errors import CheckpointError

WHOLE = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))


def checksum(value: Any) -> int:
    """Return the checksum of a tensor, or the contribution of a shard."""
    return int(base_checksums({"w": value}, LocalControl())["w"], 16)


REGIONS: dict[str, list[Any]] = {
    "flat": [Span(0, 50), Span(50, 50), Span(50, 120)],
    "empty": [Box((0, 0, 0), (6, 4, 5)), Box((6, 0, 0), (0, 4, 5))],
    "last dimension": [Box((0, 0, 0), (6, 4, 3)), Box((0, 0, 3), (6, 4, 2))],
    "two dimensions": [Box((row, column, 0), (3, 2, 5)) for row in (0, 3) for column in (0, 2)],
}


@pytest.mark.parametrize("regions", REGIONS.values(), ids=REGIONS)
def test_the_checksum_is_the_sum_over_shards(regions: list[Any]) -> None:  # L-08
    parts = [checksum(ParameterShard(cut(WHOLE, region), tuple(WHOLE.shape), region)) for region in regions]
    assert sum(parts) % 2**64 == checksum(WHOLE)
    assert checksum(ParameterShard(WHOLE, (6, 4, 5), Span(0, 120), is_primary=False)) == 0  # a replica


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_every_element_and_its_position_change_the_checksum(dtype: torch.dtype) -> None:  # L-08
    values = (WHOLE * 10).to(dtype)
    checksums = [checksum(values), checksum(values.flip(0))]
    for index in range(0, values.numel(), 7):
        other = values.clone()
        other.view(-1)[index] += 1
        checksums.append(checksum(other))
    assert len(set(checksums)) == len(checksums)


class Adapted(TrainModule):
    """A frozen base with tied weights, a trainable head, and a buffer that counts steps."""

    count: torch.Tensor

    def __init__(self, seed: int = 0, trains_base: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters("seed")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            self.head = nn.Linear(4, 1)
        self.base[-1].weight = self.base[0].weight
        self.base.requires_grad_(trains_base)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.count += 1
        return self.head(torch.tanh(self.base(batch))).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


class FrozenLater(Adapted):
    """Trains its base for one epoch, then freezes it; its optimizer keeps no state that would show what trained."""

    def on_train_epoch_start(self) -> None:
        self.base.requires_grad_(self.trainer.current_epoch == 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = list(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1)))


def trained(module: Adapted, max_epochs: int = 2, ckpt_path: Any = None, **settings: Any) -> Fit:
    fit = quiet(max_epochs=max_epochs, seed=1, enable_checkpointing=False, **settings)
    fit.fit(module, BATCHES, ckpt_path=ckpt_path)
    return fit


def assert_equal(found: nn.Module, wanted: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Adapted, str]:
    """A trained module and its trainable-only checkpoint."""
    module, path = Adapted(), str(tmp_path_factory.mktemp("adapter") / "adapter")
    trained(module).save_checkpoint(path, trainable_only=True)
    return module, path


def test_an_adapter_without_its_base_is_loaded_evaluated_and_resumed(adapter: tuple[Adapted, str]) -> None:  # L-08
    module, path = adapter
    checkpoint = load(path)
    assert set(checkpoint.weights()) == {"head.weight", "head.bias", "count"}
    assert set(checkpoint.manifest.metadata.base) == {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"}
    assert verify(path) == []
    assert "a base of 4 weights, which are not in it" in show(path)
    with pytest.raises(CheckpointError, match=r"lacks 'base\.0\.bias', 'base\.0\.weight'(.|\n)*load_from_checkpoint"):
        consolidate(path, f"{path}.out")
    assert not Path(f"{path}.out").exists()
    assert_equal(Adapted.load_from_checkpoint(path), module)
    evaluated, resumed, uninterrupted = Adapted(), Adapted(), Adapted()
    quiet().validate(evaluated, BATCHES, ckpt_path=path, verbose=False)
    assert torch.equal(evaluated.head.weight, module.head.weight)
    trained(resumed, 4, path)
    trained(uninterrupted, 4)
    assert_equal(resumed, uninterrupted)


def test_another_base_is_refused_by_name(adapter: tuple[Adapted, str]) -> None:  # L-08
    path = adapter[1]
    with pytest.raises(CheckpointError, match=r"trained on another base: .*base\.0\.weight.* has other values here"):
        Adapted.load_from_checkpoint(path, seed=1)
    with pytest.raises(CheckpointError, match=r"base\.1\.bias.* is missing here"):
        Adapted.load_from_checkpoint(path, layers=1)
    other = Adapted(seed=1)
    with pytest.raises(CheckpointError, match="trained on another base"):
        quiet().validate(other, BATCHES, ckpt_path=path)
    with pytest.raises(CheckpointError, match="trained on another base"):
        trained(other, 3, path)
    assert_equal(other, Adapted(seed=1))


@pytest.mark.parametrize("kind", [Adapted, FrozenLater])
@pytest.mark.parametrize("resumed", [False, True])
def test_weights_that_ever_trained_are_saved(kind: type[Adapted], resumed: bool, tmp_path: Path) -> None:  # L-08
    module = kind(trains_base=True)
    fit = trained(module)
    if resumed:
        fit.save_checkpoint(tmp_path / "whole")
        module = kind(trains_base=True)
        fit = trained(module, 3, tmp_path / "whole")
    assert module.base[0].weight.requires_grad == (kind is Adapted)
    fit.save_checkpoint(tmp_path / "c", trainable_only=True)
    assert set(load(tmp_path / "c").weights()) == set(module.state_dict())
    assert not load(tmp_path / "c").manifest.metadata.base


def test_an_adapter_in_half_precision_fits_the_base_in_float32(tmp_path: Path) -> None:  # L-08
    module = Adapted()
    trained(module, precision="bf16-true").save_checkpoint(tmp_path / "c", trainable_only=True)
    again = Adapted.load_from_checkpoint(tmp_path / "c")
    assert torch.equal(again.head.weight, module.head.weight.float())
    with pytest.raises(CheckpointError, match="trained on another base"):
        Adapted.load_from_checkpoint(tmp_path / "c", seed=1)
