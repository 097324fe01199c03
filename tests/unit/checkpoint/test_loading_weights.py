"""Every entry point loads weights through the module's own loading hooks, and lists weights that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import quiet
from torch import nn

from drivetrain import Callback, CheckpointError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import convert, load
from drivetrain.testing import requires_package
from worlds import on_ranks

BATCHES = [torch.ones(2, 4)] * 2


def fit(steps: int, **options: Any) -> Fit:
    return quiet(**{"max_steps": steps, "max_epochs": 2, "seed": 0, "enable_checkpointing": False, **options})


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Versioned(Scale):
    """Its version 2 stores twice the value of version 1."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Old(nn.Module):
    """The layer before its parameter was renamed."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Renamed(Scale):
    """The same layer afterwards, whose hook accepts the old name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if prefix + "gamma" in state:
            state[prefix + "weight"] = state.pop(prefix + "gamma")


class Growing(Scale):
    """Has a buffer that gets its shape from the first batch, like the observers of quantization-aware training."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen = self.weight.detach() * 1 if self.seen.numel() == 0 else self.seen * 0.5 + 1
        return super().forward(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty(state_dict[prefix + "seen"].shape) if prefix + "seen" in state_dict else self.seen
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Refusing(Scale):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        rest[-1].append("this layer cannot be converted")


class Net(TrainModule):
    def __init__(self, layer: Callable[[], nn.Module] = Scale, compiled: bool = False) -> None:
        super().__init__()
        self.layer: Any = layer()
        self.head = nn.Linear(4, 1)
        for parameter in self.head.parameters():
            nn.init.constant_(parameter, 0.5)
        if compiled:
            self.head = torch.compile(self.head, backend="eager")  # type: ignore[assignment]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.head(self.layer(batch)) - 1).square().mean()

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Lenient(Net):
    strict_loading = False


class OverridesLoading(Net):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("layer.gamma", "layer.weight"): value for name, value in state_dict.items()}
        return super().load_state_dict(state, strict, assign)


def trained(path: Path, module: Any, steps: int = 2, start: Path | None = None, **options: Any) -> Any:
    save = Checkpoint(path.parent, filename=path.name)
    fit(steps, enable_checkpointing=True, callbacks=[save], **options).fit(module, BATCHES, ckpt_path=start)
    return module


def check_every_entry_point(path: Path, before: tuple[Any, ...], after: tuple[Any, ...], **options: Any) -> None:
    """Assert that load_from_checkpoint, test and a resumed run load what the module's load_state_dict would."""
    saved = trained(path / "c", Net(*before), **options).state_dict()
    assert not [name for name in load(path / "c").weights() if "_orig_mod" in name]  # those of torch.compile
    arguments: Any = dict(zip(("layer", "compiled"), after, strict=False))
    loaded = Net.load_from_checkpoint(path / "c", **arguments).state_dict()
    tested, uninterrupted = Net(*after), Net(*before)
    fit(1, **options).test(tested, BATCHES, ckpt_path=path / "c")
    if after == (Growing,):  # the buffer has changed in the test
        tested.layer.seen = saved["layer.seen"]
    resumed = trained(path / "d", Net(*after), 4, path / "c", **options)
    assert load(path / "d").optimizer_state()["state"]["layer.weight"]["step"] == 4
    fit(4, **options).fit(uninterrupted, BATCHES)
    for new, old in zip(loaded, saved, strict=True):
        assert torch.equal(loaded[new], saved[old]), new
        assert torch.equal(tested.state_dict()[new], saved[old]), new
        assert torch.equal(resumed.state_dict()[new], uninterrupted.state_dict()[old]), new


LAYERS: list[Any] = [((Versioned,), (Versioned,)), ((Old,), (Renamed,)), ((Growing,), (Growing,))]
COMPILED: list[Any] = [((Scale, True), (Scale, False)), ((Scale, False), (Scale, True))]


@pytest.mark.parametrize(
    ("before", "after"), LAYERS + COMPILED, ids=["version", "renamed", "resized", "compiled", "to be compiled"]
)
def test_every_entry_point_loads_as_load_state_dict(tmp_path: Path, before: Any, after: Any) -> None:  # S-13
    check_every_entry_point(tmp_path, before, after)


