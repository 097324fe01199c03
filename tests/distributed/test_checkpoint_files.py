"""A checkpoint that several ranks write together is complete for every layout, or does not exist at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_runs import Regression, failing, loader, quiet

from drivetrain import Callback
from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.shards import Box, ParameterShard, Region, Span, cut
from drivetrain._format import CheckpointMetadata, StateToSave, run_collectively, save, tensor_writer
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.testing import requires_linux
from worlds import on_ranks

CHUNK_BYTES = tensor_writer.CHUNK_BYTES


def control(chunk_bytes: int = 500) -> GroupControl:
    tensor_writer.SMALL_BYTES, tensor_writer.CHUNK_BYTES = 2000, chunk_bytes
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(backend="gloo")
    return GroupControl(group, store, dist.get_rank(), dist.get_world_size())


def truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embedding.weight": random(37, 11),
        "row": random(1, 700),
        "matrix": random(16, 24).double(),
        "half": random(33).bfloat16(),
        "cube": random(5, 6, 7),
        "bytes": torch.arange(101, dtype=torch.uint8),
        "tiny": random(2),
        "number": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "whole": random(40, 40),
        "buffer": torch.arange(9),
    }


def along(dimension: int, shape: torch.Size, rank: int, world_size: int) -> Region:
    """Return a rank's part as DTensor cuts it: equal parts, the last ones short or empty."""
    size = -(-shape[dimension] // world_size)
    offsets, lengths = [0] * len(shape), [*shape]
    offsets[dimension] = min(rank * size, shape[dimension])
    lengths[dimension] = min(size, shape[dimension] - offsets[dimension])
    return Box(tuple(offsets), tuple(lengths))


def flat(shape: torch.Size, rank: int, world_size: int) -> Region:
    # Uneven on purpose, as a partition that spans several parameters cuts them.
    edges = [round(shape.numel() * (rank / world_size) ** 2) for rank in range(world_size + 1)]
    return Span(edges[rank], edges[rank + 1])


def held(name: str, whole: torch.Tensor, layout: str) -> Any:
    """Return this rank's part of a tensor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if layout == "whole" or name in ("whole", "buffer", "number", "empty"):
        return whole
    if layout == "mixed":
        layout = {"cube": "columns", "matrix": "columns", "half": "flat", "bytes": "flat"}.get(name, "rows")
    if layout == "replicated twice":
        region = along(0, whole.shape, rank % (world_size // 2), world_size // 2)
        return ParameterShard(cut(whole, region), tuple(whole.shape), region, is_primary=rank < world_size // 2)
    if layout == "columns" and whole.dim() < 2:
        layout = "rows"
    kinds: dict[str, Any] = {"rows": partial(along, 0), "columns": partial(along, 1), "flat": flat}
    region = kinds[layout](whole.shape, rank, world_size)
    return ParameterShard(cut(whole, region), tuple(whole.shape), region)


def sharded(layout: str) -> StateToSave:
    """Return what this rank saves."""
    values, rank = truth(), dist.get_rank()
    mine = {name: held(name, value, layout) for name, value in values.items()}
    adam = {
        name: {"exp_avg": mine[name], "step": torch.tensor(2.0)} for name in values if values[name].is_floating_point()
    }
    group = {"lr": 0.1, "params": list(adam)}
    state: dict[str, Any] = {"average": {"embedding.weight": mine["embedding.weight"]}}
    if rank == 0:
        state["of rank 0"] = {"tensor": torch.arange(4)}
    return StateToSave(
        weights=mine,
        metadata=CheckpointMetadata("Sharding", "32-true", {"step": 2}),
        optimizers=[{"state": adam, "param_groups": [group]}],
        state=state,
        rank_state={"rank": rank, "generator": torch.full((3,), rank)},
    )


def _save(path: str, layout: str) -> None:
    contents = sharded(layout)
    contents.hash_algorithm = "sha256" if dist.get_rank() == 0 else None  # rank 0's choice applies to the files of all
    save(path, contents, control())


def _read(path: str, layout: str) -> None:
    checkpoint = load(path)
    wanted = {name: held(name, value, layout) for name, value in truth().items()}
    regions = {name: one.region for name, one in wanted.items() if isinstance(one, ParameterShard)}
    weights = run_collectively(control(), "loading", lambda: checkpoint.weights().staged(regions))
    state = checkpoint.optimizer_state(0, regions)["state"]
    for name, expected in wanted.items():
        for found in (weights[name], state[name]["exp_avg"] if name in state else weights[name]):
            if isinstance(expected, ParameterShard):
                assert found.region == expected.region
                assert found.shape == expected.shape
                assert torch.equal(found.local, expected.local), name
            else:
                assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("layout", "ranks", "read", "readers"),
    [
        ("rows", 4, "flat", 2),
        ("columns", 4, "mixed", 2),
        ("flat", 4, "rows", 2),
        ("mixed", 2, "columns", 4),
        ("replicated twice", 4, "flat", 2),
        ("whole", 2, "columns", 4),
    ],
)
def test_the_parts_of_all_ranks_are_a_complete_checkpoint_of_which_each_reads_its_part(
    tmp_path: Path, layout: str, ranks: int, read: str, readers: int
) -> None:  # F-01: the files are the same for all layouts; F-13: in chunks; J-11: each with a digest
    path = tmp_path / "c"
    on_ranks(_save, ranks, str(path), layout)
    assert verify(path) == []
    checkpoint = load(path)
    weights, values = checkpoint.weights(), truth()
    assert set(weights) == set(values)
    for name, value in values.items():
        assert weights[name].dtype == value.dtype
        assert torch.equal(weights[name], value), name
    state = checkpoint.optimizer_state()["state"]
    assert all(torch.equal(state[name]["exp_avg"], values[name]) for name in state)
    run = checkpoint.state()
    assert torch.equal(run["average"]["embedding.weight"], values["embedding.weight"])
    assert torch.equal(run["of rank 0"]["tensor"], torch.arange(4))
    assert [checkpoint.rank_state(rank)["rank"] for rank in range(ranks)] == list(range(ranks))
    assert checkpoint.manifest.world_size == ranks
    # F-10
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == ranks
    assert all(torch.equal(load_file(path / file)[name], values[name]) for name, file in index.items())
    on_ranks(_read, readers, str(path), read)


REFUSED = {
    "name": r"model: tiny: .* on rank\(s\) \[0\]; missing on rank\(s\) \[1\]",
    "dtype": r'model: whole: "torch.float32 of shape \(40, 40\)" on .* \[0\]; "torch.float64 .*" on .* \[1\]',
    "form": r'model: row: .*, sharded" on rank\(s\) \[0\]; "torch.float32 of shape \(1, 700\)" on rank.* \[1\]',
    "order": r'agree on the order of tensors: "\w+" on rank\(s\) \[0\]; "\w+" on rank\(s\) \[1\]',
    "parts": r'optimizer-1: missing on rank\(s\) \[0\]; "optimizer " on rank\(s\) \[1\]',
    "gap": "'cube' has 210 elements, and the ranks contribute 126",
    "path": r'agree on the path: ".*/c" on rank\(s\) \[0\]; ".*/c-of-rank-1" on rank\(s\) \[1\]',
    "value": "'generator', a object",
    "disk that is not shared": r"rank 1(?s:.*)No such file or directory",
    "memory": r"and rank 0 sees nothing(?s:.*)all ranks must write to the same storage",  # F-09
}
"""What is wrong on rank 1, and the error on all ranks."""


def spoiled(harm: str) -> StateToSave:
    contents = sharded("rows")
    weights = contents.weights = dict(contents.weights)
    if dist.get_rank() == 0:
        return contents
    if harm == "name":
        weights["other"] = weights.pop("tiny")
    elif harm == "dtype":
        weights["whole"] = weights["whole"].double()
    elif harm == "form":
        weights["row"] = truth()["row"]
    elif harm == "gap":
        weights["cube"] = replace(weights["cube"], is_primary=False)
    elif harm == "order":
        contents.weights = dict(reversed(weights.items()))
    elif harm == "parts":
        contents.optimizers = [*contents.optimizers, {"state": {}, "param_groups": []}]
    elif harm == "value":
        contents.rank_state = {"generator": object()}
    return contents


def _refused(folder: str) -> dict[str, str]:
    found, talk, rank = {}, control(), dist.get_rank()
    for harm in REFUSED:
        os.makedirs(f"{folder}/{harm}/{rank}")
        path = f"{folder}/{harm}/c"
        save(path, sharded("rows"), talk)
        if harm == "path" and rank == 1:
            path += "-of-rank-1"
        elif harm == "disk that is not shared":
            path = "c"
        elif harm == "memory":
            path = "memory://c"
        with contextlib.chdir(f"{folder}/{harm}/{rank}"), failing() as error:
            save(path, spoiled(harm), talk)
        found[harm] = f"{error['type']}: {error['text']}"
    return found


def test_all_ranks_refuse_state_that_one_cannot_save(tmp_path: Path) -> None:
    # F-05: the previous checkpoint is complete, and no other files are left
    ranks = on_ranks(_refused, 2, str(tmp_path))
    assert "rank 1" in ranks[0]["value"]
    for found in ranks:
        for harm, error in found.items():
            assert re.search(f"^CheckpointError: (?s:.*){REFUSED[harm]}", error), (harm, error)
            assert verify(tmp_path / harm / "c") == []
            assert sorted(os.listdir(tmp_path / harm)) == ["0", "1", "c"]
            assert os.listdir(tmp_path / harm / "0") == []


class Odd(Callback):
    """The state that rank 1 would save cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1} if dist.get_rank() == 1 else [1]}


