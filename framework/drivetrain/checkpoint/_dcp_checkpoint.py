"""Reads folders of `torch.distributed.checkpoint` without executing code from them.

The ``.metadata`` file of such a folder is a pickle. A restricted unpickler replaces DCP's classes with placeholders and
rejects all other classes except for a few harmless ones, so that unpickling runs no code from the file.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint._nesting import nest_of
from drivetrain.errors import CheckpointError


def is_dcp(folder: Path) -> bool:
    """Return whether a folder looks like a DCP checkpoint."""
    return (folder / ".metadata").is_file()


def read_dcp(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return every tensor of a DCP checkpoint by name, unsharded, and the nest of each name.

    Entries that are not tensors are skipped.

    Raises:
        CheckpointError: the folder is damaged, was written with extensions, or its metadata refers to classes that are
            not DCP's.
    """
    try:
        with open(folder / ".metadata", "rb") as stream:
            metadata = _Unpickler(stream).load()
        descriptions, stored_chunks = (
            metadata.state["state_dict_metadata"],
            _storage_by_offset(metadata.state["storage_data"]),
        )
        tensors = {
            name: _read_tensor(folder, name, entry.state, stored_chunks)
            for name, entry in descriptions.items()
            if "chunks" in (entry.state or {})
        }
        paths = metadata.state.get("planner_data") or {}  # the keys of the nested dicts that were saved
        return tensors, {name: nest_of(name, paths.get(name)) for name in tensors}
    except CheckpointError:
        raise
    except Exception as error:
        raise _unreadable(folder, f"{type(error).__name__}: {error}") from error


def _unreadable(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{str(folder)!r} cannot be read as a folder of torch.distributed.checkpoint: {problem}.",
        "its metadata is a pickle, in which only DCP's own classes are accepted.",
        "if you trust the folder, load it with torch.distributed.checkpoint and save the state dict with safetensors.",
    )


class _Placeholder:
    """Replaces an object of a DCP class. It stores the object's state and does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _layout(*name: Any) -> None:
    """Replaces `torch.serialization._get_layout`. The result is not used, because all layouts are strided."""


_DCP_CLASSES = {
    *{"ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"},
    *{"Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _DCP_CLASSES:
            return _Placeholder
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _Placeholder
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath", "WindowsPath"):
            return _Placeholder
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        attribute = getattr(torch, name, None) if module == "torch" else None
        if isinstance(attribute, torch.dtype):
            return attribute
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}")


def _storage_by_offset(storage_data: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    return {
        (index.state["fqn"], tuple(index.state["offset"] or ())): info.state
        for index, info in _tensor_entries(storage_data)
    }


def _tensor_entries(storage_data: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    # Entries that are not tensors have no offset.
    for index, info in storage_data.items():
        if index.state.get("offset") is not None:
            yield index, info


def _read_tensor(
    folder: Path,
    name: str,
    description: dict[str, Any],
    stored_chunks: dict[tuple[str, tuple[int, ...]], dict[str, Any]],
) -> torch.Tensor:
    dtype = description["properties"].state[0]
    full_tensor = torch.empty(tuple(description["size"]), dtype=dtype)
    elements_read = 0
    for chunk in description["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        chunk_values = _read_chunk(folder, stored_chunks[name, offsets])
        if tuple(chunk_values.shape) != sizes or chunk_values.dtype != dtype:
            raise _unreadable(folder, f"{name!r} has a part of shape {tuple(chunk_values.shape)} instead of {sizes}")
        full_tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = (
            chunk_values
        )
        elements_read += chunk_values.numel()
    if elements_read < full_tensor.numel():
        raise _unreadable(folder, f"{name!r} has {full_tensor.numel()} elements, of which {elements_read} are stored")
    return full_tensor


def _read_chunk(folder: Path, info: dict[str, Any]) -> torch.Tensor:
    name = info["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise _unreadable(folder, f"it points to {name!r}")
    if info.get("transform_descriptors"):
        raise _unreadable(folder, f"its files were transformed by {info['transform_descriptors']}")
    with open(folder / name, "rb") as stream:
        stream.seek(info["offset"])
        content = io.BytesIO(stream.read(info["length"]))
    part: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
    return part