def _check_layers(strategy: str, path: Path) -> None:
    for number, (before, after) in enumerate(LAYERS):
        check_every_entry_point(path / str(number), before, after, strategy=strategy, devices=2)


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_3", marks=requires_package("deepspeed"))]
)
def test_resumed_weights_are_the_same_under_every_strategy(tmp_path: Path, strategy: str) -> None:  # S-13
    on_ranks(_check_layers, 2, strategy, tmp_path)


@pytest.mark.parametrize(("kind", "layer"), [(Net, Renamed), (Lenient, Renamed), (OverridesLoading, Scale)])
def test_renamed_weights_are_evaluated(tmp_path: Path, kind: type[Net], layer: type[nn.Module]) -> None:  # S-13
    module = trained(tmp_path / "c", Net(Old))
    tested = kind(layer)
    assert fit(1).test(tested, BATCHES, ckpt_path=tmp_path / "c") == fit(1).test(module, BATCHES)
    loaded: Any = kind.load_from_checkpoint(tmp_path / "c", layer=layer)
    assert torch.equal(loaded.layer.weight, module.layer.gamma)
    assert torch.equal(tested.layer.weight, module.layer.gamma)


def test_load_from_checkpoint_materializes_lazy_layers(tmp_path: Path) -> None:  # S-13
    lazy = partial(nn.LazyLinear, 4)
    module = Net(lazy)
    module.layer(torch.ones(1, 4))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    convert(tmp_path / "weights.pt", tmp_path / "c")
    assert torch.equal(Net.load_from_checkpoint(tmp_path / "c", layer=lazy).layer.weight, module.layer.weight)


def test_the_error_of_a_hook_is_reported_and_nothing_is_loaded(tmp_path: Path) -> None:
    trained(tmp_path / "c", Net())
    module = Net(Refusing)
    before = module.head.weight.clone()
    with pytest.raises(CheckpointError, match="this layer cannot be converted"):  # S-13
        fit(4).fit(module, BATCHES, ckpt_path=tmp_path / "c", allow=("module",))
    assert torch.equal(module.head.weight, before)


def test_names_and_shapes_that_differ_are_listed(tmp_path: Path) -> None:  # F-11
    path, saved = tmp_path / "c", trained(tmp_path / "c", Net(Old))
    different = "missing 'layer.weight', unexpected 'layer.gamma'"
    with pytest.raises(CheckpointError, match=f"do not fit Net: {different}"):
        Net.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"do not fit Net: {different}") as caught:
        fit(4).fit(Net(), BATCHES, ckpt_path=path, allow=("module", "optimizer"))
    assert "load_from_checkpoint(path, strict=False)" in str(caught.value)
    with pytest.warns(UserWarning, match=f"skipped, with strict=False: {different}"):
        module = Net.load_from_checkpoint(path, strict=False)
    assert torch.equal(module.head.weight, saved.head.weight)
    for strict in (True, False):
        message = r"of another shape 'layer.gamma \(\(4,\) instead of \(1,\)\)'"
        with pytest.raises(CheckpointError, match=message) as caught:
            Net.load_from_checkpoint(path, strict=strict, layer=partial(Old, 1))
        assert "strict=False" not in str(caught.value)  # it would not help


class LoadsMismatched(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        load = trainer.strategy.load_model_state
        head = {"head.weight": torch.ones(1, 4), "head.bias": torch.ones(1)}
        renamed, narrow = {**head, "layer.gamma": torch.ones(4)}, {**head, "layer.weight": torch.ones(1)}
        with pytest.raises(CheckpointError, match=r"unexpected 'layer.gamma'"):
            load(renamed, strict=True)
        with pytest.raises(CheckpointError, match=r"layer.weight \(\(1,\) instead of \(4,\)\)"):
            load(narrow, strict=False)
        with pytest.warns(UserWarning, match=r"Net; skipped, with strict=False: .*unexpected 'layer.gamma'"):
            load(renamed, strict=False)


def _load_mismatched(strategies: list[str]) -> None:
    for strategy in strategies:
        run = fit(1, strategy=strategy, callbacks=LoadsMismatched())
        run.fit(Net(), BATCHES)
        assert run.global_step == 1


@requires_package("deepspeed")
def test_strategies_that_shard_parameters_list_the_same_names() -> None:  # F-11
    on_ranks(_load_mismatched, 2, ["fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
