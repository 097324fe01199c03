"""The note on out-of-memory errors: the sizes of the run's state, and the settings to change."""

from __future__ import annotations

import dataclasses
import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression

from drivetrain import Precision, Strategy
from drivetrain.precision import HalfPrecision, MixedPrecision
from drivetrain.strategies import MemoryAdvice
from drivetrain_strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy


class Hungry(Regression):
    """Allocates more memory than any machine has, in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1000, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        activation = torch.ones(1000, 10)
        if batch_idx == 2:
            torch.empty(2**50)
        return self.loss(batch) + 0.0 * (self.wide.weight.sum() + activation.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _note(path: Path, batch_size: int = 4, **options: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        fit(path, **options).fit(Hungry(), regression(batch_size=batch_size))
    note, where = caught.value.__notes__
    assert where == "Where: rank 0, epoch 0, global step 2, batch index 2"
    assert note in "".join(traceback.format_exception(caught.value))
    return note.splitlines()


def test_the_error_names_sizes_and_settings_to_change(tmp_path: Path) -> None:
    lines = _note(tmp_path)
    assert lines[0].startswith("Out of memory on rank 0, cpu, fit, global_step=2.")
    assert re.fullmatch(r"  parameters 3\.9\d+ KiB, optimizer state 7\.8\d+ KiB", lines[1])
    assert lines[-4] == "Change first: batch_size=2 instead of 4 with accumulate_grad_batches=2: the same steps"
    assert "precision='bf16-mixed'" in lines[-3]
    assert "activation checkpointing" in lines[-2]
    assert "strategy='fsdp' on several devices" in lines[-1]


def test_sharding_is_suggested_first_if_the_state_is_large() -> None:
    # Private: only a CUDA device tells how much of its memory the state takes.
    from drivetrain._engine.out_of_memory import _advice

    trainer = SimpleNamespace(accumulate_grad_batches=1)
    run: Any = SimpleNamespace(stage="fit", strategy=SingleDeviceStrategy(), module=Regression(), trainer=trainer)
    run.strategy.precision = MixedPrecision("bf16-mixed", "cpu")
    assert _advice(run, 4, state_first=True)[0].startswith("strategy='fsdp'")
    assert _advice(run, 4, state_first=False)[0].startswith("batch_size=2")


class CustomStrategy(SingleDeviceStrategy):
    """A third-party strategy with its own settings, or without any."""

    silent = False

    def memory_advice(self, module: torch.nn.Module) -> list[MemoryAdvice]:
        state = MemoryAdvice("state", f"CustomStrategy(shelves={sum(1 for _ in module.parameters())})")
        return [] if self.silent else [state, MemoryAdvice("activations", "CustomStrategy(fold=True)")]


def test_a_third_party_strategy_gives_its_own_advice(tmp_path: Path) -> None:  # K-02
    strategy = CustomStrategy()
    lines = _note(tmp_path, strategy=strategy)
    assert [line.strip().removeprefix("then: ") for line in lines[-3:]] == [
        "precision='bf16-mixed': activations of half the size",
        "CustomStrategy(fold=True)",
        "CustomStrategy(shelves=4)",
    ]
    strategy.silent = True
    lines = _note(tmp_path, strategy=strategy, precision="bf16-true", batch_size=1)
    assert "On this rank there were:" in lines[0]
    assert not any("Change first" in line for line in lines)


BY_HAND = ("activations", "activation checkpointing (torch.utils.checkpoint around each block)")
BY_CLASS = ("activations", "activation checkpointing (FSDPStrategy(activation_checkpointing=[Block]))")
OFFLOAD = ("state", "FSDPStrategy(cpu_offload=True)")


def ddp() -> DDPStrategy:
    strategy = DDPStrategy()
    strategy.placement = dataclasses.replace(strategy.placement, world_size=2)
    return strategy


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (SingleDeviceStrategy(), [("state", "strategy='fsdp' on several devices"), BY_HAND]),
        (ddp(), [("state", "strategy='fsdp'"), BY_HAND]),
        (FSDPStrategy(), [OFFLOAD, BY_CLASS]),
        (FSDPStrategy("grad_op"), [("state", "FSDPStrategy(sharding='full')"), OFFLOAD, BY_CLASS]),
        (FSDPStrategy(cpu_offload=True, activation_checkpointing=[torch.nn.Linear]), []),
    ],
)
def test_each_strategy_advises_its_own_settings(strategy: Strategy, expected: list[tuple[str, str]]) -> None:
    advice = strategy.memory_advice(torch.nn.Linear(1, 1))
    assert [(one.reduces, one.text.partition(":")[0]) for one in advice] == expected


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision(), ["precision='bf16-mixed'"]),
        (MixedPrecision("bf16-mixed", "cpu"), ["precision='bf16-true'"]),
        (MixedPrecision("16-mixed", "cpu"), ["precision='16-true'"]),
        (HalfPrecision("bf16-true"), []),
    ],
)
def test_each_precision_advises_a_lower_one(precision: Precision, expected: list[str]) -> None:
    assert [one.text.partition(":")[0] for one in precision.memory_advice()] == expected
