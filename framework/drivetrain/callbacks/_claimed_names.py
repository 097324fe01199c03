"""Chooses free names for checkpoints, and reserves them until the checkpoints are complete."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain.checkpoint._folders import claim_name, is_checkpoint_at
from drivetrain.checkpoint._retention import KeptCheckpoint


class ClaimedNames:
    """The names that this process has reserved in folders of checkpoints."""

    def __init__(self) -> None:
        self._releases: dict[str, Callable[[], None]] = {}

    def claim(
        self, control: ControlPlane, folder: str, name: str, to_remove: Sequence[KeptCheckpoint]
    ) -> tuple[str, str]:
        """Return a name and an identifier for a new checkpoint, chosen by rank 0. Collective.

        Args:
            control: the control plane.
            folder: the folder of the checkpoint.
            name: the preferred name, to which a version is appended if the name is taken.
            to_remove: the only checkpoints that may be overwritten.
        """
        chosen: tuple[str, str] = control.broadcast_object(
            self._claim(folder, name, to_remove) if control.rank == 0 else None
        )
        return chosen[0], chosen[1]

    def _claim(self, folder: str, name: str, to_remove: Sequence[KeptCheckpoint]) -> tuple[str, str]:
        def may_overwrite(existing: str) -> bool:
            with suppress(OSError):  # If the storage fails, another name is chosen.
                return any(
                    saved.name == existing and is_checkpoint_at(folder, existing, saved.identifier)
                    for saved in to_remove
                )
            return False

        name, release = claim_name(folder, name, may_overwrite)
        self._releases[name] = release
        return name, secrets.token_hex(16)

    def release(self, name: str) -> None:
        """Release a name, if it is reserved."""
        release = self._releases.pop(name, None)
        if release is not None:
            release()

    def release_all(self) -> None:
        """Release the names of checkpoints that were not completed."""
        for name in list(self._releases):
            self.release(name)
