"""The same work with drivetrain and other frameworks: one framework per file, written as its users would write it.

Each file has ``train(work, way, steps)``, which returns a checksum of the trained weights. The files' docstrings state
what a bare loop switches off, and how logging, progress bar, logger and checkpoint callback are switched on.
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
    """Describes where a framework's loop is defined.

    Attributes:
        file: its module in this folder.
        function: the training function in it.
        package: the package that it needs.
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
    """Return, by name, those whose package is installed."""
    return {name: getattr(_load(peer.file), peer.function) for name, peer in PEERS.items() if _version(peer.package)}


def versions() -> str:
    """Return the versions of all packages as text."""
    packages = dict.fromkeys(peer.package for name, peer in PEERS.items() if name != OURS)
    return ", ".join(f"{package} {_version(package) or 'not installed'}" for package in packages)


@contextmanager
def on_a_terminal() -> Iterator[str]:
    """Redirect output to a hidden terminal within the context, as in a typical run; yields a folder for files."""
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = _Terminal()
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    finally:
        sys.stdout, sys.stderr = before


class _Terminal(io.TextIOBase):
    """Behaves like a terminal whose text goes to /dev/null."""

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
