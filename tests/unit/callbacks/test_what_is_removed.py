"""`Checkpoint` removes only checkpoints of its own run, identified by name and identifier."""

from __future__ import annotations

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
from test_checkpoint import Scored, fit, loader, names

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load

RUN = "drivetrain_logs/version_0"  # the folder of the first run, below the root


def edited(checkpoint: Path, change: Any) -> None:
    """Edit state.json and update all checksums."""
    file, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    document = json.loads(file.read_text())
    change(document)
    content = json.dumps(document).encode()
    file.write_bytes(content)
    listed = json.loads(manifest.read_text())
    del listed["crc32"]
    listed["files"]["state.json"] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    body = json.dumps(listed, indent=1).encode().removesuffix(b"\n}")
    manifest.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())


def of_the_callback(document: Any) -> Any:
    """The state of the `Checkpoint` in a state.json, whatever the encoding puts around it."""
    found = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "saved_at" in value:
                found.append(value)
            for one in value.values():
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)

    look(document)
    (state,) = found
    return state


@pytest.fixture
def unrelated(tmp_path: Path) -> Path:
    folder = tmp_path / "unrelated"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


PLANTED = [
    lambda folder: {"name": f"../{folder.name}", "identifier": "a" * 32},
    lambda folder: {"name": "linked", "identifier": "a" * 32},
    lambda folder: {"path": str(folder), "score": None, "number": 0, "step": 0},  # as earlier versions wrote it
    lambda folder: str(folder),
]


@pytest.mark.parametrize("key", ["kept", "going", "interim"])
@pytest.mark.parametrize("planted", PLANTED)
def test_an_edited_list_removes_nothing(key: str, planted: Any, unrelated: Path, tmp_path: Path) -> None:
    # J-01: an edited state.json emptied a home folder
    fit(tmp_path, Checkpoint(), max_epochs=1).fit(Scored([0.0]), loader())
    (tmp_path / RUN / "checkpoints/linked").symlink_to(unrelated)
    start = tmp_path / RUN / "checkpoints/epoch=0-step=6"

    def change(document: Any) -> None:
        state, one = of_the_callback(document), planted(unrelated)
        state[key] = one if key == "interim" else [one, *state[key]]

    edited(start, change)
    fit(tmp_path, Checkpoint(), max_epochs=3).fit(Scored([0.0] * 3), loader(), ckpt_path=start)
    assert (unrelated / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / RUN / "checkpoints/linked").is_symlink()
    assert "epoch=2-step=18" in names(tmp_path)


def test_an_edited_list_empties_no_bucket(tmp_path: Path) -> None:
    # J-01: with memory:// a whole bucket went
    bucket = fsspec.filesystem("memory")
    bucket.pipe_file("/bucket/others/thesis.txt", b"years of work")
    folder = "memory://bucket/run"

    class Remembers(Checkpoint):
        def state_dict(self) -> dict[str, Any]:
            planted = {"name": "..", "identifier": "a" * 32}, {"path": "memory://bucket"}, {"name": "others"}
            return {**super().state_dict(), "going": [*planted]}

    fit(tmp_path, Remembers(folder), max_epochs=1).fit(Scored([0.0]), loader())
    fit(tmp_path, Remembers(folder), max_epochs=3).fit(Scored([0.0] * 3), loader(), ckpt_path="last")
    assert bucket.cat_file("/bucket/others/thesis.txt") == b"years of work"


def test_a_bucket_keeps_what_lies_beside_a_checkpoint(tmp_path: Path) -> None:
    # J-01: only a checkpoint's own files go, one by one
    bucket, folder = fsspec.filesystem("memory"), "memory://other/run"
    fit(tmp_path, Checkpoint(folder), max_epochs=1).fit(Scored([0.0]), loader())
    bucket.pipe_file("/other/run/epoch=0-step=6/notes.txt", b"mine")
    fit(tmp_path, Checkpoint(folder), max_epochs=2).fit(Scored([0.0] * 2), loader(), ckpt_path="last")
    assert bucket.find("/other/run/epoch=0-step=6") == ["/other/run/epoch=0-step=6/notes.txt"]
    assert load(f"{folder}/epoch=1-step=12").progress["epoch"] == 2


def test_a_folder_keeps_what_somebody_has_put_into_a_checkpoint(tmp_path: Path) -> None:  # J-01
    folder = tmp_path / "c"
    fit(tmp_path, Checkpoint(folder), max_epochs=1).fit(Scored([0.0]), loader())
    (first,) = (one for one in folder.iterdir() if one.is_dir())
    (first / "manifest.json.sig").write_text("mine")
    (first / "notes").mkdir()
    again = Checkpoint(folder)
    fit(tmp_path, again, max_epochs=2).fit(Scored([0.0] * 2), loader(), ckpt_path="auto")
    assert sorted(one.name for one in first.iterdir()) == ["manifest.json.sig", "notes"]
    assert Path(again.best_model_path) != first


