"""Saves that are interrupted, by a kill, a full disk or a denied permission, or happen at the same time: F-05, F-07."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing_run import KEPT, QUIET, Augmented, Drawing
from saving_processes import Saving, begin_and_wait, control_of_ranks, number_in, numbered, save_when_told

from drivetrain import CheckpointError, Fit
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._format import StateToSave, checkpoint_folder, save
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.checkpoint import load, verify
from drivetrain.testing import requires_linux, run_distributed

LOCAL = LocalControl()
KILLS = int(os.environ.get("FAULTS", "12"))


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("exchanging", [True, False], ids=["exchange", "two renames"])
def test_a_kill_at_any_instant(tmp_path: Path, exchanging: bool) -> None:
    instants = random.Random(5)
    seen = set()
    for _ in range(KILLS):
        saving = Saving(save_when_told, str(tmp_path / "c"), exchanging)
        saving.pipe.send("go")
        assert [saving.pipe.recv(), saving.pipe.recv()] == ["ready", 0]
        time.sleep(instants.uniform(0, 0.1))
        saving.kill()
        last = max([0, *saving.told()])
        # The last save that was reported, or the next one.
        assert number_in(tmp_path / "c") in (last, last + 1)
        seen.update(leftovers(tmp_path))
    assert seen, "no kill hit a save: the instants are chosen badly"
    save(str(tmp_path / "c"), numbered(99), LOCAL)
    assert number_in(tmp_path / "c") == 99
    assert leftovers(tmp_path) == []


def test_files_of_a_writer_are_kept_until_it_is_killed(tmp_path: Path) -> None:
    saving = Saving(begin_and_wait, str(tmp_path / "c"))
    assert saving.pipe.recv() == "begun"
    held = leftovers(tmp_path)
    assert len(held) == 2
    save(str(tmp_path / "another"), numbered(1), LOCAL)
    assert leftovers(tmp_path) == held
    saving.kill()
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load(tmp_path / "c")
    save(str(tmp_path / "another"), numbered(2), LOCAL)
    assert os.listdir(tmp_path) == ["another"]


def test_a_kill_between_two_renames(tmp_path: Path) -> None:
    """Where a disk cannot exchange two names atomically, the checkpoint has no name for a moment."""
    save(str(tmp_path / "c"), numbered(1), LOCAL)
    os.rename(tmp_path / "c", tmp_path / f".replaced-{16 * '0'}")
    (tmp_path / f".saving-{16 * '0'}.lock").write_text("c")
    assert number_in(tmp_path / "c") == 1
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load(tmp_path / "d")
    save(str(tmp_path / "d"), numbered(2), LOCAL)
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]
    assert number_in(tmp_path / "c") == 1


def test_simultaneous_saves_to_one_path(tmp_path: Path) -> None:
    writers = [Saving(save_when_told, str(tmp_path / "c"), True, 15) for _ in range(3)]
    for writer in writers:
        assert writer.pipe.recv() == "ready"
    for writer in writers:
        writer.pipe.send("go")
    for writer in writers:
        writer.process.join()
        assert writer.told() == [*range(15)]
    assert number_in(tmp_path / "c") == 14
    assert leftovers(tmp_path) == []


def large() -> StateToSave:
    return StateToSave({"w": torch.zeros(2**20)})


@requires_linux()
def test_a_disk_without_room_and_one_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = tmp_path / "disk", tmp_path / "disk" / "c"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small disk")
    try:
        save(str(path), numbered(1), LOCAL)
        changed, used = disk.stat().st_mtime_ns, shutil.disk_usage(disk).used
        told = rf"'{path}' needs 4,2\d\d,\d\d\d bytes, and '{disk}' has [\d,]+ bytes free"
        with pytest.raises(CheckpointError, match=told):
            save(str(path), large(), LOCAL)
        assert disk.stat().st_mtime_ns == changed  # not even a folder was created temporarily
        monkeypatch.setattr(checkpoint_folder, "_check_disk_space", lambda target, needed: None)
        with pytest.raises(CheckpointError, match=r"could not be written: rank 0: OSError: .*No space left"):
            save(str(path), large(), LOCAL)
        assert number_in(path) == 1
        assert (os.listdir(disk), shutil.disk_usage(disk).used) == (["c"], used)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_limit_on_one_rank(tmp_path: Path) -> None:
    errors = run_distributed(_limited, 2, str(tmp_path / "c"))
    assert all("rank 1: OSError: [Errno 27] File too large" in error for error in errors), errors
    assert number_in(tmp_path / "c") == 1
    assert os.listdir(tmp_path) == ["c"]


@requires_linux()
@pytest.mark.parametrize("path", ["/sys/checkpoint", f"{__file__}/checkpoint"], ids=["no permission", "below a file"])
def test_a_path_that_cannot_be_written(path: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'{path}' could not be written: rank 0: \w*Error"):
        save(path, large(), LOCAL)


def _limited(path: str) -> str:
    control = control_of_ranks()
    save(path, numbered(1, control.rank, 2), control)
    contents = StateToSave({f"w{number}": torch.zeros(20 * 2**20) for number in range(2)})
    if control.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        save(path, contents, control)
    except CheckpointError as error:
        return str(error)
    return "saved"


def _save_beside_another_run(folder: Path) -> Any:
    seed = dist.get_rank() + 1
    dist.destroy_process_group()  # the runs differ from here on
    store = dist.FileStore(f"{folder}.store", 2)  # type: ignore[attr-defined]

    def begin_with_the_other(fit: Any, *_: Any) -> None:
        step = f"step {fit.global_step}"
        store.add(step, 1)
        while store.add(step, 0) < 2:
            time.sleep(0.0001)

    saver = Checkpoint(folder, every_n_train_steps=1, save_async=seed == 2, keep_last=KEPT)
    callbacks = [LambdaCallback(on_train_batch_start=begin_with_the_other), saver]
    module = Drawing(lambda *words: None)
    fit = Fit(callbacks=callbacks, default_root_dir=folder, max_epochs=2, seed=seed, **QUIET)
    fit.fit(module, torch.utils.data.DataLoader(Augmented(), batch_size=3, shuffle=True))
    return seed, sorted(saver.best_k_models), [parameter.detach() for parameter in module.parameters()]


def test_two_runs_that_save_into_one_folder_leave_each_others_files(tmp_path: Path) -> None:
    for seed, kept, trained in run_distributed(_save_beside_another_run, 2, tmp_path):
        assert len(kept) == KEPT
        for path in kept:
            assert verify(path) == []
            assert load(path).state()["data"]["seed"] == seed, f"{path} is the other's"
        newest = load(max(kept, key=lambda path: load(path).progress["global_step"])).weights()
        assert all(torch.equal(one, other) for one, other in zip(newest.values(), trained, strict=True))
    assert len(os.listdir(tmp_path)) == 2 * KEPT + 2  # "latest", and the folder of runs
    assert len(os.listdir(tmp_path / "drivetrain_logs")) == 2
