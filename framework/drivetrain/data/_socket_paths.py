"""Workers hand their tensors over through sockets, whose paths the system cuts short: refused before a run hangs."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import sys
import tempfile

import torch.multiprocessing

from drivetrain.errors import ConfigurationError

_LONGEST = 107 if sys.platform == "linux" else 103  # bytes of a socket's path: `sun_path`, less the zero at its end
_BELOW = len("/pymp-xxxxxxxx") + len("/listener-xxxxxxxx")  # what multiprocessing puts below the temporary folder


def check_temporary_folder(num_workers: int) -> None:
    """Refuse a temporary folder in which ``num_workers`` could make no socket.

    Each worker would print ``AF_UNIX path too long`` and go on, and the run would wait for its batches for ever.

    Raises:
        ConfigurationError: names the folder.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    if hasattr(multiprocessing.util, "_get_base_temp_dir"):
        return  # a Python that looks for a shorter one by itself
    own = getattr(multiprocessing.process.current_process(), "_config", {}).get("tempdir")
    folder = os.path.dirname(own) if own else tempfile.gettempdir()  # workers share what is there already
    length = len(os.fsencode(folder))
    if length + _BELOW > _LONGEST:
        raise ConfigurationError(
            f"num_workers={num_workers} with temporary files in {folder!r}, a path of {length} bytes.",
            f"workers hand over their tensors through sockets below it, whose paths may have {_LONGEST} bytes in all: "
            "the run would wait for the first batch for ever.",
            f"set TMPDIR to a folder whose path has at most {_LONGEST - _BELOW} bytes, such as /tmp, before Python "
            "starts; or num_workers=0.",
        )
