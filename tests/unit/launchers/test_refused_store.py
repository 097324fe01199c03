"""A started process that cannot connect to the store."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain.environments import Placement
from drivetrain.launchers import world as module


def test_a_refused_process_does_not_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:  # G-01
    tried = []

    def connect(*args: Any, **options: Any) -> TCPStore:
        tried.append(args)
        return TCPStore(*args, **options)

    monkeypatch.setattr(module, "TCPStore", connect)
    monkeypatch.setattr(module, "_CONNECT_LIMIT_ONE_NODE", timedelta(seconds=0.1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = module.World("function", Placement(1, 2, 1, 2), "127.0.0.1", free.getsockname()[1])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="timed out"):
                world.store("runs")
        assert world.failures() == []  # queried while the error is reported
    assert len(tried) == 1
