"""What tells the data of one prediction from another's, without reading it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.sampler import BatchSampler

from drivetrain.data._order_fingerprint import digest_of_batch, subset_fingerprint
from drivetrain.data._samplers import len_or_none


def facts_of(loader: Any) -> dict[str, Any]:
    """Return what is known of a loader's data and its order, as JSON has it."""
    data = getattr(loader, "dataset", loader)
    facts: dict[str, Any] = {
        "class": class_name(data),
        "samples": len_or_none(data),
        "subset": subset_fingerprint(data),
    }
    if isinstance(loader, DataLoader):
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        # Predicted in the order of the data set, both of them.
        plain = type(inner) in (SequentialSampler, RandomSampler) and not getattr(inner, "replacement", False)
        facts["order"] = "of the data set" if plain else class_name(inner)
    if isinstance(data, TensorDataset) and len(data):
        facts["digest of some samples"] = digest_of_batch(
            [data[index] for index in sorted({0, len(data) // 2, len(data) - 1})]
        )
    return facts


def class_name(one: object) -> str:
    """Return a class's name by which a later run knows it again."""
    # A script's own is called by its name, for it may be imported the next time.
    kind = type(one)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"
