"""Log known values and read tables back; use the real wandb and mlflow without a network."""

from __future__ import annotations

import importlib.util
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pytest
import torch

from drivetrain import Logger
from drivetrain.loggers import MLFlowLogger, WandbLogger

LoggerT = TypeVar("LoggerT", bound=Logger)

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
"""The environment in which neither uses the network."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither service uses the network, and wandb's own process does not outlive the test."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    if importlib.util.find_spec("wandb") is not None:
        import wandb

        wandb.teardown()


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Limit the files of this process: as on a disk that is full, a write fails midway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def log_steps(logger: LoggerT, *steps: int, name: str = "loss") -> LoggerT:
    """Log half of each step's number, and return the logger."""
    for step in steps:
        logger.log_metrics({name: step / 2}, step)
    return logger


def read_table(folder: str | Path | None) -> list[str]:
    """Return the lines of the table in a folder or at a URL."""
    with fsspec.open(f"{folder}/metrics.csv", "r", newline="") as stream:
        return str(stream.read()).splitlines()


def folder_of(logger: MLFlowLogger | WandbLogger) -> Path:
    return Path(str(logger.log_dir))


def assert_no_file_has(folder: Path, secret: str) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


class Drawing:
    """A figure that draws itself, as matplotlib's do."""

    def savefig(self, file: Any, format: str) -> None:
        from PIL import Image

        Image.new("RGB", (5, 3), (255, 0, 0)).save(file, format=format)


def log_all_media(logger: Logger, step: int = 2) -> None:
    logger.log_image("seen/picture", torch.full((3, 4, 6), 0.5), step)
    logger.log_figure("figure", Drawing(), step)
    logger.log_histogram("weights", torch.arange(8.0), step)
    logger.log_text("text", "# Hello", step)
    logger.log_table("table", [{"x": 1, "y": "a|b"}, {"x": torch.tensor(2)}], step)
