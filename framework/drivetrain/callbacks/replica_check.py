"""ReplicaCheck: checks that all replicas of the parameters are bit-identical."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain._config.argument_checks import check_count
from drivetrain._distributed.checksum import checksums
from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain.callback import Callback
from drivetrain.errors import DistributedError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class ReplicaCheck(Callback):
    """Compares checksums of all parameters between ranks, and raises an error if replicas differ.

    Replicas that start with the same weights and apply the same gradients stay bit-identical. If they diverge, every
    rank trains a different model, although the loss looks normal. The check runs at the start of
    training, every ``every_n_steps`` steps and at the end of training. It costs one pass over the weights and one small
    collective.

    Sharded parameters are compared between ranks that hold the same shard. Buffers are not compared, because running
    statistics depend on each rank's data until the strategy broadcasts those of rank 0.

    Args:
        every_n_steps: optimizer steps between two checks.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1.
        DistributedError: on every rank, if replicas differ. The message names the first parameter that differs, and the
            ranks.
    """

    priority = 90  # before callbacks that save or decide

    _key_arguments = ("every_n_steps",)

    def __init__(self, every_n_steps: int = 100) -> None:
        meaning = "the number of optimizer steps between two checks"
        check_count("ReplicaCheck", "every_n_steps", every_n_steps, 1, meaning)
        self.every_n_steps = every_n_steps
        self._last_checked_step = -1

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check that all ranks start with the same weights."""
        self._check(trainer, module)

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check the weights every ``every_n_steps`` steps."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._last_checked_step:
            self._check(trainer, module)

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the final weights."""
        if trainer.global_step != self._last_checked_step:
            self._check(trainer, module)

    def _check(self, trainer: RunContext, module: TrainModule) -> None:
        """Compare the parameters bit by bit. A collective operation."""
        self._last_checked_step = step = trainer.global_step
        control = trainer.strategy.control
        if control.world_size == 1:
            return
        names, parameters = zip(*module.named_parameters(), strict=True)
        check_ranks_agree(control, {"names of the parameters": names})  # or the next collective would mix them up
        parts = [_local_part(parameter) for parameter in parameters]
        local = torch.stack([checksums([part for part, _ in parts]), torch.tensor([shard for _, shard in parts])])
        gathered = control.all_gather(local)
        if bool((gathered == gathered[0]).all()):
            return
        for index, name in enumerate(names):
            copies: dict[int, dict[int, list[int]]] = {}  # the ranks of each shard, by the checksums of their copies
            for rank, (sums, shards) in enumerate(gathered.tolist()):
                copies.setdefault(shards[index], {}).setdefault(sums[index], []).append(rank)
            for ranks_by_checksum in copies.values():
                if len(ranks_by_checksum) > 1:
                    raise _difference(name, step, sorted(ranks_by_checksum.values(), key=len, reverse=True))


def _difference(name: str, step: int, groups: list[list[int]]) -> DistributedError:
    """Return the error for a parameter that differs between groups of ranks, of which the largest comes first."""
    return DistributedError(
        f"The replicas differ after step {step}: parameter {name!r} is not the same on "
        + " and on ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in groups),
        "replicas that start with the same weights and apply the same gradients stay bit-identical, so other code has "
        "changed this parameter on some ranks. Known causes are nn.Embedding(max_norm=...), a module checkpointed "
        "twice with use_reentrant=True under plain DDP, a graph that changes under static_graph=True, and code that "
        "writes to the parameter depending on the rank or the rank's data",
        "find the code that writes to the parameter; ReplicaCheck(every_n_steps=1) shows the first step at which it "
        "differs",
    )


def _local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's shard, and a number that is the same on all ranks that hold the same shard."""
    # isinstance would need an import of DTensor, which is slow.
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, 0
    sharded: Any = tensor
    coordinate, shard = mesh.get_coordinate(), 0
    for dimension, placement in enumerate(sharded.placements):
        if not placement.is_replicate():
            shard = shard * mesh.size(dimension) + coordinate[dimension]
    return sharded.to_local(), shard
