"""A reader written only from docs/checkpoint-format.md can read our checkpoints."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from checkpoint_case import STATE, contents, equal
from safetensors import safe_open

from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint._format import Sizes, save


class Reader:
    """Uses JSON, CRC-32 and the safetensors library, but not drivetrain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "manifest.json").read_bytes()
        end = text.rindex(b',\n "crc32": "')
        assert text[end:] == b',\n "crc32": "%08x"\n}\n' % zlib.crc32(text[:end])
        self.manifest = json.loads(text)
        assert self.manifest["format"] == 1

    def content(self, name: str) -> bytes:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
        content, record = (self.folder / name).read_bytes(), self.manifest["files"][name]
        block = self.manifest["block_size"]
        assert len(content) == record["size"]
        for number in range(-(-len(content) // block)):
            digits = record["crc32"][8 * number : 8 * number + 8]
            assert zlib.crc32(content[number * block : (number + 1) * block]) == int(digits, 16)
        return content

    def tensors(self, part: Any) -> dict[str, torch.Tensor]:
        found = {}
        for name in part["tensors"]:
            self.content(name)
            with safe_open(self.folder / name, "pt") as file:
                found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        return found

    def document(self, part: Any) -> Any:
        return self.value(json.loads(self.content(part["document"])), self.tensors(part))

    def value(self, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, list):
            return [self.value(part, tensors) for part in value]
        if not isinstance(value, dict):
            return value
        match list(value.items()):
            case [("$tensor", name)]:
                return tensors[name]
            case [("$tuple", parts)]:
                return tuple(self.value(part, tensors) for part in parts)
            case [("$float", text)]:
                return float(text)
            case [("$pairs", pairs)]:
                return {self.value(key, tensors): self.value(part, tensors) for key, part in pairs}
            case [("$counter", pairs)]:
                return Counter({self.value(key, tensors): self.value(part, tensors) for key, part in pairs})
        return {key: self.value(part, tensors) for key, part in value.items()}

    def weights(self) -> dict[str, Any]:
        part = self.manifest["weights"]
        found: dict[str, Any] = self.tensors(part)
        if part["document"] is not None:
            found.update(self.document(part))
        return {**found, **{tied: found[first] for tied, first in self.manifest["aliases"].items()}}


def test_it_reads_a_checkpoint(tmp_path: Path) -> None:
    given = contents(size=5000)
    save(str(tmp_path / "c"), given, LocalControl(), sizes=Sizes(large=30_000))
    reader = Reader(tmp_path / "c")
    assert len(reader.manifest["weights"]["tensors"]) == 2
    assert equal(dict(sorted(reader.weights().items())), dict(sorted(given.weights.items())))
    assert equal(reader.document(reader.manifest["optimizers"][0]), given.optimizers[0])
    assert equal(reader.document(reader.manifest["state"]), STATE)
    assert equal(reader.document(reader.manifest["ranks"][0]), given.rank_state)
    index = json.loads(reader.content(reader.manifest["weights"]["index"]))["weight_map"]
    assert set(index.values()) == set(reader.manifest["weights"]["tensors"])
