"""Damages the files that a run has written."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from lives import Life, Run

from drivetrain.checkpoint import load, verify
from drivetrain.errors import CheckpointError
from drivetrain.launchers import RankFailedError

HOW = ("altered", "cut short", "gone", "all gone")


@dataclass
class Damage:
    """Damage that was done to a file.

    Attributes:
        how: one of `HOW`.
        path: the file.
        checkpoint: the checkpoint that it belongs to; None for a file that refers to one.
    """

    how: str
    path: Path
    checkpoint: Path | None


def damage(run: Run, draw: random.Random) -> Damage | None:
    """Damage the newest checkpoint, if there is another one to fall back to."""
    paths = sorted((run.saves / name for name in run.checkpoints()), key=lambda path: load(path).manifest.written)
    if len(paths) < 2:
        return None
    files = [path for path in sorted(paths[-1].rglob("*")) if path.is_file() and path.stat().st_size]
    latest = run.saves / "latest"  # an earlier damage may have removed it
    path, how = draw.choice([*files, *([latest] if latest.is_file() else [])]), draw.choice(HOW)
    checkpoint = None if path.name == "latest" else paths[-1]
    content = bytearray(path.read_bytes())
    if how == "all gone" and checkpoint is not None:
        shutil.rmtree(checkpoint)
    elif how.endswith("gone"):
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return Damage(how, path, checkpoint)


def check_and_remove(damage: Damage, life: Life) -> None:
    """Check that a damaged checkpoint is either never chosen or refused by name before anything changes; then remove
    it.
    """
    checkpoint = damage.checkpoint
    if not life.ended:
        assert checkpoint is not None, life.error
        assert isinstance(life.error, CheckpointError | RankFailedError), life.error
        assert checkpoint.name in str(life.error), life.error
        assert life.reached == 0
    if checkpoint is not None and checkpoint.exists() and (not life.ended or verify(checkpoint)):
        shutil.rmtree(checkpoint)