def _train_with_odd_state(folder: Path) -> tuple[str, int]:
    fit = quiet(strategy="ddp", enable_checkpointing=True, callbacks=[Checkpoint(folder), Odd()])
    with failing() as error:
        fit.fit(Regression(), loader(8, 2))
    return f"{error['type']}: {error['text']}", fit.global_step


def test_state_that_one_rank_cannot_save_is_refused_before_the_first_step(tmp_path: Path) -> None:  # J-08
    for error, steps in on_ranks(_train_with_odd_state, 2, tmp_path / "c"):
        assert error.startswith("CheckpointError")
        assert "callbacks/Odd/seen', a set" in error
        assert steps == 0
    assert not (tmp_path / "c").exists()


def _damaged_for_one(path: str) -> str:
    # Rank 0 reads an intact file, rank 1 a damaged one.
    name = "buffer" if dist.get_rank() else "embedding.weight"
    talk, checkpoint = control(), load(path)
    with failing() as error:
        run_collectively(talk, "The checkpoint cannot be loaded", lambda: checkpoint.weights().sources()[name].read())
    return f"{error['type']}: {error['text']}"


def test_all_ranks_refuse_a_checkpoint_that_one_finds_damaged(tmp_path: Path) -> None:  # F-06
    path = tmp_path / "c"
    on_ranks(_save, 2, str(path), "rows")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["embedding.weight"] != index["buffer"]
    content = bytearray((path / index["buffer"]).read_bytes())
    content[-1] ^= 1
    (path / index["buffer"]).write_bytes(content)
    for error in on_ranks(_damaged_for_one, 2, str(path)):
        assert error.startswith("CheckpointError")
        assert f"{index['buffer']} was altered" in error


def _peak(path: str) -> int:
    """Save a tensor of 192 MiB that is spread over two ranks; return the peak growth of this process in bytes."""
    rank = dist.get_rank()
    talk = control(CHUNK_BYTES)
    half = torch.full((24, 2**20), float(rank))
    contents = StateToSave({"w": ParameterShard(half, (48, 2**20), Box((24 * rank, 0), (24, 2**20)))})
    status = Path("/proc/self/status")

    def field(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    save(f"{path}-small", sharded("rows"), talk)  # imports on the way must not be counted
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = field("VmRSS")
    save(path, contents, talk)
    return field("VmHWM") - before


@requires_linux()
def test_a_save_holds_a_few_chunks_instead_of_whole_tensors(tmp_path: Path) -> None:  # F-13
    for grown in on_ranks(_peak, 2, str(tmp_path / "c")):
        assert grown < 40 * 2**20
    weight = load(tmp_path / "c").weights()["w"]
    assert [weight[row, -1].item() for row in (0, 23, 24, 47)] == [0, 0, 1, 1]
