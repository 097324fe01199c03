"""Whatever bytes a checkpoint holds, reading it ends in a value or a CheckpointError, in bounded time and memory: J-10.

A run goes on from some of them, up to its first step.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutating import Mutator

from drivetrain import CheckpointError, ConfigurationError, DataModule, Fit, TrainModule
from drivetrain.callbacks import EarlyStopping
from drivetrain.checkpoint import load, show, verify
from drivetrain.checkpoint._finding import newest

FAULTS = int(os.environ.get("FAULTS", "0"))
COUNT = 500 * FAULTS or 2000
SEED = int(os.environ.get("FAULTS_SEED", "5"))
OLDER = Path(__file__).parents[1] / "unit" / "checkpoint" / "older"
SECONDS = 10.0
MEBIBYTES = 200


def _read_all(path: Path) -> None:
    checkpoint = load(path)
    checkpoint.weights().staged()
    for index in range(len(checkpoint.manifest.optimizers)):
        checkpoint.optimizer_groups(index)
        checkpoint.optimizer_state(index)
    checkpoint.state()
    for rank in range(len(checkpoint.manifest.ranks)):
        checkpoint.rank_state(rank)


def _verify(path: Path) -> None:
    """It raises nothing, and where it finds nothing everything can be read."""
    if not verify(path):
        _read_all(path)


def _newest(path: Path) -> None:
    newest([str(path.parent)])


READINGS: tuple[Callable[[Path], object], ...] = (_read_all, _verify, show, _newest)


def _bounded(read: Callable[[Path], object], path: Path, what: str, *also: type[Exception]) -> bool:
    """Whether it ended in a value; it may end in a CheckpointError."""
    began = time.process_time()
    try:
        read(path)
    except (CheckpointError, *also):
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        assert time.process_time() - began < SECONDS, what
    return True


@pytest.mark.timeout(300 + 5 * FAULTS)
@pytest.mark.parametrize("kind", ["single_device", "ddp"])
def test_reading_ends_in_a_value_or_a_checkpoint_error(kind: str, tmp_path: Path) -> None:
    # J-10
    path = tmp_path / "checkpoints" / kind
    shutil.copytree(OLDER / kind, path)
    (path.parent / "latest").write_bytes(b"\xff\0../..")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = errors = 0
    for what in Mutator(path, SEED).mutations(COUNT // 2):
        for read in READINGS:
            ended = _bounded(read, path, f"{what}, {read.__name__}", *([] if read is not _newest else []))
            values, errors = values + ended, errors + (not ended)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert values > COUNT // 20, "nothing came through"
    assert errors > COUNT // 20, "nothing was refused"
    assert grown < MEBIBYTES
    assert verify(path) == []
