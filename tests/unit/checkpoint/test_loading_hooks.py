"""Every entry point loads weights through the module's own loading hooks, as load_state_dict does: S-13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import CheckpointError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import convert, load
from drivetrain.testing import requires_package
from worlds import on_ranks

BATCHES = [torch.ones(2, 4)] * 2


def fit(steps: int, **options: Any) -> Fit:
    return Fit(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": steps, "seed": 0, "enable_checkpointing": False, **options},
    )


class Scale(nn.Module):
    """A layer whose version 2 stores twice the value of version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Old(nn.Module):
    """A layer before its parameter was renamed."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))

    @property
    def factor(self) -> torch.Tensor:
        return self.gamma


class Renamed(nn.Module):
    """The same layer afterwards, whose hook accepts the old name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if prefix + "gamma" in state:
            state[prefix + "weight"] = state.pop(prefix + "gamma")

    @property
    def factor(self) -> torch.Tensor:
        return self.weight


class Growing(nn.Module):
    """A layer whose buffer gets its shape from the first batch, like the observers of quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.empty(0))

    @property
    def factor(self) -> torch.Tensor:
        with torch.no_grad():
            self.seen = self.weight.detach() * 1 if self.seen.numel() == 0 else self.seen * 0.5 + 1
        return self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty(state_dict[prefix + "seen"].shape) if prefix + "seen" in state_dict else self.seen
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Net(TrainModule):
    """A linear layer over the layer of the given class."""

    def __init__(self, layer: type[nn.Module] = Scale, compiled: bool = False) -> None:
        super().__init__()
        self.layer = layer()
        self.head = nn.Linear(4, 1)
        for parameter in self.head.parameters():
            nn.init.constant_(parameter, 0.5)
        self.compiled = compiled
        if compiled:
            self.head = torch.compile(self.head, backend="eager")  # type: ignore[assignment]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        factor: Any = self.layer.weight if isinstance(self.layer, Scale) else self.layer.factor
        return (self.head(batch * factor) - 1).square().mean()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(batch)

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Lenient(Net):
    """A module that skips weights whose names do not match."""

    strict_loading = False


def trained(path: Path, *args: Any, **options: Any) -> Any:
    module, save = Net(*args), Checkpoint(path.parent, filename=path.name)
    fit(2, enable_checkpointing=True, callbacks=[save], **options).fit(module, BATCHES)
    return module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((Scale,), (Scale,), id="version"),
        pytest.param((Old,), (Renamed,), id="renamed"),
        pytest.param((Growing,), (Growing,), id="resized"),
        pytest.param((Scale, True), (Scale, False), id="compiled"),
        pytest.param((Scale, False), (Scale, True), id="to be compiled"),
    ],
)
def test_load_from_checkpoint_and_a_resumed_run_give_the_same_weights_as_load_state_dict(
    tmp_path: Path, before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:  # S-13
    saved = trained(tmp_path / "c", *before).state_dict()
    assert not [name for name in load(tmp_path / "c").weights() if "_orig_mod" in name]  # those of torch.compile
    names = dict(zip(saved, Net(*after).state_dict(), strict=True))
    arguments: Any = dict(zip(("layer", "compiled"), after, strict=False))
    loaded = Net.load_from_checkpoint(tmp_path / "c", **arguments)
    for old, new in names.items():
        assert torch.equal(loaded.state_dict()[new], saved[old]), new
    resumed, uninterrupted = Net(*after), Net(*before)
    run = fit(4, max_epochs=2)
    run.fit(resumed, BATCHES, ckpt_path=tmp_path / "c")
    run.save_checkpoint(tmp_path / "d")
    assert load(tmp_path / "d").optimizer_state()["state"]["layer.weight"]["step"] == 4
    fit(4, max_epochs=2).fit(uninterrupted, BATCHES)
    for old, new in names.items():
        assert torch.equal(resumed.state_dict()[new], uninterrupted.state_dict()[old]), new


@pytest.mark.parametrize("kind", [Net, Lenient])
def test_an_evaluation_uses_renamed_weights_also_without_strict_loading(tmp_path: Path, kind: type[Net]) -> None:
    module = trained(tmp_path / "c", Old)
    (expected,) = fit(1).test(module, BATCHES)
    (loss,) = fit(1).test(kind(Renamed), BATCHES, ckpt_path=tmp_path / "c")  # S-13
    assert loss == expected


class OverridesLoading(Net):
    """A module that renames weights in its own load_state_dict."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("layer.gamma", "layer.weight"): value for name, value in state_dict.items()}
        return super().load_state_dict(state, strict, assign)


