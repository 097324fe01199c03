"""The manifest names secrets that were left out (J-11); `tests/unit/engine/test_secrets.py` has runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_case import resealed, written

from drivetrain.checkpoint import load, show, verify
from drivetrain.errors import CheckpointError


def test_one_that_an_earlier_version_wrote_is_not_shown(tmp_path: Path) -> None:  # J-11
    def as_it_was(document: dict[str, Any]) -> None:
        document["hyper_parameters"]["api_token"] = "sk-1"
        del document["left_out"]

    path = written(tmp_path / "c")
    resealed(tmp_path / "c", as_it_was)
    assert load(path).hyper_parameters == {"width": 3, "api_token": "sk-1"}  # loads as before
    assert verify(path) == []
    assert "sk-1" not in show(path)
    assert "without api_token" in show(path)


def test_what_was_left_out_is_shown_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "c")
    assert "without" not in show(path)
    resealed(tmp_path / "c", lambda document: document.update(left_out=["api_token", "auth.password"]))
    assert load(path).manifest.metadata.left_out == ("api_token", "auth.password")
    assert "without api_token, auth.password" in show(path)


@pytest.mark.parametrize("wrong", [[3], 3, None])
def test_a_manifest_whose_list_of_them_is_none_is_damaged(tmp_path: Path, wrong: Any) -> None:  # J-10
    path = written(tmp_path / "c")
    resealed(tmp_path / "c", lambda document: document.update(left_out=wrong))
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
