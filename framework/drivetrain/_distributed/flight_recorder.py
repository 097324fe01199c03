"""Dumps torch's flight recorder, which holds the last collectives of this process.

Only this module uses the private bindings of the flight recorder.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable
from typing import Any

# The binding for NCCL, which CUDA builds have, and then the binding for other backends.
_DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")
_MAX_COLLECTIVES = 50  # the maximum number of collectives in the text file


class FlightRecord:
    """Writes a rank's flight record to files.

    Attributes:
        folder: the folder for the files. With None, no files are written.
        pattern: a glob pattern for the text files of all ranks, or None until this rank has written its files.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.folder: str | None = None
        self.pattern: str | None = None

    def write(self) -> None:
        """Write ``flight-rank-N.txt``, to be read and compared, and ``flight_rank_N``, a dump for torch's tools.

        Do nothing if there is no record or the folder cannot be written.
        """
        folder, dumped = self.folder, None if self.folder is None else dump()
        if folder is None or dumped is None:
            return
        raw, record = dumped
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"flight_rank_{self._rank}"), "wb") as file:
                file.write(raw)
            with open(os.path.join(folder, f"flight-rank-{self._rank}.txt"), "w", encoding="utf-8") as text:
                text.writelines(f"{line}\n" for line in describe_collectives(record))
        except OSError:
            return
        self.pattern = os.path.join(folder, "flight-rank-*.txt")


def dump() -> tuple[bytes, dict[str, Any]] | None:
    """Return the recorder's dump, pickled and as a dict, or None if there is no recorder or the recorder is empty.

    ``TORCH_FR_BUFFER_SIZE`` sets how many collectives the recorder holds. The default is 2000; 0 disables the recorder.
    """
    bindings = importlib.import_module("torch._C._distributed_c10d")
    for name in _DUMP_FUNCTIONS:
        function: Callable[[], bytes] | None = getattr(bindings, name, None)
        if function is None:
            continue
        try:
            raw = function()
            record: dict[str, Any] = pickle.loads(raw)  # unpickling is safe, because this process created the pickle
            if record.get("entries"):
                return raw, record
        except Exception:
            continue  # another version of torch may use another format
    return None


def describe_collectives(record: dict[str, Any]) -> list[str]:
    """Return a line for each of the last collectives, in order. Matching calls on two ranks give equal lines."""
    lines = []
    for entry in record["entries"][-_MAX_COLLECTIVES:]:
        number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
        group = " ".join(map(str, entry.get("process_group", ())))
        sizes = f"{entry.get('input_sizes')} {' '.join(entry.get('input_dtypes', ()))}"
        frames = [frame for frame in entry.get("frames", ()) if "/torch/" not in frame["filename"]]
        caller = f" in {frames[0]['name']}, {frames[0]['filename']}:{frames[0]['line']}" if frames else ""
        lines.append(f"group {group}, {number}: {entry.get('profiling_name')} {sizes} {entry.get('state')}{caller}")
    return lines
