"""Dumps torch's flight recorder, which holds the last collectives of this process.

Only this module uses the private bindings of the flight recorder.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable

# The binding for NCCL, which CUDA builds have, and then the binding for other backends.
_DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")


class FlightRecord:
    """Writes a rank's flight record to files.

    Attributes:
        folder: the folder for the files. With None, no files are written.
        pattern: a glob pattern for the files of all ranks, or None until this rank has written its file.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.folder: str | None = None
        self.pattern: str | None = None

    def write(self) -> None:
        """Write ``flight_rank_N``, which torch's tools read.

        Do nothing if there is no record or the folder cannot be written.
        """
        folder, record = self.folder, None if self.folder is None else dump()
        if folder is None or record is None:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"flight_rank_{self._rank}"), "wb") as file:
                file.write(record)
        except OSError:
            return
        self.pattern = os.path.join(folder, "flight_rank_*")


def dump() -> bytes | None:
    """Return the recorder's pickled dump, or None if there is no recorder or the recorder is empty.

    ``TORCH_FR_BUFFER_SIZE`` sets how many collectives the recorder holds. The default is 2000; 0 disables the recorder.
    """
    bindings = importlib.import_module("torch._C._distributed_c10d")
    for name in _DUMP_FUNCTIONS:
        function: Callable[[], bytes] | None = getattr(bindings, name, None)
        if function is None:
            continue
        try:
            raw = function()
            if pickle.loads(raw).get("entries"):  # unpickling is safe, because this process created the pickle
                return raw
        except Exception:
            continue  # another version of torch may use another format
    return None
