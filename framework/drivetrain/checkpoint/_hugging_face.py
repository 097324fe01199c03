"""A checkpoint's weights in the layout of Hugging Face's ``save_pretrained``, which ``from_pretrained`` opens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.checkpoint._format import Checkpoint, load
from drivetrain.checkpoint._format.folder import as_os_errors
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.checkpoint._format.tensor_reader import TensorSource
from drivetrain.checkpoint.consolidation import create_file, write_tensors
from drivetrain.errors import CheckpointError, listed, nearest

Sources = Mapping[str, TensorSource]

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|index\.json)")
_ADAPTER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,100}")
_KNOWN_ADAPTERS = frozenset(
    ("LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "LN_TUNING", "C3A", "MISS", "FOURIERFT", "TRAINABLE_TOKENS")
)
"""PEFT's kinds of adapters whose files hold the model's own tensors. Others compute theirs, or share some."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", re.IGNORECASE)


def write_pretrained(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefix: str = "",
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_size: int | str = "50GB",
) -> str:
    """Do what `convert` says of ``to="hf"``; return the folder."""
    limit, target = _parse_size(max_shard_size), os.fspath(out).rstrip("/")
    if not target:  # else the files' names would begin at the root of the file system
        raise CheckpointError(f"out={os.fspath(out)!r} names no folder.", "", "give the folder to write.")
    checkpoint = load(path)
    name, description = _select_model(checkpoint, prefix, config)
    # A model whose configuration does not tie them would leave what is not stored at its initial values.
    untied = description.get("config", {}).get("tie_word_embeddings") is False
    sources = _model_tensors(checkpoint, name, with_tied=untied)
    _check_no_weights(target)
    adapters = description.get("adapters")
    if adapters:
        for adapter, settings in adapters.items():
            folder = target if adapter == "default" or len(adapters) == 1 else f"{target}/{adapter}"
            _write_adapter(checkpoint, folder, adapter, settings, description, sources)
        return target
    _check_complete(checkpoint, name)
    dtype = next((str(one.dtype).partition(".")[2] for one in sources.values() if one.dtype.is_floating_point), None)
    settings = {**description["config"], **({} if dtype is None else {"dtype": dtype})}
    _write_weights(target, sources, limit)
    if description.get("generation_config"):
        _write_json(f"{target}/generation_config.json", description["generation_config"])
    _write_json(f"{target}/config.json", settings)
    return target


# Which model it is


