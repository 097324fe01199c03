"""Read the rows in wandb's local files, ``run-<id>.wandb``, so that a resumed run does not write these rows again.

wandb's service process appends blocks of 32 KiB to these files, so some of the last rows are missing after a kill.
wandb has no public reader for these files. They contain protocol buffers in the record format of LevelDB's log.
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
_HEADER_BYTES = 7  # the size of a file's header, and of the header of a record's fragment
_BLOCK_BYTES = 32768
_FULL, _FIRST, _LAST = 1, 2, 4  # types of fragments


class StoredRows:
    """Summary of the rows of a run in all local files of the run.

    Args:
        folder: the folder that contains wandb's folder ``wandb``.
        run_id: wandb's id of the run.
        step_key: the key of the optimizer step in a row.
    """

    def __init__(self, folder: str, run_id: str, step_key: str) -> None:
        self.latest: dict[str, int] = {}
        """The last optimizer step with a value, by metric."""
        self.next_row = 0
        """The number (wandb's ``_step``) of the row that follows the last row."""
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "wandb", "*run-*", f"run-{run_id}.wandb"))):
            for row in read_rows(path):
                self.next_row = max(self.next_row, int(row.pop("_step", -1)) + 1)
                step = row.pop(step_key, None)
                if isinstance(step, int | float):
                    for name in row:
                        self.latest[name] = max(self.latest.get(name, -1), int(step))


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.wandb`` file as values by name. A value with nested keys (media) is a dict."""
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    for content in read_records(path):
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


def read_records(path: str) -> Iterator[bytes]:
    """Yield the complete records of a file, up to where a kill truncated the file."""
    with open(path, "rb") as stream:
        content = stream.read()
    if not content.startswith(_MAGIC):
        return
    position, record = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(content):
        remaining = _BLOCK_BYTES - position % _BLOCK_BYTES
        if remaining < _HEADER_BYTES:  # The rest of the block is too short for a fragment.
            position += remaining
            continue
        checksum, length, record_type = struct.unpack_from("<IHB", content, position)
        piece = content[position + _HEADER_BYTES : position + _HEADER_BYTES + length]
        if len(piece) < length or zlib.crc32(piece, zlib.crc32(bytes([record_type]))) != checksum:
            return
        position += _HEADER_BYTES + length
        record = piece if record_type in (_FULL, _FIRST) else record + piece
        if record_type in (_FULL, _LAST):
            yield record