class NewName(Renamed):
    """The layer with the new name and without a hook."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(4))


def test_an_overridden_load_state_dict_is_used_by_every_entry_point(tmp_path: Path) -> None:
    module = trained(tmp_path / "c", Old)
    loaded: Any = OverridesLoading.load_from_checkpoint(tmp_path / "c", layer=NewName)
    assert torch.equal(loaded.layer.weight, module.layer.gamma)  # S-13
    tested: Any = OverridesLoading(NewName)
    fit(1).test(tested, BATCHES, ckpt_path=tmp_path / "c")
    assert torch.equal(tested.layer.weight, module.layer.gamma)


class Lazy(TrainModule):
    """A module with a layer whose shape is known after the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


def test_load_from_checkpoint_materializes_lazy_layers(tmp_path: Path) -> None:
    module = Lazy()
    module.layer(torch.ones(1, 4))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    convert(tmp_path / "weights.pt", tmp_path / "c")
    assert torch.equal(Lazy.load_from_checkpoint(tmp_path / "c").layer.weight, module.layer.weight)  # S-13


class Refusing(Scale):
    """A layer that refuses its weights."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        rest[-1].append("this layer cannot be converted")


def test_the_error_of_a_hook_is_reported_and_nothing_is_loaded(tmp_path: Path) -> None:
    trained(tmp_path / "c")
    module = Net(Refusing)
    before = module.head.weight.clone()
    with pytest.raises(CheckpointError, match="this layer cannot be converted"):  # S-13
        fit(4, max_epochs=2).fit(module, BATCHES, ckpt_path=tmp_path / "c", allow=("module",))
    assert torch.equal(module.head.weight, before)


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_3", marks=requires_package("deepspeed"))]
)
def test_resumed_weights_are_the_same_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    for rank in on_ranks(_loaded_by_each_entry_point, 2, strategy, tmp_path):
        for (loaded, tested, saved), (resumed, uninterrupted) in rank:
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)  # S-13
            torch.testing.assert_close(tested, saved, rtol=0, atol=0)
            torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


def _loaded_by_each_entry_point(strategy: str, path: Path) -> list[Any]:
    pairs: list[tuple[Any, Any]] = [(Scale, Scale), (Old, Renamed), (Growing, Growing)]
    return [values for before, after in pairs for values in _loaded(strategy, path / after.__name__, before, after)]


def _loaded(strategy: str, path: Path, before: Any, after: Any) -> list[Any]:
    """Return each weight as load_from_checkpoint, test and fit load it, next to the values that it must have."""
    options: dict[str, Any] = {"strategy": strategy, "devices": 2}
    saved = trained(path / "c", before, **options).state_dict()
    loaded = Net.load_from_checkpoint(path / "c", layer=after).state_dict()
    uninterrupted, tested, resumed = Net(before), Net(after), Net(after)
    fit(1, **options).test(tested, BATCHES, ckpt_path=path / "c")
    fit(4, max_epochs=2, **options).fit(uninterrupted, BATCHES)
    fit(4, max_epochs=2, **options).fit(resumed, BATCHES, ckpt_path=path / "c")
    if after is Growing:  # the buffer has changed in the test
        tested.layer.seen = saved["layer.seen"]
    after_test, after_fit, whole_run = tested.state_dict(), resumed.state_dict(), uninterrupted.state_dict()
    return [
        ((loaded[new], after_test[new], saved[old]), (after_fit[new], whole_run[old]))
        for old, new in zip(saved, loaded, strict=True)
    ]
