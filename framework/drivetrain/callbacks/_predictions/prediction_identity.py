"""Identifies a prediction by its weights, module, precision and data, so that only the same prediction is resumed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.sampler import BatchSampler

from drivetrain._data.combined import CombinedLoader
from drivetrain._data.order_fingerprint import digest_of_batch, subset_fingerprint
from drivetrain._data.samplers import len_or_none
from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


def prediction_identity(trainer: RunContext, module: Any) -> dict[str, Any]:
    """Return JSON-serializable values that are equal for runs that make the same predictions. A collective operation.

    At most a few samples of the data are read.
    """
    return {
        "weights": _weights_digest(trainer.strategy),
        "module": _class_name(module),
        "precision": trainer.strategy.precision.name,
        "data": [_data_identity(loader) for loader in trainer.evaluated_loaders],
        "limit": repr(trainer.limit_predict_batches),
        "use_distributed_sampler": trainer.use_distributed_sampler,
        "number of ranks": trainer.strategy.data_world_size,
    }


def _weights_digest(strategy: Strategy) -> str:
    """Return a digest of the exact values of all parameters and persistent buffers.

    A collective operation. Each rank computes position-dependent checksums of its shards. Only one number per tensor is
    gathered.

    Args:
        strategy: the strategy that has set up the module.
    """
    headers, sums = [], []
    for name, value in sorted(strategy.model_state().items()):
        shard = strategy.shard_of(value)
        headers.append(f"{name} {tuple(shard.shape)} {shard.dtype}")
        sums.append(checksum_share(shard, strategy.rank))
    total = strategy.control.all_gather(stack_on_cpu(sums)).sum(0).tolist()
    return hashlib.blake2b(repr((headers, total)).encode(), digest_size=16).hexdigest()


def _data_identity(loader: Any) -> dict[str, Any]:
    """Return JSON-serializable values that identify a loader's data, the order of the data and its batches."""
    data = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    identity: dict[str, Any] = {
        "class": _class_name(data),
        "samples": len_or_none(data),
        "subset": subset_fingerprint(data),
        "batch size": getattr(loader if batch_sampler is None else batch_sampler, "batch_size", None),
    }
    if isinstance(loader, CombinedLoader):
        identity |= {"mode": loader.mode, "loaders": [_data_identity(part) for part in loader.flattened]}
    if isinstance(loader, DataLoader):
        sampler: Any = loader.sampler if batch_sampler is None else batch_sampler
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        # With either of these samplers, predict uses the order of the dataset.
        draws_once = not getattr(inner, "replacement", False)
        uses_dataset_order = type(inner) in (SequentialSampler, RandomSampler) and draws_once
        identity["order"] = "of the data set" if uses_dataset_order else _class_name(inner)
        identity["drawn samples"] = len_or_none(inner)
    if isinstance(data, TensorDataset) and len(data):
        identity["digest of some samples"] = digest_of_batch(
            [data[index] for index in sorted({0, len(data) // 2, len(data) - 1})]
        )
    return identity


def _class_name(instance: object) -> str:
    """Return the name of an object's class, by which a later run recognizes it."""
    # The module name of a class in the script is omitted, because it differs if the next run imports the script.
    cls = type(instance)
    return cls.__qualname__ if cls.__module__ == "__main__" else f"{cls.__module__}.{cls.__qualname__}"
