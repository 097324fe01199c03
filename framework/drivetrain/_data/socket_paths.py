"""Checks that workers can create sockets in the temporary folder; if they cannot, a run would hang."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import sys
import tempfile

import torch.multiprocessing

from drivetrain.errors import ConfigurationError

# Maximum number of bytes of a socket's path: the size of `sun_path` without the final zero byte.
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
# Number of bytes that multiprocessing appends to the temporary folder's path.
_SUFFIX_LENGTH = len("/pymp-xxxxxxxx") + len("/listener-xxxxxxxx")


def check_temporary_folder(num_workers: int) -> None:
    """Check that the temporary folder's path leaves room for the workers' socket names.

    Otherwise each worker would print ``AF_UNIX path too long``, and the run would wait for its batches forever.

    Args:
        num_workers: the number of workers, for the error.

    Raises:
        ConfigurationError: the path is too long.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    if hasattr(multiprocessing.util, "_get_base_temp_dir"):
        return  # This version of Python chooses another folder if the path is too long.
    process_folder = getattr(multiprocessing.process.current_process(), "_config", {}).get("tempdir")
    folder = os.path.dirname(process_folder) if process_folder else tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length + _SUFFIX_LENGTH > _MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"num_workers={num_workers} is not possible with temporary files in {folder!r}, a path of {length} bytes.",
            f"workers send tensors through sockets in that folder, whose paths may have at most {_MAX_SOCKET_PATH} "
            "bytes: the run would wait for the first batch forever.",
            f"set TMPDIR to a folder whose path has at most {_MAX_SOCKET_PATH - _SUFFIX_LENGTH} bytes, such as /tmp, "
            "before Python starts, or use num_workers=0.",
        )
