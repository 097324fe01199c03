"""ReplicaCheck: checks that all replicas of the module are bit-identical."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain._config.argument_checks import check_count, check_types
from drivetrain._distributed.checksum import checksums
from drivetrain._distributed.control_plane import ControlPlane, check_ranks_agree, digest_of
from drivetrain.callback import Callback
from drivetrain.errors import DistributedError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

# Layers whose running statistics differ between ranks until DDP broadcasts those of rank 0 at the start of a forward
# pass.
_LOCAL_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class ReplicaCheck(Callback):
    """Compares checksums of all parameters and buffers between ranks, and raises an error if replicas differ.

    Replicas that start with the same weights and apply the same gradients stay bit-identical. If they diverge, every
    rank trains a different model, although the loss looks normal. The check runs at the start of
    training, every ``every_n_steps`` steps and at the end of training. It costs one pass over the weights and one small
    collective.

    Sharded parameters are compared between ranks that hold the same shard. Running statistics of batch and instance
    normalization are not compared, because they depend on each rank's data until the strategy broadcasts those of
    rank 0.

    Args:
        every_n_steps: optimizer steps between two checks.
        buffers: whether to also compare buffers.
        ignore: names of parameters and buffers that may differ, with ``*`` as a wildcard.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1.
        DistributedError: on every rank, if replicas differ. The message names the first parameter or buffer that
            differs, and the ranks.
    """

    priority = 90  # before callbacks that save or decide

    _key_arguments = ("every_n_steps", "buffers", "ignore")

    def __init__(self, every_n_steps: int = 100, buffers: bool = True, ignore: Sequence[str] = ()) -> None:
        check_types(ReplicaCheck, locals())
        meaning = "the number of optimizer steps between two checks"
        check_count("ReplicaCheck", "every_n_steps", every_n_steps, 1, meaning)
        self.every_n_steps = every_n_steps
        self.buffers = buffers
        self.ignore = tuple(ignore)
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
        self._last_checked_step = trainer.global_step
        control = trainer.strategy.control
        if control.world_size > 1:
            compare_replicas(control, self._tensors_to_compare(module), f"after step {trainer.global_step}")

    def _tensors_to_compare(self, module: nn.Module) -> dict[str, Tensor]:
        tensors: dict[str, tuple[str, Tensor]] = {f"parameter {n!r}": (n, p) for n, p in module.named_parameters()}
        if self.buffers:
            local = {
                f"{prefix}.{name}" if prefix else name
                for prefix, child in module.named_modules()
                if isinstance(child, _LOCAL_STATISTICS)
                for name, _ in child.named_buffers(recurse=False)
            }
            tensors |= {f"buffer {n!r}": (n, tensor) for n, tensor in module.named_buffers() if n not in local}
        return {
            label: tensor
            for label, (name, tensor) in tensors.items()
            if not any(fnmatchcase(name, pattern) for pattern in self.ignore)
        }


def compare_replicas(control: ControlPlane, tensors: dict[str, Tensor], when: str) -> None:
    """Compare ``tensors`` between all ranks, bit by bit. A collective operation.

    Args:
        control: the control plane.
        tensors: the tensors, by labels for the error message. DTensors are compared between ranks with the same shard.
        when: text for the error message, such as "after step 3".

    Raises:
        DistributedError: on every rank, if a tensor differs or the ranks pass different labels.
    """
    labels = list(tensors)
    check_ranks_agree(  # with different labels, the next collective would hang or mix up tensors
        control,
        {**dict.fromkeys(labels, f"held {when}"), "order of parameters and buffers": digest_of(labels)},
        "replicas are compared name by name",
        "register the same parameters and buffers on every rank",
    )
    parts = [_local_part(tensor) for tensor in tensors.values()]
    local = torch.cat([checksums([part for part, _ in parts]), torch.tensor([shard for _, shard in parts])])
    gathered = control.all_gather(local)
    sums, shards = gathered[:, : len(labels)], gathered[:, len(labels) :]
    if not shards.any() and bool((sums == sums[0]).all()):
        return
    differing: dict[str, dict[int, list[int]]] = {}
    for index, label in enumerate(labels):
        copies: dict[int, dict[int, list[int]]] = {}  # the ranks of each shard, by the checksums of their copies
        for rank, (shard, checksum) in enumerate(zip(shards[:, index].tolist(), sums[:, index].tolist(), strict=True)):
            copies.setdefault(shard, {}).setdefault(checksum, []).append(rank)
        for ranks_by_checksum in copies.values():
            if len(ranks_by_checksum) > 1:
                differing.setdefault(label, ranks_by_checksum)
    if differing:
        label, groups = next(iter(differing.items()))
        raise DistributedError(
            f"The replicas differ {when}: {label} is not the same on {_format_groups(groups)}"
            + (f" (the first of {len(differing)} that differ)" if len(differing) > 1 else ""),
            "replicas that start with the same weights and apply the same gradients stay bit-identical, so other code "
            "has changed this tensor on some ranks. Known causes are nn.Embedding(max_norm=...), a module checkpointed "
            "twice with use_reentrant=True under plain DDP, a graph that changes under static_graph=True, and code "
            "that writes to the tensor depending on the rank or the rank's data",
            "find the code that writes to the tensor; ReplicaCheck(every_n_steps=1) shows the first step at which it "
            "differs. If it is meant to differ between ranks, use ReplicaCheck(ignore=[...])",
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


def _format_groups(groups: dict[int, list[int]]) -> str:
    # The largest group comes first, so that the deviating ranks come last.
    ordered = sorted(groups.values(), key=len, reverse=True)
    return " and on ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in ordered)
