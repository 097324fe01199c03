"""Contents of a small checkpoint, functions that damage one, and a small run."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from drivetrain import Fit, TrainModule

# Private, because a run writes only what it holds: these tests choose a checkpoint's contents.
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._format import CheckpointMetadata, StateToSave, save
from drivetrain._format.file_writer import BlockChecksums

STATE = {
    "loop": {"position": (3, 4), 7: "a key that is no string", "best": float("inf"), "milestones": Counter({2: 1})},
    "average": {"layer.weight": torch.arange(6.0).view(2, 3)},
}


def contents(scale: float = 1.0, size: int = 3) -> StateToSave:
    """Return weights with a tied name and several dtypes, AdamW's state, a run's state and a rank's state."""
    weight = torch.arange(2.0 * size).view(2, size) * scale
    adam = {"exp_avg": weight + 1, "exp_avg_sq": weight + 2, "step": torch.tensor(5.0)}
    return StateToSave(
        weights={
            "layer.weight": weight,
            "head.weight": weight,
            "half": torch.full((5,), scale).half(),
            "count": torch.tensor(3),
            "none": torch.empty(0, 3),
            "quantizer._extra_state": {"range": (0.0, 1.0)},
        },
        aliases={"head.weight": "layer.weight"},
        metadata=CheckpointMetadata("DDPStrategy", "bf16-mixed", {"step": 5, "epoch": 1}, {"width": 3}),
        optimizers=[
            {
                "state": {"layer.weight": adam},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["layer.weight", "half"]}],
            }
        ],
        state=STATE,
        rank_state={"generator": torch.arange(5, dtype=torch.uint8)},
    )


def save_contents(path: Path | str, values: StateToSave, **options: Any) -> str:
    """Save contents on one process, and return the checkpoint's path."""
    save(str(path), values, LocalControl(), **options)
    return str(path)


def written(path: Path | str, scale: float = 1.0) -> str:
    """Save a small checkpoint, and return its path."""
    return save_contents(path, contents(scale))


def equal(ours: Any, theirs: Any) -> bool:
    """Return whether two nested values are equal, including container types and dtypes."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def resealed(folder: Path, change: Any) -> None:
    """Apply ``change`` to the manifest's document and recompute its checksum, as a forger would."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document.pop("crc32")
    change(document)
    body = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    path.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Replace a file's content, and its size and checksums in the manifest."""
    (folder / name).write_bytes(content)
    sums = BlockChecksums()
    sums.update(content)
    record = {"size": sums.size, "crc32": sums.text()}
    resealed(folder, lambda document: document["files"].setdefault(name, {}).update(record))


def tensor_file(header: Any, nbytes: int) -> bytes:
    """Return a safetensors file with any header and ``nbytes`` zeros."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def token_free(name: str) -> str:
    return re.sub(r"-[0-9a-f]{16}", "", name)


class OneLayer(TrainModule):
    def __init__(self, inputs: int = 4, outputs: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def quiet(**options: Any) -> Fit:
    """Return a `Fit` on the CPU without output."""
    no_output = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return Fit(**{"accelerator": "cpu", **no_output, **options})
