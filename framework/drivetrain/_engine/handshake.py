"""The ranks' handshake: before the first step they make sure that they are about to do the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import ControlPlane, spread
from drivetrain.errors import DistributedError
from drivetrain.run_context import RunContext


def check_ranks_agree(control: ControlPlane, facts: Mapping[str, Any]) -> None:
    """Compare JSON-able facts with rank 0's; where they differ anywhere, say on which ranks and how.

    Raises:
        DistributedError: on every rank; names each fact that differs, the ranks and their values.
    """
    if control.world_size == 1:
        return
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
    (odd,) = control.agree("the handshake", control.from_rank_0(digest) != digest)
    if not odd:
        return
    everybody = control.gather_objects(dict(facts))
    lines = []
    for name in sorted({name for other in everybody for name in other}):
        values = spread([json.dumps(other.get(name)) for other in everybody])
        if len(values) > 1:
            told = "; ".join(f"{value} on rank(s) {ranks}" for value, ranks in values.items())
            lines.append(f"{name}: {told}")
    raise DistributedError(
        f"The ranks do not agree on {len(lines)} thing(s): " + " | ".join(lines[:20]),
        "they would compute different things, or wait for each other in vain.",
        "look for what only one rank reads or draws: an unseeded split, a flag, an environment variable.",
    )


def settle_folder(control: ControlPlane, wanted_by: Sequence[str]) -> None:
    """Refuse ranks of which only some want a folder for the run, which all of them settle together. Collective.

    Args:
        control: the way to the other ranks.
        wanted_by: what wants one on this rank: classes of loggers, callbacks and a profiler, ``ckpt_path``.

    Raises:
        DistributedError: on every rank; names what wants it, and the ranks.
    """
    if control.world_size == 1:
        return
    wanted = bool(wanted_by)
    (odd,) = control.agree("whether the run has a folder", control.from_rank_0(wanted) != wanted)
    if not odd:
        return
    told = spread([", ".join(one) or "nothing" for one in control.gather_objects(list(wanted_by))])
    raise DistributedError(
        "Some ranks want a folder for the run and some do not: "
        + "; ".join(f"{what} on rank(s) {ranks}" for what, ranks in told.items())
        + ".",
        "rank 0 settles which one, and tells all others: loggers, a Checkpoint and a profiler are there on every rank.",
        "give Fit the same ones on every rank; what only rank 0 is to do, they leave to it by themselves.",
    )


def facts_about(module: nn.Module) -> dict[str, Any]:
    """Return what must be alike of a module: each parameter's shape, dtype and whether it trains."""
    facts: dict[str, Any] = {
        f"parameter {name!r}": [list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for name, parameter in module.named_parameters()
    }
    facts["order of parameters"] = hashlib.blake2b(
        "\n".join(name for name, _ in module.named_parameters()).encode(), digest_size=8
    ).hexdigest()
    facts["torch"] = torch.__version__
    return facts


def facts_about_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> dict[str, Any]:
    """Return what must be alike of optimizers: their classes, and each group's numbers. Replicas drift apart else."""
    facts: dict[str, Any] = {"schedulers": [type(scheduler).__name__ for scheduler in schedulers]}
    for index, optimizer in enumerate(optimizers):
        facts[f"optimizer {index}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            where = f"optimizer {index}, group {number}"
            facts[f"{where}, parameters"] = len(group["params"])
            said = {name: _plain(value) for name, value in group.items() if name != "params"}
            facts |= {f"{where}, {name}": value for name, value in said.items() if value is not None}
    return facts


def _plain(value: Any) -> Any:
    """Numbers, text and sequences of these as they are, a one-element tensor as a number, and None for the rest."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    parts = value if isinstance(value, list | tuple) else [value]
    return value if all(isinstance(part, bool | int | float | str) for part in parts) else None


def settings_alike(trainer: RunContext) -> dict[str, Any]:
    """The settings that must be alike on every rank, as the handshake compares them."""
    names = (
        "max_epochs max_steps min_epochs min_steps accumulate_grad_batches gradient_clip_val overfit_batches "
        "gradient_clip_algorithm val_check_interval check_val_every_n_epoch num_sanity_val_steps seed "
        "log_every_n_steps limit_train_batches limit_val_batches limit_test_batches limit_predict_batches "
        "inference_mode use_distributed_sampler preemption_signals reload_dataloaders_every_n_epochs"
    )
    facts: dict[str, Any] = {name: getattr(trainer, name) for name in names.split()}
    facts["strategy"] = trainer.strategy.name
    facts["precision"] = trainer.strategy.precision.name
    facts["profiler"] = type(trainer.profiler).__name__ if trainer.profiles else None  # at its end ranks compare
    return facts
