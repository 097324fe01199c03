"""Identifies the data of a prediction, reading at most a few samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.sampler import BatchSampler

from drivetrain.data._order_fingerprint import digest_of_batch, subset_fingerprint
from drivetrain.data._samplers import len_or_none
from drivetrain.data.combined import CombinedLoader


def data_identity(loader: Any) -> dict[str, Any]:
    """Return JSON-serializable values that identify a loader's data, the order of the data and its batches."""
    data = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    identity: dict[str, Any] = {
        "class": class_name(data),
        "samples": len_or_none(data),
        "subset": subset_fingerprint(data),
        "batch size": getattr(loader if batch_sampler is None else batch_sampler, "batch_size", None),
    }
    if isinstance(loader, CombinedLoader):
        identity |= {"mode": loader.mode, "loaders": [data_identity(part) for part in loader.flattened]}
    if isinstance(loader, DataLoader):
        sampler: Any = loader.sampler if batch_sampler is None else batch_sampler
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        # With either of these samplers, predict uses the order of the dataset.
        draws_once = not getattr(inner, "replacement", False)
        uses_dataset_order = type(inner) in (SequentialSampler, RandomSampler) and draws_once
        identity["order"] = "of the data set" if uses_dataset_order else class_name(inner)
        identity["drawn samples"] = len_or_none(inner)
    if isinstance(data, TensorDataset) and len(data):
        identity["digest of some samples"] = digest_of_batch(
            [data[index] for index in sorted({0, len(data) // 2, len(data) - 1})]
        )
    return identity


def class_name(instance: object) -> str:
    """Return the name of an object's class, by which a later run recognizes it."""
    # The module name of a class in the script is omitted, because it differs if the next run imports the script.
    cls = type(instance)
    return cls.__qualname__ if cls.__module__ == "__main__" else f"{cls.__module__}.{cls.__qualname__}"
