"""Checkpoints in a bucket: a real S3 server on loopback. F-09, F-05."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import STATE, contents, equal, token_free, written

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, ParameterShard, Span
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, Sizes, save
from drivetrain.testing import requires_package
from worlds import on_ranks

pytestmark = [pytest.mark.slow, requires_package("s3fs"), requires_package("moto"), requires_package("flask")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Create a bucket, configured through the environment variables that S3 clients read."""
    import fsspec

    for name, value in {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("bucket")
    yield filesystem
    if filesystem.exists("bucket"):
        filesystem.rm("bucket", recursive=True)
    filesystem.clear_instance_cache()


def names(bucket: Any) -> list[str]:
    bucket.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in bucket.find("bucket/runs/c"))


def test_a_round_trip(bucket: Any) -> None:
    path = written("s3://bucket/runs/c")
    checkpoint, given = load(path), contents()
    assert verify(path) == []
    assert equal(dict(sorted(checkpoint.weights().items())), dict(sorted(given.weights.items())))
    assert equal(checkpoint.optimizer_state(), given.optimizers[0])
    assert equal(checkpoint.state(), STATE)


def test_a_save_onto_an_existing_path(bucket: Any) -> None:
    written("s3://bucket/runs/c")
    before = names(bucket)
    written("s3://bucket/runs/c", 2.0)
    assert verify("s3://bucket/runs/c") == []
    assert load("s3://bucket/runs/c").weights()["layer.weight"][0, 1] == 2
    after = names(bucket)
    assert sorted(map(token_free, after)) == sorted(map(token_free, before))
    assert set(after) & set(before) == {"manifest.json"}


def test_large_tensors_come_by_the_part(bucket: Any) -> None:
    # Larger than one upload part and one block.
    value = torch.arange(15 * 2**20, dtype=torch.int32)
    save("s3://bucket/runs/c", Contents({"w": value}), LocalControl())
    source = load("s3://bucket/runs/c").weights().sources()["w"]
    assert torch.equal(source.read(Span(3 * 2**20 - 5, 4 * 2**20 + 5)), value[3 * 2**20 - 5 : 4 * 2**20 + 5])
    assert torch.equal(source.read(), value)


def _save_half(path: str) -> None:
    import torch.distributed as dist

    from drivetrain._distributed.control_group import GroupControl

    rank = dist.get_rank()
    control = GroupControl(dist.new_group(backend="gloo"), dist.distributed_c10d._get_default_store(), rank, 2)
    for number in range(2):
        half = torch.full((3, 500), float(rank + number))
        contents = Contents(
            {"w": ParameterShard(half, (6, 500), Box((3 * rank, 0), (3, 500))), "v": torch.ones(2000)}, rank_state=rank
        )
        save(path, contents, control, sizes=Sizes(small=2000, piece=1000))


def test_two_ranks_write_side_by_side(bucket: Any) -> None:
    path = "s3://bucket/runs/c"
    on_ranks(_save_half, 2, path, timeout=100)
    assert verify(path) == []
    checkpoint = load(path)
    assert checkpoint.weights()["w"][:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert checkpoint.rank_state(1) == 1
    assert len(names(bucket)) == len(checkpoint.manifest.files) + 1
    assert len(checkpoint.manifest.weights.tensors) == 2


def test_damage_is_named(bucket: Any) -> None:
    path = written("s3://bucket/runs/c")
    manifest = load(path).manifest
    assert manifest.state is not None
    state, (optimizer,) = manifest.state.document, manifest.optimizers[0].tensors
    bucket.pipe_file(f"bucket/runs/c/{state}", b" " * bucket.size(f"bucket/runs/c/{state}"))
    bucket.rm_file(f"bucket/runs/c/{optimizer}")
    problems = "\n".join(verify(path))
    assert f"{state} was altered" in problems
    assert f"{optimizer} is missing" in problems


def test_a_bucket_that_is_not_there(bucket: Any) -> None:
    with pytest.raises(CheckpointError, match="'s3://nowhere/c' could not be written: rank 0: "):
        written("s3://nowhere/c")
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load("s3://nowhere/c")


def test_a_bucket_that_vanishes(bucket: Any) -> None:
    checkpoint = load(written("s3://bucket/runs/c"))
    weights = checkpoint.weights()
    bucket.rm("bucket", recursive=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read|is missing"):
        checkpoint.optimizer_state()
    assert len(weights) == 6
    with pytest.raises(CheckpointError, match="'s3://bucket/runs/c' could not be written: rank 0: "):
        written("s3://bucket/runs/c", 2.0)


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, bucket: Any) -> None:
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="'s3://bucket/runs/c' could not be written: rank 0: "):
        written("s3://bucket/runs/c")
    with pytest.raises(CheckpointError):
        load("s3://bucket/runs/c")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


class Small(TrainModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Vanishing(Callback):
    """Deletes the bucket after a step."""

    def __init__(self, bucket: Any, step: int) -> None:
        self.bucket, self.step = bucket, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            while self.bucket.exists("bucket"):
                with suppress(OSError):  # a background save may be writing to it
                    self.bucket.rm("bucket", recursive=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_into_a_bucket(bucket: Any, in_background: bool, tmp_path: Path) -> None:
    # F-09: saves, resumes, and raises a clear error once the bucket is deleted
    def run(max_steps: int, *more: Callback) -> Fit:
        saves = Checkpoint("s3://bucket/runs", every_n_train_steps=2, save_top_k=-1, save_async=in_background)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return Fit(default_root_dir=tmp_path, max_steps=max_steps, callbacks=[saves, *more], **quiet)  # type: ignore[arg-type]

    batches = [torch.randn(2, 4) for _ in range(12)]
    run(4).fit(Small(), batches)
    found = sorted(bucket.ls("bucket/runs", detail=False, refresh=True))
    assert [path.rpartition("step=")[2] for path in found if "step=" in path] == ["2", "4"]
    resumed = run(12, Vanishing(bucket, 7))
    with pytest.raises(CheckpointError, match=r"'s3://bucket/runs/.*step=[68]' could not be written"):
        resumed.fit(Small(), batches, ckpt_path="auto")
    assert resumed.global_step >= 7


@pytest.mark.parametrize(
    ("url", "lacking", "named"),
    [("s3://bucket/runs", True, "NoCredentials"), ("s3://nowhere/runs", False, "NoSuchBucket|FileNotFound|not exist")],
)
def test_a_bucket_out_of_reach_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, bucket: Any, tmp_path: Path, url: str, lacking: bool, named: str
) -> None:  # J-08
    if lacking:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket.clear_instance_cache()
    run = Fit(
        default_root_dir=tmp_path, callbacks=Checkpoint(url), max_epochs=1, logger=False, enable_progress_bar=False
    )
    with pytest.raises(ConfigurationError, match=named):
        run.fit(Small(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))  # type: ignore[arg-type]
    assert run.global_step == 0
