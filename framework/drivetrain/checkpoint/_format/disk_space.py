"""Checks free disk space before a checkpoint is written."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.errors import CheckpointError

_EXTRA_BYTES_PER_FILE = 4096  # for a file's header, partial last block and manifest entry


def check_disk_space(target: Path, needed: int, files: int = 0) -> None:
    """Raise if a checkpoint will not fit on the disk.

    Args:
        target: path of the checkpoint; its parent exists.
        needed: number of bytes of all tensors and documents of all ranks.
        files: number of files.

    Raises:
        CheckpointError: the disk does not have enough free space.
    """
    free = free_bytes(target.parent)
    needed += files * _EXTRA_BYTES_PER_FILE
    if free is not None and free < needed:
        raise CheckpointError(
            f"{str(target)!r} needs {needed:,} bytes, and {str(target.parent)!r} has {free:,} bytes free.",
            "an older checkpoint is removed only after the new one is complete; nothing was written",
            "free some space, keep fewer checkpoints (save_top_k, keep_last), save weights only "
            "(save_weights_only=True), or save to another disk or an object store",
        )


def free_bytes(folder: Path) -> int | None:
    """Return how many bytes this process may write to the disk of ``folder``; None if the disk does not report it.

    Quotas are not considered. A write that exceeds a quota fails.
    """
    disk = os.statvfs(folder)
    if disk.f_blocks == 0:
        return None
    is_root = os.geteuid() == 0
    return disk.f_frsize * (disk.f_bfree if is_root else disk.f_bavail)
