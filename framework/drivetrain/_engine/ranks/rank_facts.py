"""What all ranks must have in common before the first step: facts about module, settings and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import ControlPlane, check_ranks_agree, digest_of
from drivetrain.run_context import RunContext


def check_folder_agreement(control: ControlPlane, wanted_by: Sequence[str]) -> None:
    """Check that either all ranks or no rank need a folder, because ranks choose the folder together. Collective.

    Args:
        control: connects the ranks.
        wanted_by: the class names of the loggers, callbacks and profiler that need a folder on this rank, and
            "ckpt_path" if that argument is given.

    Raises:
        DistributedError: ranks differ. Every rank raises the error, which lists ``wanted_by`` for the ranks.
    """
    check_ranks_agree(
        control,
        {"what needs a folder for the run": ", ".join(wanted_by) or "nothing"},
        "rank 0 chooses the folder for all ranks, so loggers, Checkpoint and a profiler must exist on every rank.",
        "give Fit the same objects on every rank; they write on rank 0 only where one file is enough.",
        compared=bool(wanted_by),
    )


def module_facts(module: nn.Module) -> dict[str, Any]:
    """Return the facts about parameters that must be equal on all ranks, such as shapes, dtypes and order."""
    facts: dict[str, Any] = {
        f"parameter {name!r}": [list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for name, parameter in module.named_parameters()
    }
    facts["order of parameters"] = digest_of(list(facts))
    facts["torch"] = torch.__version__
    return facts


def optimizer_facts(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> dict[str, Any]:
    """Return the optimizer classes and group options, which must be equal on all ranks or replicas would diverge."""
    facts: dict[str, Any] = {"schedulers": [type(scheduler).__name__ for scheduler in schedulers]}
    for index, optimizer in enumerate(optimizers):
        facts[f"optimizer {index}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            group_name = f"optimizer {index}, group {number}"
            facts[f"{group_name}, parameters"] = len(group["params"])
            options = {name: _as_json(value) for name, value in group.items() if name != "params"}
            facts |= {f"{group_name}, {name}": value for name, value in options.items() if value is not None}
    return facts


def _as_json(value: Any) -> Any:
    """Return a number, a string or a list of them unchanged, a one-element tensor as a number, and otherwise None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    parts = value if isinstance(value, list | tuple) else [value]
    return value if all(isinstance(part, bool | int | float | str) for part in parts) else None


def setting_facts(trainer: RunContext) -> dict[str, Any]:
    """Return the settings of the trainer that must be equal on all ranks."""
    names = (
        "max_epochs max_steps min_epochs min_steps accumulate_grad_batches gradient_clip_val overfit_batches "
        "gradient_clip_algorithm val_check_interval check_val_every_n_epoch num_sanity_val_steps seed "
        "log_every_n_steps limit_train_batches limit_val_batches limit_test_batches limit_predict_batches "
        "inference_mode use_distributed_sampler preemption_signals reload_dataloaders_every_n_epochs"
    )
    facts: dict[str, Any] = {name: getattr(trainer, name) for name in names.split()}
    facts["strategy"] = trainer.strategy.name
    facts["precision"] = trainer.strategy.precision.name
    facts["profiler"] = trainer.given_profiler and type(trainer.given_profiler).__name__  # summaries are collective
    return facts
