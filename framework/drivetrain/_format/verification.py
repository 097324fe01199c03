"""Verifies a whole checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from drivetrain._format.checkpoint_reader import CheckpointReader, load, map_in_threads
from drivetrain._format.documents import loads
from drivetrain._format.manifest import Part
from drivetrain._format.tensor_file import misaligned
from drivetrain._format.tensor_reader import tensors_in
from drivetrain.errors import CheckpointError


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read a whole checkpoint and return its problems, one line per damaged file; an empty list if it is intact.

    Files are compared with their checksums and, if the checkpoint was written with ``digest="sha256"``, with their
    digests.

    Args:
        path: a path or an fsspec URL.
    """
    try:
        checkpoint = load(path)
    except CheckpointError as error:
        return [error.what]
    lines = map_in_threads(
        lambda name: _describe_problem(checkpoint, name), checkpoint.manifest.files, checkpoint.readers
    )
    problems = [line for line in lines if line is not None]
    return problems or _find_contradictions(checkpoint)


def _describe_problem(checkpoint: CheckpointReader, name: str) -> str | None:
    try:
        return checkpoint.file(name).problem()
    except CheckpointError as error:
        return error.what


def _find_contradictions(checkpoint: CheckpointReader) -> list[str]:
    """Return the problems of files that match their checksums: contradictions, and content that cannot be read."""
    manifest = checkpoint.manifest
    optimizers = [partial(checkpoint.optimizer_document, index) for index in range(len(manifest.optimizers))]
    state_parts = [manifest.state, *manifest.ranks]
    documents = [partial(checkpoint.document, part) for part in state_parts if part is not None and part.document]
    problems = [line for part in manifest.parts() for line in _check_tensors(checkpoint, part)]
    if problems:
        return problems
    try:
        problems += _check_weights(checkpoint)
    except CheckpointError as error:
        problems.append(error.what)
    for read in (*optimizers, *documents):
        try:
            read()
        except CheckpointError as error:
            problems.append(error.what)
    return problems


def _check_weights(checkpoint: CheckpointReader) -> list[str]:
    weights = checkpoint.weights()
    aliases = checkpoint.manifest.aliases
    return [
        f"{tied} is tied to {first}, which does not exist" for tied, first in aliases.items() if first not in weights
    ]


def _check_tensors(checkpoint: CheckpointReader, part: Part) -> Iterator[str]:
    """Yield the problems of a part's tensors and of their index."""
    try:
        for name in part.tensors:
            entry = misaligned(source.entry for source in tensors_in(checkpoint.file(name)).values())
            if entry is not None:
                yield f"{name}: {entry.name!r} begins at byte {entry.begin}, which is no multiple of its element size"
        sources = checkpoint.tensors(part)
        if part.index is not None:
            file = checkpoint.file(part.index)
            index = loads(file.read(0, file.size), part.index)
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            if weight_map != {name: source.file.name for name, source in sources.items()}:
                yield f"{part.index} does not match the files of the tensors"
    except CheckpointError as error:
        yield error.what
