"""Finding checkpoints that earlier runs wrote."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.checkpoint.folders import child, children
from drivetrain.checkpoint_format import Checkpoint, load
from drivetrain.errors import CheckpointError


def newest(folders: Iterable[str]) -> Checkpoint | None:
    """Return the checkpoint committed last among those that lie directly in ``folders``, or None.

    What is torn or of another kind is passed over, and so are those that hold weights alone: no run can go on from
    them.
    """
    found: list[Checkpoint] = []
    for folder in dict.fromkeys(folders):
        for name in children(folder):
            try:
                found.append(load(child(folder, name)))
            except CheckpointError:
                continue
    whole = [one for one in found if not one.weights_only]
    return max(whole, key=lambda one: (one.manifest.written, one.path), default=None)
