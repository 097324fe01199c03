"""Saves into a store with seeded failures lose nothing and mix no checkpoints."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from saving_processes import Saving, control_of_ranks, number_in, numbered

from drivetrain import CheckpointError
from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._format import StateToSave, save, tensor_writer
from drivetrain._storage import retries
from drivetrain.testing import requires_linux, run_distributed
from faulty_store import FaultyStore
from newest_checkpoint import newest

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
EACH = max(50, -(-FAULTS // 9)) if FAULTS else 3
"""How often each kind is drawn, on one rank and on two."""

FOLDER = "faulty://store/run"


def contents(number: int, rank: int = 0, ranks: int = 1) -> StateToSave:
    return numbered(number, rank, ranks, elements=128)


def _fail_the_manifest(store: FaultyStore, draw: random.Random) -> None:
    store.fail("put", "*/manifest.json", times=draw.choice((1, None)), lost=True)
    if draw.random() < 0.5:  # and the state of the store is unknown
        store.fail("get", "*/manifest.json", times=draw.choice((1, 2, None)), after=draw.randrange(3))


def _throttle(store: FaultyStore, draw: random.Random) -> None:
    for _ in range(draw.randrange(1, 4)):
        store.fail("*", times=1, after=draw.randrange(12), seconds=0.001)


def _save_to_it_too(store: FaultyStore, draw: random.Random) -> None:
    operation, after = draw.choice((("put", draw.randrange(9)), ("get", draw.randrange(2))))
    another = partial(save, f"{FOLDER}/same", contents(3), LocalControl())
    store.fail(operation, error=None, after=after, call=another)


KINDS: dict[str, Callable[[FaultyStore, random.Random], object]] = {
    "an operation refused once or twice": lambda store, draw: store.fail(
        draw.choice(("put", "get", "size", "list", "*")), times=draw.randrange(1, 3), after=draw.randrange(12)
    ),
    "puts refused for good, from some instant on": lambda store, draw: store.fail(
        "put", times=None, after=draw.randrange(9)
    ),
    "answers of puts lost": lambda store, draw: store.fail(
        "put", times=draw.choice((1, 2, None)), after=draw.randrange(9), lost=True
    ),
    "the manifest's answer lost": _fail_the_manifest,
    "removing denied": lambda store, _: store.fail("remove", error=PermissionError("AccessDenied"), times=None),
    "throttled": _throttle,
    "listings a minute old": lambda store, _: store.fail("list", error=None, times=None, age=60.0),
    "another writer on the same path": _save_to_it_too,
}
OF_RANK_0 = ("the manifest's answer lost", "another writer on the same path")
KILLED = "SIGKILL at an operation"


@dataclass
class Tried:
    """The outcome of one draw: whether the failing save returned, and what was lost or mixed, if anything."""

    kind: str
    number: int
    saved: bool
    problem: str | None


def _problem(allowed: set[int]) -> str | None:
    """Return what is wrong with the checkpoint that is found, if anything."""
    try:
        checkpoint = newest([FOLDER])  # the one that "auto" would choose
        assert checkpoint is not None, "nothing is found"
        found = number_in(checkpoint.path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if found in allowed else f"{found} is found instead of {allowed}"


def _try(folder: Path, kind: str, number: int, control: ControlPlane) -> Tried:
    draw = random.Random(f"{SEED}/{kind}/{number}/{control.world_size}")
    rank, ranks = control.rank, control.world_size
    store = FaultyStore(folder).mount()
    onto_one = kind == OF_RANK_0[1] or draw.random() < 0.5
    paths = [f"{FOLDER}/{'same' if onto_one else count}" for count in range(5)]
    save(paths[1], contents(1, rank, ranks), control)
    struck = 0 if kind in OF_RANK_0 else draw.randrange(ranks)
    if rank == struck:
        KINDS[kind](store, draw)
    saved = True
    try:
        save(paths[2], contents(2, rank, ranks), control)
    except CheckpointError:
        saved = False
    store.heal()
    control.barrier()
    of_another = {3} if kind == OF_RANK_0[1] else set()
    problem = _problem(({2} if saved else {1, 2}) | of_another) if rank == 0 else None
    control.barrier()
    save(paths[4], contents(4, rank, ranks), control)
    afterwards = _problem({4}) if rank == 0 else None
    control.barrier()
    return Tried(kind, number, saved, problem or afterwards)


def _try_all(folder: Path, count: int, ranks: int) -> list[Tried]:
    tensor_writer.SMALL_BYTES = 64  # so that each rank has a file of weights
    retries.PAUSES = (0.001, 0.002, 0.003)  # type: ignore[assignment]  # one less than ours
    control: ControlPlane = control_of_ranks() if ranks > 1 else LocalControl()
    draws = [(kind, number) for kind in KINDS for number in range(count)]
    return [_try(folder / str(place), kind, number, control) for place, (kind, number) in enumerate(draws)]


def _save_and_die(pipe: Connection, folder: Path, number: int) -> None:
    draw = random.Random(f"{SEED}/{KILLED}/{number}")
    store = FaultyStore(folder).mount()
    onto_one = draw.random() < 0.5
    save(f"{FOLDER}/{'same' if onto_one else 1}", contents(1), LocalControl())
    store.fail("*", error=None, after=draw.randrange(20), call=lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(f"{FOLDER}/{'same' if onto_one else 2}", contents(2), LocalControl())
    pipe.send("saved")


def _killed(folder: Path, number: int) -> Tried:
    saving = Saving(_save_and_die, folder, number)
    saving.process.join(60)
    saved = saving.told() == ["saved"]
    FaultyStore(folder).mount()
    problem = _problem({2} if saved else {1, 2})
    save(f"{FOLDER}/4", contents(4), LocalControl())
    return Tried(KILLED, number, saved, problem or _problem({4}))


@requires_linux()
@pytest.mark.timeout(60 + 2 * FAULTS)
def test_no_checkpoint_is_lost_or_mixed(tmp_path: Path) -> None:  # J-04, J-08
    tried = [_killed(tmp_path / f"killed-{number}", number) for number in range(EACH)]
    for ranks in (1, 2):
        told = run_distributed(_try_all, ranks, tmp_path / str(ranks), EACH, ranks, timeout=60 + 2 * FAULTS)
        tried += told[0]
    print("\nkind | tried | the save returned | lost or mixed")
    for kind in dict.fromkeys(one.kind for one in tried):
        of_it = [one for one in tried if one.kind == kind]
        lost = sum(one.problem is not None for one in of_it)
        print(f"{kind} | {len(of_it)} | {sum(one.saved for one in of_it)} | {lost}")
    problems = [f"{one.kind}, number {one.number}: {one.problem}" for one in tried if one.problem is not None]
    again = f"again: FAULTS={FAULTS} FAULTS_SEED={SEED} make faults ARGS='-k mixed'"
    assert not problems, "\n".join([again, *problems])
    counts = Counter(one.kind for one in tried)
    assert (len(counts), min(counts.values()) >= EACH) == (1 + len(KINDS), True)
    assert {one.saved for one in tried} == {True, False}
