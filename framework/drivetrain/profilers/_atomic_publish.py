"""Files of a profiler, published in one step: whoever looks finds a whole file or none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.runs._directory import make_directory


def publish(folder: str, name: str, content: bytes | Path) -> str:
    """Write a file, in place of one of the same name; return its path or URL.

    Args:
        folder: a path or URL, made if it is not there.
        name: of the file.
        content: its bytes, or a local file with them.

    Raises:
        OSError: the storage refuses.
    """
    path = child(folder, name)
    make_directory(path.rpartition("/")[0])  # a name may have folders of its own
    filesystem, root = filesystem_of(path)
    if filesystem is not None:  # an object store shows whole objects only
        if isinstance(content, Path):
            filesystem.put_file(str(content), root)
        else:
            filesystem.pipe_file(root, content)
        return path
    beside = f"{root}.{os.urandom(4).hex()}.new"
    try:
        with open(beside, "wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    while part := source.read(2**20):
                        file.write(part)
            else:
                file.write(content)
        os.replace(beside, root)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    return path
