"""What a run has in wandb's local files, ``run-<id>.wandb``: the rows that are not to be written a second time.

wandb appends, and its service writes a file in blocks of 32 KiB: after a kill some of the last rows are there, and
others are not. Nothing public reads these files, which ``wandb sync`` sends to the server. They are records of its
protocol buffers in the framing of LevelDB's log.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

_MAGIC = b":W&B"
_HEADER = 7  # bytes of a file's, and of a piece's
_BLOCK = 32768
_FULL, _FIRST, _LAST = 1, 2, 4


class StoredRows:
    """What a run has, over all files of its parts.

    Args:
        folder: in which wandb has made its own, ``wandb``.
        run_id: the run's.
        step_key: under which a row has its optimizer step.
    """

    def __init__(self, folder: str, run_id: str, step_key: str) -> None:
        self.latest: dict[str, int] = {}
        """By metric, the last optimizer step of which there is a value."""
        self.next_row = 0
        """The number of the row, wandb's ``_step``, after the last one."""
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "wandb", "*run-*", f"run-{run_id}.wandb"))):
            for row in rows_of(path):
                self.next_row = max(self.next_row, int(row.pop("_step", -1)) + 1)
                step = row.pop(step_key, None)
                if isinstance(step, int | float):
                    for name in row:
                        self.latest[name] = max(self.latest.get(name, -1), int(step))


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.wandb`` file: numbers by name, and of what has parts (media) a dict."""
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    for content in records_of(path):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *inner = [item.key] if item.key else item.nested_key
                if inner:
                    row.setdefault(name, {})[".".join(inner)] = json.loads(item.value_json)
                else:
                    row[name] = json.loads(item.value_json)
            yield row


def records_of(path: str) -> Iterator[bytes]:
    """Yield the records that are whole, up to where a kill has torn the file."""
    with open(path, "rb") as stream:
        content = stream.read()
    if not content.startswith(_MAGIC):
        return
    at, record = _HEADER, b""
    while at + _HEADER <= len(content):
        room = _BLOCK - at % _BLOCK
        if room < _HEADER:  # a block's end, too short for a piece
            at += room
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        piece = content[at + _HEADER : at + _HEADER + length]
        if len(piece) < length or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        at += _HEADER + length
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if kind in (_FULL, _LAST):
            yield record
