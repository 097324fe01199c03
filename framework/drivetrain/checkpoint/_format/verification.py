"""What is wrong with a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from drivetrain.checkpoint._format.checkpoint_reader import Checkpoint, load
from drivetrain.checkpoint._format.checksums import block_count, check_digest
from drivetrain.checkpoint._format.documents import loads
from drivetrain.checkpoint._format.manifest import Part
from drivetrain.checkpoint._format.parallel_io import map_in_threads
from drivetrain.checkpoint._format.tensor_file import misaligned
from drivetrain.checkpoint._format.tensor_reader import ZeroBudget, damage_error, tensors_in
from drivetrain.errors import CheckpointError

_MAX_ZEROS = 2**34  # bytes: some ten seconds of SHA-256


def verify(path: str | os.PathLike[str], digest: str | None = None) -> list[str]:
    """Read all of a checkpoint and return what is wrong with it, a line for each file; nothing where it is whole.

    Compared are the checksums and, where it was written with ``digest="sha256"``, the digests.

    Args:
        path: a path or an fsspec URL.
        digest: "sha256" where every file must have its own; a checkpoint without any is whole else.

    Raises:
        ConfigurationError: no digest has this name.
    """
    check_digest("verify", digest)
    try:
        checkpoint = load(path)
    except CheckpointError as error:
        return [error.what]
    if digest is not None and not all(one.sha256 for one in checkpoint.manifest.files.values()):
        return [f"its files have no {digest}: it was written without digests"]
    zeros = ZeroBudget(_MAX_ZEROS)
    found = map_in_threads(
        lambda name: _describe_problem(checkpoint, name, zeros), checkpoint.manifest.files, checkpoint.readers
    )
    problems = [line for line in found if line is not None]
    return problems or _find_contradictions(checkpoint)


def _describe_problem(checkpoint: Checkpoint, name: str, zeros: ZeroBudget) -> str | None:
    try:
        file = checkpoint.file(name)
    except CheckpointError as error:
        # What the error says of the checkpoint is known; what it says of the file is wanted.
        return error.what.removeprefix(damage_error(checkpoint.path, "").what.removesuffix(".")).removesuffix(".")
    found, block = file.check(zeros), checkpoint.manifest.block_size
    if found.bad_blocks:
        blocks = f"{len(found.bad_blocks)} of {block_count(file.size, block)} blocks"
        return f"{name} was altered: {blocks}, the first at byte {found.bad_blocks[0] * block}"
    if found.digest_differs:
        return f"{name} is not what was written: its checksums are right, and its SHA-256 is another"
    if found.digest_skipped:
        return f"{name} consists of zeros that take no place on the disk, and its SHA-256 was not computed: too many"
    return None


def _find_contradictions(checkpoint: Checkpoint) -> list[str]:
    """What a whole file may still say that does not fit the others, or that a reader would trip over."""
    manifest = checkpoint.manifest
    optimizers = [partial(checkpoint.optimizer_document, index) for index in range(len(manifest.optimizers))]
    others = [manifest.state, *manifest.ranks]
    documents = [partial(checkpoint.document, part) for part in others if part is not None and part.document]
    problems = [line for part in manifest.parts() for line in _check_tensors(checkpoint, part)]
    if problems:
        return problems
    try:
        problems += _check_weights(checkpoint)
    except CheckpointError as error:
        problems.append(error.what)
    for look in (*optimizers, *documents):
        try:
            look()
        except CheckpointError as error:
            problems.append(error.what)
    return problems


def _check_weights(checkpoint: Checkpoint) -> list[str]:
    weights = checkpoint.weights()
    aliases = checkpoint.manifest.aliases
    return [f"{tied} is tied to {first}, which is not there" for tied, first in aliases.items() if first not in weights]


def _check_tensors(checkpoint: Checkpoint, part: Part) -> Iterator[str]:
    """What is wrong with the tensors of a part, and with their index."""
    try:
        for name in part.tensors:
            odd = misaligned(source.entry for source in tensors_in(checkpoint.file(name)).values())
            if odd is not None:
                yield f"{name}: {odd.name!r} begins at byte {odd.begin}, no multiple of its element's size"
        sources = checkpoint.tensors(part)
        if part.index is not None:
            file = checkpoint.file(part.index)
            index = loads(file.read(0, file.size), part.index)
            said = index.get("weight_map") if isinstance(index, dict) else None
            if said != {name: source.file.name for name, source in sources.items()}:
                yield f"{part.index} does not say where the tensors are"
    except CheckpointError as error:
        yield error.what
