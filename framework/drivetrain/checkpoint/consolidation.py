"""Writes the weights of a checkpoint into a single safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from drivetrain._distributed.shards import Span
from drivetrain._format import CheckpointReader, load
from drivetrain._format.file_writer import file_writer
from drivetrain._format.tensor_file import header_of, in_file_order, row_ranges, specs_of
from drivetrain._format.tensor_reader import TensorSource
from drivetrain._runs.checkpoint_folders import is_taken
from drivetrain._storage.folder import Sink
from drivetrain._storage.paths import folder_at, split
from drivetrain.checkpoint.averaged_weights import evaluated_weights
from drivetrain.errors import CheckpointError, listed

_OTHER_FORMATS = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".h5", ".onnx", ".gguf"}
_BYTES_IN_MEMORY = 16 * 2**20  # number of bytes that are read into memory at a time, unless a single row is larger


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    averaged: bool | None = None,
    *,
    overwrite: bool = False,
) -> str:
    """Write the weights of a checkpoint into one file that `safetensors.torch.load_file` opens.

    A tied tensor is stored under one name, as in the checkpoint. Values that are not tensors (``_extra_state``) are
    left out.

    Args:
        path: the checkpoint's path or URL.
        out: path or URL of the file; if it does not end with ``.safetensors``, of a folder in which the file
            ``model.safetensors`` is written.
        averaged: True for the averages of the weights, False for the trained weights. None means those that the run
            evaluated with.
        overwrite: whether to replace the file if it exists.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks the averages or lacks the weights of its base model
            (``trainable_only``); or the file has the name of another format, exists already, or cannot be written.
    """
    target = _target_file(os.fspath(out))
    checkpoint = load(path)
    check_is_whole(checkpoint)
    if not overwrite:
        check_not_taken(target)
    sources = evaluated_weights(checkpoint, averaged).sources()
    write_tensors({name: sources[name] for name in sources if name not in checkpoint.manifest.aliases}, target)
    return target


def check_is_whole(checkpoint: CheckpointReader) -> None:
    """Raise if a checkpoint holds only the parameters that were trained."""
    if checkpoint.manifest.metadata.base:
        raise CheckpointError(
            f"{checkpoint.path!r} lacks {listed(list(checkpoint.manifest.metadata.base))}.",
            "it holds only trained parameters (trainable_only=True), and a model needs all weights.",
            "load it with TrainModule.load_from_checkpoint(path), and save the module's state_dict(); for the files of "
            "a PEFT adapter, call save_pretrained of the loaded module's model.",
        )


def check_not_taken(target: str) -> None:
    """Raise if there is a file at a path or URL."""
    if is_taken(target):
        raise CheckpointError(
            f"{target!r} exists already.",
            "another file would be lost.",
            "give another path, or overwrite=True (--overwrite) to consolidate.",
        )


def _target_file(out: str) -> str:
    stem, suffix = os.path.splitext(out)
    if suffix.lower() in _OTHER_FORMATS:
        raise CheckpointError(
            f"{out!r} has the name of a file of another format.",
            "consolidate writes a safetensors file; a name without .safetensors is that of a folder.",
            f"give {stem + '.safetensors'!r}, or the name of a folder.",
        )
    return out if suffix == ".safetensors" else f"{out.rstrip('/')}/model.safetensors"


def write_tensors(sources: Mapping[str, TensorSource], target: str) -> None:
    """Write tensors of a checkpoint as one safetensors file, under the names that are the keys of ``sources``.

    Raises:
        CheckpointError: a tensor is damaged, or the file cannot be written.
    """
    specs = in_file_order(specs_of(sources))
    with file_writer(create_file(target)) as writer:
        writer.write(header_of(specs))
        for spec in specs:
            for first, last in row_ranges(spec, _BYTES_IN_MEMORY):
                span = Span(first * spec.row_size, last * spec.row_size)
                values = sources[spec.name].read(span)
                with writer.memory(values.nbytes) as memory:
                    memory.copy_(values.view(torch.uint8))


@contextmanager
def create_file(target: str) -> Iterator[Sink]:
    """Yield a stream that writes the file ``target``. The file appears under this name only once it is complete.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path, name = split(target)
    folder = folder_at(path)
    try:
        folder.make()
        with folder.replace(name) as sink:
            yield sink
    except OSError as error:
        raise CheckpointError(
            f"{target!r} could not be written: {error}.", "", "check the path, its permissions and the free space."
        ) from error