def _select_model(checkpoint: Checkpoint, prefix: str, config: Any) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name in the module, and what is known of it."""
    known, name = checkpoint.manifest.metadata.pretrained, prefix.rstrip(".")
    if not prefix and len(known) == 1:
        (name,) = known
    elif not prefix and (known or config is None):
        held = f"it holds several: {listed(sorted(known))}" if known else "it has the configuration of none"
        raise CheckpointError(
            f"It is not known which model of Hugging Face's in {checkpoint.path!r} to convert: {held}.",
            "a checkpoint keeps the configuration of each that is an attribute of the module; those of earlier "
            "versions do not.",
            'name the attribute, prefix="model." (--prefix model.), and where the checkpoint knows no configuration '
            'config="path/to/config.json" (--config) as well.',
        )
    description = known.get(name, {})
    if config is not None:
        return name, {**description, "config": _read_config(config)}
    if not description:
        raise CheckpointError(
            f"{checkpoint.path!r} has no configuration of {prefix!r}.{nearest(name, known)}",
            f"it has those of {listed(sorted(known)) or 'no model'}.",
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
            "from_pretrained builds the model from it.",
            "give a config.json, or the folder that it is in.",
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"config={str(config)!r} holds no JSON object.", "", "give a model's config.json.")
    return settings


def _model_tensors(checkpoint: Checkpoint, name: str, with_tied: bool) -> dict[str, TensorSource]:
    """The tensors of one model by its own names; of tied ones all, or the stored (else first) one."""
    prefix, aliases = f"{name}." if name else "", checkpoint.manifest.aliases
    found: dict[str, TensorSource] = {}
    taken = set()
    every = checkpoint.weights().sources()
    for full in sorted(every, key=lambda one: one in aliases):
        first = aliases.get(full, full)
        if full.startswith(prefix) and (with_tied or first not in taken):
            taken.add(first)
            found[full.removeprefix(prefix)] = every[full]
    if not found:
        raise CheckpointError(
            f"{checkpoint.path!r} has no weights whose names begin with {prefix!r}.",
            f"the first that it has are {listed(list(every)[:3])}.",
            "correct the prefix.",
        )
    return found


def _check_complete(checkpoint: Checkpoint, name: str) -> None:
    lacking = [one for one in checkpoint.manifest.metadata.base if one.startswith(f"{name}." if name else "")]
    if lacking:
        raise CheckpointError(
            f"{checkpoint.path!r} lacks {listed(lacking)}.",
            "it holds what was trained (trainable_only=True), and from_pretrained needs all weights.",
            "load it into the module, TrainModule.load_from_checkpoint(path), and call save_pretrained of the model.",
        )


def _check_no_weights(target: str) -> None:
    """Refuse a folder with weights in it: ``from_pretrained`` would take whichever it looks for first."""
    filesystem, root = filesystem_of(target)
    try:
        with as_os_errors():
            if filesystem is None:
                names = os.listdir(root)
            else:
                filesystem.invalidate_cache()
                names = [one.rpartition("/")[2] for one in filesystem.ls(root, detail=False)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{target!r} cannot be read: {error}.", "", "give another folder.") from error
    there = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if there:
        raise CheckpointError(
            f"{target!r} has {listed(there)} in it.",
            "from_pretrained would take whichever of two files it looks for first.",
            "give another folder, or remove them if nobody needs them.",
        )


# Files


def _write_weights(target: str, sources: Sources, limit: int) -> None:
    files = _split_by_size(sources, limit)
    if len(files) == 1:
        _write_tensors(f"{target}/model.safetensors", files[0])
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, held in zip(names, files, strict=True):
        _write_tensors(f"{target}/{name}", held)
    places = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
    sizes = {
        "total_parameters": sum(one.spec.numel for one in sources.values()),
        "total_size": sum(one.spec.nbytes for one in sources.values()),
    }
    _write_json(f"{target}/model.safetensors.index.json", {"metadata": sizes, "weight_map": places})


def _split_by_size(sources: Sources, limit: int) -> list[dict[str, TensorSource]]:
    """Deal tensors to files of at most ``limit`` bytes; a larger one has a file of its own."""
    files: list[dict[str, TensorSource]] = [{}]
    room = limit
    for name, source in sources.items():
        if files[-1] and source.spec.nbytes > room:
            files.append({})
            room = limit
        files[-1][name] = source
        room -= source.spec.nbytes
    return files


def _write_adapter(
    checkpoint: Checkpoint, folder: str, adapter: str, settings: Any, description: Mapping[str, Any], sources: Sources
) -> None:
    """Write what PEFT's ``save_pretrained`` writes: the adapter's weights, its name left out of theirs."""
    if not _ADAPTER.fullmatch(adapter):  # it becomes a folder's name, and nothing may lead out of that one
        raise CheckpointError(
            f"{checkpoint.path!r} has an adapter {adapter!r}.", "that is no name of a folder.", "give it another one."
        )
    if str(settings.get("peft_type")) not in _KNOWN_ADAPTERS:
        raise CheckpointError(
            f"The adapter {adapter!r} in {checkpoint.path!r} is of the kind {settings.get('peft_type')!s}.",
            "the tensors in PEFT's files are not those of the model for this kind; convert writes "
            f"{', '.join(sorted(_KNOWN_ADAPTERS))}.",
            "load it into the module, TrainModule.load_from_checkpoint(path), and call save_pretrained of the model.",
        )
    held = {}
    biases = _trained_biases(sources, description["adapters"], settings)
    for name, source in sources.items():
        parts = name.split(".")
        if adapter in parts or name in biases:
            kept = [part for part in parts if part not in (adapter, "modules_to_save")]
            if kept[-2:] == ["lora_magnitude_vector", "weight"]:  # DoRA's, a parameter once, is stored as one
                del kept[-1]
            held[description.get("adapter_prefix", "") + ".".join(kept)] = source
    if not held:
        raise CheckpointError(
            f"{checkpoint.path!r} has no weights of the adapter {adapter!r}.",
            "PEFT keeps them under names that hold the adapter's.",
            "load it into the module, TrainModule.load_from_checkpoint(path), and call save_pretrained of the model.",
        )
    _write_tensors(f"{folder}/adapter_model.safetensors", held)
    _write_json(f"{folder}/adapter_config.json", {**settings, "inference_mode": True})


def _trained_biases(sources: Sources, adapters: Mapping[str, Any], settings: Mapping[str, Any]) -> set[str]:
    """Names of the base model's biases that were trained with a LoRA adapter, whose file has them too."""
    which = settings.get("bias", "none")
    own = [name for name in sources if adapters.keys().isdisjoint(name.split("."))]
    if which == "all":
        return {name for name in own if name.endswith("bias") and ".original_module." not in name}
    if which == "lora_only":
        layers = {name.partition("lora_")[0] for name in sources if "lora_" in name}
        return {name for name in own if name.removesuffix("base_layer.bias") in layers}
    return set()


def _write_tensors(target: str, sources: Sources) -> None:
    with create_file(target) as sink:
        write_tensors(sources, sink)


def _write_json(target: str, value: Any) -> None:
    with create_file(target) as sink:
        sink.writelines([(json.dumps(value, indent=2, sort_keys=True) + "\n").encode()])


def _parse_size(size: int | str) -> int:
    """Return a number of bytes: ``"5GB"`` is five thousand million, as in transformers."""
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = int(float(found[1]) * _UNITS[found[2].upper()]) if found else size
    if not isinstance(number, int) or number <= 0:
        raise CheckpointError(
            f"max_shard_size={size!r} is no size of a file.", "", 'give bytes, or text such as "5GB".'
        )
    return number
