"""Checkpoints in a bucket: a real S3 server on loopback. F-09, F-05."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import OneLayer, contents, equal, quiet, save_contents, token_free, written

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit
from drivetrain._distributed.shards import Span  # what strategies request of a tensor
from drivetrain._format import StateToSave
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.testing import requires_package
from worlds import on_ranks

pytestmark = [requires_package("s3fs"), requires_package("moto"), requires_package("flask")]

PATH = "s3://bucket/runs/c"
CREDENTIALS = {"ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": "nothing"}


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

    for name, value in (*CREDENTIALS.items(), ("DEFAULT_REGION", "us-east-1"), ("ENDPOINT_URL", address)):
        monkeypatch.setenv(f"AWS_{name}", value)
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


def test_a_checkpoint_is_read_back_equal_and_replaced(bucket: Any) -> None:
    checkpoint, given = load(written(PATH)), contents()
    assert verify(PATH) == []
    assert equal(dict(sorted(checkpoint.weights().items())), dict(sorted(given.weights.items())))
    assert equal((checkpoint.optimizer_state(), checkpoint.state()), (given.optimizers[0], given.state))
    before = names(bucket)
    assert load(written(PATH, 2.0)).weights()["layer.weight"][0, 1] == 2
    assert verify(PATH) == []
    after = names(bucket)
    assert sorted(map(token_free, after)) == sorted(map(token_free, before))
    assert set(after) & set(before) == {"manifest.json"}


def test_a_tensor_of_several_uploads_and_blocks_is_read_whole_and_in_part(bucket: Any) -> None:  # F-09
    value = torch.arange(15 * 2**20, dtype=torch.int32)  # 60 MiB
    source = load(save_contents(PATH, StateToSave({"w": value}))).weights().sources()["w"]
    start, stop = 4 * 2**20 - 5, 4 * 2**20 + 5  # across a block
    assert torch.equal(source.read(Span(start, stop)), value[start:stop])
    assert torch.equal(source.read(), value)


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    module, saves = OneLayer(64, 64), Checkpoint("s3://bucket/runs", filename="c", every_n_train_steps=2)
    run = quiet(strategy="fsdp", default_root_dir=folder, max_steps=2, seed=1, callbacks=saves)
    run.fit(module, [torch.ones(2, 64)] * 2)
    return {name: value.detach() for name, value in module.state_dict().items()}


def test_two_ranks_write_one_checkpoint(bucket: Any, tmp_path: Path) -> None:  # F-09
    weights = on_ranks(_trained, 2, tmp_path, timeout=100)[0]
    assert verify(PATH) == []
    checkpoint = load(PATH)
    assert equal(dict(sorted(checkpoint.weights().items())), dict(sorted(weights.items())))
    assert None not in (checkpoint.rank_state(0), checkpoint.rank_state(1))
    assert len(names(bucket)) == len(checkpoint.manifest.files) + 1


class DeletesBucket(Callback):
    def __init__(self, bucket: Any, step: int) -> None:
        self.bucket, self.step = bucket, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            while self.bucket.exists("bucket"):
                with suppress(OSError):  # a background save may be writing to it
                    self.bucket.rm("bucket", recursive=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_saves_and_resumes_and_reports_a_deleted_bucket(bucket: Any, in_background: bool, tmp_path: Path) -> None:
    # F-09
    def run(max_steps: int, *more: Callback) -> Fit:
        saves = Checkpoint("s3://bucket/runs", every_n_train_steps=2, save_top_k=-1, save_async=in_background)
        return quiet(default_root_dir=tmp_path, max_steps=max_steps, callbacks=[saves, *more])

    batches = [torch.randn(2, 4) for _ in range(12)]
    run(4).fit(OneLayer(), batches)
    found = sorted(bucket.ls("bucket/runs", detail=False, refresh=True))
    assert [path.rpartition("step=")[2] for path in found if "step=" in path] == ["2", "4"]
    resumed = run(12, DeletesBucket(bucket, 7))
    with pytest.raises(CheckpointError, match=r"'s3://bucket/runs/.*step=[68]' could not be written"):
        resumed.fit(OneLayer(), batches, ckpt_path="auto")
    assert resumed.global_step >= 7


@pytest.mark.parametrize(
    ("url", "credentials", "cause"),
    [("s3://bucket/runs", False, "NoCredentials"), ("s3://nowhere/runs", True, "NoSuchBucket|FileNotFound|not exist")],
)
def test_an_unreachable_bucket_is_reported_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, bucket: Any, tmp_path: Path, url: str, credentials: bool, cause: str
) -> None:  # J-08
    if not credentials:
        for name in CREDENTIALS:
            monkeypatch.delenv(f"AWS_{name}")
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket.clear_instance_cache()
    run = quiet(default_root_dir=tmp_path, callbacks=Checkpoint(url), max_epochs=1)
    with pytest.raises(ConfigurationError, match=cause):
        run.fit(OneLayer(), [torch.ones(2, 4)])
    assert run.global_step == 0
