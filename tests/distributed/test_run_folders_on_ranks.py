"""Run folders with several ranks, and with several runs that start at the same time: J-13."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from small_runs import Regression, loader, quiet, refusal

from captured_warnings import captured_warnings
from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import DistributedError
from drivetrain.loggers import CSVLogger
from drivetrain.testing import World
from worlds import PRELOAD, on_ranks

RACERS = 4


class Net(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Warns(Net):
    def on_train_start(self) -> None:
        logging.getLogger("drivetrain").warning("from node %d", self.trainer.node_rank)


class Fetching(Warns):
    def __init__(self, api_token: str, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Dying(Net):
    """Kills all ranks at step 5."""

    def __init__(self) -> None:
        super().__init__()
        self.__class__.__qualname__ = Net.__qualname__  # one experiment, according to the records

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def _fit(root: Path, **options: Any) -> Fit:
    saver = Checkpoint(every_n_train_steps=2)
    settings = {"strategy": "ddp", "logger": CSVLogger(root), "callbacks": saver, "seed": 1, "log_every_n_steps": 1}
    return quiet(default_root_dir=root, enable_checkpointing=True, **{**settings, **options})


BATCHES = loader(24, 2)


def _run(root: Path, ckpt_path: str | None, options: dict[str, Any]) -> Any:
    trainer = _fit(root, **options)
    trainer.fit(Net(), BATCHES, ckpt_path=ckpt_path)
    logger = trainer.logger
    return trainer.log_dir, trainer.run_id, None if logger is None else logger.log_dir, trainer.global_step


def _record(folder: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return document


def test_all_ranks_use_one_folder(tmp_path: Path) -> None:  # J-13
    first = on_ranks(_run, 2, tmp_path, None, {})
    assert first[0] == first[1]
    folder = tmp_path / "drivetrain_logs" / "version_0"
    assert first[0][0] == first[0][2] == str(folder)
    assert _record(folder)["world_size"] == 2
    second = on_ranks(_run, 2, tmp_path, "auto", {"max_epochs": 2})
    assert second[0] == second[1] == (*first[0][:3], 12)
    assert [one["to_step"] for one in _record(folder)["parts"]] == [6, 12]
    assert os.listdir(tmp_path / "drivetrain_logs") == ["version_0"]
    assert _run(tmp_path, "auto", {"max_epochs": 3, "strategy": "auto"})[0] == str(folder)
    assert [one["world_size"] for one in _record(folder)["parts"]] == [2, 2, 1]


def test_an_unwritable_folder_is_refused_on_every_rank(tmp_path: Path) -> None:  # J-13
    root = tmp_path / "file"
    root.write_text("")
    settings: dict[str, Any] = {"default_root_dir": root, "strategy": "ddp", "logger": CSVLogger(root)}
    first, second = on_ranks(partial(refusal, **settings), 2, Net(), BATCHES)
    assert first == second
    assert first.startswith("ConfigurationError")
    assert "CSVLogger cannot write to" in first
    assert "is not a folder" in first


def _killed(root: Path) -> None:
    _fit(root).fit(Dying(), BATCHES)


def test_runs_that_start_at_once_resume_a_killed_one_and_share_no_folder(tmp_path: Path) -> None:  # J-13
    with World(2, preload=PRELOAD) as world, pytest.raises(DistributedError):
        world.run(_killed, tmp_path, process_group=None)
    killed = tmp_path / "drivetrain_logs" / "version_0"
    assert _record(killed)["status"] == "running"  # its process is recorded, and no longer exists
    worlds = [World(2, preload=PRELOAD) for _ in range(RACERS)]
    together, found = threading.Barrier(RACERS), []

    def race(world: World) -> None:
        together.wait()
        found.append(world.run(_run, tmp_path, "auto", {}, process_group=None, timeout=150)[0])

    threads = [threading.Thread(target=race, args=(world,)) for world in worlds]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join(170)
    finally:
        for world in worlds:
            world.close()
    assert len(found) == RACERS
    # A late one may find a run that has ended by then, with nothing left to do.
    folders = list((tmp_path / "drivetrain_logs").iterdir())
    assert {folder for folder, *_ in found} <= {str(one) for one in folders}
    records = [_record(folder) for folder in folders]
    assert all(one["status"] == "finished" for one in records)
    parts = [part for one in records for part in one["parts"]]
    assert [part["from_step"] for part in _record(killed)["parts"]][:2] == [0, 4]
    assert sum(part["from_step"] == 4 for part in parts) == 1
    assert {part["to_step"] for part in parts if part["status"] == "finished"} == {6}
    assert len({part["token"] for part in parts}) == len(parts)
    for folder in folders:
        rows = (folder / "metrics.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]


def _of_a_node(root: Path) -> Any:
    rank = os.environ["RANK"]
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, node):
        trainer = _fit(root, num_nodes=2)
        trainer.fit(Warns(), BATCHES)
    return trainer.log_dir, trainer.run_id, trainer.checkpoint_callback.best_model_path


def test_nodes_use_one_folder(tmp_path: Path) -> None:  # J-13
    first, second = on_ranks(_of_a_node, 2, tmp_path, process_group=None)
    assert first == second
    for rank in range(2):
        assert f"from node {rank}" in (Path(first[0]) / "logs" / f"rank-{rank}.log").read_text()


SECRET = "sk-very-secret"


def _warnings_of_secrets(root: Path) -> list[str]:
    with captured_warnings() as lines:
        _fit(root, strategy="fsdp").fit(Fetching(SECRET), BATCHES)
    return [line for line in lines if "api_token" in line]


def test_one_rank_warns_of_secrets_and_no_rank_writes_them(tmp_path: Path) -> None:  # J-11
    (warning,), others = on_ranks(_warnings_of_secrets, 2, tmp_path)
    assert others == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"rank-0.log", "rank-1.log", "hparams.json", "manifest.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in warning
