"""Times all ways to save and load in turn, after verifying that each restores everything."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.by_engine import Trained
from benchmarks.checkpoint_peers import PEERS
from benchmarks.checkpoint_ways import Disk, Ours, Pickle, Slower, State, Way
from benchmarks.system_memory import growth, warm

COPY = "a copy in memory"


@dataclass(frozen=True, slots=True)
class Saver:
    """One of the compared ways to save and load.

    Attributes:
        peak: additional bytes that a save needs.
        syncs: see `Way`.
        checks: see `Way`.
    """

    peak: int
    syncs: bool
    checks: bool


@dataclass(slots=True)
class Found:
    """What was measured.

    Attributes:
        nbytes: of the state.
        missing: names whose package is not installed.
        savers: the installed ones, by name.
        times: seconds in each round, by operation and saver.
    """

    nbytes: int
    missing: list[str] = field(default_factory=list)
    savers: dict[str, Saver] = field(default_factory=dict)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def take(self, what: str, name: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` and record how long it took."""
        warm(2 * self.nbytes)
        start = time.perf_counter()
        result = work()
        self.times.setdefault(what, {}).setdefault(name, []).append(time.perf_counter() - start)
        return result


def compare(rounds: int, module: Trained) -> Found:
    """Measure everything, within a run that has taken one step with ``module``."""
    state = State(module.net, module.optimizer)
    ways: list[Way] = [Disk(state), Ours(module), Slower(module)]
    found = Found(sum(tensor.nbytes for tensor in state.tensors().values()))
    for name, peer in PEERS.items():
        try:
            ways.append(peer(state))
        except ImportError:
            found.missing.append(name)
    _take_turns(rounds, ways, state, found)
    return found


def compare_small(rounds: int, module: Trained) -> Found:
    """Measure a network of many small tensors, against torch.save alone."""
    state = State(module.net, module.optimizer)
    found = Found(sum(tensor.nbytes for tensor in state.tensors().values()))
    _take_turns(rounds, [Pickle(state), Ours(module)], state, found)
    return found


def _take_turns(rounds: int, ways: Sequence[Way], state: State, found: Found) -> None:
    with tempfile.TemporaryDirectory() as place:
        for way in ways:
            found.savers[way.name] = Saver(_prove(way, state, Path(place)), way.syncs, way.checks)
        for number in range(rounds):
            found.take("stall", COPY, lambda: [tensor.clone() for tensor in state.tensors().values()])
            # The order differs in each round: each way finds the disk as the previous one left it.
            for way in random.Random(number).sample(ways, len(ways)):
                _time(way, state, found, Path(place) / "saved")


def _prove(way: Way, state: State, place: Path) -> int:
    """Save, reset everything and load it again; return by how many bytes this process grows in a further save."""
    expected = state.checksums()
    way.save(place / "first")
    state.restart()
    way.load(place / "first")
    if state.checksums() != expected:
        raise SystemExit(f"{way.name} does not bring back what it saved")
    shutil.rmtree(place / "first")
    grown = growth(lambda: way.save(place / "second"))
    shutil.rmtree(place / "second")
    return grown


def _time(way: Way, state: State, found: Found, folder: Path) -> None:
    def save() -> None:
        way.save(folder)
        for file in _files(folder):  # almost free if the data is on the disk already
            os.fsync(file)

    os.sync()
    found.take("save", way.name, save)
    state.restart()
    found.take("load", way.name, partial(way.load, folder))
    if isinstance(way, Disk | Pickle | Ours):
        found.take("read", way.name, partial(way.read, folder))
        for file in _files(folder):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        found.take("read from the disk", way.name, partial(way.read, folder))
    shutil.rmtree(folder)
    begin = getattr(way, "begin", None)
    if begin is not None:
        wait = found.take("stall", way.name, partial(begin, folder))
        wait()
        shutil.rmtree(folder)


def _files(folder: Path) -> Iterator[int]:
    """Yield descriptors of all files in a folder, one after the other."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                yield file.fileno()
