"""Whether a disk has room for a checkpoint, asked before anything of it is written."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.errors import CheckpointError

_PER_FILE = 4096  # bytes that a file's header, its last block and its line in the manifest may take beside its tensors


def check_disk_space(target: Path, needed: int, files: int = 0) -> None:
    """Refuse to begin what could not be ended.

    Args:
        target: where the checkpoint is to be; its parent exists.
        needed: bytes of all its tensors and documents, of all ranks.
        files: how many files there will be.

    Raises:
        CheckpointError: the disk has fewer bytes free.
    """
    free = free_bytes(target.parent)
    needed += files * _PER_FILE
    if free is not None and free < needed:
        raise CheckpointError(
            f"{str(target)!r} needs {needed:,} bytes, and {str(target.parent)!r} has {free:,} bytes free.",
            "a checkpoint is whole before an older one goes; nothing was written, and those that are there are whole",
            "make room, keep fewer (save_top_k, keep_last), save weights alone (save_weights_only=True), or save to "
            "another disk or an object store",
        )


def free_bytes(folder: Path) -> int | None:
    """Return how many bytes this process may still write to the disk of ``folder``; None where the disk does not tell.

    A quota is not seen: what it refuses fails while it is written.
    """
    disk = os.statvfs(folder)
    if disk.f_blocks == 0:
        return None
    reserved_too = os.geteuid() == 0
    return disk.f_frsize * (disk.f_bfree if reserved_too else disk.f_bavail)
