"""The same work, driven by us and by others: one framework a file, each as its users would write it.

Each file has ``train(work, way, steps)``, which returns a checksum of the trained weights. What is off when a loop is
bare, and how logging, bar, logger and checkpoint callback are switched on, is said where it is done.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from benchmarks.work import Way, Work

Train = Callable[[Work, Way, int], float]


class Peer(NamedTuple):
    """Where a framework's loop stands.

    Attributes:
        file: of this folder.
        function: in it.
        package: what it needs.
        slow: a small step takes several times the raw loop's, so that fewer of them are enough to tell.
    """

    file: str
    function: str
    package: str
    slow: bool = False


OURS = "drivetrain"
PEERS = {
    OURS: Peer("ours", "train", "drivetrain"),
    "Lightning": Peer("lightning", "train", "lightning", slow=True),
    "Fabric": Peer("fabric", "train", "lightning"),
    "Accelerate": Peer("accelerate", "train", "accelerate", slow=True),
    "transformers": Peer("transformers", "train", "transformers", slow=True),
    "ignite": Peer("ignite", "train", "pytorch-ignite"),
    "torchtnt": Peer("torchtnt", "train", "torchtnt"),
    "torchtnt AutoUnit": Peer("torchtnt", "train_automatically", "torchtnt", slow=True),
}


def installed() -> dict[str, Train]:
    """By name, those whose package is installed."""
    return {name: getattr(_load(peer.file), peer.function) for name, peer in PEERS.items() if _version(peer.package)}


def versions() -> str:
    """Of every package, in words."""
    packages = dict.fromkeys(peer.package for name, peer in PEERS.items() if name != OURS)
    return ", ".join(f"{package} {_version(package) or 'not installed'}" for package in packages)


@contextmanager
def on_a_terminal() -> Iterator[str]:
    """Within it output goes to a terminal that nobody sees, as a typical run's does; yields a folder for files."""
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = _Terminal()
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    finally:
        sys.stdout, sys.stderr = before


class _Terminal(io.TextIOBase):
    """Takes text as a terminal does, into /dev/null."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as this

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return self._null.write(text)

    def flush(self) -> None:
        self._null.flush()


def _load(file: str) -> object:
    return importlib.import_module(f"benchmarks.peers.{file}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
