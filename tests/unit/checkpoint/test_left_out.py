"""The manifest names secrets that were left out (J-11); `tests/unit/engine/test_secrets.py` has runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_case import resealed, written

from drivetrain.checkpoint import load, show, verify


def test_a_secret_that_an_earlier_version_wrote_is_not_shown(tmp_path: Path) -> None:  # J-11
    def as_before(document: dict[str, Any]) -> None:
        document["hyper_parameters"]["api_token"] = "sk-1"
        del document["left_out"]

    path = written(tmp_path / "c")
    assert "without" not in show(path)
    resealed(tmp_path / "c", as_before)
    assert load(path).hyper_parameters == {"width": 3, "api_token": "sk-1"}
    assert verify(path) == []
    assert "sk-1" not in show(path)
    assert "without api_token" in show(path)
    resealed(tmp_path / "c", lambda document: document.update(left_out=["api_token", "auth.password"]))
    assert load(path).manifest.metadata.left_out == ("api_token", "auth.password")
    assert "without api_token, auth.password" in show(path)
