"""The files of a checkpoint: safetensors and JSON, no pickle. Knows nothing of modules or runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.errors import CheckpointError

FORMAT = 0
"""Of the plain layout that stands in until the sharded one comes."""

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.safetensors", "manifest.json"

_TENSOR = "__tensor__"
_SPECIAL = "__special__"


@dataclass(slots=True)
class CheckpointFiles:
    """What a checkpoint holds.

    Attributes:
        weights: by parameter name.
        aliases: names that are tied to another: ``{tied: first}``.
        manifest: progress, hyper-parameters and everything else that is no weight, tensors included.
    """

    weights: dict[str, torch.Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def all_weights(self) -> dict[str, torch.Tensor]:
        """The weights with tied names filled in."""
        return {**self.weights, **{tied: self.weights[first] for tied, first in self.aliases.items()}}


def untied(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a state dict into one tensor for each storage, and the names of the others."""
    first: dict[Any, str] = {}
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.storage_offset())
        known = first.setdefault(key, name) if tensor.numel() else name
        if known == name:
            weights[name] = tensor
        else:
            aliases[name] = known
    return weights, aliases


def write_files(path: str, files: CheckpointFiles) -> None:
    """Write a checkpoint directory; the manifest comes last and commits it.

    Raises:
        CheckpointError: it could not be written, or holds what is neither JSON-able nor a tensor.
    """
    # Imported here: they are wanted at a save only, and importing fsspec costs time.
    import fsspec
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    document = {"format": FORMAT, "aliases": files.aliases, **_encode(files.manifest, tensors, "")}
    text = json.dumps(document, indent=1, allow_nan=False)
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
        filesystem.makedirs(root, exist_ok=True)
        if filesystem.exists(f"{root}/{MANIFEST}"):
            filesystem.rm(f"{root}/{MANIFEST}")
        for name, content in (
            (WEIGHTS, save(_plain(files.weights))),
            (STATE, save(_plain(tensors))),
            (MANIFEST, text.encode()),
        ):
            with filesystem.open(f"{root}/{name}", "wb") as stream:
                stream.write(content)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path!r} could not be written: {error}.",
            "",
            "check the path, its permissions and the space.",
        ) from error


def read_files(path: str) -> CheckpointFiles:
    """Read a checkpoint directory.

    Raises:
        CheckpointError: there is none, it is not whole, or it is of another format.
    """
    import fsspec
    from safetensors.torch import load

    filesystem, root = fsspec.core.url_to_fs(path)
    if not filesystem.exists(root):
        raise CheckpointError(f"There is no checkpoint at {path!r}.", "nothing is there.", "check the path.")
    contents = {}
    for name in (MANIFEST, WEIGHTS, STATE):
        try:
            with filesystem.open(f"{root}/{name}", "rb") as stream:
                contents[name] = stream.read()
        except OSError as error:
            raise CheckpointError(
                f"{path!r} is no whole checkpoint: {name} cannot be read.",
                "a checkpoint is a directory whose manifest is written last.",
                "check the path, or take an earlier checkpoint.",
            ) from error
    document = json.loads(contents[MANIFEST])
    if document.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path!r} is of another format.", "", f"this version reads format {FORMAT}.")
    aliases = document.pop("aliases")
    return CheckpointFiles(load(contents[WEIGHTS]), aliases, _decode(document, load(contents[STATE])))


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Turn a value into JSON, tensors set aside; what JSON cannot tell apart is marked, so that it comes back equal."""
    if isinstance(value, torch.Tensor):
        tensors[where] = value
        return {_TENSOR: where}
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {_SPECIAL: "float", "value": repr(value)}
    if isinstance(value, tuple):
        return {_SPECIAL: "tuple", "value": [_encode(part, tensors, f"{where}.{i}") for i, part in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(part, tensors, f"{where}.{i}") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _encode(part, tensors, f"{where}.{key}") for key, part in value.items()}
        pairs = [
            [_encode(key, tensors, f"{where}.key{i}"), _encode(part, tensors, f"{where}.{i}")]
            for i, (key, part) in enumerate(value.items())
        ]
        return {_SPECIAL: "dict", "value": pairs}
    raise CheckpointError(
        f"A checkpoint cannot hold {where.lstrip('.')!r}, a {type(value).__name__}.",
        "it holds JSON-able values and tensors, so that loading one can run no code.",
        "save numbers, strings, lists, dicts or tensors.",
    )


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    kind = value.get(_SPECIAL)
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_decode(part, tensors) for part in value["value"])
    if kind == "dict":
        return {_decode(key, tensors): _decode(part, tensors) for key, part in value["value"]}
    return {key: _decode(part, tensors) for key, part in value.items()}
