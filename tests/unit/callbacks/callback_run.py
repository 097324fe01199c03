"""A fake run with the attributes that callbacks read and a real control plane; tests call the hooks by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain.precision import Precision


@dataclass
class FakeStrategy:
    """The attributes of a strategy that callbacks read."""

    control: ControlPlane = field(default_factory=LocalControl)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class FakeRun:
    """The attributes of a `Fit` that callbacks read, which tests set."""

    strategy: FakeStrategy = field(default_factory=FakeStrategy)
    precision: Precision = field(default_factory=Precision)
    current_epoch: int = 0
    global_step: int = 0
    batch_idx: int = 0
    micro_batches: int = 0
    samples_seen: int = 0
    max_epochs: int | None = 10
    max_steps: int = -1
    max_time: Any = None
    num_training_batches: int | float = 10
    num_val_batches: list[int | float] = field(default_factory=list)
    num_test_batches: list[int | float] = field(default_factory=list)
    num_predict_batches: list[int | float] = field(default_factory=list)
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    accumulate_grad_batches: int = 1
    log_every_n_steps: int = 1
    sanity_checking: bool = False
    testing: bool = False
    predicting: bool = False
    joining: bool = False
    micro_batch_weight: float = 1.0
    should_stop: bool = False
    stop_reason: str = ""
    callback_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation_so_far: dict[str, torch.Tensor] = field(default_factory=dict)
    progress_bar_values: dict[str, torch.Tensor] = field(default_factory=dict)
    lightning_module: Any = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scheduler_configs: list[SchedulerConfig] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=lambda: ["a logger"])
    printed: list[str] = field(default_factory=list)
    logged: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)

    @property
    def metrics(self) -> Any:
        """A store in which values have no age."""
        return SimpleNamespace(reduced_at=lambda name: None, logged_at=lambda name: None, restore=lambda values: None)

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.control.rank == 0

    def request_stop(self, because: str) -> None:
        self.should_stop, self.stop_reason = True, because

    def stop_unless_withdrawn(self, owner: object, because: str | None) -> None:
        self.should_stop, self.stop_reason = because is not None, because or ""

    def print(self, *parts: object) -> None:
        self.printed.append(" ".join(map(str, parts)))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


_runs = itertools.count()


def distributed_run(**values: Any) -> FakeRun:
    """Return a fake run whose control plane uses this process's default process group."""
    from drivetrain._distributed.control_group import GroupControl

    store = dist.PrefixStore(f"run{next(_runs)}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    control = GroupControl(dist.group.WORLD, store, dist.get_rank(), dist.get_world_size())
    return FakeRun(strategy=FakeStrategy(control=control), **values)
