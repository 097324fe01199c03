"""replace_file: write a whole file atomically, at a local path or a URL."""

from __future__ import annotations

import os
from contextlib import suppress

from drivetrain.checkpoint._format.folder import as_os_errors
from drivetrain.checkpoint._format.storage import filesystem_of


def replace_file(path: str, content: bytes) -> None:
    """Write a file, so that a reader gets either the previous content or the new content.

    Raises:
        OSError: the file cannot be written.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is not None:  # object stores write atomically
        with as_os_errors():
            filesystem.pipe_file(root, content)
        return
    temporary = f"{root}.{os.urandom(4).hex()}.new"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine could leave an empty file
        os.replace(temporary, root)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
