"""FitArguments: the arguments of `Fit`, each written once, with its type and default."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.environments import Environment
from drivetrain.launchers import Launcher
from drivetrain.loggers import Logger
from drivetrain.precision import Precision
from drivetrain.precision.resolve import PrecisionName
from drivetrain.strategies.registry import StrategyName
from drivetrain.strategies.strategy import Strategy

# Needed for annotations only, and expensive to import.
if TYPE_CHECKING:
    from drivetrain.profilers import Profiler


@dataclass(kw_only=True, init=False, eq=False, repr=False)
class FitArguments:
    """The arguments of `Fit` with their types and defaults; `Fit` documents them.

    All are attributes of the same name, except each `InitVar`, from which `Fit` makes something else.
    """

    strategy: InitVar[StrategyName | str | Strategy] = "auto"
    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    precision: InitVar[PrecisionName | str | int | Precision] = "32-true"
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | dict[str, float] | timedelta | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str = "norm"
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    overfit_batches: int | float = 0
    fast_dev_run: bool | int = False
    logger: InitVar[bool | str | Logger | Sequence[str | Logger] | None] = None
    log_every_n_steps: int = 50
    enable_progress_bar: bool = True
    enable_checkpointing: bool = True
    enable_model_summary: bool = True
    default_root_dir: InitVar[str | os.PathLike[str] | None] = None
    seed: int | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    detect_anomaly: bool = False
    compile: bool | dict[str, Any] = False
    use_distributed_sampler: bool = True
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    profiler: InitVar[Literal["simple", "advanced", "pytorch"] | str | Profiler | None] = None
    launcher: str | Launcher = "auto"
    environment: str | Environment = "auto"
    preemption_signals: str | list[str] | None = "auto"
    barebones: bool = False
    plugins: object | None = None
