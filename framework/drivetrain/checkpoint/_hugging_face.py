"""Writes a checkpoint's weights in the layout of Hugging Face's ``save_pretrained``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain._format import CheckpointReader, load
from drivetrain._format.tensor_reader import TensorSource
from drivetrain._storage.paths import folder_at
from drivetrain.checkpoint.averaged_weights import evaluated_weights
from drivetrain.checkpoint.consolidation import create_file, write_tensors
from drivetrain.errors import CheckpointError, listed, nearest

Sources = Mapping[str, TensorSource]

_WEIGHTS_FILE_NAME = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|index\.json)")
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", re.IGNORECASE)


def write_pretrained(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefix: str = "",
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_size: int | str = "50GB",
    averaged: bool | None = None,
) -> str:
    """Convert a checkpoint as `convert` does with ``to="hf"``; return the target folder."""
    limit, target = _parse_size(max_shard_size), os.fspath(out).rstrip("/")
    if not target:  # an empty target would write to the root of the file system
        raise CheckpointError(f"out={os.fspath(out)!r} does not name a folder.", "", "give the folder to write.")
    checkpoint = load(path)
    name, description = _select_model(checkpoint, prefix, config)
    if description.get("adapters"):
        raise CheckpointError(
            f"The model {name!r} in {checkpoint.path!r} has PEFT adapters.",
            "PEFT chooses which tensors the files of an adapter hold, and converts some of them.",
            "load it with TrainModule.load_from_checkpoint(path), and call the model's save_pretrained.",
        )
    # If the configuration disables tying, `from_pretrained` would not initialize tied names that are not stored.
    untied = description.get("config", {}).get("tie_word_embeddings") is False
    sources = _model_tensors(checkpoint, name, averaged, with_tied=untied)
    _check_no_weights(target)
    _check_complete(checkpoint, name)
    dtype = next(
        (str(source.dtype).partition(".")[2] for source in sources.values() if source.dtype.is_floating_point), None
    )
    settings = {**description["config"], **({} if dtype is None else {"dtype": dtype})}
    _write_weights(target, sources, limit)
    if description.get("generation_config"):
        _write_json(f"{target}/generation_config.json", description["generation_config"])
    _write_json(f"{target}/config.json", settings)
    return target


# Selection of the model in the checkpoint


def _select_model(checkpoint: CheckpointReader, prefix: str, config: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name that the model to convert has in the module, and its description from the manifest."""
    descriptions, name = checkpoint.manifest.metadata.pretrained, prefix.rstrip(".")
    if not prefix and len(descriptions) == 1:
        (name,) = descriptions
    elif not prefix and (descriptions or config is None):
        reason = (
            f"it holds several: {listed(sorted(descriptions))}" if descriptions else "it has no model configuration"
        )
        raise CheckpointError(
            f"It is unclear which Hugging Face model in {checkpoint.path!r} to convert: {reason}.",
            "a checkpoint stores the configuration of each model that is an attribute of the module.",
            'name the attribute, prefix="model." (--prefix model.); if the checkpoint has no configuration, pass '
            'config="path/to/config.json" (--config) as well.',
        )
    description = descriptions.get(name, {})
    if config is not None:
        return name, {**description, "config": _read_config(config)}
    if not description:
        raise CheckpointError(
            f"{checkpoint.path!r} has no configuration of {prefix!r}.{nearest(name, descriptions)}",
            f"it has the configuration of {listed(sorted(descriptions)) or 'no model'}.",
            'correct the prefix, or pass config="path/to/config.json" (--config).',
        )
    return name, description


def _read_config(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"config={str(config)!r} cannot be read: {error}.",
            "from_pretrained builds the model from this configuration.",
            "give a config.json, or the folder that it is in.",
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"config={str(config)!r} is not a JSON object.", "", "give a model's config.json.")
    return settings


def _model_tensors(
    checkpoint: CheckpointReader, name: str, averaged: bool | None, with_tied: bool
) -> dict[str, TensorSource]:
    """Return the tensors of one model by their names in that model.

    A tied tensor has only its first name, unless ``with_tied``.
    """
    prefix, aliases = f"{name}." if name else "", checkpoint.manifest.aliases
    tensors: dict[str, TensorSource] = {}
    stored_tensors = set()
    sources = evaluated_weights(checkpoint, averaged).sources()
    for full_name in sorted(sources, key=lambda name: name in aliases):
        first = aliases.get(full_name, full_name)
        if full_name.startswith(prefix) and (with_tied or first not in stored_tensors):
            stored_tensors.add(first)
            tensors[full_name.removeprefix(prefix)] = sources[full_name]
    if not tensors:
        raise CheckpointError(
            f"{checkpoint.path!r} has no weights whose names begin with {prefix!r}.",
            f"its first weights are {listed(list(sources)[:3])}.",
            "correct the prefix.",
        )
    return tensors


def _check_complete(checkpoint: CheckpointReader, name: str) -> None:
    missing = [weight for weight in checkpoint.manifest.metadata.base if weight.startswith(f"{name}." if name else "")]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path!r} lacks {listed(missing)}.",
            "it holds only trained parameters (trainable_only=True), and from_pretrained needs all weights.",
            "load it with TrainModule.load_from_checkpoint(path), and call the model's save_pretrained.",
        )


def _check_no_weights(target: str) -> None:
    """Raise if a folder already holds weights, because ``from_pretrained`` might load the old weights."""
    try:
        names = folder_at(target).names()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{target!r} cannot be read: {error}.", "", "give another folder.") from error
    existing = [name for name in names if _WEIGHTS_FILE_NAME.fullmatch(name)]
    if existing:
        raise CheckpointError(
            f"{target!r} already holds {listed(existing)}.",
            "from_pretrained would load whichever file it finds first.",
            "give another folder, or remove these files.",
        )


# Writing of the files of a model


def _write_weights(target: str, sources: Sources, limit: int) -> None:
    files = _split_by_size(sources, limit)
    if len(files) == 1:
        write_tensors(files[0], f"{target}/model.safetensors")
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        write_tensors(tensors, f"{target}/{name}")
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    sizes = {
        "total_parameters": sum(source.numel for source in sources.values()),
        "total_size": sum(source.nbytes for source in sources.values()),
    }
    _write_json(f"{target}/model.safetensors.index.json", {"metadata": sizes, "weight_map": weight_map})


def _split_by_size(sources: Sources, limit: int) -> list[dict[str, TensorSource]]:
    """Split tensors into files of at most ``limit`` bytes; a larger tensor gets a separate file."""
    files: list[dict[str, TensorSource]] = [{}]
    remaining = limit
    for name, source in sources.items():
        if files[-1] and source.nbytes > remaining:
            files.append({})
            remaining = limit
        files[-1][name] = source
        remaining -= source.nbytes
    return files


def _write_json(target: str, value: Any) -> None:
    with create_file(target) as sink:
        sink.writelines([(json.dumps(value, indent=2, sort_keys=True) + "\n").encode()])


def _parse_size(size: int | str) -> int:
    """Return a size in bytes; ``"5GB"`` means 5 * 10**9, as in transformers."""
    match = _SIZE_PATTERN.fullmatch(size.strip()) if isinstance(size, str) else None
    number = int(float(match[1]) * _SIZE_UNITS[match[2].upper()]) if match else size
    if not isinstance(number, int) or number <= 0:
        raise CheckpointError(f"max_shard_size={size!r} is not a file size.", "", 'give bytes, or text such as "5GB".')
    return number
