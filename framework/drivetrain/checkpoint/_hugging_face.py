"""Writes a checkpoint's weights in the layout of Hugging Face's ``save_pretrained``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from drivetrain._format import CheckpointReader, load
from drivetrain._format.tensor_reader import TensorSource
from drivetrain.checkpoint.averaged_weights import evaluated_weights
from drivetrain.checkpoint.consolidation import check_is_whole, check_not_taken, create_file, write_tensors
from drivetrain.errors import CheckpointError, listed


def write_pretrained(
    path: str | os.PathLike[str], out: str | os.PathLike[str], prefix: str = "", averaged: bool | None = None
) -> str:
    """Convert a checkpoint as `convert` does with ``to="hf"``; return the target folder."""
    target = os.fspath(out).rstrip("/")
    checkpoint = load(path)
    name, description = _select_model(checkpoint, prefix.rstrip("."))
    if "adapters" in description:
        raise CheckpointError(
            f"The model {name!r} in {checkpoint.path!r} has PEFT adapters.",
            "PEFT chooses which tensors the files of an adapter hold, and converts some of them.",
            "load it with TrainModule.load_from_checkpoint(path), and call the model's save_pretrained.",
        )
    check_is_whole(checkpoint)
    weights = f"{target}/model.safetensors"
    check_not_taken(weights)
    # If the configuration disables tying, `from_pretrained` would not initialize tied names that are not stored.
    untied = description["config"].get("tie_word_embeddings") is False
    sources = _model_tensors(checkpoint, name, averaged, with_tied=untied)
    dtypes = [str(source.dtype).partition(".")[2] for source in sources.values() if source.dtype.is_floating_point]
    write_tensors(sources, weights)
    if "generation_config" in description:
        _write_json(f"{target}/generation_config.json", description["generation_config"])
    _write_json(f"{target}/config.json", {**description["config"], **({"dtype": dtypes[0]} if dtypes else {})})
    return target


def _select_model(checkpoint: CheckpointReader, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name that the model to convert has in the module, and its description from the manifest."""
    models = checkpoint.manifest.metadata.pretrained
    if not name and len(models) == 1:
        (name,) = models
    if name not in models:
        raise CheckpointError(
            f"It is unclear which Hugging Face model in {checkpoint.path!r} to convert: "
            f"it has the configuration of {listed(sorted(models)) or 'no model'}.",
            "a checkpoint stores the configuration of each model that is an attribute of the module.",
            'name one of these attributes, prefix="model." (--prefix model.).',
        )
    return name, models[name]


def _model_tensors(
    checkpoint: CheckpointReader, name: str, averaged: bool | None, with_tied: bool
) -> dict[str, TensorSource]:
    """Return the tensors of one model by their names in that model.

    A tied tensor has only its first name, unless ``with_tied``.
    """
    prefix, aliases = f"{name}.", checkpoint.manifest.aliases
    tensors: dict[str, TensorSource] = {}
    stored_tensors = set()
    sources = evaluated_weights(checkpoint, averaged).sources()
    for full_name in sorted(sources, key=lambda name: name in aliases):
        first = aliases.get(full_name, full_name)
        if full_name.startswith(prefix) and (with_tied or first not in stored_tensors):
            stored_tensors.add(first)
            tensors[full_name.removeprefix(prefix)] = sources[full_name]
    return tensors


def _write_json(target: str, value: Any) -> None:
    with create_file(target) as sink:
        sink.write((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
