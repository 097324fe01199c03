"""Saves into a store with seeded failures lose nothing and mix no checkpoints. J-04, J-08."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from saving_processes import Saving

from drivetrain import CheckpointError
from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._distributed.shards import ParameterShard, Span
from drivetrain.checkpoint import verify
from drivetrain.checkpoint._format import CheckpointMetadata, Contents, Sizes, object_storage, save
from drivetrain.testing import requires_linux, run_distributed
from faulty_store import FaultyStore
from newest_checkpoint import newest

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
EACH = max(50, -(-FAULTS // 9)) if FAULTS else 3
"""How often each kind is drawn, on one rank and on two."""

FOLDER = "faulty://store/run"
SMALL = Sizes(small=64, large=10**9, piece=512)  # so that each rank has a file of weights
_ELEMENTS = 128


def contents(number: int, rank: int, ranks: int) -> Contents:
    """A checkpoint with its number in every file."""
    part = _ELEMENTS // ranks
    shard = ParameterShard(
        torch.full((part,), float(number)), torch.Size((_ELEMENTS,)), Span(part * rank, part * (rank + 1))
    )
    return Contents(
        weights={"a": shard, "b": torch.full((_ELEMENTS,), float(number))},
        metadata=CheckpointMetadata(progress={"number": number}, lineage=(("run", number),)),
        optimizers=[{"state": {"b": {"sum": torch.full((_ELEMENTS,), float(number))}}, "param_groups": []}],
        state={"number": number},
        rank_state={"number": torch.tensor(number)},
    )


def number_found() -> int:
    """Return the number of the checkpoint that "auto" would choose, after checking that it is complete and
    consistent.
    """
    checkpoint = newest([FOLDER])
    assert checkpoint is not None, "nothing is found"
    assert verify(checkpoint.path) == []
    number = int(checkpoint.progress["number"])
    assert checkpoint.state() == {"number": number}
    for rank in range(checkpoint.manifest.world_size):
        assert checkpoint.rank_state(rank)["number"] == number
    values = [*checkpoint.weights().values(), checkpoint.optimizer_state()["state"]["b"]["sum"]]
    assert all(bool((tensor == number).all()) for tensor in values)
    return number


# Faults, with the names that the table uses


def _refused(store: FaultyStore, draw: random.Random) -> None:
    store.fail(draw.choice(("put", "get", "size", "list", "*")), times=draw.randrange(1, 3), after=draw.randrange(12))


def _refused_for_good(store: FaultyStore, draw: random.Random) -> None:
    store.fail("put", times=None, after=draw.randrange(9))


def _answer_lost(store: FaultyStore, draw: random.Random) -> None:
    store.fail("put", times=draw.choice((1, 2, None)), after=draw.randrange(9), lost=True)


def _manifest_lost(store: FaultyStore, draw: random.Random) -> None:
    store.fail("put", "*/manifest.json", times=draw.choice((1, None)), lost=True)
    if draw.random() < 0.5:  # and the state of the store is unknown
        store.fail("get", "*/manifest.json", times=draw.choice((1, 2, None)), after=draw.randrange(3))


def _not_removed(store: FaultyStore, draw: random.Random) -> None:
    store.fail("remove", error=PermissionError("AccessDenied"), times=None)


def _throttled(store: FaultyStore, draw: random.Random) -> None:
    for _ in range(draw.randrange(1, 4)):
        store.fail("*", times=1, after=draw.randrange(12), seconds=0.001)


def _listed_late(store: FaultyStore, draw: random.Random) -> None:
    store.fail("list", error=None, times=None, age=60.0)


def _another_writer(store: FaultyStore, draw: random.Random) -> None:
    def save_too() -> None:
        save(f"{FOLDER}/same", contents(3, 0, 1), LocalControl())

    operation, after = draw.choice((("put", draw.randrange(9)), ("get", draw.randrange(2))))
    store.fail(operation, error=None, after=after, call=save_too)


KINDS: dict[str, Callable[[FaultyStore, random.Random], None]] = {
    "an operation refused once or twice": _refused,
    "puts refused for good, from some instant on": _refused_for_good,
    "answers of puts lost": _answer_lost,
    "the manifest's answer lost": _manifest_lost,
    "removing denied": _not_removed,
    "throttled": _throttled,
    "listings a minute old": _listed_late,
    "another writer on the same path": _another_writer,
}
OF_RANK_0 = ("the manifest's answer lost", "another writer on the same path")
KILLED = "SIGKILL at an operation"


@dataclass
class Tried:
    """The outcome of one draw.

    Attributes:
        kind: kind of fault.
        number: number of the draw.
        saved: whether the failing save returned.
        problem: what was lost or mixed; None if nothing was.
    """

    kind: str
    number: int
    saved: bool
    problem: str | None = None


def _try(folder: Path, kind: str, number: int, control: ControlPlane) -> Tried:
    draw = random.Random(f"{SEED}/{kind}/{number}/{control.world_size}")
    rank, ranks = control.rank, control.world_size
    store = FaultyStore(folder).mount()
    onto_one = kind == OF_RANK_0[1] or draw.random() < 0.5
    paths = [f"{FOLDER}/{'same' if onto_one else count}" for count in range(5)]
    save(paths[1], contents(1, rank, ranks), control, sizes=SMALL)
    struck = 0 if kind in OF_RANK_0 else draw.randrange(ranks)
    if rank == struck:
        KINDS[kind](store, draw)
    saved = True
    try:
        save(paths[2], contents(2, rank, ranks), control, sizes=SMALL)
    except CheckpointError:
        saved = False
    store.heal()
    control.barrier()
    problem = None
    try:
        if rank == 0:
            found = number_found()
            wanted = {2} if saved else {1, 2}
            assert found in wanted | ({3} if kind == OF_RANK_0[1] else set()), f"{found} is found, saved: {saved}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    control.barrier()
    save(paths[4], contents(4, rank, ranks), control, sizes=SMALL)
    try:
        if rank == 0 and problem is None:
            assert number_found() == 4
    except Exception as error:
        problem = f"afterwards: {type(error).__name__}: {error}"
    control.barrier()
    return Tried(kind, number, saved, problem)


def _try_all(folder: Path, count: int, ranks: int) -> list[Tried]:
    object_storage._PAUSES = (0.001, 0.002, 0.003)  # type: ignore[assignment]  # one less than ours
    control: ControlPlane = LocalControl()
    if ranks > 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        control = GroupControl(torch.distributed.new_group(backend="gloo"), store, torch.distributed.get_rank(), ranks)
    places = (
        (kind, number, folder / f"{position}-{number}")
        for position, kind in enumerate(KINDS)
        for number in range(count)
    )
    return [_try(place, kind, number, control) for kind, number, place in places]


def _save_and_die(pipe: Connection, folder: Path, number: int) -> None:
    draw = random.Random(f"{SEED}/{KILLED}/{number}")
    store = FaultyStore(folder).mount()
    onto_one = draw.random() < 0.5
    save(f"{FOLDER}/{'same' if onto_one else 1}", contents(1, 0, 1), LocalControl(), sizes=SMALL)
    store.fail("*", error=None, after=draw.randrange(20), call=lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(f"{FOLDER}/{'same' if onto_one else 2}", contents(2, 0, 1), LocalControl(), sizes=SMALL)
    pipe.send("saved")


def _killed(folder: Path, number: int) -> Tried:
    saving = Saving(_save_and_die, folder, number)
    saving.process.join(60)
    saved = saving.told() == ["saved"]
    FaultyStore(folder).mount()
    problem = None
    try:
        found = number_found()
        assert found in ({2} if saved else {1, 2}), f"{found} is found, saved: {saved}"
        save(f"{FOLDER}/4", contents(4, 0, 1), LocalControl(), sizes=SMALL)
        assert number_found() == 4
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Tried(KILLED, number, saved, problem)


def table(tried: Sequence[Tried]) -> str:
    lines = ["kind | tried | the save returned | lost or mixed"]
    for kind in dict.fromkeys(one.kind for one in tried):
        of_it = [one for one in tried if one.kind == kind]
        lost = sum(one.problem is not None for one in of_it)
        lines.append(f"{kind} | {len(of_it)} | {sum(one.saved for one in of_it)} | {lost}")
    return "\n".join(lines)


@requires_linux()
@pytest.mark.timeout(60 + 2 * FAULTS)
def test_no_checkpoint_is_lost_or_mixed(tmp_path: Path) -> None:
    tried = [_killed(tmp_path / f"killed-{number}", number) for number in range(EACH)]
    for ranks in (1, 2):
        told = run_distributed(_try_all, ranks, tmp_path / str(ranks), EACH, ranks, timeout=60 + 2 * FAULTS)
        tried += told[0]
    print(f"\n{table(tried)}")
    problems = [f"{one.kind}, number {one.number}: {one.problem}" for one in tried if one.problem is not None]
    assert not problems, "\n".join(
        [f"again: FAULTS={FAULTS} FAULTS_SEED={SEED} make faults ARGS='-k mixed'", *problems]
    )
    counts = Counter(one.kind for one in tried)
    assert min(counts.values()) >= EACH
    assert any(not one.saved for one in tried)
    assert any(one.saved for one in tried)
