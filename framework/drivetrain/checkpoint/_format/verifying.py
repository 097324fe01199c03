"""What is wrong with a checkpoint."""

from __future__ import annotations

import os

from drivetrain.checkpoint._format.reader import Checkpoint, load, side_by_side
from drivetrain.checkpoint._format.reading import damaged
from drivetrain.errors import CheckpointError


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read all of a checkpoint and return what is wrong with it, a line for each file; nothing where it is whole."""
    try:
        checkpoint = load(path)
    except CheckpointError as error:
        return [error.what]
    found = side_by_side(lambda name: _problem(checkpoint, name), checkpoint.manifest.files, checkpoint.readers)
    problems = [line for line in found if line is not None]
    return problems or _contradictions(checkpoint)


def _problem(checkpoint: Checkpoint, name: str) -> str | None:
    try:
        file = checkpoint.file(name)
    except CheckpointError as error:
        # What the error says of the checkpoint is known; what it says of the file is wanted.
        return error.what.removeprefix(damaged(checkpoint.path, "").what.removesuffix(".")).removesuffix(".")
    wrong = file.check()
    if not wrong:
        return None
    block = checkpoint.manifest.block_size
    return f"{name} was altered: {len(wrong)} of {-(-file.size // block)} blocks, the first at byte {wrong[0] * block}"


def _contradictions(checkpoint: Checkpoint) -> list[str]:
    """What a whole file may still say that does not fit the others."""
    problems = []
    try:
        weights = checkpoint.weights()
        for tied, first in checkpoint.manifest.aliases.items():
            if first not in weights:
                problems.append(f"{tied} is tied to {first}, which is not there")
        for index in range(len(checkpoint.manifest.optimizers)):
            checkpoint.optimizer_state(index)
        checkpoint.state()
        for rank in range(len(checkpoint.manifest.ranks)):
            checkpoint.rank_state(rank)
    except CheckpointError as error:
        problems.append(error.what)
    return problems
