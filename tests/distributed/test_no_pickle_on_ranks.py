"""A rank sends a pickle where the others expect plain values: it is not opened. J-06."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain._distributed.control_group import GroupControl
from worlds import on_ranks


class _Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _talk(path: str) -> list[Any]:
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    control = GroupControl(dist.new_group(backend="gloo"), store, rank, 2)
    values = {"a": (rank, None), "b": [float("inf")] * rank}
    heard: list[Any] = [
        control.gather_objects(values),
        control.gather_bytes(b"x" * 3 * rank),
        control.gather_bytes(b""),
        control.from_rank_0((1, 2) if rank == 0 else None),
    ]
    pickled = pickle.dumps(_Planted(path))
    if rank == 1:
        heard.append(control.gather_bytes(pickled)[0])
    else:
        try:
            heard.append(control.gather_objects([]))
        except ValueError as error:
            heard.append(type(error).__name__)
    control.barrier()
    if rank == 1:
        store.set("shared/1", pickled)  # type: ignore[arg-type]  # it takes bytes, too
    control.barrier()
    control._shared = 1
    if rank == 0:
        control.rank = 1  # it listens
        try:
            heard.append(control.from_rank_0(None))
        except ValueError as error:
            heard.append(type(error).__name__)
    control.barrier()
    return heard


def test_control_plane_messages_are_never_unpickled(tmp_path: Path) -> None:  # J-06
    planted = str(tmp_path / "planted")
    for rank, heard in enumerate(on_ranks(_talk, 2, planted)):
        assert heard[:4] == [
            [{"a": (0, None), "b": []}, {"a": (1, None), "b": [float("inf")]}],
            [b"", b"xxx"],
            [b"", b""],
            (1, 2),
        ]
        if rank == 0:
            assert heard[4:] == ["UnicodeDecodeError", "UnicodeDecodeError"]
        else:
            assert heard[4:] == [b"[]"]
    assert not Path(planted).exists()
    pickle.loads(pickle.dumps(_Planted(planted)))
    assert Path(planted).is_dir()  # unpickling it does create the folder
