"""Refuses embeddings that modify their weights in the forward, since replicas would diverge."""

from __future__ import annotations

from torch import nn

from drivetrain.errors import ConfigurationError


def refuse_embedding_max_norm(module: nn.Module, world_size: int) -> None:
    """Refuse ``nn.Embedding(max_norm=...)`` on several ranks.

    Raises:
        ConfigurationError: the module contains such an embedding, which the message names.
    """
    if world_size == 1:
        return
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            raise ConfigurationError(
                f"{name!r} is an {type(child).__name__} with max_norm={child.max_norm}, on {world_size} ranks.",
                "such a layer rewrites the rows that this rank looks up, so the replicas would silently diverge.",
                "remove max_norm, and renormalize all rows in on_train_batch_end, on every rank.",
            )
