"""Processes that save, for tests that kill them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import ParameterShard, Span
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import CheckpointMetadata, Contents, save
from drivetrain.checkpoint._format.local_storage import LocalStorage
from drivetrain.launchers.function_launcher import PRELOAD


def numbered(number: int, rank: int = 0, ranks: int = 1, elements: int = 40_000) -> Contents:
    """A checkpoint with its number in every file, which takes a while to write."""
    part, whole = elements // ranks, torch.full((elements,), float(number))
    shard = ParameterShard(whole[:part].clone(), torch.Size((elements,)), Span(part * rank, part * (rank + 1)))
    return Contents(
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


def save_and_save(pipe: Connection, path: str, exchanging: bool = True) -> None:
    """Save number 0, 1, 2, ... to one path, reporting each, until the process is killed."""
    if not exchanging:
        import drivetrain.checkpoint._format.local_storage as module

        module.exchange = lambda first, second: False  # type: ignore[attr-defined]
    number = 0
    while True:
        save(path, numbered(number), LocalControl())
        pipe.send(number)
        number += 1


def save_some(pipe: Connection, path: str, count: int) -> None:
    """Save ``count`` times to one path, while another process does too."""
    pipe.send("ready")
    pipe.recv()
    for number in range(count):
        save(path, numbered(number), LocalControl())
    pipe.send("done")


def begin_and_wait(pipe: Connection, path: str) -> None:
    """Stop in the middle of a save."""
    place = LocalStorage.begin(path)
    with place.open("model.safetensors") as stream:
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
        """Return everything that it has reported so far."""
        found = []
        with suppress(EOFError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        return found

    def kill(self) -> None:
        """Kill it, whatever it is doing."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