def test_a_run_that_begins_with_a_neighbours_checkpoint_leaves_its_own_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # J-01: both say Checkpoint("run"), and their names are the same
    for experiment in ("A", "B"):
        (tmp_path / experiment).mkdir()
        monkeypatch.chdir(tmp_path / experiment)
        fit(Path(), Checkpoint("run", save_top_k=0, keep_last=2), max_epochs=2).fit(Scored([0.0] * 2), loader())
    before = sorted(path.name for path in (tmp_path / "B/run").glob("epoch=*"))
    kept = Checkpoint("run", save_top_k=0, keep_last=2)
    fit(Path(), kept, max_epochs=4).fit(Scored([0.0] * 4), loader(), ckpt_path="../A/run/epoch=1-step=12")
    after = sorted(path.name for path in (tmp_path / "B/run").glob("epoch=*"))
    assert set(before) <= set(after)
    assert len(after) == 4
    assert len(list((tmp_path / "A/run").glob("epoch=*"))) == 2


def test_another_checkpoint_that_has_taken_the_name_stays(tmp_path: Path) -> None:
    # J-01: known by its identifier, not by its name
    trainer = fit(tmp_path, Checkpoint(), max_epochs=1)
    trainer.fit(Scored([0.0]), loader())
    taken = tmp_path / RUN / "checkpoints/epoch=0-step=6"
    start = tmp_path / "start"
    taken.rename(start)
    trainer.save_checkpoint(taken)
    identifier = load(taken).manifest.identifier
    fit(tmp_path, Checkpoint(), max_epochs=2).fit(Scored([0.0] * 2), loader(), ckpt_path=start)
    assert load(taken).manifest.identifier == identifier


# Names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_last": True}, {"model": 0.1, "model-v1": 0.8}),
        ({"save_top_k": 2}, {"model": 0.1, "model-v1": 0.5}),
        ({"save_top_k": -1}, {"model": 0.5, "model-v1": 0.1, "model-v2": 0.9, "model-v3": 0.8}),
    ],
)
def test_one_name_for_all_keeps_each_that_is_to_be_kept(options: Any, expected: Any, tmp_path: Path) -> None:
    # J-02: it kept one, the last, as the best
    checkpoint = Checkpoint(filename="model", monitor="score", **options)
    module = Scored([0.5, 0.1, 0.9, 0.8])
    fit(tmp_path, checkpoint, max_epochs=4).fit(module, loader())
    kept = {Path(path).name: round(float(score), 6) for path, score in checkpoint.best_k_models.items()}  # type: ignore[arg-type]
    assert sorted(kept.values()) == sorted(expected.values())
    assert names(tmp_path) == sorted(kept)
    assert checkpoint.best_model_score == pytest.approx(0.1)
    best = load(checkpoint.best_model_path)
    assert best.progress["epoch"] == 2  # what is called the best is what was saved then


def test_a_name_with_rounded_values_is_given_twice(tmp_path: Path) -> None:
    # J-02
    checkpoint = Checkpoint(filename="{score:.0f}", monitor="score", save_top_k=2)
    fit(tmp_path, checkpoint, max_epochs=3).fit(Scored([0.3, 0.2, 0.1]), loader())
    assert sorted(round(float(score), 6) for score in checkpoint.best_k_models.values()) == [0.1, 0.2]  # type: ignore[arg-type]
    assert len(names(tmp_path)) == 2


# What a storage refuses


def test_what_cannot_be_removed_is_tried_again_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # J-08: a bucket without the right to delete ended the training
    bucket, folder = fsspec.filesystem("memory"), "memory://third/run"
    refusals: list[Any] = []
    rm_file = type(bucket).rm_file

    def refuse_at_first(self: Any, path: str) -> None:
        if "run/epoch" in path and len(refusals) < 2:
            refusals.append(path)
            raise PermissionError(f"AccessDenied: {path}")
        rm_file(self, path)

    monkeypatch.setattr(type(bucket), "rm_file", refuse_at_first)
    with caplog.at_level(logging.WARNING, logger="drivetrain"):
        fit(tmp_path, Checkpoint(folder), max_epochs=4).fit(Scored([0.0] * 4), loader())
    assert len(refusals) == 2
    assert len(re.findall("Cannot remove .*; the run will try again: AccessDenied", caplog.text)) == 2
    kept = {path.split("/")[3] for path in bucket.find("/third/run") if path.endswith("manifest.json")}
    assert kept == {"epoch=3-step=24"}


def test_a_throttled_note_of_the_latest_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # J-08
    bucket = fsspec.filesystem("memory")
    pipe_file = type(bucket).pipe_file

    def throttled(self: Any, path: str, value: bytes, **options: Any) -> None:
        if path.endswith("latest"):
            raise OSError("SlowDown")
        pipe_file(self, path, value, **options)

    monkeypatch.setattr(type(bucket), "pipe_file", throttled)
    with caplog.at_level(logging.WARNING, logger="drivetrain"):
        fit(tmp_path, Checkpoint("memory://fourth/run"), max_epochs=2).fit(Scored([0.0] * 2), loader())
    assert (
        "Cannot write latest in 'memory://fourth/run' (SlowDown). The checkpoint 'epoch=1-step=12' is complete."
        in caplog.text
    )
    assert load("memory://fourth/run/epoch=1-step=12").progress["epoch"] == 2
