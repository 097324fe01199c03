"""Processes that save, for tests that kill them."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import ParameterShard, Span
from drivetrain._format import CheckpointMetadata, StateToSave, save
from drivetrain._storage import publication
from drivetrain._storage.publication import LocalPublication
from drivetrain.checkpoint import load, verify
from drivetrain.launchers.function_launcher import PRELOAD


def control_of_ranks() -> GroupControl:
    store = dist.distributed_c10d._get_default_store()
    return GroupControl(dist.new_group(backend="gloo"), store, dist.get_rank(), dist.get_world_size())


def numbered(number: int, rank: int = 0, ranks: int = 1, elements: int = 40_000) -> StateToSave:
    """A checkpoint with its number in every file, which takes a while to write."""
    part, whole = elements // ranks, torch.full((elements,), float(number))
    shard = ParameterShard(whole[:part].clone(), torch.Size((elements,)), Span(part * rank, part * (rank + 1)))
    return StateToSave(
        weights={"shard": shard, **{f"layer{index}": whole.clone() for index in range(3)}},
        metadata=CheckpointMetadata(progress={"number": number}, lineage=(("run", number),)),
        optimizers=[{"state": {"layer0": {"exp_avg": whole.clone()}}, "param_groups": []}],
        state={"number": number},
        rank_state={"number": torch.tensor(number)},
    )


def number_in(path: str | Path) -> int:
    """Return the checkpoint's number, after checking that all of its files agree."""
    assert verify(path) == []
    checkpoint = load(path)
    number = int(checkpoint.progress["number"])
    assert checkpoint.state() == {"number": number}
    for rank in range(checkpoint.manifest.world_size):
        assert checkpoint.rank_state(rank)["number"] == number
    values = [*checkpoint.weights().values(), checkpoint.optimizer_state()["state"]["layer0"]["exp_avg"]]
    assert all(bool((tensor == number).all()) for tensor in values)
    return number


def save_when_told(pipe: Connection, path: str, exchanging: bool = True, count: int = sys.maxsize) -> None:
    """Save number 0, 1, 2, ... to one path, reporting each; the process may be killed before the last."""
    if not exchanging:
        publication.exchange = lambda first, second: False  # type: ignore[attr-defined]
    pipe.send("ready")
    pipe.recv()
    for number in range(count):
        save(path, numbered(number), LocalControl())
        pipe.send(number)


def begin_and_wait(pipe: Connection, path: str) -> None:
    place = LocalPublication.begin(Path(path))
    with place.folder.create("model.safetensors") as stream:
        stream.write(b"half of it")
    pipe.send("begun")
    time.sleep(600)


class Saving:
    """A saving process, forked after torch was imported."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> list[Any]:
        found = []
        with suppress(EOFError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
