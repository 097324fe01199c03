"""Secrets among hyper-parameters stay in memory and are written nowhere (J-11)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, fit, regression

from captured_warnings import captured_warnings
from drivetrain import DataModule, Fit, Logger
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import convert, load
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger

SECRET = "sk-very-secret"


class Fetching(Bare):
    def __init__(self, api_token: str, width: int = 3, login: Any = None, pad_token: str = "<pad>") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class Fetched(DataModule):
    def __init__(self, db_password: str, samples: int) -> None:
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return regression()


class Keeping(Logger):
    """A third-party logger."""

    name, version = "keeping", "0"

    def __init__(self) -> None:
        self.params: list[Mapping[str, Any]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.params.append(params)


class Connecting(Fetching):
    """Takes secrets of every kind, and values that resemble them."""

    def __init__(self, api_token: str, login: Any, wandb_key: str, servers: Any, headers: Any, sort_key: str) -> None:
        super().__init__(api_token, login=login)


def fetching() -> Fetching:
    return Fetching(SECRET, login={"user": "me", "password": f"{SECRET}-2"})


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("save_async", [False, True])
def test_no_file_of_a_run_contains_a_secret(tmp_path: Path, monkeypatch: Any, save_async: bool) -> None:  # J-11, Q-08
    url = f"postgres://me:{SECRET}@host/db"
    login = {"user": "me", "password": f"{SECRET}-2"}
    servers = [{"url": url, "private_key": SECRET, "port": 1}]
    headers = {"Authorization": f"Bearer {SECRET}", "Accept": "a"}
    monkeypatch.setattr("sys.argv", ["train.py", f"--db={url}", "-H", f"Cookie: {SECRET}", "--auth", SECRET])
    module, theirs = Connecting(SECRET, login, SECRET, servers, headers, "date"), Keeping()
    trainer = fit(
        tmp_path,
        logger=[CSVLogger(tmp_path / "logs"), TensorBoardLogger(tmp_path / "logs"), theirs],
        callbacks=Checkpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1, save_async=save_async),
    )
    with captured_warnings() as lines:
        trainer.fit(module, datamodule=Fetched(SECRET, 24))
        trainer.save_checkpoint(tmp_path / "end", weights_only=True)
    kept = {"width": 3, "login": {"user": "me"}, "pad_token": "<pad>"}
    kept |= {"servers": [{"port": 1}], "headers": {"Accept": "a"}, "sort_key": "date"}
    assert theirs.params == [{"samples": 24, **kept}]
    assert json.loads((tmp_path / "logs/drivetrain_logs/version_0/hparams.json").read_text()) == theirs.params[0]
    (record,) = tmp_path.rglob("run.json")
    shown = ["train.py", "--db=postgres://me:...@host/db", "-H", "Cookie: ...", "--auth", "..."]
    assert json.loads(record.read_text())["argv"][1:] == shown
    left_out = ["api_token", "login.password", "wandb_key", "servers.0.url", "servers.0.private_key"]
    left_out += ["headers.Authorization"]
    assert len(list((tmp_path / "c").glob("epoch=*"))) == 3
    for path in (tmp_path / "end", *(tmp_path / "c").glob("epoch=*")):
        assert load(path).hyper_parameters == kept
        assert sorted(load(path).manifest.metadata.left_out) == sorted(left_out)
    written = everything_in(tmp_path)
    assert b"hyper_parameters" in written
    assert SECRET.encode() not in written
    # One warning, with the names and without the values.
    (line,) = [line for line in lines if "secrets" in line]
    assert all(repr(name) in line for name in ["db_password", *left_out, "--db", "Cookie", "--auth"]), line
    assert SECRET not in "".join(lines)
    # In memory everything is unchanged.
    assert module.hparams.api_token == SECRET
    assert (module.hparams.login, module.hparams.servers) == (login, servers)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_built_in_loggers_omit_secrets_when_called_directly(tmp_path: Path, kind: Any) -> None:  # J-11
    logger = kind(tmp_path)
    with captured_warnings() as lines:
        for _ in range(2):
            logger.log_hyperparams({"hf_token": SECRET, "lr": 0.1, "tokenizer": "bpe"})
    logger.finalize("success")
    assert len(lines) == 1
    assert SECRET.encode() not in everything_in(tmp_path)
    assert b"tokenizer" in everything_in(tmp_path)


def test_a_required_secret_is_requested(tmp_path: Path) -> None:  # J-11
    path, trainer = tmp_path / "c", fit(tmp_path)
    with captured_warnings() as lines:
        trainer.fit(fetching(), regression())
    assert not lines  # nothing is written
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match="Fetching needs 'api_token'") as caught:
        Fetching.load_from_checkpoint(path)
    assert "load_from_checkpoint(path, api_token=...)" in caught.value.fix
    assert "checkpoints do not contain secrets" in caught.value.why
    module = Fetching.load_from_checkpoint(path, api_token="another")
    assert module.hparams == {"api_token": "another", "width": 3, "login": {"user": "me"}, "pad_token": "<pad>"}
    resuming = fetching()
    fit(tmp_path, max_epochs=2).fit(resuming, regression(), ckpt_path=path)
    assert resuming.hparams.api_token == SECRET


def test_a_converted_checkpoint_contains_no_secret(tmp_path: Path) -> None:  # J-11
    weights = {"layer.weight": torch.ones(1, 3), "layer.bias": torch.ones(1)}
    torch.save({"state_dict": weights, "hyper_parameters": {"api_token": SECRET, "width": 3}}, tmp_path / "theirs.ckpt")
    with captured_warnings() as lines:
        convert(tmp_path / "theirs.ckpt", tmp_path / "c")
    assert "'api_token'" in lines[0]
    assert SECRET.encode() not in everything_in(tmp_path / "c")
    with pytest.raises(CheckpointError, match="needs 'api_token'"):
        Fetching.load_from_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"api_token": SECRET}, "api_token"),
        ({"wandb_key": SECRET}, "wandb_key"),
        ({"db": {"password": SECRET}}, "db"),
        ({"db": f"s3://u:{SECRET}@h"}, "db"),
        ('api_token = "{}"\n', "api_token"),
        (("DRIVETRAIN_API_TOKEN", SECRET), "DRIVETRAIN_API_TOKEN"),
        (("DRIVETRAIN_MAX_EPOCHS", f"s3://u:{SECRET}@h"), r"max_epochs=\.\.\."),
    ],
)
def test_a_mistake_in_a_setting_shows_no_secret(tmp_path: Path, monkeypatch: Any, given: Any, named: str) -> None:
    # J-11, Q-08: error messages end up in logs
    monkeypatch.chdir(tmp_path)
    if isinstance(given, str):
        Path("drivetrain.toml").write_text(given.format(SECRET))
    if isinstance(given, tuple):
        monkeypatch.setenv(*given)
    with pytest.raises(ConfigurationError, match=named) as caught:
        Fit(**(given if isinstance(given, dict) else {}))
    assert SECRET not in str(caught.value)


def test_no_password_of_a_url_is_recorded_or_shown(tmp_path: Path, monkeypatch: Any) -> None:
    class Failing(Fetching):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise OSError(f"cannot reach s3://me:{SECRET}@host/data")

    root = f"memory://u:{SECRET}@h/root"
    trainer = fit(tmp_path, logger=CSVLogger(tmp_path / "logs"), default_root_dir=root)
    assert SECRET not in str(trainer.settings)
    with pytest.raises(OSError, match="cannot reach"):
        trainer.fit(Failing(""), regression())
    (record,) = tmp_path.rglob("run.json")
    assert "cannot reach s3://me:...@host/data" in json.loads(record.read_text())["why"]
    assert json.loads(record.read_text())["settings"]["default_root_dir"]["value"] == "memory://u:...@h/root"
    assert SECRET not in record.read_text()
    monkeypatch.chdir(tmp_path)
    Path("drivetrain.toml").write_text("max_epochs = 3\n")
    monkeypatch.setenv("DRIVETRAIN_SEED", "7")
    assert repr(Fit(devices=1, default_root_dir=root)) == "Fit(devices=1, max_epochs=3, default_root_dir=..., seed=7)"
